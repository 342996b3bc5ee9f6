"""Small models and data that many tests share."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten as L


class Classifier(L.LightningModule):
    """A two-layer classifier; logs train_loss and val_loss."""

    def __init__(self, width: int = 16, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class Manual(Classifier):
    """Steps by itself on each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Several(Classifier):
    """Takes one or several loaders in every stage."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))


class Attempts:
    """A list of each module that lies beside it: attributes of the module go back where an attempt fails."""

    def __init__(self) -> None:
        self._lists: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else self._lists.setdefault(module, [])


def dataset(samples: int = 40, seed: int = 0) -> TensorDataset:
    """Return random features (samples, 8) and labels (samples,) in {0, 1}."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader(samples: int = 40, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader over ``dataset``."""
    return DataLoader(dataset(samples), batch_size, **options)


def quiet(**arguments: Any) -> L.Trainer:
    """Return a Trainer on the CPU without bar, summary, logger and checkpoints unless asked for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **arguments})


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two modules have the same parameters and buffers, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Numbered(Dataset[Any]):
    """Samples that know their index: (features (8,), label (), index ())."""

    def __init__(self, samples: int = 40) -> None:
        self.inner = dataset(samples)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y = self.inner[index]
        return x, y, index
