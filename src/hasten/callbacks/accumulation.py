"""GradientAccumulationScheduler: change ``accumulate_grad_batches`` at given epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.rank_zero import rank_zero_warn
from hasten.callbacks.early_stopping import ends_before
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.optim import check_accumulation

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Change how many batches are accumulated for an optimizer step, by epoch.

    The number depends on the index of the epoch alone, so a resumed run accumulates like the uninterrupted one, also
    if it is resumed in the middle of an epoch. When fit ends, ``trainer.accumulate_grad_batches`` is 1 again.

    Args:
        scheduling: the first epoch (from 0) to the number of batches accumulated from then on; 1 batch in the epochs
            before the first one named.

    Raises:
        TypeError: ``scheduling`` is not a dict, or is empty.
        MisconfigurationException: an epoch is below 0 or a number of batches below 1; when fit begins, if the Trainer
            has another ``accumulate_grad_batches`` or the optimizer computes the loss several times a step.
        RuntimeError: when fit begins, if the module uses manual optimization.

    Example::

        >>> scheduler = GradientAccumulationScheduler({0: 8, 4: 2})
        >>> [scheduler.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 9)]
        [8, 8, 2, 2]

    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        super().__init__()
        if not isinstance(scheduling, dict) or not scheduling:
            what = f"GradientAccumulationScheduler(scheduling={check.shown(scheduling)}):"
            fix = "give a dict of epoch to number of batches, for instance {0: 8, 4: 2}."
            raise make_error(TypeError, what, fix=fix, argument="scheduling")
        owner, error = "GradientAccumulationScheduler", MisconfigurationException
        for epoch, batches in scheduling.items():
            check.whole(owner, "scheduling: epoch", epoch, at_least=0, error=error)
            check.whole(owner, f"scheduling: epoch {epoch}", batches, at_least=1, unit="batches", error=error)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)
        self._active = False

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch accumulates more than one batch."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches accumulated in an epoch, from 0."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse runs whose accumulation cannot be scheduled."""
        self._active = False
        self._check(trainer, pl_module)
        self._active = True

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise make_error(
                RuntimeError,
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` is not supported for manual "
                f"optimization, which {type(pl_module).__name__} uses.",
                fix="Remove the callback.",
            )
        if trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` callback.",
                fix=f"Use scheduling={{0: {trainer.accumulate_grad_batches}, ...}} alone.",
                argument="accumulate_grad_batches",
            )
        for optimizer in trainer.optimizers:
            given = f"GradientAccumulationScheduler(scheduling={self.scheduling})"
            check_accumulation(optimizer, max(self.scheduling.values()), given)
        hooks = ("optimizer_step", "optimizer_zero_grad")
        own = [hook for hook in hooks if overrides(pl_module, LightningModule, hook)]
        if own and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                f"{type(pl_module).__name__} overrides {' and '.join(own)}, and gradients are accumulated: the hooks "
                "will not be called on every batch, but once for each optimizer step."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the number for the current epoch, which may be resumed in its middle."""
        if not self._active:
            self._check(trainer, pl_module)
        if self.scheduling[0] == 1 and ends_before(trainer, min(self.epochs[1:], default=0)):
            rank_zero_warn(
                f"GradientAccumulationScheduler(scheduling={self.scheduling}): epochs count from 0, and "
                f"Trainer(max_epochs={trainer.max_epochs}) ends before any of them.",
                fix="Begin earlier, or train for more epochs.",
            )
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Reset the number, so that the Trainer can fit again, unless it was refused for its own number."""
        if self._active:
            trainer.accumulate_grad_batches = 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1
