"""Two averages of the weights: a moving one (EMA) and one over the last epochs (SWA), against none at all."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import EMAWeightAveraging, StochasticWeightAveraging


class DigitClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.layers(x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), batch_size=len(y))
        self.log("loss", nn.functional.cross_entropy(logits, y), batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = torch.utils.data.random_split(data, [1497, 300], torch.Generator().manual_seed(0))
    kinds: dict[str, list[L.Callback]] = {
        "plain": [],
        "EMA": [EMAWeightAveraging(decay=0.98)],
        "SWA": [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=0.5, annealing_epochs=2)],
    }
    for name, callbacks in kinds.items():
        L.seed_everything(7)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=8, callbacks=callbacks, logger=False, enable_checkpointing=False
        )
        model = DigitClassifier()
        trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
        # The averages are in the model now.
        result = trainer.test(model, DataLoader(val, batch_size=300), verbose=False)[0]
        print(f"{name}: accuracy {result['accuracy']:.3f}, loss {result['loss']:.3f}")


if __name__ == "__main__":
    main()
