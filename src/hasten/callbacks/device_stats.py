"""DeviceStatsMonitor: log the load and memory of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import need
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.types import Batch, StepOutput

_PURPOSE = "DeviceStatsMonitor(cpu_stats=...)"


class DeviceStatsMonitor(Callback):
    """Log memory and load of the device each ``log_every_n_steps``, before and after a batch.

    The keys are ``DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.peak`` and the like. On CUDA they are
    those of ``torch.cuda.memory_stats`` (bytes and counts); on the CPU ``cpu_percent``, ``cpu_vm_percent`` and
    ``cpu_swap_percent`` of the whole machine, for which psutil must be installed. Nothing waits for the device.

    Args:
        cpu_stats: log the CPU's load too. None: where the run is on the CPU; False: never.

    Raises:
        MisconfigurationException: the Trainer has no logger.
        ModuleNotFoundError: the CPU's load is requested and psutil is not installed.
        TypeError: ``cpu_stats`` is neither None nor a bool.

    Example::

        >>> monitor = DeviceStatsMonitor(cpu_stats=True)

    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = check.boolean("DeviceStatsMonitor", "cpu_stats", cpu_stats, allow_none=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is something to log, and a logger."""
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`: leave out one of them."
            )
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if self._cpu_stats or (self._cpu_stats is None and on_cpu):
            # The first call of cpu_percent has nothing to compare with, and returns 0.
            need("psutil", purpose=_PURPOSE).cpu_percent()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Log before a step whose values are logged."""
        self._log_step(trainer, "on_train_batch_start", ahead=1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Log after a step whose values are logged."""
        self._log_step(trainer, "on_train_batch_end", ahead=0)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log before each ``log_every_n_steps``-th batch."""
        self._log_evaluation(trainer, "start", batch_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log after each ``log_every_n_steps``-th batch."""
        self._log_evaluation(trainer, "end", batch_idx)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def _log_step(self, trainer: Trainer, hook: str, *, ahead: int) -> None:
        progress, every = trainer.progress, trainer.log_every_n_steps
        if every and progress.accumulation_index == 0 and (progress.logged_step + ahead) % every == 0:
            self._log(trainer, hook, progress.logged_step + ahead - 1)

    def _log_evaluation(self, trainer: Trainer, edge: str, batch_idx: int) -> None:
        every = trainer.log_every_n_steps
        if every and (batch_idx + 1) % every == 0:
            stage = "test" if trainer.testing else "validation"
            self._log(trainer, f"on_{stage}_batch_{edge}", trainer.progress.logged_step)

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        stats = self._stats(trainer) if trainer.is_global_zero else {}
        if stats:
            name = f"{type(self).__qualname__}.{hook}"
            for logger in trainer.loggers:
                separator = logger.group_separator
                logger.log_metrics({f"{name}{separator}{key}": stats[key] for key in stats}, step=step)

    def _stats(self, trainer: Trainer) -> dict[str, float]:
        device = trainer.strategy.root_device
        if device.type == "cpu":
            return {} if self._cpu_stats is False else get_cpu_stats()
        stats: dict[str, float] = dict(trainer.accelerator.get_device_stats(device))
        return {**stats, **get_cpu_stats()} if self._cpu_stats else stats


def get_cpu_stats() -> dict[str, float]:
    """Return the load of this machine's CPU, memory and swap, in percent.

    Raises:
        ModuleNotFoundError: psutil is not installed.

    Example::

        >>> sorted(get_cpu_stats())
        ['cpu_percent', 'cpu_swap_percent', 'cpu_vm_percent']

    """
    psutil = need("psutil", purpose=_PURPOSE)
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
