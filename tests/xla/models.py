"""A small model and its data, for tests on XLA devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L

SAMPLES, BATCH = 40, 4


def network(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(net(x).float(), y)


def optimizer_of(net: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9 if name == "momentum" else 0.0)


def loader(samples: int = SAMPLES, batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


class Net(L.LightningModule):
    def __init__(self, optimizer: str = "sgd", dropout: float = 0.1) -> None:
        super().__init__()
        self.net, self.optimizer, self.losses = network(dropout), optimizer, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net, self.optimizer)


class Manual(Net):
    def __init__(self, optimizer: str = "sgd", dropout: float = 0.1) -> None:
        super().__init__(optimizer, dropout)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        optimizer.step()


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu().float() for parameter in module.parameters()]
