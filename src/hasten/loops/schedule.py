"""When learning-rate schedulers step, when validation runs within fit, and which batches a step accumulates."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten._lib.durations import Period
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import by_kind, parameters_of
from hasten.elsewhere import alias
from hasten.optim import LRSchedulerConfig

if TYPE_CHECKING:
    from hasten.loops.run import Run


class ValidationSchedule:
    """Decide after which batches validation is due.

    ``interval`` is in batches (int), a share of an epoch (float), optimizer steps or time. Validation runs in every
    ``every_n_epochs``; None counts ``interval`` over epochs.
    """

    def __init__(self, interval: int | float | Period, every_n_epochs: int | None) -> None:
        self._last_seconds = time.monotonic()
        self.change(interval, every_n_epochs)

    def change(self, interval: int | float | Period, every_n_epochs: int | None) -> None:
        """Validate at other times from now on."""
        self._interval = interval
        self._every_n_epochs = every_n_epochs
        # Steps and time are checked after each batch.
        self.per_batch = isinstance(interval, Period)

    def batches_between(self, length: float) -> float:
        """Return the number of batches between validations, in an epoch of ``length`` batches."""
        interval = self._interval
        if isinstance(interval, Period):
            return math.inf
        if isinstance(interval, int):
            if self._every_n_epochs is not None and not math.isinf(length) and interval > length:
                raise MisconfigurationException(
                    f"Trainer(val_check_interval={interval}): an epoch has {int(length)} batches. Use at most "
                    f"{int(length)}, or check_val_every_n_epoch=None to count batches over epochs."
                )
            return interval
        if math.isinf(length):
            if interval == 1.0:
                return math.inf
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}): a share of an epoch needs a train_dataloader with a "
                "length. Give a number of batches, for instance val_check_interval=1000."
            )
        return max(1, int(length * interval))

    def due_in(self, epoch: int) -> bool:
        """Return whether validation may be due in an epoch."""
        return self._every_n_epochs is None or (epoch + 1) % self._every_n_epochs == 0

    def due(self, run: Run) -> bool:
        """Return whether validation is due after the batch just done."""
        progress = run.progress
        if not self.due_in(progress.epoch) or run.validation.is_off():
            return False
        if run.should_stop and run.may_stop_early():
            return True
        if isinstance(self._interval, Period):
            if self._interval.steps is not None:
                return progress.accumulation_index == 0 and progress.logged_step % self._interval.steps == 0
            assert self._interval.time is not None
            late = time.monotonic() - self._last_seconds >= self._interval.time.total_seconds()
            # Clocks differ between processes; the first one's is right for all.
            return bool(run.runtime.broadcast(late)) if run.runtime.world_size > 1 else late
        every = self.batches_between(run.train.limit)
        if self._every_n_epochs is None:
            return progress.total_batches % every == 0
        if every >= run.train.limit:
            return progress.last_batch
        return progress.batch % every == 0

    def next_batch(self, run: Run) -> float:
        """Return the next ``total_batches`` at which ``due`` must be checked; it also is at the end of an epoch."""
        if run.validation.is_off(loads=False) or self.per_batch:
            return math.inf
        every = self.batches_between(run.train.limit)
        if math.isinf(every):
            return math.inf
        progress = run.progress
        done = progress.total_batches if self._every_n_epochs is None else progress.batch
        return progress.total_batches + every - done % every

    def left(self, run: Run, batches: float) -> float:
        """Return about how many validations follow within the next ``batches`` of the run; 0 where time decides."""
        if run.validation.is_off(loads=False):
            return 0.0
        progress, length = run.progress, run.train.limit
        if isinstance(self._interval, Period):
            every = (self._interval.steps or math.inf) * run.accumulate_grad_batches
        else:
            every = min(self.batches_between(length), length)
        if math.isinf(every):
            return 0.0
        done = progress.total_batches if self._every_n_epochs is None else progress.batch
        return ((done + batches) // every - done // every) / (self._every_n_epochs or 1)

    def mark_done(self) -> None:
        """Remember when the last validation ended."""
        self._last_seconds = time.monotonic()


def step(run: Run, *, stepped: bool) -> None:
    """Step the schedulers whose interval a batch completes; ``stepped``: an optimizer stepped after it."""
    if not run.module.automatic_optimization:
        return
    progress = run.progress
    for config in run.schedulers:
        if config.reduce_on_plateau:
            continue
        if config.interval == "step":
            if stepped and progress.batch % config.frequency == 0:
                _step_one(run, config, None)
        elif progress.last_batch and (progress.epoch + 1) % config.frequency == 0:
            _step_one(run, config, None)


def any_monitored(run: Run, interval: str) -> bool:
    """Return whether a scheduler steps on a monitored value at this interval."""
    return any(config.reduce_on_plateau and config.interval == interval for config in run.schedulers)


def step_on_monitored(run: Run, interval: str) -> None:
    """Step the schedulers that watch a value, once the value has been logged."""
    if not run.module.automatic_optimization:
        return
    progress = run.progress
    done = progress.batch if interval == "step" else progress.epoch + 1
    for config in run.schedulers:
        if config.reduce_on_plateau and config.interval == interval and done % config.frequency == 0:
            value = _monitored(run, config)
            if value is not None:
                _step_one(run, config, value)


def _step_one(run: Run, config: LRSchedulerConfig, value: Any) -> None:
    try:
        run.module.lr_scheduler_step(config.scheduler, value)
    except ValueError as error:
        if "total steps" in str(error):
            error.add_note(
                f"The {type(config.scheduler).__name__} was made for fewer steps than this run takes: {run.max_epochs} "
                f"epochs of {run.train.limit} batches. Make it with total_steps=self.trainer."
                "estimated_stepping_batches. A resumed run keeps the plan of its checkpoint: to train longer than that "
                "plan, load the weights alone and begin a new one."
            )
        raise


def _monitored(run: Run, config: LRSchedulerConfig) -> Any:
    name = str(config.monitor)
    several = run.runtime.world_size > 1
    if several and config.interval == "step":
        run.logged.sync_step_values()
    metrics = run.logged.callback_metrics()
    value = metrics.get(name)
    if several:
        # Without sync_dist it is another one on each process, which would train apart: that of the first counts.
        value = run.runtime.broadcast(None if value is None else value.detach().cpu())
    if value is not None:
        return value
    message = (
        f"The scheduler {type(config.scheduler).__name__} steps on monitor={name!r}, which was never logged. "
        f"Logged so far: {sorted(metrics)}.{did_you_mean(name, list(metrics))} "
        f"Log it with self.log({name!r}, ...), or set the lr_scheduler's interval and frequency so that it steps "
        "after the validation that logs it."
    )
    if config.strict:
        raise MisconfigurationException(message)
    rank_zero_warn(message, RuntimeWarning)
    return None


# -- the batches of an accumulation


def plan_windows(run: Run) -> tuple[int, int, float]:
    """Return (size of an accumulation, size of the last one, index of the last one's first batch).

    A resumed run completes the accumulation that its checkpoint has open, and counts the others from there: the sizes
    may differ from those of the run before. What is accumulated already is scaled to the new size.
    """
    progress, size, length = run.progress, run.accumulate_grad_batches, run.train.limit
    index = progress.accumulation_index
    # An open accumulation that has the new size already ends with the next batch.
    start = progress.batch - index if index < size else progress.batch + 1
    # Lightning divides by the full size, also in the last, shorter accumulation: the same numbers under its names.
    tail_size, tail_start = (size, math.inf) if alias.active() else _tail(max(0, length - start), size)
    windows = size, tail_size, start + tail_start
    divisor_before, run.windows = run.accumulation_divisor(), windows
    if index and divisor_before is not None and run.window_weight is None:
        divisor = run.divisor_of(progress.batch)
        if divisor != divisor_before and run.module.automatic_optimization:
            for optimizer in run.optimizers:
                scale_gradients(run, optimizer, divisor_before / divisor)
    return windows


def _tail(length: float, size: int) -> tuple[int, float]:
    """Return (size of the last, shorter accumulation, index of its first batch)."""
    if size == 1 or math.isinf(length) or length % size == 0:
        return size, math.inf
    tail = int(length) % size
    return tail, length - tail


def divide_gradients(run: Run, optimizer: Optimizer, weight: float | Tensor) -> None:
    """Divide gradients by the weight of their accumulation; the mean over nothing has none, or zeros on a device."""
    if isinstance(weight, Tensor) and not on_host(weight):
        scale_gradients(run, optimizer, torch.where(weight == 0, 0.0, 1.0 / weight))
    elif weight:
        scale_gradients(run, optimizer, 1.0 / weight)
    elif run.runtime.strategy.owns_step:
        scale_gradients(run, optimizer, 0.0)
    else:
        for parameter in parameters_of(optimizer):
            parameter.grad = None


def scale_gradients(run: Run, optimizer: Optimizer, factor: float | Tensor) -> None:
    if run.runtime.strategy.owns_step:
        run.runtime.strategy.scale_gradients(factor)
        return
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    for alike in by_kind(gradients):
        torch._foreach_mul_(alike, factor.to(alike[0]) if isinstance(factor, Tensor) else factor)


def on_host(weight: object) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type == "cpu"
