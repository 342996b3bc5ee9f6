"""Enumerations of strings, and the names of accelerators and strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import Any, Self

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import unknown_word
from hasten.extend.entry_points import found
from hasten.machine.devices import ACCELERATORS, added_accelerators
from hasten.resolve import REGISTERED_ACCELERATORS, REGISTERED_STRATEGIES, STRATEGIES


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
        listed = f"use one of {', '.join(repr(m.value) for m in cls)}."
        shown = f"{value!r} is not a {cls.__name__}"
        what, fix = unknown_word(shown, str(value), [str(m.value) for m in cls], listed)
        raise make_error(ValueError, what, fix=fix)


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


class Registry(dict[str, dict[str, Any]]):
    """The names that an argument accepts; a program can add names of its own.

    Args:
        kind: "strategy" or "accelerator".
        names: those that there are.
        made: where ``resolve`` finds what makes the object of a name that was added.

    Example::

        >>> "ddp" in StrategyRegistry, AcceleratorRegistry.available_accelerators()[0]
        (True, 'cpu')

    """

    def __init__(self, kind: str, names: Iterable[str], made: dict[str, Callable[[], Any]]) -> None:
        super().__init__({name: {"description": "", "init_params": {}} for name in names})
        self._kind, self._made = kind, made

    def available(self) -> list[str]:
        """Return all names."""
        return list(self)

    available_strategies = available_accelerators = available

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> object:
        """Give a class a name, which ``Trainer`` and ``Fabric`` then accept.

        Args:
            name: the name; upper and lower case are the same.
            strategy: the class; without it, a decorator for the class is returned.
            description: what it is.
            override: replace the class of a name that was registered before.
            init_params: for the class.

        Raises:
            TypeError: the name is not a string.
            MisconfigurationException: the name exists.

        """
        if not isinstance(name, str):
            raise TypeError(f"register({name!r}): the name of a class is a string, not {type(name).__name__}.")
        if (strategy := init_params.pop("accelerator", strategy)) is None:
            return lambda kind: self.register(name, kind, description, override, **init_params)
        if name in self and not override:
            raise MisconfigurationException(
                f"register({name!r}): there is a {self._kind} of this name. Choose another, or pass override=True."
            )
        self[name] = {self._kind: strategy, "description": description, "init_params": init_params}
        self._made[name.lower()] = functools.partial(strategy, **init_params)
        return strategy

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]  # as Lightning's
        """Return an object of the class that was registered as ``name``; ``default`` if there is one.

        Raises:
            KeyError: no class was registered under this name.

        """
        if name.lower() in self._made:
            return self._made[name.lower()]()
        if default is not None:
            return default
        raise KeyError(f"{name!r} was not registered. There are: {', '.join(self._made) or 'none'}.")

    def remove(self, name: str) -> None:
        """Take a registered name back."""
        self.pop(name)
        self._made.pop(name.lower(), None)


AcceleratorRegistry = Registry(
    "accelerator",
    sorted({*ACCELERATORS, *(kind.name() for kind in added_accelerators().values())}),
    REGISTERED_ACCELERATORS,
)
StrategyRegistry = Registry("strategy", [*STRATEGIES, *found("hasten.strategies")], REGISTERED_STRATEGIES)


__all__ = ["GradClipAlgorithmType", "LightningEnum"]
