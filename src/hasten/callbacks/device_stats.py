"""DeviceStatsMonitor: the load and memory of the device, beside the values of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import need
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

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
        ModuleNotFoundError: the CPU's load is asked for and psutil is not installed.
        TypeError: ``cpu_stats`` is neither None nor a bool.

    Example::

        >>> monitor = DeviceStatsMonitor(cpu_stats=True)

    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        if cpu_stats is not None and not isinstance(cpu_stats, bool):
            raise TypeError(f"DeviceStatsMonitor(cpu_stats={cpu_stats!r}): use True, False or None.")
        self._cpu_stats = cpu_stats

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is something to log, and something to log to."""
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`: leave out one of them."
            )
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if self._cpu_stats or (self._cpu_stats is None and on_cpu):
            # The first call of cpu_percent has nothing to compare with, and says 0.
            need("psutil", purpose=_PURPOSE).cpu_percent()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log before a step whose values are logged."""
        progress, every = trainer._progress, trainer.log_every_n_steps
        if every and progress.window == 0 and (progress.updates + 1) % every == 0:
            self._log(trainer, "on_train_batch_start", progress.updates)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log after it."""
        progress, every = trainer._progress, trainer.log_every_n_steps
        if every and progress.window == 0 and progress.updates % every == 0:
            self._log(trainer, "on_train_batch_end", progress.updates - 1)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log before a batch, now and then."""
        self._evaluation(trainer, "on_validation_batch_start", batch_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log after a batch, now and then."""
        self._evaluation(trainer, "on_validation_batch_end", batch_idx)

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log before a batch, now and then."""
        self._evaluation(trainer, "on_test_batch_start", batch_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log after a batch, now and then."""
        self._evaluation(trainer, "on_test_batch_end", batch_idx)

    def _evaluation(self, trainer: Trainer, hook: str, batch_idx: int) -> None:
        every = trainer.log_every_n_steps
        if every and (batch_idx + 1) % every == 0:
            self._log(trainer, hook, trainer._progress.updates)

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        if not trainer.is_global_zero:
            return
        stats = self._stats(trainer)
        if not stats:
            return
        name = f"{type(self).__qualname__}.{hook}"
        for logger in trainer.loggers:
            separator = logger.group_separator
            logger.log_metrics({f"{name}{separator}{key}": value for key, value in stats.items()}, step=step)

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
