"""Time limits on which all processes agree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.trainer import Trainer

# Seconds between two broadcasts of the first process's clock: rarely enough to cost nothing.
_INTERVAL_SECONDS = 1.0


class SharedDeadline:
    """Let a time limit pass at the same batch on every process, by the clock of the first one."""

    def __init__(self) -> None:
        self._next_batch = 0
        self._last_batch = 0
        self._last_seconds = time.monotonic()

    def passed(self, trainer: Trainer, is_late: bool) -> bool:
        """Return the first process's ``is_late``; False between two broadcasts."""
        if trainer.world_size == 1:
            return is_late
        batch = trainer.total_batch_idx
        # A lower number belongs to another run.
        if self._last_batch <= batch < self._next_batch:
            return False
        now = time.monotonic()
        done, seconds = batch - self._last_batch, now - self._last_seconds
        pause = max(1, int(_INTERVAL_SECONDS * done / seconds)) if done > 0 and seconds > 0 else 1
        is_late, pause = trainer.strategy.broadcast((is_late, min(pause, 2 * max(done, 1))))
        self._next_batch, self._last_batch, self._last_seconds = batch + pause, batch, now
        return is_late
