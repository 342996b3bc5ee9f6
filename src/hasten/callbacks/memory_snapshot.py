"""MemorySnapshot: write what filled the memory of a GPU when a fit runs out of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hasten._lib import check, torch_private
from hasten._lib.device import is_cuda, is_out_of_memory
from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import log, rank_zero_warn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer


class MemorySnapshot(Callback):
    """Write a snapshot of a GPU's memory when a fit ends because memory has run out.

    While a fit runs, torch records each allocation with the Python calls that made it, and the last ``max_entries`` of
    them are kept. If an out-of-memory error ends the fit, each process in which it was raised writes
    ``memory_rank_0.pickle`` (with its own rank), which https://pytorch.org/memory_viz shows: what was in memory, and
    which line of the program has allocated it. A batch that is tried again in smaller parts (``micro_batch="auto"``)
    does not end the fit, and writes nothing.

    Recording costs time at each allocation. On other devices than CUDA GPUs nothing is recorded or written.

    The method is that of https://docs.pytorch.org/docs/stable/torch_cuda_memory.html.

    Args:
        dirpath: folder of the files; created when one is written. By default ``trainer.default_root_dir``.
        max_entries: number of allocations and releases that are kept.

    Raises:
        MisconfigurationException: an argument is out of range, or no path.

    Example::

        >>> MemorySnapshot("snapshots").max_entries
        100000

    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, max_entries: int = 100_000) -> None:
        error = MisconfigurationException
        self.dirpath = check.path("MemorySnapshot", "dirpath", dirpath, allow_none=True, error=error)
        self.max_entries = check.whole("MemorySnapshot", "max_entries", max_entries, at_least=1, error=error)
        self._records = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to record, for a fit on a GPU."""
        if stage == "fit" and is_cuda(trainer.strategy.root_device):
            torch_private.record_memory_history(self.max_entries)
            self._records = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the snapshot if memory has run out."""
        if not self._records or not is_out_of_memory(exception):
            return
        folder = os.fspath(self.dirpath or trainer.default_root_dir)
        path = os.path.join(folder, f"memory_rank_{trainer.global_rank}.pickle")
        try:
            os.makedirs(folder, exist_ok=True)
            torch_private.dump_memory_snapshot(path)
        except OSError as error:
            # The program must end with the error that it has.
            rank_zero_warn(f"MemorySnapshot: {path} cannot be written: {error.strerror}.")
        else:
            log.warning(f"Memory has run out. What was in it is in {path}; https://pytorch.org/memory_viz shows it.")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record no longer."""
        if self._records:
            self._records = False
            torch_private.record_memory_history(None)
