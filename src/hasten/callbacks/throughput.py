"""ThroughputMonitor: samples, items and operations a second, measured without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten.callbacks.silent import silence, unsilence
from hasten.loops.states import RunningStage, TrainerFn
from hasten.module.callback import Callback
from hasten.report.throughput import Throughput, compute_dtype, get_available_flops

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

# A stage's name in its hooks.
_NAME_OF = {
    RunningStage.TRAINING: "train",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


class ThroughputMonitor(Callback):
    """Log how fast a run is: batches, samples and items a second, FLOP/s, and their share of the peak (MFU).

    The values go to the loggers each ``log_every_n_steps``, under ``train/device/samples_per_sec`` and the like;
    see ``hasten.report.throughput.Throughput`` for all of them. Rates are over the last ``window_size`` batches.
    Nothing waits for the device: on CUDA the time is that of events which the device passes, read when
    they have happened. Time spent in validation does not count as training.

    The operations of a batch are ``pl_module.flops_per_batch``, if there is one, asked at every batch; else those of
    the first batch of each stage, counted while it runs.

    Args:
        batch_size_fn: gives the number of samples of a batch.
        length_fn: gives the number of items (tokens, ...) of a batch.
        **kwargs: ``window_size`` (100) and ``separator`` ("/") of Throughput, and ``available_flops``: the peak of
            the device, where it is not known.

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
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if not callable(function) and not (name == "length_fn" and function is None):
                raise TypeError(
                    f"ThroughputMonitor({name}={function!r}): pass a function of a batch, for instance "
                    "lambda batch: batch[0].size(0)."
                )
        Throughput(**kwargs)  # What is wrong with them shows now.
        self.kwargs = kwargs
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.available_flops: float | None = kwargs.get("available_flops")
        self._throughputs: dict[RunningStage, Throughput] = {}
        self._measures: dict[RunningStage, _Measure] = {}
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
            self._measures[found] = _Measure(device)
        unsilence(self, *(f"on_{name}_batch_start" for name in _NAME_OF.values()))
        if not trainer.is_global_zero or hasattr(pl_module, "flops_per_batch"):
            silence(self, ThroughputMonitor, *(f"on_{name}_batch_start" for name in _NAME_OF.values()))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop counting, after an exception too."""
        self._end_count()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rates are those of this process."""
        return {}

    # -- what a batch does

    def _start(self, trainer: Trainer) -> None:
        stage = trainer.state.stage
        if not trainer.is_global_zero or stage not in self._measures or trainer.sanity_checking:
            return
        measure = self._measures[stage]
        if trainer.state.fn == TrainerFn.FITTING or not measure.batches:
            self._throughputs[stage].reset()
            measure.reset()
        measure.begin()

    def _begin_count(self, trainer: Trainer) -> None:
        """Count the operations of the first batch of a stage."""
        stage = trainer.state.stage
        measure = None if stage is None else self._measures.get(stage)
        if measure is None or measure.flops is not None or trainer.sanity_checking:
            return
        from torch.utils.flop_counter import FlopCounterMode

        self._counting = FlopCounterMode(display=False)
        self._counting.__enter__()

    def _end_count(self) -> int | None:
        if self._counting is None:
            return None
        counter, self._counting = self._counting, None
        counter.__exit__(None, None, None)
        return int(counter.get_total_flops())

    def _update(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        stage = trainer.state.stage
        if not trainer.is_global_zero or stage not in self._measures or trainer.sanity_checking:
            return
        measure = self._measures[stage]
        counted = self._end_count()
        if counted is not None:
            measure.flops = counted
            silence(self, ThroughputMonitor, f"on_{_NAME_OF[stage]}_batch_start")
        own = getattr(pl_module, "flops_per_batch", None)
        flops = own if own is not None else (measure.flops or None)
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
        if not metrics:
            return
        named = {f"{stage.value}{throughput.separator}{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(dict(named), step=step)

    def _evaluated(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        self._update(trainer, pl_module, batch)
        stage, every = trainer.state.stage, trainer.log_every_n_steps
        if stage in self._measures and not trainer.sanity_checking and every:
            done = self._measures[stage].batches
            if done % every == 0:
                self._log(trainer, done)

    # -- hooks

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin to measure training."""
        self._start(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the operations of the first batch."""
        self._begin_count(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Measure, and log with the step's other values."""
        self._update(trainer, pl_module, batch)
        progress, every = trainer._progress, trainer.log_every_n_steps
        # With the optimizer's step: an accumulation is measured when it is complete.
        if every and progress.window == 0 and progress.updates % every == 0:
            self._log(trainer, progress.updates - 1)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin to measure validation."""
        self._start(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the operations of the first batch."""
        self._begin_count(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Measure, and log now and then."""
        self._evaluated(trainer, pl_module, batch)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Go on measuring training, without the time of validation."""
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._measures[RunningStage.TRAINING].begin()

    def on_test_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin to measure the test."""
        self._start(trainer)

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the operations of the first batch."""
        self._begin_count(trainer)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Measure, and log now and then."""
        self._evaluated(trainer, pl_module, batch)

    def on_predict_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin to measure prediction."""
        self._start(trainer)

    def on_predict_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the operations of the first batch."""
        self._begin_count(trainer)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Measure, and log now and then."""
        self._evaluated(trainer, pl_module, batch)

    def __getstate__(self) -> dict[str, Any]:
        # Events of a device stay in its process.
        return {**self.__dict__, "_measures": {}, "_counting": None}


class _Measure:
    """The totals of one stage, with times that the device says when it has got there."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self.flops: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the totals; the operations of a batch stay known."""
        self.batches = self._samples = 0
        self._lengths: int | None = None
        self._seconds = 0.0
        self._mark: Any = None
        self._last = -1.0
        # (where the interval began, where it ended, totals then)
        self._waiting: deque[tuple[Any, Any, dict[str, Any]]] = deque()

    def begin(self) -> None:
        """Measure from now on."""
        self._mark = self._now()

    def batch_ended(self, samples: int, length: int | None, flops: float | None) -> None:
        """Take a batch that ends here."""
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
        self._waiting.append((self._mark if self._mark is not None else now, now, totals))
        self._mark = now

    def arrived(self) -> list[dict[str, Any]]:
        """Return the totals up to the last batch that the device has finished, each with its time."""
        found = []
        while self._waiting and (not self._events or self._waiting[0][1].query()):
            begun, ended, totals = self._waiting.popleft()
            self._seconds += begun.elapsed_time(ended) / 1000 if self._events else ended - begun
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
