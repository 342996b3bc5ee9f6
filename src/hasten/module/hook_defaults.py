"""The hooks of a module with their defaults; ``hasten.hooks.HOOKS`` lists all hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hasten.types import Batch, StepOutput


class CheckpointHooks:
    """The hooks of a module that read and change checkpoints; they do nothing by default."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; may change ``checkpoint``."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read, before weights are restored; may change ``checkpoint``."""


class ModelHooks(CheckpointHooks):
    """The hooks of a module; they do nothing by default. ``hasten.Callback`` describes their arguments."""

    def on_fit_start(self) -> None:
        """Called when fit begins, after ``setup``."""

    def on_fit_end(self) -> None:
        """Called when fit ends."""

    def on_train_start(self) -> None:
        """Called before the first training epoch."""

    def on_train_end(self) -> None:
        """Called after the last training epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of a training epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of a training epoch."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        """Called before a training batch; return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: StepOutput, batch: Batch, batch_idx: int) -> None:
        """Called after a training batch; the counters already include it.

        Args:
            outputs: ``{"loss": detached loss, ...}``, or None where ``training_step`` returned None.
            batch: the batch, on the device.
            batch_idx: index of the batch in the epoch, from 0.

        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before backward."""

    def on_after_backward(self) -> None:
        """Called after backward, before the optimizer steps."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when the gradients of a step are complete and unscaled, before they are clipped."""

    def on_validation_start(self) -> None:
        """Called when an evaluation begins."""

    def on_validation_end(self) -> None:
        """Called when an evaluation ends."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of an evaluation."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last batch of an evaluation."""

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch of an evaluation."""

    def on_validation_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a batch of an evaluation."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation within fit, to free the memory of the gradients."""
        assert isinstance(self, nn.Module)
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Called when an evaluation begins, to switch to eval mode."""
        assert isinstance(self, nn.Module)
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called when an evaluation ends; unless overridden, every sub-module gets its former mode back instead."""
        # Reached by overrides that call super(): the module then sets the mode of all its parts.
        assert isinstance(self, nn.Module)
        self.train()

    # Test and prediction have the same hooks as validation.
    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_validation_model_train
