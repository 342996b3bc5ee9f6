"""What a Trainer is doing, and how far a training run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any


class TrainerFn(StrEnum):
    """The call in progress."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The part of a call in progress: fit also validates."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether validation or test steps run."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The beginning of the name of the hook that gives this stage's data."""
        return {"validate": "val", "sanity_check": "val"}.get(self.value, self.value)


class TrainerStatus(StrEnum):
    """How the call went."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the call has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


@dataclass
class TrainerState:
    """Status, call and stage in one place."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the last call came to its end."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended, in whichever way."""
        return self.status.stopped


# Where a call begins.
FIRST_STAGE = {fn: RunningStage("train" if fn == TrainerFn.FITTING else fn.value) for fn in TrainerFn}


# Names in checkpoints where they differ.
_KEYS = {"logged_step": "updates", "accumulation_index": "window", "post_batch_done": "followed"}


@dataclass
class Progress:
    """Five counters and two flags; checkpoints are taken between batches only, so they are enough.

    Args:
        epoch: index of the epoch in hand.
        batch: batches done in this epoch.
        total_batches: batches done in the whole run.
        global_step: optimizer steps done in the whole run.
        logged_step: batches after which an optimizer stepped; the x axis of loggers counts them.
        accumulation_index: batches whose gradients wait for the next optimizer step.
        post_batch_done: what follows a batch (validation, schedulers on a monitored value) was done for the last one.
        epoch_ended: the epoch in hand is complete, its last hooks included.
        last_batch: the last batch of the epoch is done.
        begun: the epoch has begun, though maybe no batch of it is done; only set in checkpoints taken inside a batch.

    """

    epoch: int = 0
    batch: int = 0
    total_batches: int = 0
    global_step: int = 0
    logged_step: int = 0
    accumulation_index: int = 0
    post_batch_done: bool = True
    epoch_ended: bool = False
    last_batch: bool = False
    begun: bool = False

    # Between the first and the last hook of an epoch; no counter, since checkpoints do not need it.
    in_epoch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for field in fields(self):
            setattr(self, field.name, state.get(_KEYS.get(field.name, field.name), field.default))

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
        self.batch, self.accumulation_index = 0, 0
        self.epoch_ended, self.last_batch, self.post_batch_done, self.begun = False, False, True, False
