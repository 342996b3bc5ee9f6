"""Time limits on which all processes agree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.trainer import Trainer

# How often processes ask the first one for the time: rarely enough to cost nothing.
_ASK_SECONDS = 1.0


class AgreedClock:
    """Says at the same batch on every process that something is late, by the first process's clock."""

    def __init__(self) -> None:
        self._ask_at = 0
        self._asked_at = 0
        self._asked_seconds = time.monotonic()

    def late(self, trainer: Trainer, late: bool) -> bool:
        """Return the first process's ``late``; between two questions, False."""
        if trainer.world_size == 1:
            return late
        batch = trainer.total_batch_idx
        # A lower number is another run.
        if self._asked_at <= batch < self._ask_at:
            return False
        now = time.monotonic()
        done, seconds = batch - self._asked_at, now - self._asked_seconds
        pause = max(1, int(_ASK_SECONDS * done / seconds)) if done > 0 and seconds > 0 else 1
        late, pause = trainer.strategy.broadcast((late, min(pause, 2 * max(done, 1))))
        self._ask_at, self._asked_at, self._asked_seconds = batch + pause, batch, now
        return late
