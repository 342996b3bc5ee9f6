"""Classes of the field that hasten does not have: there to be named, not to be made."""

from __future__ import annotations

from typing import Any

from hasten._lib.errors import MisconfigurationException


def absent(name: str, base: type, *, home: str, instead: str) -> Any:
    """Return a class that can be imported, subclassed and asked about with ``isinstance``, but not made.

    Packages name such classes in their type hints and in ``isinstance`` without ever using them.

    Args:
        name: of the class.
        base: what the class is one of.
        home: the module that offers it.
        instead: a sentence: what to use in its place.

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

    said = f"Not in this version of hasten. {instead}"
    return type(name, (base,), {"__new__": refuse, "__module__": home, "__qualname__": name, "__doc__": said})
