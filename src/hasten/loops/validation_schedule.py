"""When validation runs within fit."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from hasten._lib.durations import Interval
from hasten._lib.errors import MisconfigurationException

if TYPE_CHECKING:
    from hasten.loops.run import Run


class ValidationChecks:
    """Decide after which batches validation is due.

    Args:
        interval: batches (int), a share of an epoch (float), optimizer steps or time between validations.
        every_n_epochs: validate in every so many epochs; None counts ``interval`` over epochs.

    """

    def __init__(self, interval: int | float | Interval, every_n_epochs: int | None) -> None:
        self._last_seconds = time.monotonic()
        self.change(interval, every_n_epochs)

    def change(self, interval: int | float | Interval, every_n_epochs: int | None) -> None:
        """Validate at other times from now on."""
        self._interval = interval
        self._every_n_epochs = every_n_epochs
        # What cannot be told in batches is asked after each of them.
        self.asks_each = isinstance(interval, Interval)

    def batches_between(self, length: float) -> float:
        """Return the number of batches between validations, in an epoch of ``length`` batches.

        Raises:
            ValueError: the interval does not fit the length.

        """
        interval = self._interval
        if isinstance(interval, Interval):
            return math.inf
        if isinstance(interval, int):
            if self._every_n_epochs is not None and not math.isinf(length) and interval > length:
                raise ValueError(
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

    def due(self, run: Run) -> bool:
        """Return whether validation is due after the batch just done."""
        progress = run.progress
        if run.validation.is_off():
            return False
        if self._every_n_epochs is not None and (progress.epoch + 1) % self._every_n_epochs:
            return False
        if run.should_stop and run.may_stop_early():
            return True
        if isinstance(self._interval, Interval):
            if self._interval.steps is not None:
                return progress.window == 0 and progress.updates % self._interval.steps == 0
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

    def next_at(self, run: Run) -> float:
        """Return the next ``total_batches`` at which ``due`` must be asked; epoch ends always ask."""
        if run.validation.is_off() or self.asks_each:
            return math.inf
        every = self.batches_between(run.train.limit)
        if math.isinf(every):
            return math.inf
        progress = run.progress
        done = progress.total_batches if self._every_n_epochs is None else progress.batch
        return progress.total_batches + every - done % every

    def now_done(self) -> None:
        """Remember when the last validation ended."""
        self._last_seconds = time.monotonic()
