"""``Trainer(batch_size="auto")``: the largest batch size that trains, found before training begins."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from hasten._lib.rank_zero import rank_zero_debug, rank_zero_info
from hasten.data.memory.read import available_bytes, gigabytes
from hasten.loops.micro_batches import check_rebatched
from hasten.loops.resume import resolve_path
from hasten.loops.run import Run
from hasten.machine.host import process_memory_bytes
from hasten.tuner.batch_size import BatchSizeOptions, Search, size_of
from hasten.tuner.probe import ProbeRun
from hasten.tuner.tuned_value import TunedValue

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

_MOST_TRIALS = 40
# Memory of a device varies from batch to batch, and from one epoch to the next.
_MARGIN = 0.05
_MOST = 65_536
# Where memory hardly runs out, larger batches only make fewer steps of an epoch.
_MOST_ON_CPU = 1024
# Of the memory available on the host: a process that takes more than there is gets killed, without an error.
_SHARE_OF_HOST = 0.5


def find_batch_size(
    trainer: Trainer, module: LightningModule, given: dict[str, Any], datamodule: Any, ckpt_path: Any
) -> None:
    """Find the batch size and set it: on the Trainer, and where module or datamodule have a ``batch_size``.

    Weights, optimizers, random numbers, loaders and counters are restored, and no file is written. All processes find
    the same size: one that fits on each of them.

    Args:
        trainer: with ``batch_size="auto"``.
        module: the module.
        given: the loaders of the call, by stage.
        datamodule: of the call, or None.
        ckpt_path: of the call. A resumed run uses the size of its checkpoint.

    Raises:
        ValueError: something else than a loader decides how large its batches are.
        RuntimeError: not even one sample fits.

    """
    if trainer.fast_dev_run:
        rank_zero_info(
            "Trainer(batch_size='auto', fast_dev_run=...): the batch size stays that of the loader."
        )
        return
    if resolve_path(trainer, ckpt_path) is not None:
        return
    size: int = trainer.prepared_run("fit", module, given, datamodule, _search)
    set_batch_size(trainer, size)
    TunedValue(module, datamodule or trainer.datamodule, "batch_size").set(size)


def set_batch_size(trainer: Trainer, size: int | Literal["auto"]) -> None:
    """Let the Trainer's next run read batches of ``size`` samples."""
    arguments = trainer._arguments
    speed = dataclasses.replace(arguments.speed, batch_size=size)
    trainer._arguments = dataclasses.replace(arguments, speed=speed)


def _search(run: Run) -> int:
    # Spawned processes have another Trainer.
    probe = ProbeRun(run.module.trainer, run)
    loaders = run.train.streams()
    for loader in loaders:
        check_rebatched(loader, "auto", name="the train dataloader")
    sizes = [size_of(loader) or 1 for loader in loaders if isinstance(loader, DataLoader)]
    loader_size = probe.maximum(max(sizes))
    on_cpu = run.runtime.device.type == "cpu"
    most = _MOST_ON_CPU if on_cpu else _MOST
    margin = 0.0 if on_cpu else _MARGIN
    options = BatchSizeOptions(
        "binsearch", 3, min(loader_size, most), _MOST_TRIALS, "batch_size", margin, most
    )
    search = _AutomaticSearch(probe, options, on_cpu=on_cpu)
    size = search.run()
    each = " on each process" if run.runtime.world_size > 1 else ""
    rank_zero_info(
        f"Trainer(batch_size='auto'): {size} samples a batch{each}; the loader has {loader_size}. {search.why(size)}"
    )
    return size


class _AutomaticSearch(Search):
    """A search that changes the batch size of the loaders, also of those passed to the call."""

    caller = "Trainer(batch_size='auto')"

    def __init__(self, probe: ProbeRun, options: BatchSizeOptions, *, on_cpu: bool) -> None:
        super().__init__(probe, "fit", options)
        self._on_cpu = on_cpu
        self._too_large: list[int] = []
        self._host_full = ""

    def _report(self, text: str) -> None:
        rank_zero_debug(text)

    def _set_size(self, size: int) -> None:
        self._probe.batch_size = size
        super()._set_size(size)

    def _trained_with(self, size: int) -> int:
        if not self._on_cpu:
            trained = super()._trained_with(size)
        else:
            # "5" resets the peak to the present size.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = process_memory_bytes() or 0
            trained = super()._trained_with(size)
            growth, left = max(0, (process_memory_bytes(peak=True) or 0) - before), available_bytes()
            if trained and self._probe.maximum(int(2 * growth > _SHARE_OF_HOST * left)):
                self._most = trained
                self._host_full = f"took {gigabytes(growth)}, and {gigabytes(left)} are left on this machine"
        if not trained:
            self._too_large.append(size)
        return trained

    def why(self, size: int) -> str:
        """Return a sentence that explains why the size is not larger."""
        if self._too_large:
            return f"{min(self._too_large)} do not fit into memory."
        if self._samples is not None and size >= self._samples:
            each = " for each process" if self._probe.run.runtime.world_size > 1 else ""
            return f"The data has {self._samples}{each}."
        if self._host_full:
            return f"They {self._host_full}."
        where = " on the CPU, where memory seldom runs out. Give a number to use more" if self._on_cpu else ""
        return f"No more than {self._options.max_val} are tried{where}."
