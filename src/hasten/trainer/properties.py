"""Read-only properties of Trainer; none waits for the device."""

from __future__ import annotations

import math
import os
import signal as signals
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from hasten import callbacks
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.observers import WatchedList
from hasten.elsewhere import conventions
from hasten.loggers.folders import FolderLogger
from hasten.module.callback import Callback
from hasten.runtime import ReadOnly, RuntimeView
from hasten.trainer.settings import TrainerSettings
from hasten.trainer.tools import LoopOf
from hasten.types import RunningStage, TrainerFn, TrainerState, TrainerStatus

if TYPE_CHECKING:
    import torch

    from hasten import LightningDataModule, LightningModule
    from hasten.compile.report import CompileReport
    from hasten.logged_values import LoggedValues
    from hasten.loggers.base import Logger
    from hasten.loops.run import Progress, Run
    from hasten.loops.run_data import StageData
    from hasten.optim import LRSchedulerConfig
    from hasten.precision.base import Precision
    from hasten.record.history import History
    from hasten_lightning.internals.results import LoggerConnector
    from hasten_lightning.loops.views import EvaluationLoop, FitLoop, PredictionLoop


class _InStage:
    """Whether a stage is in progress; programs that imitate a run assign it."""

    def __init__(self, stage: RunningStage, doc: str) -> None:
        self._stage, self.__doc__ = stage, doc

    @overload
    def __get__(self, instance: None, owner: type) -> _InStage: ...

    @overload
    def __get__(self, instance: TrainerView, owner: type) -> bool: ...

    def __get__(self, instance: TrainerView | None, owner: type) -> _InStage | bool:
        return self if instance is None else instance.state.stage is self._stage

    def __set__(self, instance: TrainerView, is_now: bool) -> None:
        if is_now:
            instance.state.stage = self._stage
        elif instance.state.stage is self._stage:
            instance.state.stage = None


def _loaders(source_name: str, doc: str) -> ReadOnly[Any]:
    def loaders(trainer: TrainerView) -> Any:
        source = trainer._source(source_name)
        if source is None or not source.loaded:
            return None
        return source.in_structure

    return ReadOnly(loaders, doc)


def _limits(source_name: str, doc: str) -> ReadOnly[list[float]]:
    return ReadOnly(lambda trainer: trainer._limits(source_name), doc)


def _of_class(trainer: TrainerView, name: str) -> list[Any]:
    """Return the callbacks of a class of ``hasten.callbacks``, which is imported now."""
    kind = getattr(callbacks, name)
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def _callbacks_of(name: str, doc: str) -> ReadOnly[list[Any]]:
    return ReadOnly(lambda trainer: _of_class(trainer, name), doc)


def _first_of(name: str, doc: str) -> ReadOnly[Any]:
    return ReadOnly(lambda trainer: next(iter(_of_class(trainer, name)), None), doc)


class TrainerView(RuntimeView, TrainerSettings):
    """The readable side of a Trainer."""

    state: TrainerState
    _progress: Progress
    _logged: LoggedValues
    _history: History
    _callbacks: WatchedList[Callback]
    _loggers: list[Any]
    _loops: dict[str, Any]
    _assigned_optimizers: tuple[Any, ...] = ()
    _module: LightningModule | None
    _datamodule: LightningDataModule | None
    _should_stop: bool
    _ckpt_path: str | None
    _assigned_path: str | None
    _received_sigterm: bool
    _between_batches: bool

    # -- for callbacks and tools

    progress = ReadOnly["Progress"]("_progress", "The counters of training.")

    @property
    def current_run(self) -> Run:
        """The run of the current call, or of the last one.

        Raises:
            RuntimeError: nothing has been run yet.

        """
        if self._run is None:
            raise make_error(RuntimeError, "Trainer.current_run:", fix="call fit, validate, test or predict first.")
        return self._run

    # -- progress

    current_epoch = ReadOnly[int](
        "_progress.current_epoch",
        "Index of the current epoch, from 0; between epochs and after fit, the number of epochs done.",
    )
    global_step = ReadOnly[int]("_progress.global_step", "Optimizer steps done in the whole run.")

    total_batch_idx = ReadOnly[int](
        lambda trainer: trainer._progress.total_batches - 1, "Index of the last batch over the whole run, from 0."
    )
    is_last_batch = ReadOnly[bool](
        lambda trainer: trainer._run is not None and trainer._run.window.is_last_batch,
        "Whether the current training batch is the last of its epoch.",
    )

    @property
    def should_stop(self) -> bool:
        """Whether the run was asked to stop; assign True to end it after this batch."""
        return self._should_stop or (self._run is not None and self._run.limits.stop_agreed)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._should_stop = bool(stop)
        if self._run is None:
            return
        limits = self._run.limits
        limits.should_stop = bool(stop)
        if stop:
            limits.stop_requests += 1
        else:
            limits.stop_agreed = limits.stop.asks = False

    # -- state

    training = _InStage(RunningStage.TRAINING, "Whether training steps run.")
    validating = _InStage(RunningStage.VALIDATING, "Whether validation steps run.")
    testing = _InStage(RunningStage.TESTING, "Whether test steps run.")
    predicting = _InStage(RunningStage.PREDICTING, "Whether prediction steps run.")
    sanity_checking = _InStage(RunningStage.SANITY_CHECKING, "Whether the validation sanity check runs.")
    received_sigterm = ReadOnly[bool](
        lambda trainer: (
            trainer._received_sigterm
            or (trainer._run is not None and trainer._run.limits.stop.signal == signals.SIGTERM)
        ),
        "Whether SIGTERM has arrived, which ends the run after the batch in hand.",
    )
    between_batches = ReadOnly[bool](
        "_between_batches", "Whether no batch is in progress, so that the state can be saved."
    )

    @property
    def evaluating(self) -> bool:
        """Whether validation, test or the sanity check runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last call was ended by an exception or a signal."""
        return self.state.status is TrainerStatus.INTERRUPTED

    # -- the loops

    fit_loop = LoopOf["FitLoop"]("Limits and counters of training.")
    validate_loop = LoopOf["EvaluationLoop"]("The batches of ``validate``.")
    test_loop = LoopOf["EvaluationLoop"]("The batches of ``test``.")
    predict_loop = LoopOf["PredictionLoop"]("The batches and outputs of ``predict``.")
    # Callbacks written for Lightning ask it whether loggers get the values of a step.
    _logger_connector = LoopOf["LoggerConnector"]("What was logged, and whether loggers get it now.")

    # -- the machine

    precision = ReadOnly[str]("_runtime.precision.precision", 'The precision in use, for instance "32-true".')
    precision_plugin = ReadOnly["Precision"]("_runtime.precision", "The object behind ``precision``.")
    scaler = ReadOnly["torch.amp.GradScaler | None"]("_runtime.scaler", "The GradScaler of fp16 training, or None.")
    num_nodes = ReadOnly[int]("_runtime.num_nodes", "Number of machines.")
    num_devices = ReadOnly[int]("_runtime.num_devices", "Number of devices on this machine.")
    distributed_sampler_kwargs = ReadOnly["dict[str, int] | None"](
        "_runtime.distributed_sampler_kwargs", "``num_replicas`` and ``rank`` for a distributed sampler, or None."
    )

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices on this machine."""
        return list(self._runtime.device_ids)

    # -- module, data, optimizers

    lightning_module = ReadOnly["LightningModule | None"]("_module", "The module.")

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The datamodule of the last call."""
        return self._datamodule

    @datamodule.setter
    def datamodule(self, datamodule: LightningDataModule | None) -> None:
        self._datamodule = datamodule

    @property
    def model(self) -> torch.nn.Module | None:
        """The module as the strategy wraps it."""
        return self._module if self._run is None else self._run.wrapped

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the run."""
        return list(self._assigned_optimizers) if self._run is None else self._run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        if self._run is None:
            self._assigned_optimizers = tuple(optimizers)
        else:
            self._run.optimizers[:] = optimizers

    wrapped_optimizers = ReadOnly[list[Any]](
        lambda trainer: [] if trainer._run is None else trainer._run.wrapped_optimizers,
        "The optimizers as manual optimization uses them.",
    )
    lr_scheduler_configs = ReadOnly["list[LRSchedulerConfig]"](
        lambda trainer: [] if trainer._run is None else trainer._run.schedulers,
        "The learning-rate schedulers and when they step.",
    )

    train_dataloader = _loaders("train", "The training loader as it is read, or None before it was loaded.")
    val_dataloaders = _loaders("validation", "The validation loader, or a list of several.")
    test_dataloaders = _loaders("test", "The test loader, or a list of several.")
    predict_dataloaders = _loaders("predict", "The prediction loader, or a list of several.")
    num_val_batches = _limits("validation", "Batches of each validation loader.")
    num_test_batches = _limits("test", "Batches of each test loader.")
    num_predict_batches = _limits("predict", "Batches of each prediction loader.")

    @property
    def num_training_batches(self) -> float:
        """Batches in a training epoch; infinite when unknown."""
        source = self._source("train")
        return _whole(source.limit) if source is not None and source.loaded else math.inf

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader in the sanity check."""
        if self.state.fn not in (TrainerFn.FITTING, None):
            return []
        return [min(self.num_sanity_val_steps, limit) for limit in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates."""
        source = self._source("validation")
        return source is not None and not source.is_off(loads=False)

    @property
    def compile_report(self) -> CompileReport | None:
        """Graphs, seconds, breaks and recompiles of ``compile`` in the last run; None where it is off."""
        run = self._run
        return None if run is None or run.compiled is None else run.compiled.report()

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps of the whole fit; infinite when nothing limits it.

        Example: a scheduler's ``total_steps=self.trainer.estimated_stepping_batches``.
        """
        run, max_steps = self._run, self._arguments.max_steps
        if run is None and self._arguments.max_epochs != -1:
            raise MisconfigurationException(
                "Trainer.estimated_stepping_batches: known during fit only, for instance in configure_optimizers."
            )
        steps = math.inf
        if run is not None and not math.isinf(run.limits.max_epochs):
            run.data.train.begin()  # Lightning draws the seed of the loader here.
            run.data.train.load()
            if not math.isinf(limit := run.data.train.limit):
                epochs = max(int(run.limits.max_epochs), 1)  # A scheduler needs a length also where nothing is trained.
                steps = epochs * math.ceil(limit / run.window.accumulate_grad_batches)
                if (schedule := next(iter(_of_class(self, "GradientAccumulationScheduler")), None)) is not None:
                    windows = map(schedule.get_accumulate_grad_batches, range(epochs))
                    steps = sum(math.ceil(limit / window) for window in windows)
        return _whole(steps if max_steps == -1 else min(steps, max_steps))

    # -- logging

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self._loggers[0] if self._loggers else None

    @logger.setter
    def logger(self, logger: Logger | bool | None) -> None:
        self.loggers = [] if logger is None or logger is False else [logger]

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Any] | None) -> None:
        self._loggers = list(loggers or [])
        if "_runtime" in vars(self):  # Not in a subclass that sets them before ``super().__init__()``.
            self._logged.loggers = self._called_loggers()

    def _called_loggers(self) -> list[Any]:
        """Return the loggers that this process calls: all on the first process, none on others."""
        return self._loggers if self.is_global_zero or conventions.current().loggers_on_every_process else []

    @property
    def log_dir(self) -> str | None:
        """The folder for the logs of this run, the same on all processes."""
        folder: Any = self.default_root_dir
        if self._loggers:
            logger = self._loggers[0]
            names = ("log_dir", "save_dir") if isinstance(logger, FolderLogger) else ("save_dir", "log_dir")
            folder = next((found for name in names if (found := getattr(logger, name, None))), None)
        folder = self._runtime.broadcast(folder)
        return None if folder is None else os.fspath(folder)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything logged, by name; converting one to a number may wait.

        With several processes, the value of a step logged with ``sync_dist=True`` comes from the last logging interval,
        before the first from this process; ``sync_step_values`` updates it.
        """
        return self._logged.callback_metrics()

    def sync_step_values(self) -> None:
        """Reduce the values that training steps logged with ``sync_dist=True``; all processes must call it."""
        self._logged.sync_step_values()

    @property
    def history(self) -> History:
        """Everything that the last fit has logged, by step and by epoch, with or without a logger; see ``History``.

        During the fit, it has the rows that have arrived on the host. With several processes, each has the values
        that it logged itself; those reduced with ``sync_dist=True`` are the same on all.

        Example::

            >>> import hasten as L
            >>> L.Trainer(accelerator="cpu", logger=False).history
            History: nothing was logged

        """
        self._logged.deliver()
        return self._history

    @history.setter
    def history(self, history: History) -> None:
        self._history = history

    def note_row(self, values: Mapping[str, float], step: int) -> None:
        """Add to the history values that a callback sends to the loggers itself; do nothing outside of a fit."""
        if self._logged.on_row is not None:
            self._logged.on_row(step, self._progress.epoch, values)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything logged for the loggers; converting one to a number may wait."""
        return self._logged.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar that have arrived on the host."""
        self._logged.deliver()
        if self.training:
            # A progress bar written for Lightning expects the values of each batch.
            now = conventions.current().bars_have_counters
            loss = None if now or self._run is None else self._run.window.loss
            self._logged.publish_bar(self._progress.epoch, now=now, loss=loss)
            self._logged.deliver()
        return self._logged.bar_metrics()

    # -- callbacks

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks in the order in which they run; the hooks of one that is added later run from then on."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self._callbacks[:] = callbacks

    checkpoint_callbacks = _callbacks_of("Checkpoint", "All callbacks that save checkpoints.")
    checkpoint_callback = _first_of("Checkpoint", "The first callback that saves checkpoints, or None.")
    early_stopping_callbacks = _callbacks_of("EarlyStopping", "All EarlyStopping callbacks.")
    early_stopping_callback = _first_of("EarlyStopping", "The first EarlyStopping callback, or None.")
    progress_bar_callback = _first_of("ProgressBar", "The progress bar, or None.")

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint the last call started from; assign a path for calls to which none is given."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | None) -> None:
        self._ckpt_path = self._assigned_path = path or None

    # -- internal functions

    def _source(self, name: str) -> StageData | None:
        return None if self._run is None else getattr(self._run.data, name)

    def _limits(self, name: str) -> list[float]:
        source = self._source(name)
        # Reading a property does not make loaders.
        if source is None or not source.loaded or source.is_switched_off:
            return []
        return [_whole(limit) for limit in source.all_limits()]


def _whole(value: float) -> float:
    return value if math.isinf(value) else int(value)
