"""BatchSizeFinder and LearningRateFinder: the searches of the Tuner when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hasten._lib import check
from hasten._lib.rank_zero import rank_zero_warn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.trainer.limited_runs import Stage
    from hasten.tuner.lr_find import LRFinder
    from hasten.tuner.tuned_value import TunedValue


class _SearchCallback(Callback):
    """Base class of both finders: stores the value found, and uses it in a resumed run instead of searching."""

    _key: ClassVar[str]

    def __init__(self) -> None:
        self._found: Any = None
        self._is_restored = False

    def _tuned(self, trainer: Trainer, pl_module: LightningModule) -> TunedValue | None:
        """Return the attribute of the program that holds the value."""
        raise NotImplementedError

    def _is_skipped(self, trainer: Trainer) -> bool:
        if trainer.fast_dev_run:
            rank_zero_warn(f"{type(self).__name__}: skipped, since the Trainer has fast_dev_run.")
        return bool(trainer.fast_dev_run)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._found is None else {self._key: self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = state_dict[self._key]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Set the value a resumed run was trained with, before its loaders and optimizers are made."""
        state = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if trainer.state.fn == "fit" and state:
            tuned = self._tuned(trainer, pl_module)
            if tuned is not None:
                tuned.set(state[self._key])
            self._is_restored = True


class BatchSizeFinder(_SearchCallback):
    """Find the largest batch size that fits into memory before a run begins, and run with it.

    It searches when ``fit``, ``validate``, ``test`` or ``predict`` begins. Override ``on_train_epoch_start`` to search
    again later: ``self.scale_batch_size(trainer, pl_module)``. A resumed run uses the size of its checkpoint, and does
    not search when it begins.

    Args:
        mode: see ``Tuner.scale_batch_size``, also for the other arguments.
        steps_per_trial: steps with each size.
        init_val: the first size.
        max_trials: how many sizes are tried at most.
        batch_arg_name: the attribute of module, hparams or datamodule that holds the size.
        margin: how much smaller than the largest found the result of "binsearch" is, as a share.
        max_val: no larger size is tried, and none above the number of samples.

    Attributes:
        optimal_batch_size: the latest size found.

    Raises:
        ValueError: an option is out of range.

    Example::

        >>> BatchSizeFinder(mode="binsearch", max_val=512).optimal_batch_size
        2

    """

    SUPPORTED_MODES = ("power", "binsearch")
    _key = "batch_size"

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
        check.declared(BatchSizeFinder.__init__, locals())
        from hasten.tuner.batch_size import BatchSizeOptions

        super().__init__()
        self.optimal_batch_size: int | None = init_val
        owner, sizes = "BatchSizeFinder", (steps_per_trial, init_val, max_trials)
        self._options = BatchSizeOptions(owner, mode, *sizes, batch_arg_name, margin, max_val)
        # For subclasses written for Lightning that search in their own way.
        self._mode, self._steps_per_trial, self._init_val = mode.lower(), steps_per_trial, init_val
        self._max_trials, self._batch_arg_name, self._early_exit = max_trials, batch_arg_name, False
        self._margin, self._max_val = margin, max_val

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search now; the loaders are made again with the size found."""
        from hasten.tuner.batch_size import search

        if self._is_skipped(trainer):
            return
        run = trainer.current_run
        method: Stage = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        self.optimal_batch_size = self._found = search(run, method=method, options=self._options)
        was_loaded = run.data.train.loaded
        for source in run.data.of(method):
            source.reload()
        if method == "fit" and was_loaded:
            # The new loaders need the current epoch.
            run.data.train.load()
            run.data.train.set_epoch(run.progress.epoch)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training, unless the run continues with an earlier size."""
        restored, self._is_restored = self._is_restored, False
        if not restored:
            self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before ``validate``; a validation within fit keeps its size."""
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before ``test`` and ``predict``."""
        self.scale_batch_size(trainer, pl_module)

    on_predict_start = on_test_start

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimal_batch_size = self._found

    def _tuned(self, trainer: Trainer, pl_module: LightningModule) -> TunedValue:
        from hasten.tuner.tuned_value import TunedValue

        return TunedValue(pl_module, trainer.datamodule, self._options.batch_arg_name)


class LearningRateFinder(_SearchCallback):
    """Sweep over learning rates before training, and train with the one suggested.

    Override ``on_fit_start`` to do nothing and ``on_train_epoch_start`` to search at other times:
    ``self.lr_find(trainer, pl_module)``. The optimizer keeps its state. When training begins, the rate found is the
    initial rate of the schedulers; later it is the current rate, and the schedulers continue from there. A resumed run
    uses the rates of its checkpoint, and does not search when it begins.

    Args:
        min_lr: the rate of the first step; see ``Tuner.lr_find``, also for the other arguments.
        max_lr: the rate of the last step.
        num_training_steps: steps of the sweep.
        mode: "exponential" or "linear" growth.
        early_stop_threshold: end where the smoothed loss is this many times the best; None for never.
        update_attr: set the suggestion on the module, its hparams or the datamodule, and on the optimizer.
        attr_name: the attribute; ``lr`` or ``learning_rate`` by default.

    Attributes:
        optimal_lr: the result of the latest sweep, with ``results``, ``suggestion()`` and ``plot()``.

    Raises:
        ValueError: an option is out of range.

    Example::

        >>> LearningRateFinder(min_lr=1e-5, num_training_steps=50).optimal_lr is None
        True

    """

    SUPPORTED_MODES = ("linear", "exponential")
    _key = "lr"

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
        check.declared(LearningRateFinder.__init__, locals())
        from hasten.tuner.lr_find import SweepOptions

        super().__init__()
        self.optimal_lr: LRFinder | None = None
        # The rate to set again after a checkpoint of a run without this callback has set its own.
        self._again: float | None = None
        self._update_attr, self._attr_name, self._early_exit = update_attr, attr_name, False
        self._min_lr, self._max_lr, self._num_training_steps = min_lr, max_lr, num_training_steps
        self._mode, self._early_stop_threshold = mode.lower(), early_stop_threshold
        sweep = (mode, min_lr, max_lr, num_training_steps, early_stop_threshold)
        self._options = SweepOptions("LearningRateFinder", *sweep)

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search now."""
        from hasten.tuner.lr_find import set_rate, sweep

        if self._is_skipped(trainer):
            return
        run = trainer.current_run
        tuned = self._tuned(trainer, pl_module)
        self.optimal_lr = sweep(run, self._options)
        suggestion = self.optimal_lr.suggestion()
        if self._update_attr and tuned is not None and suggestion is not None:
            self._found = suggestion
            tuned.set(suggestion)
            set_rate(run, suggestion)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search before training, unless the run continues with an earlier rate."""
        restored, self._is_restored = self._is_restored, False
        if restored:
            return
        self._found = None
        self.lr_find(trainer, pl_module)
        if trainer.ckpt_path is not None:
            self._again = self._found

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the rate found again if a checkpoint has set another one."""
        from hasten.tuner.lr_find import set_rate

        again, self._again = self._again, None
        if again is not None:
            set_rate(trainer.current_run, again)

    def _tuned(self, trainer: Trainer, pl_module: LightningModule) -> TunedValue | None:
        from hasten.tuner.lr_find import rate_of

        return rate_of(pl_module, trainer.datamodule, self._attr_name, self._update_attr)
