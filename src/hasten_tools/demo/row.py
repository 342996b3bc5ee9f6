"""Train one row of a ladder in its own process: either a hand-written loop, or the same in hasten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hasten as L
from hasten._lib.device import is_host
from hasten.types import StepOutput
from hasten_tools.demo.task import Batch, RowVariant, Task
from hasten_tools.speed.trial import Session


def train(
    model: nn.Module,
    loader: Iterable[Batch],
    task: Task,
    variant: RowVariant,
    after_step: Callable[[nn.Module, Tensor, Batch], None],
) -> NoReturn:
    """Train with nothing but PyTorch, until ``after_step`` ends the process.

    The first row, in float32 and with the optimizer's defaults, is what every row of the ladder is compared with.
    """
    optimizer = task.optimizer(model, fused=variant.fused or None)
    model.train()
    while True:
        for batch in loader:
            on_device = {name: tensor.to(task.device, non_blocking=True) for name, tensor in batch.items()}
            optimizer.zero_grad()
            with torch.autocast(task.device.type, torch.bfloat16, enabled=variant.autocast):
                loss = task.loss(model, on_device)
            loss.backward()
            optimizer.step()
            after_step(model, loss, on_device)


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Batch], task: Task) -> float:
    """Return the share of samples whose largest logit is their label's, 0 to 1."""
    model.eval()
    correct: list[Tensor] = []
    for batch in loader:
        on_device = {name: tensor.to(task.device, non_blocking=True) for name, tensor in batch.items()}
        correct.append(task.logits(model, on_device).argmax(dim=-1) == on_device["labels"])
    return torch.cat(correct).double().mean().item()


class Classifier(L.LightningModule):
    """Model, loss and optimizer of a task; ``val_acc`` is logged over the epoch in validation."""

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

    Steps continue after the whole training, so that rows can be compared for as long as necessary.
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
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Classifier)
        assert isinstance(outputs, Mapping)
        self.after_step(pl_module.model, outputs["loss"], batch)

    def after_step(self, model: nn.Module, loss: Tensor, batch: Batch) -> None:
        """Report a step of ``model``: its tokens, as a part of the whole training's, and the positions computed."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        # Where all batches cost the same, each stands for the average, not for the tokens that it happens to have.
        average = round(len(batch["labels"]) * self._tokens_per_sample)
        tokens: Tensor | int = average
        slots: int | None = average
        packs, mask = self.variant.argument("packed"), batch.get("attention_mask")
        if mask is not None:
            slots = None if packs else round(mask.numel() * self._scale)
            if packs or self.variant.argument("batching") or self.variant.to_longest:
                tokens = mask.sum() * self._scale
        self.session.after_step(loss, tokens=tokens, slots=slots)

    def accuracy(self) -> dict[str, float]:
        """Return the accuracy of the whole training on the held-out samples."""
        model = self.task.model(self.variant)
        model.load_state_dict(self.weights)
        model.to(self.task.device)
        return {name: accuracy(model, loader, self.task) for name, loader in self.task.held_out().items()}


def run(session: Session, task: Task, variant: RowVariant, threads: int) -> None:
    """Train a row, step by step as the parent process orders."""
    torch.set_num_threads(threads)
    training = RowTraining(session, task, variant)
    loader = task.users_loader(variant)
    torch.manual_seed(task.seed)
    if variant.trainer is None:
        model = task.model(variant).to(task.device)
        session.ready()
        train(model, loader, task, variant, training.after_step)
    logging.getLogger("hasten").setLevel(logging.WARNING)
    trainer = L.Trainer(
        # What chooses its own speed has to know how much there is to train.
        max_epochs=task.epochs if variant.argument("speed") else -1,
        accelerator="cpu" if is_host(task.device) else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        callbacks=[training],
        **variant.trainer,
    )
    trainer.fit(Classifier(task, variant), loader)
