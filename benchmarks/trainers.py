"""The same work through a Trainer and a Fabric: one program for every library that has these names."""

from __future__ import annotations

import tempfile
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plain
from measure import CLASSES, Batches, Loop, make_network

# Nothing but training: what remains is the cost of the loop.
OFF = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def classifier(base: type[nn.Module]) -> Any:
    """Return the class of a module with the steps of each case, derived from ``base``."""

    class Classifier(base):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.network(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            F.cross_entropy(self.network(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=plain.LEARNING_RATE)

    return Classifier


def trainer_loops(L: ModuleType) -> dict[str, Loop]:
    """Return the loop of each case for a library with the field's names (``import ... as L``)."""
    Classifier = classifier(L.LightningModule)

    class LoggingClassifier(Classifier):  # type: ignore[valid-type,misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.network(x), y)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", F.cross_entropy(self.network(x), y), batch_size=len(y))

    class MetricClassifier(Classifier):
        def __init__(self) -> None:
            super().__init__()
            from torchmetrics.classification import MulticlassAccuracy

            self.accuracy = MulticlassAccuracy(num_classes=CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.network(x)
            loss = F.cross_entropy(logits, y)
            self.accuracy(logits, y)
            self.log("train_loss", loss, prog_bar=True)
            self.log("train_acc", self.accuracy, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    def fit(batches: Batches, module: Any, **arguments: Any) -> nn.Module:
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
            trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **arguments)
            trainer.fit(module, batches)
        network: nn.Module = module.network
        return network

    def validate(batches: Batches, module: Any) -> nn.Module:
        L.Trainer(accelerator="cpu", **OFF).validate(module, batches, verbose=False)
        network: nn.Module = module.network
        return network

    with_bar = {**OFF, "enable_progress_bar": True}
    idle_callbacks = [L.Callback() for _ in range(80)]
    return {
        "train": lambda batches: fit(batches, Classifier(), **OFF),
        "log": lambda batches: fit(batches, LoggingClassifier(), **OFF),
        "default": lambda batches: fit(batches, Classifier()),
        "default-log": lambda batches: fit(batches, LoggingClassifier()),
        "metric": lambda batches: fit(batches, MetricClassifier(), **with_bar),
        "accumulate": lambda b: fit(b, Classifier(), accumulate_grad_batches=plain.ACCUMULATE, **OFF),
        "clip-norm": lambda b: fit(b, Classifier(), gradient_clip_val=plain.MAX_NORM, **OFF),
        "clip-value": lambda b: fit(
            b, Classifier(), gradient_clip_val=plain.MAX_VALUE, gradient_clip_algorithm="value", **OFF
        ),
        "validate": lambda batches: validate(batches, Classifier()),
        "validate-log": lambda batches: validate(batches, LoggingClassifier()),
        "callbacks": lambda batches: fit(batches, Classifier(), callbacks=list(idle_callbacks), **OFF),
    }


def fabric_loops(L: ModuleType) -> dict[str, Loop]:
    """Return the loops of a Fabric: the hand-written one with the three lines that a Fabric changes."""

    def train(batches: Batches) -> nn.Module:
        fabric = L.Fabric(accelerator="cpu", devices=1)
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=plain.LEARNING_RATE)
        model, optimizer = fabric.setup(network, optimizer)
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        return network

    return {"fabric": train}
