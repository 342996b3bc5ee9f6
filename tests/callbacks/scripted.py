"""Modules whose logged values and losses are written down beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hasten as L
from tests.models import quiet


class Scripted(L.LightningModule):
    """One parameter; logs the values it is given, one an epoch (or one a validation).

    Args:
        val: values of ``val_loss``, one a validation.
        train: values of ``train_value``, one an epoch, logged with ``on_epoch``.
        step: log ``step_value`` = the step's index in each step.

    """

    def __init__(self, val: list[float] | None = None, train: list[float] | None = None, step: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.val, self.train_values, self.log_steps = val, train, step
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.train_values is not None:
            self.log("train_value", self.train_values[self.current_epoch], on_step=False, on_epoch=True)
        if self.log_steps:
            self.log("step_value", float(self.global_step))
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.val is not None:
            self.log("val_loss", self.val[min(self.validations, len(self.val) - 1)])

    def on_validation_epoch_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["validations"] = self.validations

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validations = checkpoint["validations"]


class Losses(L.LightningModule):
    """Its losses are those it is given, one a batch of the run: a number, a dict with one, or None."""

    def __init__(self, losses: list[Any]) -> None:
        super().__init__()
        self.losses, self.parameter = losses, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = self.losses[self.trainer.total_batch_idx + 1]
        if isinstance(given, dict):
            return {**given, "loss": self.parameter * 0.0 + given["loss"]}
        return None if given is None else self.parameter * 0.0 + given

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Endless:
    """Batches without an end."""

    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(2, 1)


BATCHES = [torch.zeros(2, 1) for _ in range(4)]


def run(module: L.LightningModule, *callbacks: L.Callback, ckpt_path: Any = None, **arguments: Any) -> L.Trainer:
    """Fit on four batches an epoch with validation; return the Trainer."""
    defaults = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = quiet(callbacks=list(callbacks), **(defaults | arguments))
    trainer.fit(module, BATCHES, [torch.zeros(2, 1)], ckpt_path=ckpt_path)
    return trainer


def names(folder: Path | str) -> list[str]:
    """Return the names of all files in a folder and below, also hidden ones."""
    root = Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def python_calls(function: Any, *arguments: Any) -> list[str]:
    """Return the names of the Python functions that a call runs."""
    import sys

    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls
