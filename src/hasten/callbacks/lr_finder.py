"""LearningRateFinder: a learning rate found when fit begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_warn
from hasten.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.tuner.lr_find import LRFinder


class LearningRateFinder(Callback):
    """Sweep over learning rates before training, and train with the one suggested.

    Override ``on_fit_start`` to do nothing and ``on_train_epoch_start`` to search at milestones of your own:
    ``self.lr_find(trainer, pl_module)``. Optimizers keep their state; their rate, and the one their schedulers start
    from, become the one found.

    Args:
        min_lr: the rate of the first step.
        max_lr: the rate of the last step.
        num_training_steps: steps of the sweep.
        mode: "exponential" or "linear" growth.
        early_stop_threshold: end where the smoothed loss is this many times the best; None for never.
        update_attr: set the suggestion on the module, its hparams or the datamodule, and on the optimizer.
        attr_name: the attribute; ``lr`` or ``learning_rate`` by default.

    Attributes:
        optimal_lr: the result of the last sweep, with ``results``, ``suggestion()`` and ``plot()``.

    Raises:
        ValueError: an option is out of range.

    Example::

        >>> LearningRateFinder(min_lr=1e-5, num_training_steps=50).optimal_lr is None
        True

    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        from hasten.tuner.lr_find import check_options

        check_options(mode, min_lr, max_lr, num_training_steps, early_stop_threshold, "LearningRateFinder")
        self.optimal_lr: LRFinder | None = None
        self._update_attr, self._attr_name = update_attr, attr_name
        self._options: dict[str, Any] = {
            "min_lr": min_lr,
            "max_lr": max_lr,
            "num_training": num_training_steps,
            "mode": mode,
            "early_stop_threshold": early_stop_threshold,
        }

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search now."""
        from hasten.tuner import attributes
        from hasten.tuner.lr_find import attribute_of, sweep
        from hasten.tuner.trial import Trial

        if trainer.fast_dev_run:
            rank_zero_warn("LearningRateFinder: skipped, since the Trainer has fast_dev_run.")
            return
        run = trainer._run
        assert run is not None
        name = attribute_of(pl_module, trainer.datamodule, self._attr_name, self._update_attr)
        self.optimal_lr = sweep(Trial(trainer, run), **self._options)
        suggestion = self.optimal_lr.suggestion()
        if not self._update_attr or suggestion is None:
            return
        assert name is not None
        attributes.put(pl_module, trainer.datamodule, name, suggestion)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = suggestion
                if "initial_lr" in group:
                    group["initial_lr"] = suggestion
        for config in run.schedulers:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [suggestion] * len(config.scheduler.base_lrs)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training."""
        self.lr_find(trainer, pl_module)
