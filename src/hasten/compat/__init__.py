"""Programs and packages written for Lightning, unchanged: its module names lead to hasten.

``hasten run program.py`` does it for a whole program; ``hasten.compat.install()`` for the process that calls it.
"""

from __future__ import annotations

import sys

from hasten.checkpoint.allowed_types import allow_objects
from hasten.compat import processes
from hasten.compat.modules import FINDER, ROOTS, AliasModule

__all__ = ["install", "installed", "uninstall"]


def install() -> None:
    """Let ``lightning``, ``pytorch_lightning``, ``lightning_fabric`` and all their modules be hasten from here on.

    Call it before the first import of one of them; whether Lightning is installed makes no difference. Worker
    processes of a ``DataLoader`` and the processes of a distributed run get the same. A second call does nothing.

    Raises:
        RuntimeError: Lightning itself was imported already, so that a part of the program holds its classes.

    Example::

        >>> import hasten.compat
        >>> hasten.compat.install()
        >>> from lightning.pytorch import Trainer
        >>> Trainer.__module__
        'hasten.trainer.trainer'
        >>> hasten.compat.uninstall()

    Source: `importlib, meta path finders <https://docs.python.org/3/library/importlib.html>`_.

    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ROOTS and module is not None and not isinstance(module, AliasModule):
            place = getattr(module, "__file__", None)
            raise RuntimeError(
                f"hasten.compat.install(): {name} was imported already{f' from {place}' if place else ''}. Call "
                "install() before the first import of it and of packages built on it, or start the program with: "
                "hasten run PROGRAM"
            )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    processes.follow()
    # Packages put objects into their checkpoints, and Lightning writes them. Reading stays as strict as ever.
    allow_objects(True)


def installed() -> bool:
    """Return whether the names of Lightning lead to hasten in this process."""
    return FINDER in sys.meta_path


def uninstall() -> None:
    """Undo ``install``; modules that imported the names keep what they have."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]
    processes.leave()
    allow_objects(False)
