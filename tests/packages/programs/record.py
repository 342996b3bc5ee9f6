"""Keep what a run logs: a callback for programs whose package takes Lightning's callbacks."""

from __future__ import annotations

import json
import os
from typing import Any

import pytorch_lightning as pl


class KeepLosses(pl.Callback):
    """Keeps the loss of every training step, and what was logged when an epoch ends."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss of a step."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep what callbacks can read of the run."""
        self.epochs.append({key: float(value) for key, value in sorted(trainer.callback_metrics.items())})


def write(**results: Any) -> None:
    """Write results, and which package trained, where ``PACKAGE_RESULTS`` says."""
    results["trainer"] = pl.Trainer.__module__.partition(".")[0]
    with open(os.environ["PACKAGE_RESULTS"], "w") as file:
        json.dump(results, file)
