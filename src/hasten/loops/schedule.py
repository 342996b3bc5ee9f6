"""Schedules: when schedulers step, when validation runs, which batches a step accumulates, and when a run ends."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten._lib.durations import Period
from hasten._lib.errors import MisconfigurationException, add_note
from hasten._lib.names import did_you_mean_value
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_info, rank_zero_warn
from hasten.hooks import Hook
from hasten.machine.signals import LeaveRun
from hasten.module import LightningModule
from hasten.optim import LRSchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.loops.run import Run
    from hasten.machine.signals import StopRequests
    from hasten.types import Group


_STEP = Hook("lr_scheduler_step")


class ValidationSchedule:
    """Decide after which batches validation is due.

    ``interval`` is in batches (int), a share of an epoch (float), optimizer steps or time. Validation runs in every
    ``every_n_epochs``; None counts ``interval`` over epochs. ``decided_by`` is a program's own rule in their place.
    """

    def __init__(
        self,
        interval: int | float | Period,
        every_n_epochs: int | None,
        decided_by: Callable[[], bool] | None = None,
    ) -> None:
        self.decided_by = decided_by
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
            return interval
        return length if math.isinf(length) else max(1, int(length * interval))

    def check(self, length: float) -> None:
        """Check the interval for epochs of ``length`` batches."""
        interval = self._interval
        if isinstance(interval, Period):
            return
        if isinstance(interval, int):
            if self._every_n_epochs is not None and not math.isinf(length) and interval > length:
                what = (
                    f"`val_check_interval` ({interval}) must be less than or equal to the number of the training "
                    f"batches ({int(length)})."
                )
                fix = f"Use at most {int(length)}, or check_val_every_n_epoch=None to count batches over epochs."
                raise MisconfigurationException(what, fix=fix, argument="val_check_interval")
        elif math.isinf(length) and interval != 1.0:
            raise MisconfigurationException(
                "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be `1.0` or "
                f"an int, not {interval}: a share of an epoch needs a length.",
                fix="Give a number of batches, for instance val_check_interval=1000.",
                argument="val_check_interval",
            )

    def never_due(self, first_epoch: int, max_epochs: float, length: float) -> str:
        """Return the arguments that leave epochs of ``length`` batches without a validation; '' if one is due."""
        every, interval = self._every_n_epochs, self._interval
        if self.decided_by is not None:
            return ""
        if every is None:
            late = isinstance(interval, int) and interval > length * max_epochs
            return f"val_check_interval={interval}, check_val_every_n_epoch=None" if late else ""
        if math.isinf(max_epochs):
            return ""
        return "" if max_epochs // every > first_epoch // every else f"check_val_every_n_epoch={every}"

    def due_in(self, epoch: int) -> bool:
        """Return whether validation may be due in an epoch."""
        return self._every_n_epochs is None or (epoch + 1) % self._every_n_epochs == 0

    def due(self, run: Run) -> bool:
        """Return whether validation is due after the batch just done."""
        if self.decided_by is None:
            return self.due_by_interval(run)
        return not run.data.validation.is_off() and self.decided_by()

    def due_by_interval(self, run: Run) -> bool:
        """Return the same, by the arguments of the Trainer: the interval is complete, or the run is to stop."""
        if run.limits.should_stop and run.limits.may_stop_early():
            return self.due_in(run.progress.epoch) and not run.data.validation.is_off()
        return self.reached(run)

    def reached(self, run: Run) -> bool:
        """Return whether the interval is complete with the batch just done; the same on all processes."""
        progress = run.progress
        if not self.due_in(progress.epoch) or run.data.validation.is_off():
            return False
        if isinstance(self._interval, Period):
            if self._interval.steps is not None:
                return progress.accumulation_index == 0 and progress.logged_step % self._interval.steps == 0
            assert self._interval.time is not None
            late = time.monotonic() - self._last_seconds >= self._interval.time.total_seconds()
            # Clocks differ between processes; the first one's is right for all.
            return bool(run.runtime.broadcast(late))
        length = run.data.train.limit
        every = self.batches_between(length)
        if self._every_n_epochs is None and not math.isinf(every):
            return progress.total_batches % every == 0
        if every >= length:
            return progress.last_batch
        return progress.batch % every == 0

    def next_batch(self, run: Run) -> float:
        """Return the next ``total_batches`` at which ``due`` must be checked; it also is at the end of an epoch."""
        if run.data.validation.is_off(loads=False) or self.per_batch:
            return math.inf
        if self.decided_by is not None:
            return 0.0  # after each batch
        every = self.batches_between(run.data.train.limit)
        if math.isinf(every):
            return math.inf
        progress = run.progress
        done = progress.total_batches if self._every_n_epochs is None else progress.batch
        return progress.total_batches + every - done % every

    def left(self, run: Run, batches: float) -> float:
        """Return about how many validations follow within the next ``batches`` of the run; 0 if they depend on time."""
        if run.data.validation.is_off(loads=False):
            return 0.0
        progress, length = run.progress, run.data.train.limit
        if isinstance(self._interval, Period):
            every = (self._interval.steps or math.inf) * run.window.accumulate_grad_batches
        else:
            every = min(self.batches_between(length), length)
        if math.isinf(every):
            return 0.0
        done = progress.total_batches if self._every_n_epochs is None else progress.batch
        return ((done + batches) // every - done // every) / (self._every_n_epochs or 1)

    def mark_done(self) -> None:
        """Remember when the last validation ended, or training began: what came before does not count."""
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
    step: Callable[..., None] = run.module.lr_scheduler_step
    if type(run.module).lr_scheduler_step is not LightningModule.lr_scheduler_step:
        step = run.logged.inside(_STEP, [step])
    try:
        step(config.scheduler, value)
    except ValueError as error:
        if "total steps" in str(error):
            add_note(
                error,
                f"The {type(config.scheduler).__name__} was made for fewer steps than this run takes: "
                f"{run.limits.max_epochs} epochs of {run.data.train.limit} batches.",
                fix=longer_plan(run),
            )
        raise


def longer_plan(run: Run) -> str:
    """Return what to write where a scheduler was made for fewer steps than the run takes."""
    if run.resume.from_batch < 0:
        return "Make it with total_steps=self.trainer.estimated_stepping_batches."
    return (
        "A resumed run keeps the plan of its checkpoint. To train longer, begin a new plan with its weights: "
        "fit(Model.load_from_checkpoint(path), ...) without ckpt_path."
    )


def _monitored(run: Run, config: LRSchedulerConfig) -> Any:
    name = str(config.monitor)
    several = run.runtime.several_processes
    if several and config.interval == "step":
        run.logged.sync_step_values()
    metrics = run.logged.callback_metrics()
    value = metrics.get(name)
    if several:
        # Without sync_dist each process has another value and their weights would diverge: all use the first process's.
        value = run.runtime.broadcast(None if value is None else value.detach().cpu())
    if value is not None:
        return value
    what = (
        f"{type(config.scheduler).__name__} conditioned on metric {name} which is not available. Available metrics "
        f"are: {sorted(metrics)}."
    )
    fix = (
        f"{did_you_mean_value(name, metrics)} Log it with self.log({name!r}, ...), or set the lr_scheduler's interval "
        "and frequency so that it steps after the validation that logs it."
    )
    if config.strict:
        raise MisconfigurationException(what, fix=fix, argument="monitor")
    rank_zero_warn(what, RuntimeWarning, fix=fix)
    return None


# -- the batches of an accumulation


def plan_windows(run: Run) -> tuple[int, int, float]:
    """Return (size of an accumulation, size of the last one, index of the last one's first batch).

    A resumed run completes the accumulation that its checkpoint has open, and counts the others from there: the sizes
    may differ from the interrupted run. Gradients accumulated so far are scaled to the new size.
    """
    progress, size, length = run.progress, run.window.accumulate_grad_batches, run.data.train.limit
    index = progress.accumulation_index
    # An open accumulation that already has the new size ends with the next batch.
    start = progress.batch - index if index < size else progress.batch + 1
    is_full = run.conventions.tail_divides_by_full_size
    tail_size, tail_start = (size, math.inf) if is_full else _tail(max(0, length - start), size)
    windows = size, tail_size, start + tail_start
    divisor_before, run.window.plan = run.window.accumulation_divisor(), windows
    if index and divisor_before is not None and run.window.weight is None:
        divisor = run.window.divisor_of(progress.batch)
        if divisor != divisor_before and run.module.automatic_optimization:
            for optimizer in run.optimizers:
                run.runtime.engine.scale_gradients(optimizer, divisor_before / divisor)
    return windows


def _tail(length: float, size: int) -> tuple[int, float]:
    """Return (size of the last, shorter accumulation, index of its first batch)."""
    if size == 1 or math.isinf(length) or length % size == 0:
        return size, math.inf
    tail = int(length) % size
    return tail, length - tail


def divide_gradients(run: Run, optimizer: Optimizer, weight: float | Tensor) -> None:
    """Divide gradients by the weight of their accumulation; for weight 0 drop them, or set zeros on a device."""
    if isinstance(weight, Tensor) and not on_host(weight):
        run.runtime.engine.scale_gradients(optimizer, torch.where(weight == 0, 0.0, 1.0 / weight))
    elif weight:
        run.runtime.engine.scale_gradients(optimizer, 1.0 / weight)
    else:
        run.runtime.engine.drop_gradients(optimizer)


def on_host(weight: object) -> bool:
    return not isinstance(weight, Tensor) or weight.is_cpu


# -- when a run ends


class Stopped(LeaveRun):
    """Raised after a batch if Ctrl-C or SIGTERM has arrived."""


class Limits:
    """When a run ends; ``number`` is that of the run, the same on all processes."""

    # Set by the run whose limits these are.
    run: Run

    def __init__(self, stop: StopRequests, number: int = 0) -> None:
        self.stop, self.number = stop, number
        self.should_stop = False
        # How often the program, or a callback, has asked for it.
        self.stop_requests = 0
        # Whether all processes have agreed to stop; one process does not stop alone.
        self.stop_agreed = False
        # Whether the user was told that a request to stop waits for a minimum.
        self._stop_is_late = False
        # A group for messages between hosts, if the default group communicates between devices.
        self.host_group: Group = None

    @property
    def max_epochs(self) -> float:
        """The number of epochs to train; ``inf`` without a limit."""
        return _limit(self.run.arguments.max_epochs)

    @property
    def max_steps(self) -> float:
        """The number of optimizer steps to train; ``inf`` without a limit."""
        return _limit(self.run.arguments.max_steps)

    def may_stop_early(self) -> bool:
        """Return whether ``min_epochs`` and ``min_steps`` are reached."""
        progress, arguments = self.run.progress, self.run.arguments
        enough_epochs = progress.epochs_done >= (arguments.min_epochs or 0)
        return enough_epochs and progress.global_step >= (arguments.min_steps or 0)

    def stops_early(self) -> bool:
        """Return whether a request to stop takes effect; tell the user once if it has to wait."""
        if self.may_stop_early():
            return True
        if not self._stop_is_late:
            self._stop_is_late, arguments = True, self.run.arguments
            rank_zero_info(
                f"The run is to stop, but the required `min_epochs={arguments.min_epochs}` or "
                f"`min_steps={arguments.min_steps}` has not been met. Training will continue until then."
            )
        return False

    def has_next_epoch(self) -> bool:
        """Return whether another epoch follows the current one, before its validation, which may still stop the run."""
        progress = self.run.progress
        return (
            progress.epochs_done + 1 < self.max_epochs
            and progress.global_step < self.max_steps
            and not self.should_stop
            and self.stop.signal is None
        )

    def finished(self) -> bool:
        """Return whether training is over: a limit is reached, or ``should_stop`` is set and the minimum is reached."""
        progress = self.run.progress
        if progress.last_batch and not progress.epoch_ended:
            return False  # A resumed run calls the last hooks of the epoch.
        if progress.global_step >= self.max_steps:
            return True
        if not progress.mid_epoch and progress.epochs_done >= self.max_epochs:
            return True
        return self.should_stop and self.may_stop_early()

    def leave_if_stopped(self) -> None:
        """Leave the run if Ctrl-C or SIGTERM arrived; all processes pass here, so that all leave."""
        number = self.agree_now()
        if number is not None:
            raise Stopped(number)

    def agree_now(self) -> int | None:
        """Stop on all processes if one must stop, at a point that all pass; return the signal that arrived at any."""
        if not self.run.runtime.several_processes:
            return self.stop.signal
        self.stop.asks = self.stop.asks or self.should_stop
        number = self.stop.agreed_now()
        self.apply_agreement()
        return number

    def apply_agreement(self) -> None:
        """Stop if an agreement said so."""
        if self.stop.granted:
            self.should_stop = self.stop_agreed = True


def _limit(value: int | None) -> float:
    return math.inf if value is None or value < 0 else value


def warn_of_second_fit(run: Run) -> None:
    """Warn of a call of fit that trains nothing, because an earlier one has reached the limit."""
    by_steps = run.progress.global_step >= run.limits.max_steps
    name = "max_steps" if by_steps else "max_epochs"
    done = run.progress.global_step if by_steps else run.progress.epochs_done
    rank_zero_warn(
        f"Trainer.fit(): {type(run.module).__name__} is not trained: an earlier fit of this Trainer has reached "
        f"{name}={done}, and the counters go on.",
        fix=f"Make a new Trainer for another model, or write trainer.fit_loop.{name} = {done + 1} or more to train on.",
    )


def warn_of_idle_schedulers(run: Run) -> None:
    """Warn of schedulers that a fit with manual optimization has never stepped."""
    for config in run.schedulers if run.progress.epochs_done and not run.arguments.fast_dev_run else ():
        if getattr(config.scheduler, "last_epoch", 1) == 0:
            rank_zero_warn(
                f"{type(run.module).__name__}: {type(config.scheduler).__name__} was not stepped in this fit: with "
                "manual optimization the Trainer steps no scheduler.",
                PossibleUserWarning,
                fix="Call self.lr_schedulers().step() in training_step, or in on_train_epoch_end.",
            )
