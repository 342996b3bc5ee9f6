"""The import alias in other processes: started by multiprocessing, and by running the program again."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import sys
from typing import Any

from hasten._lib.optional import installed
from hasten._lib.rank_zero import rank_zero_only

# Runs in processes started by "spawn" or "forkserver" before they import the program's main module. It uses only
# builtins, because `hasten` may be importable only with this process's path.
_INSTALL = """
import sys
sys.path[:0] = [folder for folder in {path!r} if folder not in sys.path]
import hasten.compat
hasten.compat.install()
"""


class _Install:
    """Installs the alias where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (_INSTALL.format(path=[folder for folder in sys.path if isinstance(folder, str)]), {})


_original: Any = None
_original_rank_zero_only: Any = None


def share_rank() -> None:
    """Make ``lightning_utilities``, which packages for Lightning use, take the rank from hasten."""
    global _original_rank_zero_only
    if _original_rank_zero_only is None and installed("lightning_utilities"):
        shared: Any = importlib.import_module("lightning_utilities.core.rank_zero")
        _original_rank_zero_only, shared.rank_zero_only = shared.rank_zero_only, rank_zero_only


def follow() -> None:
    """Install the alias also in processes that multiprocessing starts, such as the workers of a loader."""
    global _original
    share_rank()
    if _original is not None:
        return
    _original = original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # The child unpickles this first, then imports the program's main module, and with it `lightning`.
        return {"hasten": _Install(), **original(name)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def leave() -> None:
    """Undo ``follow``."""
    global _original, _original_rank_zero_only
    if _original_rank_zero_only is not None:
        shared: Any = importlib.import_module("lightning_utilities.core.rank_zero")
        shared.rank_zero_only, _original_rank_zero_only = _original_rank_zero_only, None
    if _original is not None:
        multiprocessing.spawn.get_preparation_data = _original
        _original = None
