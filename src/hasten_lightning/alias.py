"""Have the module names of Lightning lead to hasten in this process, and those that it starts."""

from __future__ import annotations

import importlib
import logging
import multiprocessing.spawn
import sys
from contextlib import ExitStack
from typing import Any

from hasten._lib.errors import make_error
from hasten._lib.observers import set_until
from hasten._lib.rank_zero import log, rank_zero_only
from hasten.elsewhere.conventions import HASTEN, use
from hasten_lightning.conventions import LIGHTNING
from hasten_lightning.modules import FINDER, PRODUCTS_FINDER, ROOTS, AliasModule, restore

# Names under which programs find the logger of Lightning's messages, to silence them or to send them elsewhere.
_LOGGERS = [
    name + end for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    for end in ("", ".utilities.rank_zero", ".plugins.environments")
]  # fmt: skip
# What `uninstall` undoes.
_replaced = ExitStack()

# Runs in processes started by "spawn" or "forkserver" before they import the program's main module. It uses only
# builtins, because `hasten` may be importable only with this process's path.
_INSTALL = """
import sys
sys.path[:0] = [folder for folder in {path!r} if folder not in sys.path]
import hasten_lightning
hasten_lightning.install()
"""


class _Install:
    """Installs the alias where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (_INSTALL.format(path=[folder for folder in sys.path if isinstance(folder, str)]), {})


def install() -> None:
    """Make ``lightning``, ``pytorch_lightning``, ``lightning_fabric`` and all their modules lead to hasten.

    Call it before the first import of one of them; whether Lightning is installed makes no difference. Worker
    processes of a ``DataLoader`` and the processes of a distributed run get the same. A second call does nothing.

    Raises:
        RuntimeError: Lightning itself was imported already, so that a part of the program holds its classes.

    Example::

        >>> import hasten_lightning
        >>> hasten_lightning.install()
        >>> from lightning.pytorch import Trainer
        >>> Trainer.__module__
        'hasten_lightning.trainer'
        >>> hasten_lightning.uninstall()

    Source: `importlib, meta path finders <https://docs.python.org/3/library/importlib.html>`_.

    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ROOTS and module is not None and not isinstance(module, AliasModule):
            place = getattr(module, "__file__", None)
            raise make_error(
                RuntimeError,
                f"hasten.compat.install(): {name} was imported already{f' from {place}' if place else ''}.",
                fix=(
                    "Call install() before the first import of it and of packages built on it, or write: hasten run "
                    "PROGRAM"
                ),
            )
    if installed():
        return
    sys.meta_path.insert(0, FINDER)
    sys.meta_path.append(PRODUCTS_FINDER)
    _replaced.callback(sys.meta_path.remove, PRODUCTS_FINDER)
    use(LIGHTNING)
    _replaced.callback(use, HASTEN)
    # lightning_utilities, which packages for Lightning use, takes the rank from hasten.
    _replace(importlib.import_module("lightning_utilities.core.rank_zero"), "rank_zero_only", rank_zero_only)
    for name in _LOGGERS:
        set_until(_replaced, logging.Logger.manager.loggerDict, name, log)
    # A process that multiprocessing starts, such as the worker of a loader, unpickles this first, then imports the
    # program's main module, and with it `lightning`.
    original = multiprocessing.spawn.get_preparation_data
    _replace(multiprocessing.spawn, "get_preparation_data", lambda name: {"hasten": _Install(), **original(name)})


def _replace(owner: object, name: str, value: object) -> None:
    _replaced.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def installed() -> bool:
    """Return whether the names of Lightning lead to hasten in this process."""
    return FINDER in sys.meta_path


def uninstall() -> None:
    """Undo ``install``; modules that imported the names keep what they have."""
    if installed():
        sys.meta_path.remove(FINDER)
        if "hasten_lightning.cli" in sys.modules:
            sys.modules["hasten_lightning.cli"].forget_classes()
    restore()
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]
    _replaced.close()
