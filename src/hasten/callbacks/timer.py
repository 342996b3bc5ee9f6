"""Timer: measures a run and stops it when its time is up; and time limits on which all processes agree."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hasten._lib import check
from hasten._lib.durations import parse_duration
from hasten._lib.errors import MisconfigurationException, parts_of
from hasten._lib.names import LightningEnum
from hasten._lib.rank_zero import rank_zero_info
from hasten.hooks import use_hooks
from hasten.machine.signals import StopRequests
from hasten.module.callback import Callback
from hasten.types import RunningStage, TrainerFn

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer

# Seconds between two broadcasts of the first process's clock: rarely enough to cost nothing.
_BROADCAST_SECONDS = 1.0


class Interval(LightningEnum):
    """When a Timer checks the clock."""

    step = "step"
    epoch = "epoch"


class Timer(Callback):
    """Measure training, validation and test, and stop the training when its time is up.

    The time already trained is part of checkpoints: a resumed run gets the rest. Time in which the process was stopped
    (Ctrl-Z, SIGSTOP, a suspended job) does not count, except with ``interval="epoch"``. With a duration, epochs are not
    limited to 1000 where the Trainer has no ``max_epochs``.

    Args:
        duration: time to train: "DD:HH:MM:SS", "90min", a timedelta, or a dict of its arguments; None only
            measures.
        interval: check the clock after each "step" or each "epoch".
        verbose: report when the time is up.

    Raises:
        MisconfigurationException: an argument cannot be read.

    Example::

        >>> timer = Timer("00:00:30:00")
        >>> timer.time_remaining()
        1800.0

    """

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        check.declared(Timer.__init__, locals())
        super().__init__()
        self._duration: float | None = None
        if duration is not None:
            allowed, error = "'DD:HH:MM:SS', '90min', or a timedelta", MisconfigurationException
            check.instance("Timer", "duration", duration, (str, dict, timedelta), allowed, error=error)
            try:
                self._duration = parse_duration(duration, argument="Timer(duration=...)").total_seconds()
            except ValueError as unreadable:
                what, fix, _ = parts_of(unreadable)
                raise MisconfigurationException(what, fix=fix, argument="duration") from None
        check.one_of("Timer", "interval", interval, [one.value for one in Interval], error=MisconfigurationException)
        self._interval = Interval(interval)
        self._verbose = verbose
        self._reset()
        self._shared = SharedDeadline()
        self._is_distributed = False
        self._deadline = math.inf
        # When the process was last seen to run, and how often it had been stopped by then. In a list: to set an
        # attribute of a callback is a call.
        self._seen, self._continued = [0.0], 0

    def _reset(self) -> None:
        self._start_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._end_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._offset = 0.0

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return when a stage started, in seconds of ``time.monotonic``; None if it did not."""
        return self._start_time[RunningStage(stage)]

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return when a stage ended, in seconds of ``time.monotonic``; None if it did not."""
        return self._end_time[RunningStage(stage)]

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Return how long a stage took so far, in seconds; training counts the runs it was resumed from."""
        start, end = self.start_time(stage), self.end_time(stage)
        offset = self._offset if stage == RunningStage.TRAINING else 0.0
        if start is None:
            return offset
        return (time.monotonic() if end is None else end) - start + offset

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return the seconds left of ``duration``; None without one."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the fit before, and run a hook after each batch only if the clock is checked there."""
        if stage == "fit" and self._start_time[RunningStage.TRAINING] is not None:
            self._reset()
        use_hooks(self, Timer, self._counts_batches, "on_train_batch_end")

    @property
    def _counts_batches(self) -> bool:
        return self._duration is not None and self._interval == Interval.step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; a resumed run may have no time left."""
        if self._duration is not None and self._verbose:
            rank_zero_info(f"Training ends after {timedelta(seconds=self._duration)} hours at the latest.")
        started = time.monotonic()
        self._begin(RunningStage.TRAINING, started)
        self._seen, self._continued = [started], StopRequests.continued
        self._is_distributed = trainer.runtime.several_processes is True  # A Mock has nothing to agree on.
        if self._duration is not None:
            # Computed once: a step only compares two numbers.
            self._deadline = started + self._duration - self._offset
            # A program may call the hook before the Trainer has run, or with a Mock of one.
            if isinstance(trainer.state.fn, TrainerFn):
                trainer.current_run.observers.pace.deadline = time.perf_counter() + self._duration - self._offset
        self._check_time_remaining(trainer, self._offset)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time[RunningStage.TRAINING] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)
        self._begin(RunningStage.VALIDATING, time.monotonic())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time[RunningStage.VALIDATING] = time.monotonic()
        self._look(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(RunningStage.TESTING, time.monotonic())

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time[RunningStage.TESTING] = time.monotonic()

    def on_fit_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Stop at once if no time is left."""
        self._check_time_remaining(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        now = time.monotonic()
        if self._continued != StopRequests.continued:
            self._look(trainer)
        self._seen[0], is_late = now, now >= self._deadline
        if self._shared.passed(trainer, is_late) if self._is_distributed else is_late:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        if self._interval == Interval.epoch:
            self._check_time_remaining(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0)

    def _look(self, trainer: Trainer) -> None:
        """Take out the time since the last look if the process was stopped in it."""
        started, ended = self._start_time[RunningStage.TRAINING], self._end_time[RunningStage.TRAINING]
        if started is None or ended is not None or not self._counts_batches:
            return
        now = time.monotonic()
        if self._continued != StopRequests.continued:
            stopped_seconds = now - self._seen[0]
            self._offset -= stopped_seconds
            self._deadline += stopped_seconds
            trainer.current_run.observers.pace.deadline += stopped_seconds
        self._seen[0], self._continued = now, StopRequests.continued

    def _begin(self, stage: RunningStage, now: float) -> None:
        self._start_time[stage], self._end_time[stage] = now, None

    def _check_time_remaining(self, trainer: Trainer, elapsed: float | None = None) -> None:
        if self._duration is None:
            return
        # Clocks differ between processes; the first one decides for all.
        if trainer.strategy.broadcast((self.time_elapsed() if elapsed is None else elapsed) >= self._duration):
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._verbose and not trainer.should_stop:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            rank_zero_info(f"Time limit reached. Elapsed time is {elapsed}. Signaling Trainer to stop.")
        trainer.should_stop = True


class SharedDeadline:
    """Let a time limit pass at the same batch on every process, by the clock of the first one."""

    def __init__(self) -> None:
        self._next_batch = 0
        self._last_batch = 0
        self._last_seconds = 0.0

    def __eq__(self, other: object) -> bool:
        """Return whether both pass at the same batches, as copies of a callback do."""
        return type(other) is type(self) and vars(other) == vars(self)

    def passed(self, trainer: Trainer, is_late: bool) -> bool:
        """Return the first process's ``is_late``; False between two broadcasts."""
        if not trainer.runtime.several_processes:
            return is_late
        batch = trainer.total_batch_idx
        # A lower number belongs to another run.
        if self._last_batch <= batch < self._next_batch:
            return False
        now = time.monotonic()
        done, seconds = batch - self._last_batch, now - self._last_seconds
        pause = max(1, int(_BROADCAST_SECONDS * done / seconds)) if done > 0 and seconds > 0 else 1
        is_late, pause = trainer.strategy.broadcast((is_late, min(pause, 2 * max(done, 1))))
        self._next_batch, self._last_batch, self._last_seconds = batch + pause, batch, now
        return is_late
