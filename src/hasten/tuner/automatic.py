"""``Trainer(batch_size="auto")``: the largest batch size that trains, found before training begins."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from hasten._lib.rank_zero import rank_zero_debug, rank_zero_info
from hasten.data.memory.read import available_bytes, gigabytes
from hasten.loops.resume import resolve_path
from hasten.loops.run import Run
from hasten.loops.split_sizes import check_rebatched
from hasten.tuner import attributes
from hasten.tuner.batch_size import Search, size_of
from hasten.tuner.trial import Trial

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

_STEPS_OF_A_TRIAL = 3
_MOST_TRIALS = 40
# Memory of a device varies from batch to batch, and from one epoch to the next.
_MARGIN = 0.05
_MOST = 65_536
# Where memory hardly runs out, larger batches only make fewer steps of an epoch.
_MOST_ON_CPU = 1024
# Of the memory that is left on the host: a process that takes more than there is gets killed, without an error.
_SHARE_OF_HOST = 0.5


def find_batch_size(
    trainer: Trainer, module: LightningModule, given: dict[str, Any], datamodule: Any, ckpt_path: Any
) -> None:
    """Find the batch size and set it: on the Trainer, and on module or datamodule where they have a ``batch_size``.

    Weights, optimizers, random numbers, loaders and counters are afterwards as they were before, and no file is
    written. All processes find the same size: one that fits on each of them.

    Args:
        trainer: with ``batch_size="auto"``.
        module: the module.
        given: the loaders of the call, by stage.
        datamodule: of the call, or None.
        ckpt_path: of the call. A run that goes on does so with the size of its checkpoint.

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
    attributes.put(module, datamodule or trainer.datamodule, "batch_size", size)


def set_batch_size(trainer: Any, size: int | str) -> None:
    """Have the Trainer's next run read batches of ``size`` samples."""
    arguments = trainer._arguments
    speed = dataclasses.replace(arguments.speed, batch_size=size)
    trainer._arguments = dataclasses.replace(arguments, speed=speed)


def _search(run: Run) -> int:
    # In copies of this process the Trainer is another one.
    trial = Trial(run.module.trainer, run)
    loaders = run.train.streams()
    for loader in loaders:
        check_rebatched(loader, "auto", name="the train dataloader")
    own = trial.largest(max([size_of(loader) or 1 for loader in loaders if isinstance(loader, DataLoader)]))
    on_cpu = run.runtime.device.type == "cpu"
    search = _Automatic(trial, _MOST_ON_CPU if on_cpu else _MOST, host=_Host() if on_cpu else None)
    size = search.run("binsearch", min(own, search.most), _MOST_TRIALS, 0.0 if on_cpu else _MARGIN)
    each = " on each process" if run.runtime.world_size > 1 else ""
    rank_zero_info(
        f"Trainer(batch_size='auto'): {size} samples a batch{each}; the loader has {own}. {search.why(size)}"
    )
    return size


class _Automatic(Search):
    """A search that makes the loaders with another size, whoever gave them."""

    asked = "Trainer(batch_size='auto')"

    def __init__(self, trial: Trial, most: int, host: _Host | None) -> None:
        super().__init__(
            trial, "fit", _STEPS_OF_A_TRIAL, "batch_size", most, say=rank_zero_debug, put=self._set
        )
        self._bound = most
        self._host = host
        self._too_large: list[int] = []
        self._host_full = ""

    @property
    def most(self) -> int:
        """The largest size that is tried."""
        return self._most

    def _set(self, size: int) -> None:
        trial = self._trial
        trial.batch_size = size
        attributes.put(trial.module, trial.datamodule, "batch_size", size)

    def _trained_with(self, size: int) -> int:
        if self._host is not None:
            self._host.begin()
        trained = super()._trained_with(size)
        if not trained:
            self._too_large.append(size)
        elif self._host is not None:
            growth, left = self._host.growth(), available_bytes()
            is_full = self._trial.largest(int(2 * growth > _SHARE_OF_HOST * left))
            if is_full:
                self._most = trained
                self._host_full = f"took {gigabytes(growth)}, and {gigabytes(left)} are left on this machine"
        return trained

    def why(self, size: int) -> str:
        """Say in a sentence why it is not more."""
        if self._too_large:
            return f"{min(self._too_large)} do not fit into memory."
        if self._samples is not None and size >= self._samples:
            return f"The data has {self._samples}{self._each}."
        if self._host_full:
            return f"They {self._host_full}."
        where = " on the CPU, where memory seldom runs out. Give a number to use more" if self._host else ""
        return f"No more than {self._bound} are tried{where}."

    @property
    def _each(self) -> str:
        return " for each process" if self._trial.run.runtime.world_size > 1 else ""


class _Host:
    """How much memory of the host a trial takes at most; Linux tells, elsewhere it counts as nothing."""

    def begin(self) -> None:
        """Count from here."""
        with suppress(OSError):
            # "5" sets the largest size so far back to the present one.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._status("VmRSS")

    def growth(self) -> int:
        """Return the bytes by which the process was larger than at the beginning, at its largest."""
        return max(0, self._status("VmHWM") - self._before)

    def _status(self, name: str) -> int:
        if os.name != "posix":
            return 0
        with suppress(OSError, ValueError):
            for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
        return 0
