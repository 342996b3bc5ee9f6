"""What programs read of ``trainer.fit_loop`` and its like: the counters and limits of a run, in the field's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.loops.run_data import Source
    from hasten.trainer.properties import TrainerView


@dataclass(frozen=True)
class Count:
    """How many were begun, and how many are complete."""

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Counts:
    """The counts of the whole run, and those of the epoch (or call) in hand."""

    total: Count
    current: Count


class FitLoop:
    """``trainer.fit_loop``: limits, which can be changed, and counters, which can be read.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.fit_loop.max_epochs += 3  # a later fit goes on
        >>> trainer.max_epochs
        5

    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self.epoch_loop = TrainingEpochLoop(trainer)

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; -1 for no limit."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int | None) -> None:
        self._trainer._change("max_epochs", epochs)

    @property
    def min_epochs(self) -> int | None:
        """Epochs to train before a callback may stop the run."""
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, epochs: int | None) -> None:
        self._trainer._change("min_epochs", epochs)

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train; -1 for no limit."""
        return self._trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps to train before a callback may stop the run."""
        return self._trainer.min_steps

    @property
    def max_batches(self) -> float:
        """Batches of an epoch."""
        return self._trainer.num_training_batches

    @property
    def batch_idx(self) -> int:
        """Index of the last batch done in this epoch; -1 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the last batch done in the run; -1 before the first."""
        return self.epoch_loop.total_batch_idx

    @property
    def epoch_progress(self) -> Counts:
        """The epochs begun and complete."""
        progress = self._trainer._progress
        running = self._trainer.training or progress.mid_epoch
        begun = max(progress.epochs_done, progress.epoch + 1 if running else 0)
        count = Count(begun, begun, progress.epochs_done, progress.epochs_done)
        return Counts(total=count, current=count)

    @property
    def done(self) -> bool:
        """Whether training is over: a limit is reached, or somebody asked and may."""
        run = self._trainer._run
        return run is not None and run.finished()

    @property
    def restarting(self) -> bool:
        """Whether this fit goes on from a checkpoint."""
        return self._trainer.ckpt_path is not None

    def setup_data(self) -> None:
        """Ask for the training data now."""
        source = self._trainer._source("train")
        if source is not None:
            source.load()


class TrainingEpochLoop:
    """``trainer.fit_loop.epoch_loop``."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self.val_loop = EvaluationLoop(trainer, "validation")

    @property
    def global_step(self) -> int:
        """Optimizer steps done in the run."""
        return self._trainer.global_step

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train; -1 for no limit."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._trainer._change("max_steps", steps)

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps to train before a callback may stop the run."""
        return self._trainer.min_steps

    @min_steps.setter
    def min_steps(self, steps: int | None) -> None:
        self._trainer._change("min_steps", steps)

    @property
    def batch_idx(self) -> int:
        """Index of the last batch done in this epoch; -1 before the first."""
        return self._trainer._progress.batch - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the last batch done in the run; -1 before the first."""
        return self._trainer._progress.total_batches - 1

    @property
    def batch_progress(self) -> Counts:
        """The batches done in the run and in this epoch."""
        progress = self._trainer._progress
        return Counts(
            total=Count(*[progress.total_batches] * 4),
            current=Count(*[progress.batch] * 4),
        )

    @property
    def _batches_that_stepped(self) -> int:
        # The x axis of loggers: packages pass it to ``logger.log_metrics``.
        return self._trainer._progress.updates


class EvaluationLoop:
    """``trainer.validate_loop``, ``trainer.test_loop`` and ``trainer.fit_loop.epoch_loop.val_loop``."""

    def __init__(self, trainer: TrainerView, source: str) -> None:
        self._trainer = trainer
        self._name = source

    @property
    def max_batches(self) -> list[float]:
        """Batches of each loader."""
        return self._trainer._limits(self._name)

    @property
    def num_dataloaders(self) -> int:
        """How many loaders there are."""
        return len(self.max_batches)

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do."""
        source = self._source
        return source is None or source.is_off()

    @property
    def _source(self) -> Source | None:
        return self._trainer._source(self._name)

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self._source)


class DataSource:
    """Where the batches of a loop come from; packages ask it whether there are any."""

    def __init__(self, source: Source | None) -> None:
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
        """What was predicted, by batch; by loader and batch where there are several."""
        run = self._trainer._run
        return [] if run is None or run.kept_predictions is None else run.kept_predictions

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """Indices in the dataset of the samples of each batch, by loader and batch."""
        run = self._trainer._run
        return [] if run is None else run.epoch_batch_indices

    @property
    def current_batch_indices(self) -> list[int]:
        """Indices in the dataset of the samples of the batch in hand."""
        run = self._trainer._run
        return [] if run is None else run.batch_indices
