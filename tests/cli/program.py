"""A program with a command line: classes whose arguments are of all kinds, and LightningCLI on them."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import torch
from torch import nn

import hasten as L
from hasten.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from tests.models import loader


class Encoder(nn.Module):
    """A layer of 8 features."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.layer = nn.Linear(8, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class DeepEncoder(Encoder):
    """An encoder that has been made deep."""

    def __init__(self, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth = depth


class Kind(Enum):
    """Two kinds."""

    one = 1
    two = 2


class LineData(L.LightningDataModule):
    """Random features.

    Args:
        batch_size: samples in a batch.
        classes: how many classes.

    """

    def __init__(self, batch_size: int = 4, samples: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.samples = samples
        self.classes = 2

    def train_dataloader(self) -> Any:
        return loader(self.samples, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(self.samples, self.batch_size)

    def test_dataloader(self) -> Any:
        return loader(self.samples, self.batch_size)

    def predict_dataloader(self) -> Any:
        return loader(self.samples, self.batch_size)


class LineNet(L.LightningModule):
    """A classifier.

    Args:
        width: features between the layers.
        name: what it is called.

    """

    def __init__(
        self,
        width: int = 4,
        encoder: Encoder | None = None,
        kind: Kind = Kind.one,
        mode: Literal["min", "max"] = "min",
        name: str | None = None,
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.kind, self.mode, self.name, self.lr = width, kind, mode, name, lr
        self.encoder = encoder if encoder is not None else Encoder(width)
        self.head = nn.Linear(self.encoder.dim, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WideLineNet(LineNet):
    """A classifier with one more argument."""

    def __init__(self, extra: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = extra


class Injected(LineNet):
    """A classifier that is given the makers of its optimizer and scheduler."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
        width: int = 4,
    ) -> None:
        super().__init__(width)
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Unannotated(L.LightningModule):
    """A module whose argument may be anything."""

    def __init__(self, part=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.part = part


# Fast and silent: the tests look at what the command line made of its words.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "num_sanity_val_steps": 0,
}


def cli(*args: Any, kind: type[LightningCLI] = LightningCLI, **options: Any) -> LightningCLI:
    """Return the LightningCLI of ``LineNet`` and ``LineData`` after it read ``args``: words, a line, or one dict."""
    given = args[0] if args and not isinstance(args[0], str) else list(args)
    if len(args) == 1 and isinstance(args[0], str):
        given = args[0].split()
    defaults: dict[str, Any] = {
        "model_class": LineNet,
        "datamodule_class": LineData,
        "trainer_defaults": dict(QUIET),
        "save_config_callback": None,
        "seed_everything_default": 1,
        "run": False,
    }
    return kind(**{**defaults, **options}, args=given)


def main() -> None:
    """Run the program on its command line."""
    LightningCLI(LineNet, LineData, trainer_defaults=QUIET, seed_everything_default=1)


if __name__ == "__main__":
    main()
