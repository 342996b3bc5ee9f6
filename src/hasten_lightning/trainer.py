"""Trainer under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hasten._lib.optional import installed
from hasten.loggers.base import Logger
from hasten.loops.progress import TrainerFn, TrainerStatus
from hasten.module.callback import Callback
from hasten.profilers.base import Profiler
from hasten.strategies.base import Strategy
from hasten.trainer import trainer
from hasten.types import (
    AcceleratorLike,
    Devices,
    Duration,
    LoggerLike,
    PathLike,
    Plugin,
    PrecisionName,
    StrategyLike,
)
from hasten_lightning import environment
from hasten_lightning._classes.plugins import dress_precision
from hasten_lightning._classes.strategies import dress
from hasten_lightning.facades import Facade, exactly
from hasten_lightning.internals.accelerator_connector import AcceleratorConnector
from hasten_lightning.internals.checkpoint_connector import CheckpointConnector, without_run
from hasten_lightning.internals.results import Results

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
    def __init__(
        self,
        *,
        accelerator: AcceleratorLike = "auto",
        strategy: StrategyLike = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        logger: LoggerLike | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str = -1,
        min_steps: int | str | None = None,
        max_time: Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | Duration | None = None,
        check_val_every_n_epoch: int | str | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | str | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int | str = 0,
        default_root_dir: PathLike | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        # A config may say null for what is on or off.
        given.update({name: False for name in _SWITCHES if given[name] is None})
        super().__init__(**given, **environment.of("Trainer"))
        self._dress_strategy()

    @property
    def max_epochs(self) -> int | None:  # type: ignore[override]
        """Epochs to train; None before the first fit if the program gives no number, as in Lightning."""
        settled = self.state.fn == TrainerFn.FITTING or self._progress.global_step or self._progress.epochs_done
        unlimited = self._arguments.max_epochs_assumed or self._arguments.max_epochs == -1
        return None if unlimited and not settled and self._given["max_epochs"] is None else self._arguments.max_epochs

    def _called_loggers(self) -> list[Any]:
        """Return all loggers on every process: Lightning's are decorated with rank_zero_only where they write."""
        return self._loggers

    @property
    def _results(self) -> Results | None:
        """The values of the running stage, and how they are named; None outside of a call, as in Lightning."""
        return Results(self._logged) if self.state.status == TrainerStatus.RUNNING else None

    def _default_logger(self, folder: str) -> Logger:
        """Return a TensorBoardLogger where TensorBoard is installed, as Lightning does."""
        if not installed("tensorboard"):
            return super()._default_logger(folder)
        from hasten.loggers import TensorBoardLogger

        return TensorBoardLogger(folder)

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
        """Return what ``save_checkpoint`` writes.

        Args:
            weights_only: leave out what only training needs.

        """
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
        new._dress_strategy()
        return new

    def change_arguments(self, **changes: object) -> None:
        """Change arguments between two calls; see ``hasten.Trainer.change_arguments``."""
        super().change_arguments(**changes)
        self._dress_strategy()

    def _dress_strategy(self) -> None:
        # One that the program has made stays as it is.
        if not isinstance(self._given["strategy"], Strategy):
            dress(self._runtime.strategy)
        dress_precision(self._runtime.precision)
