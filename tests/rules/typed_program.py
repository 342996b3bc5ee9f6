"""A program that mypy checks with the library: results by overload, and errors where an argument or a name is misspelt.

An error that mypy no longer finds is an unused ``type: ignore``, which is an error too.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

import hasten as L
from hasten.callbacks import EarlyStopping
from hasten.demos.boring_classes import BoringModel
from hasten.optim import HastenOptimizer
from hasten.utilities import grad_norm

fabric = L.Fabric(accelerator="cpu")
model = nn.Linear(2, 2)
adam, sgd = Adam(model.parameters()), SGD(model.parameters())


def results(data: DataLoader[int], module: L.LightningModule) -> None:
    assert_type(fabric.setup(model), nn.Linear)
    assert_type(fabric.setup(model, adam), tuple[nn.Linear, Adam])
    assert_type(fabric.setup(model, adam, sgd), tuple[nn.Linear, Adam, SGD])
    assert_type(fabric.setup(model, adam, sgd, sgd), tuple[Any, ...])
    assert_type(fabric.setup_dataloaders(data), DataLoader[int])
    assert_type(fabric.setup_dataloaders(data, data), list[DataLoader[int]])
    assert_type(fabric.all_reduce(torch.ones(1)), Tensor)
    assert_type(fabric.all_reduce(1.0, reduce_op="sum"), Tensor)
    assert_type(fabric.all_reduce([torch.ones(1)]), list[Tensor])
    assert_type(fabric.all_gather({"loss": torch.ones(1)}), dict[str, Tensor])
    assert_type(module.optimizers(), HastenOptimizer | list[HastenOptimizer])
    assert_type(module.optimizers(use_pl_optimizer=False), Optimizer | list[Optimizer])


def names() -> None:
    assert_type(L.Trainer(max_epochs=3), L.Trainer)
    assert_type(L.callbacks.Timer("1h").start_time(), float | None)
    assert_type(L.loggers.CSVLogger("logs"), L.loggers.CSVLogger)
    assert_type(L.seed_everything(1), int)
    assert_type(L.Trainer().fit_loop.epoch_loop.batch_idx, int)
    # Under the names that programs import; the modules are in hasten_lightning.
    assert_type(grad_norm(model, 2), dict[str, Tensor])
    assert_type(L.utilities.suggested_max_num_workers(1), int)
    assert_type(BoringModel().loss(torch.ones(1)), Tensor)


def mistakes() -> None:
    L.Trainer(max_epoch=3)  # type: ignore[call-arg]
    L.Trainer(max_epochs=[3])  # type: ignore[arg-type]
    L.Trainer(on_bad_loss="stpo")  # type: ignore[arg-type]
    L.Fabric(device=3)  # type: ignore[call-arg]
    L.Trainr()  # type: ignore[attr-defined]
    L.callbaks.Timer()  # type: ignore[attr-defined]
    L.demos.BoringModl()  # type: ignore[attr-defined]
    EarlyStopping("val_loss", patients=3)  # type: ignore[call-arg]
