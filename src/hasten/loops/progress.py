"""The counters of a training run: what has been done, and so where a resumed run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Five counters and two flags; checkpoints are taken between batches only, so they are enough.

    Args:
        epoch: index of the epoch in hand.
        batch: batches done in this epoch.
        total_batches: batches done in the whole run.
        global_step: optimizer steps done in the whole run.
        updates: batches after which an optimizer stepped; the x axis of loggers.
        window: batches whose gradients wait for the next optimizer step.
        followed: what follows a batch (validation, schedulers on a monitored value) was done for the last one.
        epoch_ended: the epoch in hand is complete, its last hooks included.
        last_batch: the last batch of the epoch is done.
        begun: the epoch has begun, though maybe no batch of it is done; only set in checkpoints taken inside a batch.

    """

    epoch: int = 0
    batch: int = 0
    total_batches: int = 0
    global_step: int = 0
    updates: int = 0
    window: int = 0
    followed: bool = True
    epoch_ended: bool = False
    last_batch: bool = False
    begun: bool = False

    # Between the first and the last hook of an epoch; no counter, since checkpoints do not need it.
    in_epoch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, field.default))

    @property
    def epochs_done(self) -> int:
        """Epochs that are complete."""
        return self.epoch + 1 if self.epoch_ended else self.epoch

    @property
    def current_epoch(self) -> int:
        """Index of the epoch in hand; between epochs, and after the last, of the one that would come next."""
        begun = self.batch > 0 or self.last_batch or self.epoch_ended or self.begun
        return self.epoch + 1 if begun and not self.in_epoch else self.epoch

    @property
    def mid_epoch(self) -> bool:
        """Whether batches of an epoch are done whose end is not."""
        return not self.epoch_ended and (self.batch > 0 or self.last_batch or self.begun)

    def next_epoch(self) -> None:
        """Begin the epoch after the one that ended."""
        if self.epoch_ended:
            self.epoch += 1
        self.batch, self.window = 0, 0
        self.epoch_ended, self.last_batch, self.followed, self.begun = False, False, True, False
