"""Whether Lightning's module names lead to hasten in this process.

Where a program written for Lightning may rely on what Lightning does and hasten does something else on purpose, for
instance refuses what Lightning only warns about, the code asks ``active()`` once, before the loop, and does what
Lightning does.
"""

from __future__ import annotations

_active = False


def active() -> bool:
    """Return True between ``hasten.compat.install()`` and ``uninstall()``, and in programs under ``hasten run``."""
    return _active


def activate(on: bool) -> None:
    """Say that the alias is installed, or that it no longer is."""
    global _active
    _active = on


def class_of(thing: object) -> type:
    """Return the class of an object; hasten's own where the program has made it under Lightning's name.

    ``hasten.compat`` has subclasses with Lightning's parameters, which are the same classes to all code here.
    """
    kind = type(thing)
    return vars(kind).get("behind") or kind
