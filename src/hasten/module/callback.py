"""Callback: the hooks a callback may override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hasten._lib.patched import replaced

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class Callback:
    """Code that runs at named moments of a run, beside the module.

    Override the hooks you need; those you do not override cost nothing, however many callbacks there are.
    Hooks run in the order of ``Trainer(callbacks=[...])``, callbacks before the module; callbacks with
    ``runs_last`` (checkpoints, early stopping) run after the module where a batch, an epoch or a validation
    ends, so that they see everything logged there.

    Example::

        >>> import hasten as L
        >>> class Greet(L.Callback):
        ...     def on_train_start(self, trainer, pl_module):
        ...         print("hello")

    """

    runs_last: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in CALLBACK_HOOKS:
            replaced(self)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        if name in CALLBACK_HOOKS:
            replaced(self)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value as ``pl_module.log`` does; for use in the hooks."""
        self._logging_module().log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log several values as ``pl_module.log_dict`` does; for use in the hooks."""
        self._logging_module().log_dict(dictionary, *args, **kwargs)

    def _logging_module(self) -> LightningModule:
        module: LightningModule | None = self.__dict__.get("_module")
        if module is None:
            raise RuntimeError(f"{type(self).__name__}.log(): there is no run. Call it in a hook.")
        return module

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint; unique among the callbacks of one Trainer."""
        return self.__class__.__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Format a state key that includes the arguments which tell two callbacks of one class apart."""
        return f"{self.__class__.__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when fit, validate, test or predict begins; ``stage`` says which."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called when fit, validate, test or predict ends, also after an exception."""

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

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Called before a training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch; the counters already include it."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation begins."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when validation ends; ``trainer.callback_metrics`` has its values."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a test begins."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a test ends."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when prediction begins."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when prediction ends."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a prediction batch."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called when an exception, Ctrl-C or SIGTERM ends the run."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called before a checkpoint is written; may change ``checkpoint``."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called after a checkpoint was read, before its state is restored."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Called before ``loss.backward()``."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after ``loss.backward()``, before the optimizer steps."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Called when gradients are complete and unscaled, before they are clipped."""


CALLBACK_HOOKS = frozenset(name for name in vars(Callback) if not name.startswith("_"))
