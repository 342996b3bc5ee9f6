"""Train one row of a ladder in its own process: the loop a good engineer writes by hand, and the same in hasten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import hasten as L
from hasten.demo.task import Batch, RowVariant, Task
from hasten.speed.trial import Session


def train(
    model: nn.Module,
    loader: Iterable[Batch],
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    *,
    epochs: int,
    device: torch.device,
    after_step: Callable[[Tensor, Batch], None] = lambda loss, batch: None,
) -> None:
    """Train in float32 with nothing but PyTorch: what every row of the ladder is compared with.

    Args:
        model: what to train; on ``device`` already.
        loader: gives batches, mappings of tensors.
        optimizer: of the model's parameters.
        loss_of: returns the loss of the model on a batch, 0-d.
        epochs: passes over the loader; -1 goes on until ``after_step`` ends the process.
        device: where to compute.
        after_step: called with the loss and the batch of each step.

    """
    model.train()
    epoch = 0
    while epoch != epochs:
        for batch in loader:
            on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            optimizer.zero_grad()
            loss = loss_of(model, on_device)
            loss.backward()
            optimizer.step()
            after_step(loss, on_device)
        epoch += 1


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Batch], task: Task) -> float:
    """Return the share of samples whose largest logit is their label's, 0 to 1."""
    model.eval()
    correct = total = 0
    for batch in loader:
        on_device = {name: tensor.to(task.device, non_blocking=True) for name, tensor in batch.items()}
        guesses = task.logits(model, on_device).argmax(dim=-1)
        correct += int((guesses == on_device["labels"]).sum())
        total += len(guesses)
    return correct / total


class Classifier(L.LightningModule):
    """Model, loss and optimizer of a task; ``val_acc`` is logged over the epoch in validation.

    Args:
        task: what to train.
        variant: which of its variants.

    """

    def __init__(self, task: Task, variant: RowVariant) -> None:
        super().__init__()
        self.task = task
        self.model: nn.Module = task.model(variant)
        self.loss = task.loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        correct = self.task.logits(self.model, batch).argmax(dim=-1) == batch["labels"]
        self.log("val_acc", correct.float().mean(), batch_size=len(correct), prog_bar=True)

    def configure_optimizers(self) -> Optimizer:
        return self.task.optimizer(self.model)


class RowTraining(L.Callback):
    """Report each step to the parent process, and keep the weights that the whole training ends with.

    Steps go on after the whole training, so that rows can be compared for as long as that takes.

    Args:
        session: what steps are reported to.
        task: what is trained.
        variant: of the row.

    Attributes:
        weights: after the whole training; empty before.

    """

    def __init__(self, session: Session, task: Task, variant: RowVariant) -> None:
        self.session, self.task, self.variant = session, task, variant
        session.device = task.device
        session.handlers["accuracy"] = self.accuracy
        whole = task.lengths(RowVariant())
        self._tokens_per_sample = sum(whole) / len(whole)
        # Rows that cut samples do the same training with fewer tokens.
        self._scale = sum(whole) / sum(task.lengths(variant))
        self._steps_left = task.steps(variant)
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.session.ready()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Classifier)
        self.after_step(pl_module.model, outputs["loss"], batch)

    def after_step(self, model: nn.Module, loss: Tensor, batch: Batch) -> None:
        """Report a step of ``model``."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        tokens, slots = self._work(batch)
        self.session.after_step(loss, tokens=tokens, slots=slots)

    def _work(self, batch: Batch) -> tuple[Tensor | int, int | None]:
        """Return a batch's tokens, as a part of those of the whole training, and the places computed for them."""
        mask, packs = batch.get("attention_mask"), self.variant.argument("packed")
        if mask is not None and (self.variant.argument("batching") or packs):
            slots = None if packs else round(mask.numel() * self._scale)
            return mask.sum() * self._scale, slots
        # All batches cost the same: each stands for the average, not for the tokens that it happens to have.
        tokens = round(len(batch["labels"]) * self._tokens_per_sample)
        return tokens, tokens if mask is None else round(mask.numel() * self._scale)

    def accuracy(self) -> dict[str, float | None]:
        """Return the accuracy of the whole training, on the validation and on the test samples."""
        model = self.task.model(self.variant)
        model.load_state_dict(self.weights)
        model.to(self.task.device)
        validation = self.task.validation_loader()
        return {
            "validation": None if validation is None else accuracy(model, validation, self.task),
            "test": accuracy(model, self.task.test_loader(), self.task),
        }


def run(session: Session, task: Task, variant: RowVariant, threads: int) -> None:
    """Train a row, step by step as the parent process orders.

    Args:
        session: connects to the parent.
        task: what to train.
        variant: of the row.
        threads: for the CPU.

    """
    torch.set_num_threads(threads)
    training = RowTraining(session, task, variant)
    torch.manual_seed(task.seed)
    if variant.trainer is not None:
        _train_in_hasten(training, task.users_loader(variant))
        return
    model = task.model(variant).to(task.device)
    optimizer = task.optimizer(model)
    torch.manual_seed(task.seed)
    session.ready()
    train(
        model,
        task.users_loader(variant),
        optimizer,
        task.loss,
        epochs=-1,
        device=task.device,
        after_step=lambda loss, batch: training.after_step(model, loss, batch),
    )


def _train_in_hasten(training: RowTraining, loader: DataLoader[Any]) -> None:
    task, variant = training.task, training.variant
    logging.getLogger("hasten").setLevel(logging.WARNING)
    trainer = L.Trainer(
        # What chooses its own speed has to know how much there is to train.
        max_epochs=task.epochs if variant.argument("speed") else -1,
        accelerator="cpu" if task.device.type == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        callbacks=[training],
        **(variant.trainer or {}),
    )
    module = Classifier(task, variant)
    torch.manual_seed(task.seed)
    trainer.fit(module, loader)
