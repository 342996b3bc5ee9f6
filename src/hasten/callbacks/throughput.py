"""ThroughputMonitor: samples, items and operations a second, measured without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib import check
from hasten.callbacks.unused_hooks import disable_hooks, enable_hooks
from hasten.loops.progress import RunningStage, TrainerFn
from hasten.module.callback import Callback
from hasten.report.throughput import Throughput, compute_dtype, get_available_flops

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.types import Batch, StepOutput

_BATCH_START = {
    RunningStage.TRAINING: "on_train_batch_start",
    RunningStage.VALIDATING: "on_validation_batch_start",
    RunningStage.TESTING: "on_test_batch_start",
    RunningStage.PREDICTING: "on_predict_batch_start",
}


class ThroughputMonitor(Callback):
    """Log how fast a run is: batches, samples and items a second, FLOP/s, and their share of the peak (MFU).

    The values go to the loggers each ``log_every_n_steps``, under ``train/device/samples_per_sec`` and the like;
    see ``hasten.report.throughput.Throughput`` for all of them. Rates are over the last ``window_size`` batches.
    Nothing waits for the device: on CUDA times are those of CUDA events, read when they have happened. Time spent in
    validation does not count as training.

    The operations of a batch are ``pl_module.flops_per_batch``, if there is one, read at every batch; else those of
    the first batch of each stage, counted while it runs.

    Args:
        batch_size_fn: returns the number of samples of a batch.
        length_fn: returns the number of items (tokens, ...) of a batch.
        **kwargs: ``window_size`` (100) and ``separator`` ("/") of Throughput, and ``available_flops``: the peak of
            the device, for devices that are not known.

    Raises:
        TypeError: ``batch_size_fn`` or ``length_fn`` cannot be called.
        ValueError: ``window_size`` is less than 2.

    Example::

        >>> monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)

    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        allowed = "a function of a batch, for instance lambda batch: batch[0].size(0)"
        check.callable_("ThroughputMonitor", "batch_size_fn", batch_size_fn, allowed=allowed)
        check.callable_("ThroughputMonitor", "length_fn", length_fn, allowed=allowed, allow_none=True)
        Throughput(**kwargs)  # raises for wrong arguments
        self.kwargs = kwargs
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.available_flops: float | None = kwargs.get("available_flops")
        self._throughputs: dict[RunningStage, Throughput] = {}
        self._measures: dict[RunningStage, _StageTotals] = {}
        self._counting: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look up the peak of the device."""
        device = trainer.strategy.root_device
        if "available_flops" not in self.kwargs:
            self.available_flops = get_available_flops(device, compute_dtype(trainer.precision_plugin))
        options = {**self.kwargs, "available_flops": self.available_flops, "world_size": trainer.world_size}
        stages = [trainer.state.stage]
        if stage == TrainerFn.FITTING.value:
            stages = [RunningStage.TRAINING, RunningStage.VALIDATING]
        for found in stages:
            assert found is not None
            self._throughputs[found] = Throughput(**options)
            self._measures[found] = _StageTotals(device)
        enable_hooks(self, *_BATCH_START.values())
        if not trainer.is_global_zero or hasattr(pl_module, "flops_per_batch"):
            disable_hooks(self, ThroughputMonitor, *_BATCH_START.values())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop counting, after an exception too."""
        self._end_count()

    # -- hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure a stage."""
        stage = trainer.state.stage
        if not trainer.is_global_zero or stage not in self._measures or trainer.sanity_checking:
            return
        measure = self._measures[stage]
        if trainer.state.fn == TrainerFn.FITTING or not measure.batches:
            self._throughputs[stage].reset()
            measure.reset()
        measure.begin()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the operations of the first batch of a stage."""
        stage = trainer.state.stage
        measure = None if stage is None else self._measures.get(stage)
        if measure is None or measure.flops is not None or trainer.sanity_checking:
            return
        from torch.utils.flop_counter import FlopCounterMode

        self._counting = FlopCounterMode(display=False)
        self._counting.__enter__()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Measure, and log with the step's other values."""
        self._update(trainer, pl_module, batch)
        progress, every = trainer.progress, trainer.log_every_n_steps
        # With the optimizer's step: an accumulation is measured when it is complete.
        if every and progress.accumulation_index == 0 and progress.logged_step % every == 0:
            self._log(trainer, progress.logged_step - 1)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure, and log each ``log_every_n_steps`` batches."""
        self._update(trainer, pl_module, batch)
        stage, every = trainer.state.stage, trainer.log_every_n_steps
        if stage in self._measures and not trainer.sanity_checking and every:
            batches = self._measures[stage].batches
            if batches % every == 0:
                self._log(trainer, batches)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue to measure training, without the time of validation."""
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._measures[RunningStage.TRAINING].begin()

    # -- inside

    def _end_count(self) -> int | None:
        if self._counting is None:
            return None
        counter, self._counting = self._counting, None
        counter.__exit__(None, None, None)
        return int(counter.get_total_flops())

    def _update(self, trainer: Trainer, pl_module: LightningModule, batch: Batch) -> None:
        stage = trainer.state.stage
        if not trainer.is_global_zero or stage not in self._measures or trainer.sanity_checking:
            return
        measure = self._measures[stage]
        counted = self._end_count()
        if counted is not None:
            measure.flops = counted
            disable_hooks(self, ThroughputMonitor, _BATCH_START[stage])
        flops = getattr(pl_module, "flops_per_batch", None)
        if flops is None:
            flops = measure.flops or None
        with torch.no_grad():
            samples = self.batch_size_fn(batch)
            length = None if self.length_fn is None else self.length_fn(batch)
        measure.batch_ended(samples, length, flops)

    def _log(self, trainer: Trainer, step: int) -> None:
        stage = trainer.state.stage
        if not trainer.is_global_zero or stage not in self._measures:
            return
        throughput = self._throughputs[stage]
        for totals in self._measures[stage].arrived():
            throughput.update(**totals)
        metrics = throughput.compute()
        if metrics:
            named = {f"{stage.value}{throughput.separator}{name}": value for name, value in metrics.items()}
            for logger in trainer.loggers:
                logger.log_metrics(dict(named), step=step)

    def __getstate__(self) -> dict[str, Any]:
        # CUDA events cannot be pickled.
        return {**self.__dict__, "_measures": {}, "_counting": None}


class _StageTotals:
    """The totals of one stage, with the times at which the device reached them."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self.flops: int | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the totals, but not the operations of a batch."""
        self.batches = self._samples = 0
        self._lengths: int | None = None
        self._seconds = 0.0
        self._mark: Any = None
        self._last = -1.0
        # (start and end of the interval, totals at its end)
        self._pending: deque[tuple[Any, Any, dict[str, Any]]] = deque()

    def begin(self) -> None:
        """Measure from now on."""
        self._mark = self._now()

    def batch_ended(self, samples: int, length: int | None, flops: float | None) -> None:
        """Count a batch that ends now."""
        now = self._now()
        self.batches += 1
        self._samples += samples
        if length is not None:
            self._lengths = (self._lengths or 0) + length
        totals = {
            "batches": self.batches,
            "samples": self._samples,
            "lengths": self._lengths,
            "flops": flops,
        }
        self._pending.append((self._mark if self._mark is not None else now, now, totals))
        self._mark = now

    def arrived(self) -> list[dict[str, Any]]:
        """Return the totals up to the last batch that the device has finished, each with its time."""
        found = []
        while self._pending and (not self._events or self._pending[0][1].query()):
            started, ended, totals = self._pending.popleft()
            self._seconds += started.elapsed_time(ended) / 1000 if self._events else ended - started
            if self._seconds > self._last:  # A clock may stand still between two small batches.
                self._last = self._seconds
                found.append({"time": self._seconds, **totals})
        return found

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
