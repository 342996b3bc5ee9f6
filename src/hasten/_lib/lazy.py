"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str,
    homes: Mapping[str, str | Sequence[str]],
    *,
    also: Sequence[str] = (),
    hidden: Sequence[str] = (),
    submodules: Sequence[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package that loads its names lazily.

    Args:
        package: the package's ``__name__``.
        homes: the names of each module, ``{"hasten.callbacks.timer": "Interval Timer"}``, or a sequence of them.
            ``"Name=other"`` is called ``other`` there.
        also: names that the package defines itself, for ``__all__``.
        hidden: names of ``homes`` to leave out of ``__all__``.
        submodules: subpackages that are imported when they are used as attributes of the package.

    Example, in the ``__init__`` of a package::

        __getattr__, __dir__, __all__ = attach(__name__, {"hasten.callbacks.timer": ("Timer",)})

    """
    names: dict[str, tuple[str, str]] = {}
    for module, members in homes.items():
        for member in members.split() if isinstance(members, str) else members:
            name, _, other = member.partition("=")
            names[name] = (module, other or name)
    public = sorted({*names, *also}.difference(hidden))
    # With a path, `from module import name` asks for a module of this name too, and its error says what to write.
    vars(sys.modules[package]).setdefault("__path__", [])

    def load(name: str) -> Any:
        if name in names:
            module, member = names[name]
            value = getattr(importlib.import_module(module), member)
            setattr(sys.modules[package], name, value)
            return value
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        from hasten.extend import frames

        hint = ""
        # `from package import name` asks before it looks for a module of this name.
        if frames.name_of(frames.caller()) != "_handle_fromlist":
            from hasten.extend.moved import what_to_write

            hint = what_to_write(package, name, [*public, *submodules])
        # With a name, but without an object, for which Python would add a second hint.
        raise AttributeError(f"module {package!r} has no attribute {name!r}. {hint}".rstrip(), name=name)

    def listed() -> list[str]:
        return sorted([*public, *submodules])

    return load, listed, public
