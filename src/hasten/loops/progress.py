"""The status of a Trainer: which call and which stage are in progress, and how the call went."""

from __future__ import annotations

from dataclasses import dataclass

from hasten._lib.names import LightningEnum


class TrainerFn(LightningEnum):
    """The call in progress."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
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


class TrainerStatus(LightningEnum):
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
