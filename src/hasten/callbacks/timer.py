"""Timer: how long a run takes, and its end when the time is up."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hasten._lib.durations import parse_duration
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.callbacks.clock import AgreedClock
from hasten.callbacks.silent import silence
from hasten.loops.states import RunningStage
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class Interval(StrEnum):
    """When a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"


class Timer(Callback):
    """Measure training, validation and test, and stop the training when its time is up.

    The time already trained is part of checkpoints: a resumed run has what is left of it.

    Args:
        duration: time to train: "DD:HH:MM:SS", "90min", a timedelta, or a dict of its arguments; None only
            measures.
        interval: look at the clock after each "step" or each "epoch".
        verbose: say when the time is up.

    Raises:
        MisconfigurationException: an argument cannot be read.

    Example::

        >>> timer = Timer("00:00:30:00")
        >>> timer.time_remaining()
        1800.0

    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = Interval.step,
        verbose: bool = True,
    ) -> None:
        self._duration: float | None = None
        if duration is not None:
            if not isinstance(duration, (str, dict, timedelta)):
                raise MisconfigurationException(
                    f"Timer(duration={duration!r}): write 'DD:HH:MM:SS', '90min', or a timedelta."
                )
            try:
                self._duration = parse_duration(duration, argument="Timer(duration=...)").total_seconds()
            except ValueError as error:
                raise MisconfigurationException(str(error)) from None
        if interval not in list(Interval):
            raise MisconfigurationException(
                f"Timer(interval={interval!r}): use 'step' or 'epoch'."
                + did_you_mean(str(interval), list(Interval))
            )
        self._interval = Interval(interval)
        self._verbose = verbose
        self._start_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._end_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._offset = 0.0
        self._clock = AgreedClock()
        self._several = False
        self._deadline = math.inf
        self._hear_batches()

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
        """Listen to batches only if the clock is looked at after each."""
        self._hear_batches()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; a resumed run may have no time left."""
        self._begin(RunningStage.TRAINING)
        self._several = trainer.world_size > 1
        if self._duration is not None:
            # Known once, so that a step needs to compare two numbers only.
            self._deadline = time.monotonic() + self._duration - self._offset
            self._check_time_remaining(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._end(RunningStage.TRAINING)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of validation."""
        self._begin(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of validation."""
        self._end(RunningStage.VALIDATING)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the test."""
        self._begin(RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of the test."""
        self._end(RunningStage.TESTING)

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop at once if no time is left."""
        if self._duration is not None:
            self._check_time_remaining(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop if the time is up."""
        late = time.monotonic() >= self._deadline
        if (late or self._several) and self._clock.late(trainer, late):
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop if the time is up."""
        if self._interval == Interval.epoch and self._duration is not None:
            self._check_time_remaining(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the time each stage took so far."""
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._offset = state_dict.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0)

    def _hear_batches(self) -> None:
        if self._duration is None or self._interval != Interval.step:
            silence(self, Timer, "on_train_batch_end")

    def _begin(self, stage: RunningStage) -> None:
        self._start_time[stage], self._end_time[stage] = time.monotonic(), None

    def _end(self, stage: RunningStage) -> None:
        self._end_time[stage] = time.monotonic()

    def _check_time_remaining(self, trainer: Trainer) -> None:
        late = self._duration is not None and self.time_elapsed() >= self._duration
        if trainer.world_size > 1:
            # Clocks differ between processes; the first one's is right for all.
            late = trainer.strategy.broadcast(late)
        if late:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._verbose and not trainer.should_stop:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            rank_zero_info(f"Time limit reached. Elapsed time is {elapsed}. Training stops.")
        trainer.should_stop = True
