"""A demo task as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

import hasten as L

if TYPE_CHECKING:
    from hasten.demo.plain import Batch
    from hasten.demo.task import Switches, Task


class Classifier(L.LightningModule):
    """Model, loss and optimizer of a task; ``accuracy`` is logged over the epoch in validation and test.

    Args:
        task: what to train.
        switches: which of its variants.

    """

    def __init__(self, task: Task, switches: Switches) -> None:
        super().__init__()
        self.task = task
        self.switches = switches
        self.model: nn.Module = task.model(switches)
        self.loss = task.loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_accuracy("val_acc", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_accuracy("test_acc", batch)

    def _log_accuracy(self, name: str, batch: Batch) -> None:
        labels = batch["labels"]
        right = self.task.logits(self.model, batch).argmax(dim=-1) == labels
        self.log(name, right.float().mean(), batch_size=len(labels), prog_bar=True)

    def configure_optimizers(self) -> Optimizer:
        return self.task.optimizer(self.model)


class FirstStep(L.Callback):
    """Takes the time at which the first step begins.

    Args:
        clock: gives the time in seconds.
        skip: so many steps before it do not count.

    """

    def __init__(self, clock: Callable[[], float], *, skip: int = 0) -> None:
        self.clock = clock
        self.skip = skip
        self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.skip and not self.seconds:
            self.seconds = self.clock()
