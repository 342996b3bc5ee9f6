"""A program that kills fits while they save in the background, and looks at what they leave behind; see ``kills.py``.

``python background_kills.py FOLDER KILLS`` prints the number of the last checkpoint, and how many kills left files
behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import background, files
from tests.checkpoint.kills import kill_savers
from tests.models import quiet


class Counts(L.LightningModule):
    """All weights are the number of steps made."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((400_000,), float(number)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_for_ever(folder: Path, number: int) -> None:
    """Save after each step, until killed."""
    saves = ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)
    trainer = quiet(callbacks=[saves], enable_checkpointing=True, max_epochs=-1)
    trainer.fit(Counts(number), [torch.zeros(1)] * 1000)


def main(folder: Path, kills: int) -> None:
    """Kill fits that save one file."""
    background.LARGE_BYTES = 0
    path = folder / "last.ckpt"
    # Imports what a fit needs, before it is forked.
    quiet(max_steps=1).fit(Counts(0), [torch.zeros(1)])
    files.save({"state_dict": {"weight": torch.zeros(400_000)}}, path)

    def start(number: int, kill: int) -> list[int]:
        child = os.fork()
        if not child:
            os.close(2)
            train_for_ever(folder, number)
        return [child]

    def read() -> dict[str, Any]:
        weight = files.load(path)["state_dict"]["weight"]
        return {"number": int(weight[0]), "weight": weight}

    kill_savers(path, kills, start, read, wait_seconds=0.4, is_enough=lambda in_the_middle: in_the_middle > 1, most=5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
