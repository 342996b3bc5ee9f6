"""What the thread that watches a run of two processes costs: steps with it and without it, in turns.

    PYTHONPATH=src python benchmarks/watchdog.py [--rounds 12] [--steps 400]

Both processes train a small model, so that a step is short and anything added to it shows. Prints the median time of a
step, and the ratio of both with the range in which it lies by chance.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten as L
from hasten.machine import watchdog
from hasten.strategies import DDPStrategy


class Regression(L.LightningModule):
    """A small model that notes when each step ended."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ends.append(time.perf_counter())
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds_per_step(steps: int, *, watched: bool) -> float:
    """Train one epoch and return the median time of a step."""
    module = Regression()
    batches = [(torch.randn(16, 32), torch.randn(16, 1)) for _ in range(steps)]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    if torch.distributed.is_initialized():
        watchdog.stop()
        if watched:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            watchdog.start(rank=rank, world_size=size, timeout=timedelta(minutes=10))
    trainer.fit(module, batches)
    pauses = [after - before for before, after in zip(module.ends, module.ends[1:], strict=False)]
    return statistics.median(pauses)


def processor_seconds() -> float:
    """Return for how long the watching threads that live now have computed, on Linux."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hasten-watchdog")]
    files = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in threads]
    return sum(int(file.read_text().split()[0]) for file in files if file.exists()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    seconds_per_step(50, watched=True)  # joins, and warms up
    with_thread, without = [], []
    for number in range(given.rounds):
        for watched in (True, False) if number % 2 else (False, True):
            (with_thread if watched else without).append(seconds_per_step(given.steps, watched=watched))
    seconds_per_step(10, watched=True)
    before = processor_seconds()
    time.sleep(10)
    busy = (processor_seconds() - before) / 10
    if torch.distributed.get_rank() == 0:
        ratios = [a / b for a, b in zip(with_thread, without, strict=True)]
        chance = random.Random(0)
        medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
        print(f"with: {statistics.median(with_thread) * 1e6:.1f} us a step")
        print(f"without: {statistics.median(without) * 1e6:.1f} us a step")
        print(f"processor time of the thread: {busy * 1e3:.2f} ms a second")
        print(f"ratio {statistics.median(ratios):.4f} (95 %: {medians[50]:.4f} to {medians[-51]:.4f})")


if __name__ == "__main__":
    main()
