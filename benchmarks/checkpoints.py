"""How long a save stops training, what it costs the fit, and how long a checkpoint takes to load.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --megabytes 1000 --rounds 3 --json benchmarks/results/checkpoints.json

A linear model and its state of Adam have the given size. Each fit saves after each epoch. "stops" is the time between
the last step of an epoch and the first of the next, less the same of a fit that saves nothing; the first save, which
takes memory for the copies, is named apart. "wall" and "CPU" are what a save adds to the seconds of the whole fit: they
include what the thread takes from training, and the wait for the last file. ``torch.save`` is called by a callback. All
rows are measured in turns, and files are read from the cache of the system.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import files
from hasten.plugins import AsyncCheckpointIO, TorchCheckpointIO

EPOCHS = 6


class Model(L.LightningModule):
    """Weights of which a step uses few, so that it is short."""

    def __init__(self, megabytes: int, width: int = 1000) -> None:
        super().__init__()
        # Adam keeps two more of each.
        count = max(1, megabytes * 1_000_000 // (3 * 4 * width * width))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(count))
        self.layer = nn.Linear(256, 256)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(batch)
        if batch_idx == 0:
            output = output + sum(weight[:1, :256] for weight in self.weights)
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Stops(L.Callback):
    """Notes the seconds from the end of each epoch, before checkpoints, to the beginning of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ended: float | None = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._ended is not None:
            self.seconds.append(time.perf_counter() - self._ended)


class SavesByHand(L.Callback):
    """Calls ``torch.save`` after each epoch."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "by_hand.pt")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save({"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, self.path)


def rows(folder: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return, for each row, a function that makes the callbacks and plugins of its Trainer."""
    return {
        "no saves": lambda: {"callbacks": []},
        "torch.save": lambda: {"callbacks": [SavesByHand(folder)]},
        "hasten, TorchCheckpointIO": lambda: {"callbacks": [ModelCheckpoint(folder)], "plugins": TorchCheckpointIO()},
        "hasten, AsyncCheckpointIO": lambda: {"callbacks": [ModelCheckpoint(folder)], "plugins": AsyncCheckpointIO()},
        "hasten": lambda: {"callbacks": [ModelCheckpoint(folder)]},
        "hasten, save_last=True": lambda: {"callbacks": [ModelCheckpoint(folder, save_last=True)]},
    }


def fit(arguments: dict[str, Any], megabytes: int, steps: int) -> dict[str, float]:
    """Return the milliseconds between epochs of a fit, and those of the whole fit."""
    stops, module = Stops(), Model(megabytes)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in arguments["callbacks"]),
        **{**arguments, "callbacks": [stops, *arguments["callbacks"]]},
    )
    batches = [torch.randn(32, 256) for _ in range(steps)]
    began, used = time.perf_counter(), time.process_time()
    trainer.fit(module, batches)
    return {
        "first": 1e3 * stops.seconds[0],
        "stops": 1e3 * statistics.median(stops.seconds[1:]),
        "wall": 1e3 * (time.perf_counter() - began) / EPOCHS,
        "cpu": 1e3 * (time.process_time() - used) / EPOCHS,
    }


def measure_saves(megabytes: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measure the rows in turns, and return medians in milliseconds."""
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            for name, make in rows(folder).items():
                measured = fit(make(), megabytes, steps)
                if turn:  # The first warms up.
                    found.setdefault(name, []).append(measured)
                for path in Path(folder).iterdir():
                    path.unlink()
    plain = found.pop("no saves")
    return [
        {
            "row": name,
            **{key: statistics.median(a[key] - b[key] for a, b in zip(of, plain, strict=True)) for key in plain[0]},
        }
        for name, of in found.items()
    ]


def measure_loads(megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Measure loading in turns; return medians in milliseconds, and of the ratios to ``torch.load``."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "a.ckpt")
        module = Model(megabytes)
        contents = {"state_dict": module.state_dict()}
        contents["optimizer"] = {name: [value, value + 1] for name, value in contents["state_dict"].items()}
        files.save(contents, path)
        ways: dict[str, Callable[[], object]] = {
            "torch.load": lambda: torch.load(path, weights_only=True),
            "hasten": lambda: files.load(path),
            "hasten, check only": lambda: files.verify(path),
        }
        wall: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, load in ways.items():
                began, used = time.perf_counter(), time.process_time()
                kept = load()
                wall[name].append(1e3 * (time.perf_counter() - began))
                cpu[name].append(1e3 * (time.process_time() - used))
                del kept
    # The first round is slower: it takes memory from the system.
    ratios = {name: [a / b for a, b in zip(wall[name][1:], wall["torch.load"][1:], strict=True)] for name in ways}
    return [
        {
            "row": name,
            "wall": statistics.median(wall[name][1:]),
            "cpu": statistics.median(cpu[name][1:]),
            "ratio": statistics.median(ratios[name]),
        }
        for name in ways
    ]


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="size of a checkpoint (default: 300)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (default: 5)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of an epoch (default: 2000)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("hasten").setLevel(logging.ERROR)

    saves = measure_saves(options.megabytes, options.rounds, options.steps)
    print(f"a save of {options.megabytes} MB, ms")
    print(f"{'':27} {'first stops':>11} {'later':>7} {'wall':>7} {'CPU':>7}")
    for row in saves:
        print(f"{row['row']:27} {row['first']:>11.0f} {row['stops']:>7.0f} {row['wall']:>7.0f} {row['cpu']:>7.0f}")
    loads = measure_loads(options.megabytes, 3 * options.rounds)
    print(f"\nloading it, ms\n{'':27} {'wall':>11} {'CPU':>7} {'ratio':>7}")
    for row in loads:
        print(f"{row['row']:27} {row['wall']:>11.0f} {row['cpu']:>7.0f} {row['ratio']:>7.2f}")
    if options.json:
        found = {"command": sys.argv, "saves": saves, "loads": loads}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
