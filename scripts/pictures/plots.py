"""Draw the pictures of docs/plots.md: docs/images/plot-*.png, from runs that this trains in half a minute.

Run: python scripts/pictures/plots.py
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.commands import main as hasten
from hasten.loggers import CSVLogger

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
RUNS = {"adamw": (torch.optim.AdamW, 1e-3), "sgd": (torch.optim.SGD, 3e-2), "adamw-cosine": (torch.optim.AdamW, 4e-3)}
EPOCHS, BATCH_SIZE = 30, 32


class Digits(L.LightningModule):
    """A small convolutional network that reads digits."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], lr: float, cosine_steps: int) -> None:
        super().__init__()
        self.optimizer, self.lr, self.cosine_steps = optimizer, lr, cosine_steps
        self.network = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(256, 10)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.network(batch[0])
        self.log("val_loss", cross_entropy(scores, batch[1]))
        self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.lr)
        if not self.cosine_steps:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.cosine_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(folder: Path) -> None:
    """Train the runs, each into ``folder/NAME/version_0``."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    for name, (optimizer, lr) in RUNS.items():
        L.seed_everything(1, verbose=False)
        model = Digits(optimizer, lr, 44 * EPOCHS if "cosine" in name else 0)
        trainer = L.Trainer(
            max_epochs=EPOCHS, logger=CSVLogger(folder, name=name), accelerator="cpu", log_every_n_steps=2,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(
            model,
            DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=BATCH_SIZE, shuffle=True),
            DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=200),
        )


def main() -> None:
    """Train and draw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        train(Path("logs"))
        one, several = ["logs/adamw/version_0"], [f"logs/{run}/version_0" for run in RUNS]
        keys = ["--key", "val_loss", "val_acc", "lr"]
        for picture, words in {
            "plot-run.png": [*one, "--smooth", "0.9"],
            "plot-runs.png": [*several, "--smooth", "0.9"],
            "plot-keys.png": [*several, *keys, "-x", "time"],
            "plot-log.png": [*several, "--key", "train_loss", "--smooth", "31", "--log"],
        }.items():
            print(" ".join(["hasten plot", *words]))
            if hasten(["plot", *words, "-o", os.fspath(IMAGES / picture)]):
                raise SystemExit(1)


if __name__ == "__main__":
    main()
