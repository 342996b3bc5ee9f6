"""Modules under other names: those that they had before they moved, and those that ``lightning`` has them under.

Most are there for one version. The names of backends stay: the core offers their public names under the old paths, and
imports them when they are used (``hasten.strategies.DeepSpeedStrategy``). The names of ``lightning`` stay too: programs
that replace ``lightning`` by ``hasten`` in their imports have ``import hasten.pytorch as pl``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The packages and modules of ``lightning`` that hasten has in other places. Not all modules of a package are there.
_OF_LIGHTNING = {
    "hasten.pytorch": "hasten",
    **{f"hasten.fabric.{name}": f"hasten.{name}" for name in ("accelerators", "plugins", "strategies", "utilities")},
    "hasten.callbacks.progress.rich_progress": "hasten.callbacks.rich_progress",
    **{f"hasten.callbacks.progress.{name}": "hasten.callbacks.progress" for name in ("progress_bar", "tqdm_progress")},
}

# The package that has the modules now, by a module's old name. Modules below a name have moved with it.
MOVED = {
    "hasten.compat": "hasten_lightning",  # Stays: programs and documentation name it.
    **{f"hasten.{name}": f"hasten_tools.{name}" for name in ("demo", "eject", "plan", "preflight", "speed")},
    **{
        f"hasten.commands.{name}": f"hasten_tools.commands.{name}"
        for name in (
            *("advise", "check", "consolidate", "eject", "env", "known", "launch"),
            *("plan", "plot", "report", "trial"),
        )
    },
    **{
        f"hasten.report.{name}": f"hasten_tools.report.{name}"
        for name in ("compare", "curves", "page", "page_curves", "page_run", "plots")
    },
    **{f"hasten.commands.{name}": f"hasten_lightning.commands.{name}" for name in ("migrate", "run")},
    # These stay: public names, to which stubs beside the core's modules lead type checkers.
    **{f"hasten.{name}": f"hasten_lightning.{name}" for name in ("demos", "utilities")},
    "hasten.transformers": "hasten_tools.transformers",
    "hasten.fabric.loggers": "hasten_lightning._classes.fabric_loggers",
    "hasten.trainer.loop_counts": "hasten_lightning.loops.counts",
    "hasten.trainer.loop_views": "hasten_lightning.loops.views",
    "hasten.record.read": "hasten_tools.report.read",
    "hasten.report.deepspeed": "hasten_deepspeed.summary",  # Its class was in hasten.report.summary.
    "hasten.strategies.deepspeed": "hasten_deepspeed.strategy",
    "hasten.strategies.zero": "hasten_deepspeed",
    "hasten.optim.deepspeed_offload": "hasten_deepspeed.offload",
    "hasten.precision.deepspeed": "hasten_deepspeed.precision",
    "hasten.xla": "hasten_xla",
    "hasten.strategies.xla": "hasten_xla.strategies",
    "hasten.precision.xla": "hasten_xla.precision",
    "hasten.profilers.xla": "hasten_xla.profiler",
    "hasten.checkpoint.xla": "hasten_xla.checkpoint",
    **_OF_LIGHTNING,
}


def new_name(name: str) -> str | None:
    """Return the name that a module has now, or None if it has not moved.

    Example::

        >>> new_name("hasten.speed.levers"), new_name("hasten.loops.fit")
        ('hasten_tools.speed.levers', None)

    """
    head, tail = name, ""
    while head not in MOVED:
        head, dot, last = head.rpartition(".")
        if not dot:
            return None
        tail = f".{last}{tail}"
    return MOVED[head] + tail


class OldNames:
    """A finder for ``sys.meta_path``: the old name of a module gives the same module object as the new one.

    A package gets a separate module object without a search path, so that this finder also finds its submodules; so
    does a module that is a package in ``lightning``.
    """

    def __init__(self) -> None:
        # Importing has set ``__spec__`` to the spec of the old name; these are the former values.
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module that has moved; None for any other."""
        if not name.startswith("hasten.") or (new := new_name(name)) is None:
            return None
        from hasten.extend.frames import asked_by_find_spec  # ``import hasten`` does without it.

        if asked_by_find_spec() and not _is_there(new):
            return None
        loader: Any = self
        return ModuleSpec(name, loader, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its new name."""
        new = spec.origin or ""
        of_lightning = any(f"{spec.name}.".startswith(f"{root}.") for root in _OF_LIGHTNING)
        if not _is_there(new):
            instead = "" if of_lightning else _known_place(spec.name)
            if not of_lightning and not instead:
                # With the name that was asked for: Python then says which name it cannot import from the package.
                raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
            from hasten._lib.errors import make_error  # ``import hasten`` does without it.

            raise make_error(ModuleNotFoundError, f"hasten has no {spec.name}.", fix=instead or _instead(new))
        module = importlib.import_module(new)
        if hasattr(module, "__path__") or (of_lightning and new.count(".") == 1):
            package = ModuleType(spec.name, module.__doc__)
            package.__dict__.update(__path__=[], __getattr__=module.__getattribute__, __dir__=module.__dir__)
            package.__dict__.update({"__all__": module.__all__} if hasattr(module, "__all__") else {})
            return package
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has already run under its new name."""
        spec = module.__spec__
        if spec is not None and spec.name in self._specs:
            module.__spec__ = self._specs.pop(spec.name)


class MissingNames:
    """The last finder of ``sys.meta_path``: for names that hasten does not have, the error says what to write.

    ``from package import name`` asks for a module of this name where the package has no such attribute.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Return None for names of other packages, and where it is asked whether a module is there."""
        if not name.startswith("hasten."):
            return
        from hasten._lib.errors import make_error
        from hasten.extend.frames import asked_by_find_spec

        if asked_by_find_spec():
            return
        package, _, last = name.rpartition(".")
        # Without name=: with it, Python replaces the message.
        fix = what_to_write(package, last, dir(sys.modules[package]))
        raise make_error(ModuleNotFoundError, f"hasten has no {name}.", fix=fix)


def install() -> None:
    """Let old names be imported; before other finders, which take a folder that git has left behind for a package."""
    sys.meta_path.insert(0, OldNames())
    sys.meta_path.append(MissingNames())


def what_to_write(package: str, name: str, known: Collection[str]) -> str:
    """Return a sentence that says what to write in place of a name that a package of hasten lacks; "" for none.

    ``known`` are the names that the package has.

    Example::

        >>> what_to_write("hasten", "ModelCheckpoint", ["Trainer"])
        'Write from hasten.callbacks import ModelCheckpoint.'

    """
    from hasten._lib.names import did_you_mean, nearest

    if name.startswith("_"):
        return ""
    if instead := _known_place(f"{package}.{name}"):
        return instead
    homes = _homes()
    if name in homes:
        return f"Write from {homes[name]} import {name}."
    # Names in lower case are nearer to hasten: accelerator, profiler, seed.
    of_torch = ("torch.utils.data", "torch.nn", "torch.optim", "torch") if name == "nn" or name[:1].isupper() else ()
    for home in of_torch:
        if name in dir(importlib.import_module(home)):
            return f"Write from {home} import {name}."
    # The names of classes and modules often differ in case alone.
    alike = [each for each in known if each[:1].isupper() == name[:1].isupper()]
    if hint := (did_you_mean(name, alike) or did_you_mean(name, known)).strip():
        return hint
    near = nearest(name, homes)
    return f"Did you mean from {homes[near]} import {near}?" if near is not None else ""


def _known_place(full_name: str) -> str:
    """Return what to write for a module or class that other libraries have at this place; "" for others."""
    from hasten.elsewhere.names import PLACES

    return PLACES.get(re.sub(r"^hasten(_lightning)?\.(pytorch\.)?", "", full_name), "")


# The packages in which programs look for classes, the most usual first.
_PUBLIC = (
    "hasten", "hasten.callbacks", "hasten.loggers", "hasten.strategies", "hasten.plugins", "hasten.profilers",
    "hasten.tuner", "hasten.cli", "hasten.data", "hasten.accelerators", "hasten.utilities",
)  # fmt: skip


def _homes() -> dict[str, str]:
    """Return the public package of each public class and function."""
    homes: dict[str, str] = {}
    for package in _PUBLIC:
        # The packages beside the core may be left out.
        with suppress(ImportError):
            for name in getattr(importlib.import_module(package), "__all__", ()):
                homes.setdefault(name, package)
    return homes


def _is_there(module: str) -> bool:
    """Return whether a module can be imported; ``ModuleNotFoundError`` if a package above it is missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return False  # What is above it is no package.


def _instead(module: str) -> str:
    """Return the import to write in place of a module that hasten does not have."""
    from hasten._lib.names import nearest

    package, _, last = module.rpartition(".")
    if instead := _known_place(module):
        return instead
    names = [name for name in dir(importlib.import_module(package)) if not name.startswith("_")]
    # Lightning has ModelCheckpoint in a module of its own, model_checkpoint.
    same = next((name for name in names if name.lower() == last.replace("_", "").lower()), None)
    near = same or (nearest(last, names) if last[:1].isupper() else None)
    if near is not None:
        return f"Did you mean from {package} import {near}?"
    return (
        f"Import what you need from {package}; hasten migrate PROGRAM writes all imports of a program that imports "
        "lightning."
    )
