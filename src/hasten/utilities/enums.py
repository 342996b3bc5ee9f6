"""Enumerations whose members are texts."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any


class LightningEnum(StrEnum):
    """Texts with names; compared without regard to case.

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
    def from_str(cls, value: str, source: str = "key") -> Any:
        """Return the member called ``value`` (``source="key"``), or with that text ("value")."""
        for member in cls:
            texts = {"key": [member.name], "value": [member.value], "any": [member.name, member.value]}[
                source
            ]
            if value.replace("-", "_").lower() in [text.replace("-", "_").lower() for text in texts]:
                return member
        raise ValueError(
            f"{value!r} is no {cls.__name__}: use one of {', '.join(repr(m.value) for m in cls)}."
        )


class GradClipAlgorithmType(LightningEnum):
    """What ``gradient_clip_algorithm`` takes."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Return whether ``value`` is one of them."""
        return any(member == value for member in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return all of them."""
        return [member.value for member in GradClipAlgorithmType]


__all__ = ["GradClipAlgorithmType", "LightningEnum"]
