"""What micro-batches and recomputed activations cost in time, and save in memory.

    python benchmarks/microbatch.py
    python benchmarks/microbatch.py --accelerator gpu --precision bf16-mixed --batch 64 --width 1024 --layers 12

A transformer encoder classifies made-up sequences. Each way of computing the same batch runs in turn (A B C ... A B C
...), in processes of their own; a figure is the median over the turns of the ratio to the whole batch of that turn.
Memory is what a step takes at its peak beyond weights and optimizer: on the CPU as torch's profiler counts it, on a
GPU as the allocator does.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hasten as L
from measure import hardware

WARM_UP = 2


def ways(batch: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of the Trainer by the name of a row."""
    return {
        "whole": {},
        "micro_batch='auto', nothing runs out": {"micro_batch": "auto"},
        f"micro_batch={batch // 2}": {"micro_batch": batch // 2},
        f"micro_batch={batch // 4}": {"micro_batch": batch // 4},
        "memory='selective'": {"memory": "selective"},
        "memory='full'": {"memory": "full"},
        f"micro_batch={batch // 4}, memory='full'": {"micro_batch": batch // 4, "memory": "full"},
    }


class Encoder(L.LightningModule):
    """A transformer encoder with a classifier on its first token; stamps each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            options.width, options.width // 64, 4 * options.width, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.head = nn.Linear(options.width, 2)
        self.stamps: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)[:, 0]), y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Memory(L.Callback):
    """Notes the peak of the memory of one step, the second, by the profiler of torch."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            if module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                self._before = torch.cuda.memory_allocated()
            else:
                self._profile.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if module.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._profile.stop()
        now = 0
        for event in sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, now)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Train some steps one way; return seconds of a step and the memory of a step in MiB."""
    arguments = ways(options.batch)[options.way]
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(options.batch, options.tokens, options.width, generator=generator),
        torch.randint(2, (options.batch,), generator=generator),
    )

    def fit(steps: int, *callbacks: L.Callback) -> Encoder:
        module = Encoder(options)
        L.Trainer(
            max_epochs=1,
            accelerator=options.accelerator,
            devices=1,
            precision=options.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **arguments,
        ).fit(module, [batch] * steps)
        return module

    stamps = fit(WARM_UP + options.steps + 1).stamps[WARM_UP:]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(stamps))
    memory = Memory()
    fit(3, memory)
    return {"seconds": seconds, "mebibytes": memory.peak_bytes / 2**20}


def main() -> None:
    """Measure each way in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--batch", type=int, default=32, help="samples (default: 32)")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample (default: 128)")
    parser.add_argument("--width", type=int, default=128, help="features (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default: 5)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options)))
        return

    names = list(ways(options.batch))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.turns):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"turn {turn + 1} of {options.turns} done", file=sys.stderr, flush=True)

    rows = []
    print(f"{'':<38} {'ms a step':>10} {'time':>6} {'MiB a step':>11} {'memory':>7}")
    for name in names:
        mine = found[name]
        seconds, mebibytes = (statistics.median(one[key] for one in mine) for key in ("seconds", "mebibytes"))
        slower, smaller = (
            statistics.median(one[key] / whole[key] for one, whole in zip(mine, found["whole"], strict=True))
            for key in ("seconds", "mebibytes")
        )
        print(f"{name:<38} {1000 * seconds:>10.1f} {slower:>6.2f} {mebibytes:>11.1f} {smaller:>7.2f}")
        rows.append({"way": name, "turns": mine, "time_ratio": round(slower, 4), "memory_ratio": round(smaller, 4)})
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "way")}
        facts = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            "torch": torch.__version__,
            "settings": settings,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
