"""Where a program that imports hasten itself finds a name of Lightning."""

from __future__ import annotations

import importlib
import re

from hasten._lib.errors import is_absent
from hasten._lib.lazy import homes_of
from hasten.compat.modules import ROOTS, TABLE, relative

_FAMILIES = {
    package: homes_of(package)
    for package in ("hasten.callbacks", "hasten.demos", "hasten.loggers", "hasten.profilers")
}
# Reached as attributes after `import hasten`.
_PACKAGES = frozenset(_FAMILIES) | {
    f"hasten.{name}"
    for name in ("accelerators", "cli", "data", "plugins", "strategies", "tuner", "utilities")
}
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+")


def place_of(module: str, name: str) -> tuple[str, str] | None:
    """Return (module of hasten, name there) for a name in a module of Lightning, or None.

    Example::

        >>> place_of("lightning.pytorch.callbacks.early_stopping", "EarlyStopping")
        ('hasten.callbacks', 'EarlyStopping')

    """
    found = TABLE.get(relative(module) or "", {}).get(name)
    if found is None or found[0] == "hasten.compat.names":
        return None
    home, there = found
    utilities = homes_of("hasten.utilities")
    if name in utilities and (home.startswith("hasten.utilities") or utilities[name] == found):
        return "hasten.utilities", name
    for family, names in _FAMILIES.items():
        if names.get(name) == found and there == name:
            return family, name
    return home, there


def can_be_made(place: tuple[str, str]) -> bool:
    """Return whether a name of hasten is more than a class that can only be imported."""
    module, name = place
    return not is_absent(getattr(importlib.import_module(module or name), name, None))


def module_for(module: str) -> str | None:
    """Return the module of hasten that has all names of a module of Lightning, or None.

    Example::

        >>> module_for("lightning.pytorch"), module_for("pytorch_lightning.trainer.states")
        ('hasten', 'hasten.utilities')

    """
    place = relative(module)
    if place in ("", "pytorch"):
        return "hasten"
    names = TABLE.get(place or "", {})
    homes = {place_of(module, name) for name in names if not name.startswith("__")}
    modules = {found[0] for found in homes if found is not None}
    same = all(found is not None and found[1] in names for found in homes)
    return modules.pop() if len(modules) == 1 and same else None


def as_attribute(base: str, place: tuple[str, str]) -> str | None:
    """Return the attribute path to a name from a variable that holds the module ``base``, or None.

    Example::

        >>> as_attribute("hasten", ("hasten.callbacks", "Timer")), as_attribute("hasten", ("hasten.optim", "parse"))
        ('callbacks.Timer', None)

    """
    module, name = place
    if module == base:
        return name
    return f"{module.removeprefix('hasten.')}.{name}" if base == "hasten" and module in _PACKAGES else None


def rewritten(dotted: str) -> str | None:
    """Return the name in hasten for a dotted name of Lightning, or None.

    Example::

        >>> rewritten("pytorch_lightning.callbacks.ModelCheckpoint")
        'hasten.callbacks.ModelCheckpoint'
        >>> rewritten("lightning.pytorch.Trainer.fit")
        'hasten.Trainer.fit'

    """
    words = dotted.split(".")
    for end in range(len(words) - 1, 0, -1):
        module = ".".join(words[:end])
        if relative(module) in TABLE:
            place = place_of(module, words[end])
            if place is not None:
                return ".".join([*place, *words[end + 1 :]])
            break
    return module_for(dotted) if relative(dotted) in TABLE else None
