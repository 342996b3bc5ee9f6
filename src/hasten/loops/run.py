"""Run: everything one call of fit, validate, test or predict works on, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from hasten._lib.observers import follow
from hasten._lib.rank_zero import rank_zero_info
from hasten.arguments import Arguments
from hasten.checkpoint.metrics import ModuleMetrics
from hasten.elsewhere import alias
from hasten.hooks import Hooks, nothing
from hasten.logged_values import LoggedValues
from hasten.loops.progress import RunningStage, TrainerState
from hasten.loops.run_data import StageData, StallMonitor
from hasten.loops.schedule import ValidationSchedule
from hasten.loops.user_code import FirstEpoch
from hasten.module import LightningModule
from hasten.optim import LRSchedulerConfig
from hasten.optim.averaged import AveragedWeights
from hasten.record.file import NoRecord
from hasten.record.history import History
from hasten.record.pace import Pace

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from hasten.compile.model import CompiledModel
    from hasten.loops.bad_loss import Guard
    from hasten.loops.micro_batches import MemoryPlan
    from hasten.loops.resume import BatchStart
    from hasten.machine.signals import StopRequests
    from hasten.runtime import Runtime
    from hasten.types import Group


def unprofiled(action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``: what a run without a profiler makes of it."""
    return function


class Stopped(BaseException):
    """Ctrl-C or SIGTERM arrived, and the batch in hand is complete. No ``except Exception`` of a user swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


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
    # Batches that were evaluated or predicted: what watches the run sees that it goes on.
    evaluated = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for counter in fields(self):
            setattr(self, counter.name, state.get(_KEYS.get(counter.name, counter.name), counter.default))

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


@dataclass(slots=True)
class Window:
    """Where the current batch is in its accumulation: the batches between two optimizer steps.

    Args:
        is_start: whether it is the first batch.
        is_end: whether it is the last one, after which the optimizer steps.
        size: by what its loss is divided: the number of batches, or more for a part of a batch.

    """

    is_start: bool = True
    is_end: bool = True
    size: float = 1


@dataclass(eq=False)
class Run:
    """The actors of a run, named once; loops see this and never a Trainer."""

    arguments: Arguments
    runtime: Runtime
    module: LightningModule
    wrapped: nn.Module
    hooks: Hooks
    logged: LoggedValues
    progress: Progress
    state: TrainerState
    stop: StopRequests
    validation_schedule: ValidationSchedule
    train: StageData
    validation: StageData
    test: StageData
    predict: StageData
    # Given the name of an action and a function; see trainer/profiling.py.
    watch: Callable[[str, Callable[..., Any]], Callable[..., Any]] = unprofiled
    optimizers: list[Any] = field(default_factory=list)
    wrapped_optimizers: list[Any] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    # Which weights are in the module where optimizers train with others than they evaluate with.
    averages: AveragedWeights = field(default_factory=lambda: AveragedWeights(()))
    accumulate_grad_batches: int = 1
    # For a program that was written for Lightning: does what Lightning does where hasten differs on purpose.
    as_lightning: bool = field(default_factory=alias.active)
    # Whether gradients may stay after a step: the loop finds out when it chooses how to train.
    keeps_gradients: bool = True
    # Something was changed that the loop had decided upon: it decides again before the next batch.
    changed: bool = False
    should_stop: bool = False
    # Whether it was said that a request to stop waits for a minimum.
    stop_is_late: bool = False
    # Whether all processes agreed on it; one process does not stop alone.
    stop_agreed: bool = False
    # Which run of several processes this is, the same on all of them.
    number: int = 0
    # Batches of the run that were done when it was resumed; -1 where it was not.
    resumed_at: int = -1
    skip_sanity: bool = False
    # Loads the training data, where that is left to the loop.
    load_data: Callable[[], None] = nothing
    # Restores the random generators of a checkpoint, once the first batch is due.
    restore_random: Callable[[], None] = nothing
    is_last_batch: bool = False
    window: Window = field(default_factory=Window)
    window_weight: Any = None
    # Completes the gradients within the step of the wrapped optimizer, where that is not done before it.
    finish_in_step: Callable[[], None] | None = None
    # Whether a batch of the accumulation had a loss and no weight.
    window_is_unweighed: bool = False
    # Size of an accumulation, size of the epoch's last one, and where that begins.
    windows: tuple[int, int, float] | None = None
    # By what the checkpoint's run divided each batch of the window it left open.
    resumed_divisor: int | None = None
    random_before_validation: dict[str, Any] | None = None
    # Where hooks of this run save checkpoints inside a batch.
    batch_start: BatchStart | None = None
    metrics_before_validation: dict[str, Any] | None = None
    kept_predictions: Any = None
    keeps_predictions: bool = False
    returns_predictions: bool = True
    batch_indices: list[int] = field(default_factory=list)
    epoch_batch_indices: list[list[list[int]]] = field(default_factory=list)
    skipped_batches: int = 0
    # The stage that is evaluated now, what ``progress.evaluated`` was when that began, and batches of earlier ones.
    evaluating: str = ""
    evaluated_from: int = 0
    evaluated: dict[str, int] = field(default_factory=dict)
    # Steps on the loggers' x axis of the validations before, by loader, where it goes on from one to the next.
    validated: dict[int, int] = field(default_factory=dict)
    # The latest loss, as training_step gave it: read when values are fetched anyway.
    last_loss: Any = None
    # Checks loss and gradients before each step, as on_bad_loss says; and its state in the checkpoint.
    guard: Guard | None = None
    resumed_guard: dict[str, Any] | None = None
    # How long the first batches were waited for.
    stalls: StallMonitor = field(default_factory=StallMonitor)
    # How fast it trains; everything logged; and what the run notes about itself in a file, where one is written.
    pace: Pace = field(default_factory=Pace)
    history: History = field(default_factory=History)
    record: NoRecord = field(default_factory=NoRecord)
    first_epoch: FirstEpoch = field(default_factory=FirstEpoch)
    # What micro_batch="auto" and memory="auto" found to fit into memory.
    memory_plan: MemoryPlan | None = None
    # What the compiler made of the module; None where nothing is compiled.
    compiled: CompiledModel | None = None
    # Processes that speak from host to host, where the others speak from device to device.
    host_group: Group = None
    # Takes back what was changed about the user's module for this run.
    undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.metrics = ModuleMetrics(self.module, self.logged.evaluation_metrics)
        follow(self)

    def peak_flops(self) -> float | None:
        """Return the operations a second that the device reaches at most; None if that is not known."""
        from hasten.report.peaks import known_peak
        from hasten.report.throughput import compute_dtype

        return known_peak(self.runtime.device, compute_dtype(self.runtime.precision))

    def operation_counter(self) -> FlopCounterMode:
        """Return a context that counts floating-point operations."""
        from hasten.report.peaks import flop_counter

        return flop_counter()

    def replaced(self, owner: object) -> None:
        """Note that a method or entry of ``owner`` was set or removed: if it takes part, the loop decides again."""
        parts = (self.module, self.train.datamodule, *self.schedulers, *self.wrapped_optimizers)
        if any(owner is part for part in parts):
            self.changed = True

    def change_arguments(self, arguments: Arguments) -> None:
        """Go on with other arguments from the next batch, and with another limit of batches from the next epoch."""
        before, self.arguments = self.arguments, arguments
        if arguments.limit_train_batches is not before.limit_train_batches:
            self.train.next_limit = arguments.limit_train_batches
        if arguments.limit_val_batches is not before.limit_val_batches:
            self.validation.next_limit = arguments.limit_val_batches
            self.validation.take_limit()
        self.validation_schedule.change(arguments.val_check_interval, arguments.check_val_every_n_epoch)
        self.train.reload_every_n_epochs = arguments.reload_dataloaders_every_n_epochs
        self.changed = True

    def all_data(self) -> tuple[StageData, StageData, StageData, StageData]:
        """Return the data of all stages."""
        return self.train, self.validation, self.test, self.predict

    def data_of(self, fn: str) -> list[StageData]:
        """Return the data that fit, validate, test or predict reads, the main one first."""
        train, validation, test, predict = self.all_data()
        return {"fit": [train, validation], "validate": [validation], "test": [test], "predict": [predict]}[fn]

    @property
    def max_epochs(self) -> float:
        """Epochs to train for; infinite when there is no limit."""
        return _limit(self.arguments.max_epochs)

    @property
    def max_steps(self) -> float:
        """Optimizer steps to train for; infinite when there is no limit."""
        return _limit(self.arguments.max_steps)

    @property
    def training(self) -> bool:
        """Whether the loop is in an epoch of training, its validation not counted."""
        return self.progress.in_epoch and self.state.stage == RunningStage.TRAINING

    def divisor_of(self, batch_idx: int) -> int:
        """Return by what the loss of a batch is divided: the number of batches in its accumulation."""
        assert self.windows is not None
        size, tail_size, tail_start = self.windows
        return size if batch_idx < tail_start else tail_size

    def accumulation_divisor(self) -> int | None:
        """Return by what the batches of the open accumulation were divided; None where that is not known."""
        if not self.progress.accumulation_index:
            return None
        return self.resumed_divisor if self.windows is None else self.divisor_of(self.progress.batch - 1)

    def gradients_may_count(self) -> bool:
        """Return whether gradients that are there between two batches may be part of an optimizer's next step."""
        return self.progress.accumulation_index > 0 or self.keeps_gradients

    def may_stop_early(self) -> bool:
        """Return whether ``min_epochs`` and ``min_steps`` are reached."""
        progress, arguments = self.progress, self.arguments
        enough_epochs = progress.epochs_done >= (arguments.min_epochs or 0)
        return enough_epochs and progress.global_step >= (arguments.min_steps or 0)

    def stops_early(self) -> bool:
        """Return whether a request to stop takes effect; say once that it has to wait."""
        if self.may_stop_early():
            return True
        if not self.stop_is_late:
            self.stop_is_late, arguments = True, self.arguments
            rank_zero_info(
                f"The run is to stop, but the required `min_epochs={arguments.min_epochs}` or "
                f"`min_steps={arguments.min_steps}` has not been met. Training will continue until then."
            )
        return False

    def goes_on(self) -> bool:
        """Return whether another epoch follows the one whose batches are done, before its validation has its say."""
        progress = self.progress
        return (
            progress.epochs_done + 1 < self.max_epochs
            and progress.global_step < self.max_steps
            and not self.should_stop
            and self.stop.signal is None
        )

    def finished(self) -> bool:
        """Return whether training is over: a limit is reached, or ``should_stop`` is set and the minimum is reached."""
        progress = self.progress
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
        """Stop on all processes if one is to stop, at a place that all pass; return the signal that arrived at any."""
        if self.runtime.world_size == 1:
            return self.stop.signal
        self.stop.asks = self.stop.asks or self.should_stop
        number = self.stop.agreed_now()
        self.take_agreement()
        return number

    def take_agreement(self) -> None:
        """Stop if an agreement said so."""
        if self.stop.granted:
            self.should_stop = self.stop_agreed = True

    def enter(self, stage: RunningStage) -> RunningStage | None:
        """Change the stage; return the one before."""
        before = self.state.stage
        self.state.stage = stage
        return before


def _limit(value: int | None) -> float:
    return math.inf if value is None or value < 0 else value
