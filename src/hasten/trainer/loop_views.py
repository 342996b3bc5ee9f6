"""``trainer.fit_loop`` and the other loops: counters and limits of a run under the names that programs use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.runtime import ReadOnly
from hasten.trainer.settings import Setting

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run_data import StageData
    from hasten.trainer.properties import TrainerView

_MAX_EPOCHS = "Epochs to train; -1 for no limit."
_MIN_EPOCHS = "Epochs to train before a callback may stop the run."
_MAX_STEPS = "Optimizer steps to train; -1 for no limit."
_MIN_STEPS = "Optimizer steps to train before a callback may stop the run."


@dataclass(frozen=True)
class Count:
    """How many have begun, and how many are complete."""

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Counts:
    """The counts of the whole run, and those of the current epoch (or call)."""

    total: Count
    current: Count


class LoopView:
    """A view of one loop of a Trainer."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    _arguments = ReadOnly["Arguments"]("_trainer._arguments", "The arguments of the Trainer.")

    def _change(self, name: str, value: Any) -> None:
        self._trainer._change(name, value)


class TrainingEpochLoop(LoopView):
    """``trainer.fit_loop.epoch_loop``."""

    max_steps = Setting[int](_MAX_STEPS)
    min_steps = Setting[int | None](_MIN_STEPS)

    def __init__(self, trainer: TrainerView) -> None:
        super().__init__(trainer)
        self.val_loop = EvaluationLoop(trainer, "validation")

    global_step = ReadOnly[int]("_trainer.global_step", "Optimizer steps done in the run.")
    total_batch_idx = ReadOnly[int](
        "_trainer.total_batch_idx", "Index of the last batch completed in the run; -1 before the first."
    )
    # The x axis of loggers: packages pass it to ``logger.log_metrics``.
    _batches_that_stepped = ReadOnly[int]("_trainer._progress.logged_step", "Steps at which values are logged.")

    @property
    def batch_idx(self) -> int:
        """Index of the last batch completed in this epoch; -1 before the first."""
        return self._trainer.progress.batch - 1

    @property
    def batch_progress(self) -> Counts:
        """The batches done in the run and in this epoch."""
        progress = self._trainer.progress
        return Counts(total=Count(*[progress.total_batches] * 4), current=Count(*[progress.batch] * 4))


class FitLoop(LoopView):
    """``trainer.fit_loop``: limits, which can be assigned, and counters.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.fit_loop.max_epochs += 3  # a later fit continues
        >>> trainer.max_epochs
        5

    """

    max_epochs = Setting[int](_MAX_EPOCHS)
    min_epochs = Setting[int | None](_MIN_EPOCHS)
    max_steps = Setting[int](_MAX_STEPS, settable=False)
    min_steps = Setting[int | None](_MIN_STEPS, settable=False)

    def __init__(self, trainer: TrainerView) -> None:
        super().__init__(trainer)
        self.epoch_loop = TrainingEpochLoop(trainer)

    max_batches = ReadOnly[float]("_trainer.num_training_batches", "Batches of an epoch.")
    batch_idx = ReadOnly[int](
        "epoch_loop.batch_idx", "Index of the last batch completed in this epoch; -1 before the first."
    )
    total_batch_idx = ReadOnly[int](
        "_trainer.total_batch_idx", "Index of the last batch completed in the run; -1 before the first."
    )

    @property
    def epoch_progress(self) -> Counts:
        """The epochs that have begun and that are complete."""
        progress = self._trainer.progress
        running = self._trainer.training or progress.mid_epoch
        begun = max(progress.epochs_done, progress.epoch + 1 if running else 0)
        count = Count(begun, begun, progress.epochs_done, progress.epochs_done)
        return Counts(total=count, current=count)

    @property
    def done(self) -> bool:
        """Whether training is over: a limit is reached, or a request to stop takes effect."""
        run = self._trainer._run
        return run is not None and run.finished()

    @property
    def restarting(self) -> bool:
        """Whether this fit continues from a checkpoint."""
        return self._trainer.ckpt_path is not None

    def setup_data(self) -> None:
        """Load the training data now."""
        if (source := self._trainer._source("train")) is not None:
            source.load()


class EvaluationLoop(LoopView):
    """``trainer.validate_loop``, ``trainer.test_loop`` and ``trainer.fit_loop.epoch_loop.val_loop``."""

    def __init__(self, trainer: TrainerView, source: str) -> None:
        super().__init__(trainer)
        self._name = source

    @property
    def max_batches(self) -> list[float]:
        """Batches of each loader."""
        return self._trainer._limits(self._name)

    @property
    def num_dataloaders(self) -> int:
        """Number of loaders."""
        return len(self.max_batches)

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do."""
        source = self._trainer._source(self._name)
        return source is None or source.is_off()

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self._trainer._source(self._name))


class DataSource:
    """Where the batches of a loop come from."""

    def __init__(self, source: StageData | None) -> None:
        self._source = source

    def is_defined(self) -> bool:
        """Return whether loaders were given, or the module or datamodule has some."""
        return self._source is not None and self._source.has_data()

    def dataloader(self) -> Any:
        """Return the loader, or the list of several."""
        loaders = [] if self._source is None else self._source.loaders
        return loaders[0] if len(loaders) == 1 else loaders


class PredictionLoop(EvaluationLoop):
    """``trainer.predict_loop``."""

    @property
    def predictions(self) -> list[Any]:
        """The predictions by batch; with several loaders by loader and batch."""
        run = self._trainer._run
        return [] if run is None else run.kept_predictions or []

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """Dataset indices of the samples of each batch, by loader and batch."""
        run = self._trainer._run
        return [] if run is None else run.epoch_batch_indices

    @property
    def current_batch_indices(self) -> list[int]:
        """Dataset indices of the samples of the current batch."""
        run = self._trainer._run
        return [] if run is None else run.batch_indices
