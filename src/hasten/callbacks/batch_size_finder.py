"""BatchSizeFinder: the largest batch size that fits, found when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_warn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.tuner.trial import Stage


class BatchSizeFinder(Callback):
    """Find the largest batch size that fits into memory before a run begins, and run with it.

    It acts when ``fit`` begins, or ``validate``, ``test`` or ``predict`` when that is what was called. Override
    ``on_train_epoch_start`` to search again later: ``self.scale_batch_size(trainer, pl_module)``. A resumed run goes on
    with the size of its checkpoint, and does not search again when it begins.

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

        mode = check_options(mode, steps_per_trial, init_val, max_trials, margin, max_val, "BatchSizeFinder")
        self.optimal_batch_size: int | None = init_val
        self._found: int | None = None
        self._is_restored = False
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
        method: Stage = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        trial = Trial(trainer, run)
        self.optimal_batch_size = self._found = search(trial, method=method, **self._options)
        was_loaded = run.train.loaded
        for source in run.sources_of(method):
            source.reload()
        if method == "fit" and was_loaded:
            # The epoch in hand was told to the loaders that are gone.
            run.train.load()
            run.train.set_epoch(run.progress.epoch)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training, unless the run goes on with a size found before."""
        restored, self._is_restored = self._is_restored, False
        if not restored:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the size found."""
        return {} if self._found is None else {"batch_size": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the size back."""
        self.optimal_batch_size = self._found = state_dict["batch_size"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Set the size a resumed run was trained with, before its loaders are made."""
        from hasten.tuner import attributes

        state = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if trainer.state.fn == "fit" and state:
            attributes.put(pl_module, trainer.datamodule, self._options["name"], state["batch_size"])
            self._is_restored = True
