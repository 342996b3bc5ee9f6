"""Read-only properties of Trainer; none waits for the device."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hasten._lib.errors import MisconfigurationException
from hasten._lib.observers import WatchedList
from hasten.loops.progress import RunningStage, TrainerState, TrainerStatus
from hasten.module.callback import Callback
from hasten.runtime import RuntimeView
from hasten.trainer.loop_views import EvaluationLoop, FitLoop, PredictionLoop
from hasten.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    import torch

    from hasten.compile.report import CompileReport
    from hasten.logged_values import LoggedValues
    from hasten.loggers.base import Logger
    from hasten.loops.progress import Progress
    from hasten.loops.run import Run
    from hasten.loops.run_data import StageData
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule
    from hasten.optim import LRSchedulerConfig


class TrainerView(RuntimeView, TrainerSettings):
    """The readable side of a Trainer."""

    state: TrainerState
    _progress: Progress
    _logged: LoggedValues
    _callbacks: WatchedList[Callback]
    _loggers: list[Any]
    _module: LightningModule | None
    _datamodule: LightningDataModule | None
    _should_stop: bool
    _ckpt_path: str | None
    _received_sigterm: bool
    _between_batches: bool

    # -- for callbacks and tools

    @property
    def progress(self) -> Progress:
        """The counters of training."""
        return self._progress

    @property
    def current_run(self) -> Run:
        """What the current call works on, or the last one.

        Raises:
            RuntimeError: nothing has been run yet.

        """
        if self._run is None:
            raise RuntimeError("Trainer.current_run: call fit, validate, test or predict first.")
        return self._run

    # -- progress

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, from 0; between epochs and after fit, the number of epochs done."""
        return self._progress.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps done in the whole run."""
        return self._progress.global_step

    @property
    def total_batch_idx(self) -> int:
        """Index of the last batch over the whole run, from 0."""
        return self._progress.total_batches - 1

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
        return self._run is not None and self._run.is_last_batch

    @property
    def should_stop(self) -> bool:
        """Whether the run was asked to stop; assign True to end it after this batch."""
        agreed = self._run is not None and self._run.stop_agreed
        return self._should_stop or agreed

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._should_stop = bool(stop)
        if self._run is not None:
            self._run.should_stop = bool(stop)
            if not stop:
                self._run.stop_agreed = self._run.stop.asks = False

    # -- state

    @property
    def training(self) -> bool:
        """Whether training steps run."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """Whether validation steps run."""
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """Whether test steps run."""
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        """Whether prediction steps run."""
        return self.state.stage == RunningStage.PREDICTING

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation sanity check runs."""
        return self.state.stage == RunningStage.SANITY_CHECKING

    @property
    def evaluating(self) -> bool:
        """Whether validation, test or the sanity check runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last call was ended by an exception or a signal."""
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM ended the run."""
        return self._received_sigterm

    @property
    def between_batches(self) -> bool:
        """Whether no batch is in progress, so that the state can be saved."""
        return self._between_batches

    # -- the loops

    @property
    def fit_loop(self) -> FitLoop:
        """Limits and counters of training."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The batches of ``validate``."""
        return EvaluationLoop(self, "validation")

    @property
    def test_loop(self) -> EvaluationLoop:
        """The batches of ``test``."""
        return EvaluationLoop(self, "test")

    @property
    def predict_loop(self) -> PredictionLoop:
        """The batches and outputs of ``predict``."""
        return PredictionLoop(self, "predict")

    # -- the machine

    @property
    def precision(self) -> Any:
        """The precision in use, for instance "32-true"."""
        return self._runtime.precision.precision

    @property
    def precision_plugin(self) -> Any:
        """The object behind ``precision``."""
        return self._runtime.precision

    @property
    def scaler(self) -> Any:
        """The GradScaler of fp16 training, or None."""
        return self._runtime.scaler

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._runtime.num_nodes

    @property
    def num_devices(self) -> int:
        """Number of devices on this machine."""
        return self._runtime.num_devices

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices on this machine."""
        return list(self._runtime.device_ids)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """``num_replicas`` and ``rank`` for a distributed sampler, or None."""
        return self._runtime.distributed_sampler_kwargs

    # -- module, data, optimizers

    @property
    def lightning_module(self) -> LightningModule | None:
        """The module."""
        return self._module

    @property
    def model(self) -> torch.nn.Module | None:
        """The module as the strategy wraps it."""
        return self._module if self._run is None else self._run.wrapped

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The datamodule of the last call."""
        return self._datamodule

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the run."""
        return [] if self._run is None else self._run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        if self._run is not None:
            self._run.optimizers[:] = optimizers

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers as manual optimization uses them."""
        return [] if self._run is None else self._run.wrapped_optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The learning-rate schedulers and when they step."""
        return [] if self._run is None else self._run.schedulers

    @property
    def train_dataloader(self) -> Any:
        """The training loader as it is read, or None before it was loaded."""
        return self._loaders("train", single=True)

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or a list of several."""
        return self._loaders("validation")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, or a list of several."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, or a list of several."""
        return self._loaders("predict")

    @property
    def num_training_batches(self) -> float:
        """Batches in a training epoch; infinite when unknown."""
        source = self._source("train")
        return _whole(source.limit) if source is not None and source.loaded else math.inf

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader."""
        return self._limits("validation")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader in the sanity check."""
        return [min(self.num_sanity_val_steps, limit) for limit in self._limits("validation")]

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each test loader."""
        return self._limits("test")

    @property
    def compile_report(self) -> CompileReport | None:
        """Graphs, seconds, breaks and recompiles of ``compile`` in the last run; None where it is off."""
        run = self._run
        return None if run is None or run.compiled is None else run.compiled.report()

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each prediction loader."""
        return self._limits("predict")

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates."""
        source = self._source("validation")
        return source is not None and not source.is_off()

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps of the whole fit; infinite when nothing limits it.

        Example: a scheduler's ``total_steps=self.trainer.estimated_stepping_batches``.
        """
        run, arguments = self._run, self._arguments
        max_steps = math.inf if arguments.max_steps in (-1, None) else arguments.max_steps
        if run is None:
            raise MisconfigurationException(
                "Trainer.estimated_stepping_batches: known during fit only, for instance in configure_optimizers."
            )
        if math.isinf(run.max_epochs):
            return _whole(max_steps)
        run.train.load()
        if math.isinf(run.train.limit):
            return _whole(max_steps)
        from hasten.callbacks.accumulation import GradientAccumulationScheduler

        for callback in self._callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                windows = map(callback.get_accumulate_grad_batches, range(int(run.max_epochs)))
                return _whole(min(sum(math.ceil(run.train.limit / window) for window in windows), max_steps))
        an_epoch = math.ceil(run.train.limit / run.accumulate_grad_batches)
        return _whole(min(an_epoch * run.max_epochs, max_steps))

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
        self._logged.loggers = self._loggers if self.is_global_zero else ()

    @property
    def log_dir(self) -> str | None:
        """The folder for the logs of this run, the same on all processes."""
        if self._loggers:
            logger = self._loggers[0]
            folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        else:
            folder = self.default_root_dir
        folder = self._runtime.broadcast(folder)
        return None if folder is None else os.fspath(folder)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything logged, by name; converting one to a number may wait.

        With several processes, the value of a step logged with ``sync_dist=True`` is that of the last logging
        interval; ``sync_step_values`` updates it.
        """
        return self._logged.callback_metrics()

    def sync_step_values(self) -> None:
        """Reduce the values that training steps logged with ``sync_dist=True``; all processes must call it."""
        self._logged.sync_step_values()

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything logged for the loggers; converting one to a number may wait."""
        return self._logged.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar that have arrived on the host."""
        self._logged.deliver()
        if self.training:
            self._logged.publish_bar(self._progress.epoch)
        return dict(self._logged.bar_values)

    # -- callbacks

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks in the order they run; the hooks of one added later run from then on."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self._callbacks[:] = callbacks

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All callbacks that save checkpoints."""
        from hasten.callbacks.checkpoint import Checkpoint

        return [callback for callback in self._callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All EarlyStopping callbacks."""
        from hasten.callbacks.early_stopping import EarlyStopping

        return [callback for callback in self._callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, or None."""
        from hasten.callbacks.progress import ProgressBar

        return next((callback for callback in self._callbacks if isinstance(callback, ProgressBar)), None)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint the last call started from."""
        return self._ckpt_path

    # -- inside

    def _source(self, name: str) -> StageData | None:
        return None if self._run is None else getattr(self._run, name)

    def _loaders(self, name: str, *, single: bool = False) -> Any:
        source = self._source(name)
        if source is None or not source.loaded:
            return None
        loaders = source.loaders
        return loaders[0] if single or len(loaders) == 1 else loaders

    def _limits(self, name: str) -> list[float]:
        source = self._source(name)
        if source is None or source.is_off():
            return []
        return [_whole(limit) for limit in source.limits]


def _whole(value: float) -> float:
    return value if math.isinf(value) else int(value)
