"""Train on two processes; print what tests compare: python distributed_program.py STRATEGY OUTPUT."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

import hasten as L
from tests.models import Classifier, Numbered, quiet


class Model(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[2].tolist()
        loss = self.loss(batch[:2])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[2].tolist()
        self.log("val_loss", self.loss(batch[:2]), sync_dist=True)


def main(strategy: str, output: str, devices: int) -> None:
    torch.set_num_threads(1)
    L.seed_everything(3)
    model = Model()
    trainer = quiet(devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0)
    # 40 samples: with two processes a batch of 4 each is the joined batch of 8.
    train = DataLoader(Numbered(40), 8 // devices)
    trainer.fit(model, train, DataLoader(Numbered(11), 3))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    torch.save(
        {
            "weights": model.state_dict(),
            "metrics": metrics,
            "seen": model.seen,
            "evaluated": model.evaluated,
            "step": trainer.global_step,
            "history": {name: list(trainer.history[name]) for name in trainer.history.keys()},  # noqa: SIM118
        },
        f"{output}.{trainer.global_rank}",
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
