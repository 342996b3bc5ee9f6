"""Finetuning with a frozen backbone: learn digits 0-4, then 5-9 with the same backbone, at first frozen."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import BackboneFinetuning


class DigitClassifier(L.LightningModule):
    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone or nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.backbone(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.head(self.backbone(x)).argmax(1) == y).float().mean()
        self.log("val_accuracy", accuracy, batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=3e-3)


def loaders(digits: range) -> tuple[Any, Any]:
    images, labels = load_digits(return_X_y=True)
    chosen = (labels >= digits.start) & (labels < digits.stop)
    x = torch.tensor(images[chosen] / 16, dtype=torch.float32)
    y = torch.tensor(labels[chosen] - digits.start)
    train, val = TensorDataset(x[150:], y[150:]), TensorDataset(x[:150], y[:150])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=150)


def main() -> None:
    L.seed_everything(7)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    first = DigitClassifier()
    L.Trainer(max_epochs=3, **options).fit(first, *loaders(range(5)))

    model = DigitClassifier(first.backbone)
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=True)
    trainer = L.Trainer(max_epochs=4, callbacks=[finetuning], **options)
    trainer.fit(model, *loaders(range(5, 10)))
    groups = len(trainer.optimizers[0].param_groups)
    print(f"digits 5-9: accuracy {trainer.callback_metrics['val_accuracy']:.3f}, {groups} parameter groups")


if __name__ == "__main__":
    main()
