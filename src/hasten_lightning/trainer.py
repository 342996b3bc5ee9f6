"""Trainer under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.strategies.base import Strategy
from hasten.trainer import trainer
from hasten.trainer.settings import Setting
from hasten.types import PathLike, TrainerFn, TrainerStatus
from hasten_lightning import environment
from hasten_lightning._classes.plugins import precision_as_facade
from hasten_lightning._classes.strategies import as_facade
from hasten_lightning.facades import Facade, exactly
from hasten_lightning.internals.accelerator_connector import AcceleratorConnector
from hasten_lightning.internals.checkpoint_connector import CheckpointConnector, without_run
from hasten_lightning.internals.devices import warn_of_idle_devices
from hasten_lightning.internals.hooks import CallbackConnector, DataConnector
from hasten_lightning.internals.modules import with_external_callbacks
from hasten_lightning.internals.results import Results
from hasten_lightning.loops.views import EvaluationLoop, evaluation_loop
from hasten_lightning.utilities.enums import GradClipAlgorithmType

if TYPE_CHECKING:
    from hasten.types import StorageOptions

_SWITCHES = (
    "fast_dev_run", "inference_mode", "use_distributed_sampler", "detect_anomaly", "barebones", "sync_batchnorm",
    "enable_autolog_hparams",
)  # fmt: skip


class Trainer(trainer.Trainer, metaclass=Facade):
    """Run a ``LightningModule``: ``hasten.Trainer``, with the parameters of Lightning's Trainer.

    Environment variables set arguments that are not given, as in Lightning (``PL_TRAINER_DEVICES=2``), and those that
    only hasten has (``HASTEN_PACKED=1``; ``hasten run --packed program.py`` is the same).

    Raises:
        TypeError: an argument does not exist or has a wrong type.
        ValueError: an argument is out of range, or two contradict each other.

    Example::

        >>> import inspect
        >>> "compile" in inspect.signature(Trainer).parameters
        False
        >>> isinstance(trainer.Trainer(accelerator="cpu", logger=False), Trainer)
        True

    """

    _connector: CheckpointConnector | None = None

    @environment.with_variables
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        # A config may say null for what is on or off.
        given.update({name: False for name in _SWITCHES if given[name] is None})
        given["callbacks"] = with_external_callbacks(given["callbacks"], "lightning.pytorch.callbacks_factory")
        super().__init__(**given, **environment.of("Trainer"))
        self._use_facades()
        warn_of_idle_devices(self)

    @property
    def max_epochs(self) -> int | None:  # type: ignore[override]
        """Epochs to train; None before the first fit if the program gives no number, as in Lightning."""
        settled = self.state.fn is TrainerFn.FITTING or self._progress.global_step or self._progress.epochs_done
        unlimited = self._arguments.max_epochs_assumed or self._arguments.max_epochs == -1
        return None if unlimited and not settled and self._given["max_epochs"] is None else self._arguments.max_epochs

    def _shown_min_epochs(self) -> int | None:
        given = self._arguments.min_epochs
        return int(bool(self.min_steps)) if given is None and self.state.fn is TrainerFn.FITTING else given

    def _shown_val_check_batch(self) -> float | None:
        run = self._run
        counts = run is not None and run.data.train.loaded and not run.data.validation_schedule.per_batch
        return super().val_check_batch if counts else None

    def _set_val_check_batch(self, batches: float) -> None:
        self.val_check_interval = batches

    min_epochs: Any = property(_shown_min_epochs, doc="Epochs to train at least; a number as soon as fit has begun.")
    val_check_batch: Any = property(
        _shown_val_check_batch,
        _set_val_check_batch,
        doc="Batches between two validations; None before fit, and where time counts.",
    )
    gradient_clip_algorithm: Any = Setting(
        "How gradients are clipped, in Lightning's type.", convert=lambda name: name and GradClipAlgorithmType(name)
    )

    @property
    def _results(self) -> Results | None:
        """The values of the running stage, and how they are named; None outside of a call, as in Lightning."""
        running = self.state.status is TrainerStatus.RUNNING
        return Results(self._logged, training=self.training) if running else None

    @property
    def _loggers(self) -> list[Any]:
        # An attribute, which programs assign.
        loggers: list[Any] = vars(self)["_loggers"]
        return loggers

    @_loggers.setter
    def _loggers(self, loggers: list[Any]) -> None:
        vars(self)["_loggers"] = loggers
        if "_runtime" in vars(self):
            self._logged.loggers = self._called_loggers()

    @property
    def _detect_anomaly(self) -> bool:
        return self._arguments.detect_anomaly

    @property
    def _active_loop(self) -> Any:
        """The loop of the running stage; None outside of a call."""
        return self._logger_connector.active_loop

    @property
    def _evaluation_loop(self) -> EvaluationLoop:
        return evaluation_loop(self)

    def _show_results(self, results: list[dict[str, float]], stage: str) -> None:
        # Programs replace the method, and read values with ``item()``.
        tensors = [{name: torch.tensor(value) for name, value in result.items()} for result in results]
        self._evaluation_loop._print_results(tensors, stage)

    @property
    def _callback_connector(self) -> CallbackConnector:
        return CallbackConnector(self)

    @property
    def _data_connector(self) -> DataConnector:
        return DataConnector(self)

    @property
    def _accelerator_connector(self) -> AcceleratorConnector:
        return AcceleratorConnector.of(self)

    @property
    def _checkpoint_connector(self) -> CheckpointConnector:
        if self._connector is None:
            self._connector = CheckpointConnector(self)
        return self._connector

    @_checkpoint_connector.setter
    def _checkpoint_connector(self, connector: CheckpointConnector) -> None:
        self._connector = connector

    def dump_checkpoint(self, *, weights_only: bool) -> dict[str, Any]:
        """Return what ``save_checkpoint`` writes; ``weights_only`` leaves out what only training needs."""
        return self._checkpoint(self.current_run, weights_only=weights_only)

    def save_checkpoint(
        self, filepath: PathLike, weights_only: bool | None = None, storage_options: StorageOptions = None
    ) -> None:
        """Save the run, or the module that ``strategy.connect`` was given; see ``hasten.Trainer.save_checkpoint``."""
        module = self.strategy.connected_module
        if module is None:
            super().save_checkpoint(filepath, weights_only, storage_options)
        else:
            self._runtime.save(filepath, without_run(module), storage_options=storage_options)

    def with_arguments(self, **changes: object) -> trainer.Trainer:
        """Return a new Trainer with the same parts and other arguments; see ``hasten.Trainer.with_arguments``."""
        new = super().with_arguments(**changes)
        assert isinstance(new, Trainer)
        new._use_facades()
        return new

    def change_arguments(self, **changes: object) -> None:
        """Change arguments between two calls; see ``hasten.Trainer.change_arguments``."""
        super().change_arguments(**changes)
        self._use_facades()

    def _use_facades(self) -> None:
        # An object that the program has made is not changed.
        if not isinstance(self._given["strategy"], Strategy):
            as_facade(self._runtime.strategy)
        precision_as_facade(self._runtime.precision)
