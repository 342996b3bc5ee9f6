"""Enumerations of strings, and the names of accelerators and strategies."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NoReturn, Self

from hasten._lib.errors import MisconfigurationException
from hasten.machine.devices import ACCELERATORS
from hasten.resolve import SHARDED, STRATEGIES, XLA


class LightningEnum(StrEnum):
    """Named strings, compared without regard to case.

    Example::

        >>> GradClipAlgorithmType.NORM == "Norm"
        True
        >>> GradClipAlgorithmType.from_str("value")
        <GradClipAlgorithmType.VALUE: 'value'>

    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and str(self.value).lower() == other.lower()

    def __hash__(self) -> int:
        return hash(str(self.value).lower())

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> Self:
        """Return the member with this name (``source="key"``), this value ("value"), or either ("any")."""
        wanted = value.replace("-", "_").lower()
        for member in cls:
            texts = {"key": [member.name], "value": [member.value]}.get(source, [member.name, member.value])
            if wanted in [text.replace("-", "_").lower() for text in texts]:
                return member
        raise ValueError(f"{value!r} is not a {cls.__name__}: use one of {', '.join(repr(m.value) for m in cls)}.")


class GradClipAlgorithmType(LightningEnum):
    """What ``gradient_clip_algorithm`` takes."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Return whether ``value`` is one of them."""
        return value in list(GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return all of them."""
        return [member.value for member in GradClipAlgorithmType]


class Registry(dict[str, None]):
    """The names that an argument accepts; other objects are passed without a name.

    Example::

        >>> "ddp" in StrategyRegistry, AcceleratorRegistry.available_accelerators()[0]
        (True, 'cpu')

    """

    def available(self) -> list[str]:
        """Return all names."""
        return list(self)

    available_strategies = available_accelerators = available

    def register(self, name: str, *_: object, **__: object) -> NoReturn:
        """Raise: other classes are passed as objects."""
        argument = "strategy" if self is StrategyRegistry else "accelerator"
        raise MisconfigurationException(
            f"{name!r} cannot be registered as a name: pass the object, {argument}=..., instead."
        )


AcceleratorRegistry = Registry.fromkeys(sorted([*ACCELERATORS, "tpu"]))
StrategyRegistry = Registry.fromkeys(["single_device", *STRATEGIES, *SHARDED, *XLA])


__all__ = ["GradClipAlgorithmType", "LightningEnum"]
