"""BatchSizeFinder: the largest batch size that fits, found when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_warn
from hasten.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class BatchSizeFinder(Callback):
    """Find the largest batch size that fits into memory before a run begins, and run with it.

    It acts when ``fit`` begins, or ``validate``, ``test`` or ``predict`` when that is what was called. Override
    ``on_train_epoch_start`` to search again later: ``self.scale_batch_size(trainer, pl_module)``.

    Args:
        mode: "power" doubles until memory runs out; "binsearch" then narrows it down.
        steps_per_trial: steps tried with each size.
        init_val: the first size.
        max_trials: how many sizes are tried at most.
        batch_arg_name: the attribute of module, hparams or datamodule that holds the size.
        margin: how much smaller than the largest found the result of "binsearch" is, as a share.
        max_val: no larger size is tried, and none above the number of samples.

    Attributes:
        optimal_batch_size: the size found last.

    Raises:
        ValueError: an option is out of range.

    Example::

        >>> BatchSizeFinder(mode="binsearch", max_val=512).optimal_batch_size
        2

    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        from hasten.tuner.batch_size import check_options

        check_options(mode, steps_per_trial, init_val, max_trials, margin, max_val, "BatchSizeFinder")
        self.optimal_batch_size: int | None = init_val
        self._options: dict[str, Any] = {
            "mode": mode,
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "name": batch_arg_name,
            "margin": margin,
            "max_val": max_val,
        }

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search now; the loaders are made anew with the size found."""
        from hasten.tuner.batch_size import search
        from hasten.tuner.trial import Trial

        if trainer.fast_dev_run:
            rank_zero_warn("BatchSizeFinder: skipped, since the Trainer has fast_dev_run.")
            return
        run = trainer._run
        assert run is not None
        method = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
        self.optimal_batch_size = search(Trial(trainer, run), method=method, **self._options)
        for source in (run.train, run.validation, run.test, run.predict):
            source.reload()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training."""
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before ``validate``; a validation within fit keeps its size."""
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before ``test``."""
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before ``predict``."""
        self.scale_batch_size(trainer, pl_module)
