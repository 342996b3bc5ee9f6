"""Run: everything that one call of fit, validate, test or predict works on, and its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hasten._lib.observers import follow
from hasten.arguments import Arguments
from hasten.checkpoint.metrics import ModuleMetrics
from hasten.elsewhere.conventions import Conventions, current
from hasten.hooks import Hooks, nothing
from hasten.logged_values import LoggedValues
from hasten.loops.first_epoch import FirstEpoch
from hasten.loops.run_data import StageData, StallMonitor
from hasten.loops.schedule import Limits, ValidationSchedule
from hasten.module import LightningModule
from hasten.module.changes import ModuleChanges
from hasten.optim import LRSchedulerConfig
from hasten.optim.averaged import AveragedWeights
from hasten.record.file import NoRecord
from hasten.record.history import History
from hasten.record.pace import Pace
from hasten.types import RunningStage, TrainerState

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel
    from hasten.loops.bad_loss import Guard
    from hasten.loops.micro_batches import MemoryLimits
    from hasten.loops.saved_state import BatchStart
    from hasten.runtime import Runtime


def unprofiled(action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` unchanged, in a run without a profiler."""
    return function


# Names in checkpoints where they differ.
_KEYS = {"logged_step": "updates", "accumulation_index": "window", "post_batch_done": "followed"}
# Hooks in which no batch has begun, or the run is over.
_OUTSIDE = frozenset({"on_train_start", "on_train_epoch_start", "on_exception", "teardown"})


@dataclass
class Progress:
    """Five counters and two flags; checkpoints are taken between batches only, so they are enough."""

    epoch: int = 0  # Index of the epoch in hand.
    batch: int = 0  # Batches done in this epoch.
    total_batches: int = 0  # Batches done in the whole run.
    global_step: int = 0  # Optimizer steps done in the whole run.
    logged_step: int = 0  # Batches after which an optimizer stepped; the x axis of loggers counts them.
    accumulation_index: int = 0  # Batches whose gradients wait for the next optimizer step.
    # What follows a batch (validation, schedulers on a monitored value) was done for the last one.
    post_batch_done: bool = True
    epoch_ended: bool = False  # The epoch in hand is complete, its last hooks included.
    last_batch: bool = False  # The last batch of the epoch is done.
    # The epoch has begun, though maybe no batch of it is done; only set in checkpoints taken inside a batch.
    begun: bool = False

    # Between the first and the last hook of an epoch; no counter, since checkpoints do not need it.
    in_epoch = False
    # Batches that were evaluated or predicted, from which the watchdog sees that the run makes progress.
    evaluated = 0
    # The same, and optimizer steps, before this epoch; -1 in the rest of one that a resumed run is in.
    evaluated_before, steps_before = 0, -1
    # Epochs that on_train_batch_start has ended, and whether it has ended this one.
    cut_epochs, is_cut = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {_KEYS.get(name, name): getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.steps_before = -1
        for counter in fields(self):
            setattr(self, counter.name, state.get(_KEYS.get(counter.name, counter.name), counter.default))

    @property
    def epochs_done(self) -> int:
        """Epochs that are complete."""
        return self.epoch + 1 if self.epoch_ended else self.epoch

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch; between epochs, and after the last, of the one that would come next."""
        begun = self.batch > 0 or self.last_batch or self.epoch_ended or self.begun
        return self.epoch + 1 if begun and not self.in_epoch else self.epoch

    @property
    def validated_step(self) -> int:
        """The x axis for a validation within fit: a batch that stepped counts after the validation that follows it."""
        return max(self.logged_step - (self.accumulation_index == 0), 0)

    @property
    def mid_epoch(self) -> bool:
        """Whether an epoch is incomplete: some of its batches are done."""
        return not self.epoch_ended and (self.batch > 0 or self.last_batch or self.begun)

    def next_epoch(self) -> None:
        """Begin the epoch after the one that ended."""
        if self.epoch_ended:
            self.epoch += 1
        self.evaluated_before, self.steps_before, self.is_cut = self.evaluated, self.global_step, False
        self.batch, self.accumulation_index = 0, 0
        self.epoch_ended, self.last_batch, self.post_batch_done, self.begun = False, False, True, False


@dataclass(frozen=True, slots=True)
class Earlier:
    """The parts of a checkpoint that come from an earlier moment, at which a resumed run begins; None for the present.

    The first three are the states of the random generators, the metrics and the loggers.
    """

    random: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    loggers: list[dict[str, Any]] | None = None
    rows: Mapping[str | None, int] | None = None  # The length of the history, as ``History.mark`` returns it.
    changes: dict[str, dict[str, Any]] | None = None  # What hooks had changed about the module.


@dataclass(eq=False)
class Window:
    """Where the current batch is in its accumulation: the batches between two optimizer steps."""

    progress: Progress
    accumulate_grad_batches: int = 1  # The number of batches between two optimizer steps, from the arguments.
    is_start: bool = True  # Whether the batch is the first one.
    is_end: bool = True  # Whether it is the last one, after which the optimizer steps.
    is_last_batch: bool = False  # Whether it is the last one of its epoch.
    size: float = 1  # The divisor of its loss: the number of batches, or more for a part of a batch.
    # The size of an accumulation, the size of the epoch's last one, and the index of its first batch.
    plan: tuple[int, int, float] | None = None
    # The divisor of each batch in the accumulation that the checkpoint's run left open.
    resumed_divisor: int | None = None
    loss: Any = None  # The latest loss, as ``training_step`` returned it; it is read when values are fetched anyway.
    # Of the latest step before it was clipped; None if its gradients are not clipped by their norm.
    gradient_norm: Tensor | None = None
    weight: Any = None  # The sum of the weights of its batches so far; None if they have no weights.
    is_unweighed: bool = False  # Whether a batch had a loss without a weight.
    skipped_batches: int = 0  # Batches of the run whose loss was None.
    # Whether gradients may stay after a step: the loop finds out when it chooses how to train.
    keeps_gradients: bool = True
    # Completes the gradients within the step of the wrapped optimizer, if that is not done before it.
    finish_in_step: Callable[[], None] | None = None

    def divisor_of(self, batch_idx: int) -> int:
        """Return the divisor of a batch's loss: the number of batches in its accumulation."""
        assert self.plan is not None
        size, tail_size, tail_start = self.plan
        return size if batch_idx < tail_start else tail_size

    def accumulation_divisor(self) -> int | None:
        """Return the divisor of the batches in the open accumulation; None if it is not known."""
        if not self.progress.accumulation_index:
            return None
        return self.resumed_divisor if self.plan is None else self.divisor_of(self.progress.batch - 1)

    def gradients_may_count(self) -> bool:
        """Return whether gradients that exist between two batches may be part of an optimizer's next step."""
        return self.progress.accumulation_index > 0 or self.keeps_gradients


@dataclass(eq=False)
class RunData:
    """The data of each stage, and when validation is due within a fit."""

    train: StageData
    validation: StageData
    test: StageData
    predict: StageData
    validation_schedule: ValidationSchedule
    # Loads the training data, if the loop has to do that.
    load: Callable[[], None] = nothing

    def all(self) -> tuple[StageData, StageData, StageData, StageData]:
        """Return the data of all stages."""
        return self.train, self.validation, self.test, self.predict

    def of(self, fn: str) -> list[StageData]:
        """Return the data that fit, validate, test or predict reads, the main one first."""
        train, validation, test, predict = self.all()
        return {"fit": [train, validation], "validate": [validation], "test": [test], "predict": [predict]}[fn]


_COUNTERS = tuple(counter.name for counter in fields(Progress))


@dataclass(eq=False)
class Resume:
    """What a resumed run still needs from its checkpoint, and what its next checkpoint takes from an earlier moment."""

    # Number of batches of the run that were done when it was resumed; -1 if it was not resumed.
    from_batch: int = -1
    skip_sanity: bool = False
    # Restores the random generators of a checkpoint, once the first batch is due.
    restore_random: Callable[[], None] = nothing
    # The state of the guard against bad losses.
    guard: dict[str, Any] | None = None
    earlier: Earlier = field(default_factory=Earlier)
    # Where hooks of this run save checkpoints inside a batch.
    batch_start: BatchStart | None = None


@dataclass(eq=False)
class Observers:
    """The observers of a run, bound once before the loop; none of them changes what is trained."""

    # Called with the name of an action and a function; see trainer/profiling.py.
    watch: Callable[[str, Callable[..., Any]], Callable[..., Any]] = unprofiled
    # Its speed, everything logged, and the file in which the run records itself, if one is written.
    pace: Pace = field(default_factory=Pace)
    history: History = field(default_factory=History)
    record: NoRecord = field(default_factory=NoRecord)
    # Checks loss and gradients before each step, as on_bad_loss says.
    guard: Guard | None = None
    # How long training waited for the first batches.
    stalls: StallMonitor = field(default_factory=StallMonitor)
    first_epoch: FirstEpoch = field(default_factory=FirstEpoch)
    # Called after the last hook of an epoch.
    epoch_ended: Callable[[], None] | None = None
    # Names of the speed-ups that Trainer(speed=...) has switched on; None if it chose none.
    levers: tuple[str, ...] | None = None

    def begin_batches(self, run: Run) -> None:
        """Tell the observers that the batches of an epoch follow."""
        self.first_epoch.at_start(run)

    def end_batches(self, run: Run) -> None:
        """Tell the observers that all batches of an epoch are trained."""
        self.first_epoch.at_end(run)


@dataclass(eq=False)
class Evaluation:
    """The progress and results of evaluations and predictions of a run."""

    # The stage that is evaluated now, what ``progress.evaluated`` was when that began, and batches of earlier ones.
    stage: str = ""
    began_at: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    # Steps of earlier validations on the loggers' x axis, by loader; the next validation continues from there.
    steps_before: dict[int, int] = field(default_factory=dict)
    kept_predictions: Any = None
    keeps_predictions: bool = False
    returns_predictions: bool = True
    prints: bool = True
    batch_indices: list[int] = field(default_factory=list)
    epoch_batch_indices: list[list[list[int]]] = field(default_factory=list)


@dataclass(eq=False)
class Run:
    """Everything that the loops work on; they never see a Trainer."""

    arguments: Arguments
    runtime: Runtime
    module: LightningModule
    wrapped: nn.Module
    hooks: Hooks
    logged: LoggedValues
    progress: Progress
    state: TrainerState
    data: RunData
    window: Window
    limits: Limits
    resume: Resume = field(default_factory=Resume)
    observers: Observers = field(default_factory=Observers)
    evaluation: Evaluation = field(default_factory=Evaluation)
    optimizers: list[Any] = field(default_factory=list)
    wrapped_optimizers: list[Any] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    # Switches weights in the module, for optimizers that train with other weights than they evaluate with.
    averages: AveragedWeights = field(default_factory=lambda: AveragedWeights(()))
    # For a program that was written for Lightning: does what Lightning does where hasten differs on purpose.
    conventions: Conventions = field(default_factory=current)
    # Whether something changed on which decisions of the loop depend: it decides again before the next batch.
    changed: bool = False
    # The sizes that micro_batch="auto" and memory="auto" have found to fit into memory.
    memory_limits: MemoryLimits | None = None
    # The compiled module; None if nothing is compiled.
    compiled: CompiledModel | None = None
    # Undoes what was changed in the user's module for this run.
    undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.limits.run = self
        self.metrics = ModuleMetrics(self.module, self.logged.evaluation_metrics)
        if "torchmetrics" in sys.modules:
            self.observers.epoch_ended = self.metrics.end_epoch
        self.module_changes = ModuleChanges(self.module)
        follow(self)

    def replaced(self, owner: object, name: str) -> None:
        """Record that a method or entry of ``owner`` was set or removed: if the loop uses it, it decides again."""
        parts = (self.module, self.data.train.datamodule, *self.schedulers, *self.wrapped_optimizers)
        if any(owner is part for part in parts):
            self.changed = True

    def change_arguments(self, arguments: Arguments) -> None:
        """Use changed arguments from the next batch on, and another limit of batches from the next epoch on."""
        previous, self.arguments = self.arguments, arguments
        data = self.data
        if arguments.limit_train_batches is not previous.limit_train_batches:
            data.train.next_limit = arguments.limit_train_batches
        if arguments.limit_val_batches is not previous.limit_val_batches:
            data.validation.next_limit = arguments.limit_val_batches
            data.validation.take_limit()
        data.validation_schedule.change(arguments.val_check_interval, arguments.check_val_every_n_epoch)
        data.train.reload_every_n_epochs = arguments.reload_dataloaders_every_n_epochs
        data.validation.reload_every_n_epochs = arguments.reload_dataloaders_every_n_epochs
        self.changed = True


def has_batch_in_hand(run: Run) -> bool:
    """Return whether an epoch of training has taken a batch that its counters do not count yet."""
    is_training = run.progress.in_epoch and run.state.stage is RunningStage.TRAINING
    return is_training and run.data.train.is_in_hand(run.progress.batch)


def is_inside_batch(run: Run) -> bool:
    """Return whether a batch of training has begun and its counters have not moved yet."""
    is_outside = run.progress.last_batch or run.logged.context.row.name in _OUTSIDE
    return not is_outside and has_batch_in_hand(run)
