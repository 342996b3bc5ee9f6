"""ProgressBar: what every progress bar knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import warn_once
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class ProgressBar(Callback):
    """Base class of progress bars: knows how many batches there are and which values to show.

    Override the hooks that draw, and ``disable``, ``enable`` and ``print``.

    Example::

        >>> class Percent(ProgressBar):
        ...     def disable(self): pass
        ...     def enable(self): pass
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %")

    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The Trainer; there from ``setup`` on."""
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._trainer

    @property
    def sanity_check_description(self) -> str:
        """Text in front of the bar in the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Text in front of the bar before the first epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """Text in front of the bar in validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Text in front of the bar in the test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Text in front of the bar in prediction."""
        return "Predicting"

    @property
    def total_train_batches(self) -> float:
        """Batches of this training epoch; ``inf`` when unknown."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> float:
        """Batches of all validation loaders, 0 in an epoch that does not validate; ``inf`` when unknown."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
            return 0
        return sum(trainer.num_val_batches)

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Batches of the validation loader in hand; ``inf`` when unknown."""
        trainer = self.trainer
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return self._of_current_loader(batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of the test loader in hand; ``inf`` when unknown."""
        return self._of_current_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Batches of the prediction loader in hand; ``inf`` when unknown."""
        return self._of_current_loader(self.trainer.num_predict_batches)

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether another loader is in hand than when this was last asked."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which loader is in hand."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Stop showing the bar; called on other processes than the first."""
        raise NotImplementedError(f"{type(self).__name__} must override disable().")

    def enable(self) -> None:
        """Show the bar again."""
        raise NotImplementedError(f"{type(self).__name__} must override enable().")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bar."""
        print(*args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Learn which Trainer this is."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what is shown beside the bar; override it to change that.

        The values are those logged with ``prog_bar=True`` that have arrived on the host, and the version of
        the logger as ``v_num``.
        """
        standard = get_standard_metrics(trainer)
        logged = trainer.progress_bar_metrics
        for name in standard.keys() & logged.keys():
            warn_once(
                f"progress bar {name}",
                f"The progress bar shows {name!r} by itself, and self.log({name!r}, ..., prog_bar=True) takes its "
                "place. Choose another name, or override get_metrics().",
            )
        return {**standard, **logged}

    def _of_current_loader(self, batches: Any) -> float:
        if isinstance(batches, list):
            return batches[self._current_eval_dataloader_idx or 0]  # type: ignore[no-any-return]
        return batches  # type: ignore[no-any-return]


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what every bar shows: the version of the first logger that has one."""
    version = next((logger.version for logger in trainer.loggers if logger.version not in ("", None)), None)
    if version is None:
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
