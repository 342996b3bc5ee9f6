"""Two processes predict, and each writes its part: python examples/predict_two_processes.py FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from hasten.callbacks import BasePredictionWriter

SAMPLES = 101


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).squeeze(1)


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        samples = [index for batch in batch_indices[0] for index in batch]
        contents = {"samples": torch.tensor(samples), "predictions": torch.cat(list(predictions))}
        torch.save(contents, self.folder / f"part-{trainer.global_rank}.pt")


def main(folder: Path) -> None:
    L.seed_everything(7)
    folder.mkdir(parents=True, exist_ok=True)
    model, data = Regression(), torch.randn(SAMPLES, 8)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[Writer(folder)], logger=False)
    trainer.predict(model, DataLoader(data, batch_size=8), return_predictions=False)  # type: ignore[arg-type]
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        parts = [torch.load(path) for path in sorted(folder.glob("part-*.pt"))]
        together = torch.empty(SAMPLES)
        for part in parts:
            together[part["samples"]] = part["predictions"]
        same = torch.allclose(together, model.layer(data).squeeze(1))
        sizes = [len(part["samples"]) for part in parts]
        print(f"{len(parts)} processes wrote {sizes} predictions, equal to those of one: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "predictions"))
