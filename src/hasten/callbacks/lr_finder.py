"""LearningRateFinder: a learning rate found when fit begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_warn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.tuner.lr_find import LRFinder


class LearningRateFinder(Callback):
    """Sweep over learning rates before training, and train with the one suggested.

    Override ``on_fit_start`` to do nothing and ``on_train_epoch_start`` to search at milestones of your own:
    ``self.lr_find(trainer, pl_module)``. The optimizer keeps its state. When training begins, the rate found is the one
    its schedulers start from; later it is the rate of now, and the schedulers go on from there. A resumed run goes on
    with the rates of its checkpoint, and does not search again when it begins.

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

        mode = check_options(
            mode, min_lr, max_lr, num_training_steps, early_stop_threshold, "LearningRateFinder"
        )
        self.optimal_lr: LRFinder | None = None
        self._found: float | None = None
        self._is_restored = False
        # To be set once more, after a checkpoint of a run without this callback has set its own.
        self._again: float | None = None
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
        from hasten.tuner.lr_find import attribute_of, set_rate, sweep
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
        self._found = suggestion
        attributes.put(pl_module, trainer.datamodule, name, suggestion)
        set_rate(run, suggestion)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training, unless the run goes on with a rate found before."""
        restored, self._is_restored = self._is_restored, False
        if restored:
            return
        self._found = None
        self.lr_find(trainer, pl_module)
        if trainer.ckpt_path is not None:
            self._again = self._found

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the rate found where a checkpoint has set another one since."""
        from hasten.tuner.lr_find import set_rate

        again, self._again = self._again, None
        if again is not None:
            assert trainer._run is not None
            set_rate(trainer._run, again)

    def state_dict(self) -> dict[str, Any]:
        """Return the rate found."""
        return {} if self._found is None else {"lr": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rate back."""
        self._found = state_dict["lr"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Set the rate a resumed run was given, before its optimizers are made."""
        from hasten.tuner import attributes
        from hasten.tuner.lr_find import attribute_of

        state = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if trainer.state.fn == "fit" and state:
            name = attribute_of(pl_module, trainer.datamodule, self._attr_name, self._update_attr)
            if name is not None:
                attributes.put(pl_module, trainer.datamodule, name, state["lr"])
            self._is_restored = True
