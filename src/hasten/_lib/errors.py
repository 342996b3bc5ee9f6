"""Exceptions, and classes of Lightning that hasten does not have."""

from __future__ import annotations

from typing import Any


class MisconfigurationException(ValueError):
    """Raised for arguments that cannot work together; the message says what to change."""


class BadLossError(FloatingPointError):
    """The run ended because a loss or its gradient is not finite; the weights are those before that step."""


def absent(name: str, base: type, *, home: str, instead: str) -> Any:
    """Return a class for ``import``, type hints, subclasses and ``isinstance``, whose constructor raises.

    Args:
        name: of the class.
        base: its base class.
        home: the module that offers it.
        instead: a sentence that says what to use in its place.

    Example::

        >>> Exotic = absent("Exotic", dict, home="here", instead="Use dict.")
        >>> isinstance({}, Exotic)
        False
        >>> Exotic()
        Traceback (most recent call last):
            ...
        hasten._lib.errors.MisconfigurationException: Exotic is not in this version of hasten. Use dict.

    """

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise MisconfigurationException(f"{name} is not in this version of hasten. {instead}")

    members = {
        "__new__": refuse,
        "__module__": home,
        "__qualname__": name,
        "__doc__": f"Not in this version of hasten. {instead}",
        "__absent__": True,
    }
    return type(name, (base,), members)


def is_absent(kind: object) -> bool:
    """Return whether ``kind`` is a class made by ``absent``."""
    return isinstance(kind, type) and "__absent__" in vars(kind)
