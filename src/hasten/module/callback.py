"""Callback: the hooks a callback may override; LambdaCallback: a callback made of functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from hasten._lib.errors import make_error
from hasten._lib.observers import NotifiesOfHooks
from hasten.logged_value import LogOptions
from hasten.module.log_methods import LogMethods, Unlisted

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from hasten import LightningModule, Trainer
    from hasten.types import Batch, MetricValue, StepOutput


@runtime_checkable
class Numbered(Protocol):
    """A callback that a Trainer may have several times with equal arguments; a number makes their state keys differ."""

    state_number: int


class Callback(LogMethods, NotifiesOfHooks):
    """Base class of callbacks: objects whose hooks run at fixed points of a run, separate from the module.

    Override the hooks you need; a hook that is not overridden costs nothing. Callbacks run in the order of
    ``Trainer(callbacks=[...])``, before the same hook of the module. Callbacks with ``runs_last`` (checkpoints, early
    stopping) run after the module at the end of a batch, an epoch or a validation, so that they see everything logged
    there.

    Every hook gets the ``trainer`` and the module, ``pl_module``. In the hooks of a batch:

    - ``batch`` is what the loader yielded, on the device of the run;
    - ``batch_idx`` counts the batches of the epoch from 0, ``dataloader_idx`` the loaders of an evaluation from 0;
    - ``outputs`` is what the step returned. In training it is a dict with the detached loss under ``"loss"`` and the
      other entries of a returned dict, or None where the step returned None.

    Example::

        >>> import hasten as L
        >>> class Greet(L.Callback):
        ...     def on_train_start(self, trainer, pl_module):
        ...         print("hello")

    """

    runs_last: ClassVar[bool] = False

    if not TYPE_CHECKING:
        log, log_dict = Unlisted(LogMethods.log), Unlisted(LogMethods.log_dict)

    def _log_elsewhere(self, name: str, value: MetricValue, options: tuple[Any, ...], batch_size: int | None) -> None:
        # Through the module, which may override ``log``.
        module: LightningModule | None = self.__dict__.get("_module")
        if module is None:
            raise make_error(
                RuntimeError, f"{type(self).__name__}.log(): no run is in progress.", fix="Call it in a hook."
            )
        module.log(name, value, **LogOptions(*options)._asdict(), batch_size=batch_size)

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint; unique among the callbacks of one Trainer."""
        return self.__class__.__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a state key that contains the arguments by which two callbacks of one class differ."""
        return f"{self.__class__.__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when a call begins; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when a call ends, also after an exception; ``stage`` as for ``setup``."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when fit begins, after ``setup``."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when fit ends."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the validation sanity check."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the validation sanity check."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first training epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last training epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first batch of a training epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last batch of a training epoch; values logged in the epoch are final."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Called before a training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Called after a training batch; the counters already include it.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            outputs: ``{"loss": detached loss, ...}``, or None where ``training_step`` returned None.
            batch: the batch, on the device.
            batch_idx: index of the batch in the epoch, from 0.

        """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when an evaluation begins."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when an evaluation ends; ``trainer.callback_metrics`` has its values."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first batch of an evaluation."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last batch of an evaluation."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch of an evaluation."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch of an evaluation."""

    # Test and prediction have the same hooks as validation.
    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called when an exception, Ctrl-C or SIGTERM ends the run."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; may add to ``checkpoint`` or change it."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read, before its state is restored."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Called before ``loss.backward()``."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after ``loss.backward()``, before the optimizer steps."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called when gradients are complete and unscaled, before they are clipped."""


CALLBACK_HOOKS = Callback.__hook_names__ = frozenset(
    name for name in vars(Callback) if not name.startswith("_") and name not in ("log", "log_dict")
)
