"""A fit after a check gives the same weights as a fit without one, and the check leaves nothing behind."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hasten as L
from hasten._lib import rank_zero
from tests.models import Classifier, Manual, Several, dataset, loader, quiet


class Thorough(Several):
    """Dropout, batch norm, metrics, a schedule, attributes that grow, and random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(8)
        self.accuracy = torchmetrics.MeanMetric()
        self.register_buffer("seen", torch.zeros(1))
        self.history: list[float] = []
        self.hooks_called = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layers(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.accuracy(loss.detach())
        self.log("mean", self.accuracy)
        self.log("train_loss", loss)
        self.history.append(random.random() + float(np.random.rand()))
        return loss * (1 + self.history[-1] / 10)

    def on_train_epoch_end(self) -> None:
        self.hooks_called += 1
        self.layers[0].weight.requires_grad_(self.hooks_called < 2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Own(Dataset[Any]):
    """Draws numbers of its generators, and counts."""

    def __init__(self) -> None:
        self.data, self.count = dataset(24), 0
        self.noise, self.generator = random.Random(3), torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        x, y = self.data[index]
        return x + self.noise.random() + torch.rand(8, generator=self.generator), y


class Stream(IterableDataset[Any]):
    """Goes on where the epoch before has ended."""

    def __init__(self) -> None:
        self.data, self.place = dataset(60), 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(20):
            self.place += 1
            yield self.data[self.place % 60]


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.set_up: list[str] = []

    def setup(self, stage: str) -> None:
        self.set_up.append(stage)
        self.train_set = Own()

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(len(self.set_up))
        return DataLoader(self.train_set, 6, shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return [loader(8), loader(12)]

    def test_dataloader(self) -> Any:
        return loader(8)

    predict_dataloader = test_dataloader


class Counting(L.Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.scale = 1.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.scale *= 0.9
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)


def shuffled(**options: Any) -> Any:
    return DataLoader(Own(), 6, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


CASES: dict[str, Any] = {
    "shuffling, several loaders, metrics": lambda: (Thorough(), {"train_dataloaders": shuffled(), "val_dataloaders": [
        loader(8), loader(12)]}, {}),
    "a datamodule": lambda: (Thorough(), {"datamodule": Data()}, {}),
    "callbacks": lambda: (Thorough(), {"train_dataloaders": shuffled(), "val_dataloaders": loader(8)}, {
        "callbacks": [Counting(), L.callbacks.EMAWeightAveraging(decay=0.9), L.callbacks.EarlyStopping("val_loss")]}),
    "manual optimization": lambda: (Manual(dropout=0.2), {"train_dataloaders": shuffled()}, {}),
    "an iterable dataset": lambda: (Classifier(dropout=0.1), {"train_dataloaders": DataLoader(Stream(), 4)}, {
        "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "workers": lambda: (Classifier(dropout=0.1), {"train_dataloaders": DataLoader(
        dataset(24), 6, shuffle=True, num_workers=2, persistent_workers=True)}, {"max_epochs": 1}),
}  # fmt: skip


def outcome(name: str, *, checked: bool) -> tuple[dict[str, Tensor], Any]:
    L.seed_everything(7, verbose=False)
    model, data, arguments = CASES[name]()
    trainer = quiet(**{"max_epochs": 2, **arguments})
    if checked:
        report = trainer.check(model, **data)
        assert report.ok, str(report)
        assert not [row for row in report.rows if "this part of the check failed" in row.seen], str(report)
        assert trainer.global_step == trainer.current_epoch == 0
        assert not model._forward_hooks, "nothing stays on the module"
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    trainer.fit(model, **data)
    left: list[Any] = [torch.rand(2).tolist(), random.random(), float(np.random.rand()), trainer.callback_metrics]
    left += [getattr(model, "history", None), getattr(model, "hooks_called", None), model.training]
    left += [parameter.requires_grad for parameter in model.parameters()]
    left += [getattr(one, "batches", None) for one in trainer.callbacks]
    owner = data.get("datamodule")
    left += [owner.set_up, owner.train_set.count] if owner else [getattr(data["train_dataloaders"].dataset, "place", 0)]
    return {key: value.clone() for key, value in model.state_dict().items()}, left


@pytest.mark.parametrize("name", CASES)
def test_a_fit_after_a_check_is_the_same_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (weights, left), (expected, expected_left) = outcome(name, checked=True), outcome(name, checked=False)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(weights[key], value), key
    assert left == expected_left


def test_a_check_writes_nothing_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], recwarn: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    once, hooks = dict(rank_zero._warned), (sys.excepthook, len(rank_zero.log.filters))
    checkpoint = L.callbacks.ModelCheckpoint(monitor="val_loss/dataloader_idx_0")
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[checkpoint, L.callbacks.LearningRateMonitor()])
    model = Thorough()
    assert trainer.check(model, datamodule=Data()).ok
    assert os.listdir(tmp_path) == []
    assert checkpoint.dirpath is None
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert (sys.excepthook, len(rank_zero.log.filters)) == hooks
    assert rank_zero._warned == once
    assert not hasattr(model, "train_set")
    assert model._trainer is None if hasattr(model, "_trainer") else True


def test_an_error_leaves_nothing_behind() -> None:
    class Fails(Thorough):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            raise KeyError("label")

    torch.manual_seed(1)
    model, state = Fails(), torch.get_rng_state()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = quiet().check(model, shuffled(), loader(8))
    (row,) = report.errors
    assert (row.name, row.seen) == ("validation_step", "KeyError: 'label'")
    assert row.place.endswith(f"test_no_trace.py:{Fails.validation_step.__code__.co_firstlineno + 1}")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.history == []
    assert all(parameter.grad is None for parameter in model.parameters())
