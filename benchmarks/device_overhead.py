"""Host time of a step on a device, beside the loop one writes by hand: eager, and in CUDA graphs.

    python benchmarks/device_overhead.py                    # on the GPU
    python benchmarks/device_overhead.py --device cpu       # a rehearsal

A tiny network is bound by what the host does, so the figure is what the loop costs. Loops take turns in one
process; a ratio is the median over the rounds. All of them log nothing, but for the row that logs five values.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hasten as L
from measure import BATCH_SIZE, CLASSES, FEATURES, hardware, make_network
from trainers import OFF

WARM_UP_STEPS = 100


class Stamped:
    """Batches on the device already; the time between two of them is taken after all work was done."""

    def __init__(self, device: torch.device, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = (
            torch.randn(BATCH_SIZE, FEATURES, generator=generator).to(device),
            torch.randint(CLASSES, (BATCH_SIZE,), generator=generator).to(device),
        )
        self.device, self.steps, self.seconds = device, steps, 0.0

    def __len__(self) -> int:
        return WARM_UP_STEPS + self.steps + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(WARM_UP_STEPS):
            yield self.batch
        begin = self._now()
        for _ in range(self.steps):
            yield self.batch
        self.seconds = self._now() - begin
        yield self.batch

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Tiny(L.LightningModule):
    """The network of `overhead.py`."""

    def __init__(self, values: int = 0) -> None:
        super().__init__()
        self.network = make_network()
        self.values = values

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        for number in range(self.values):
            self.log(f"value_{number}", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def by_hand(compiled: str | None = None) -> Callable[[Stamped], None]:
    def train(batches: Stamped) -> None:
        network: Any = make_network().to(batches.device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        if compiled is not None:
            network = torch.compile(network, mode=compiled)
        for x, y in batches:
            optimizer.zero_grad()
            if compiled is not None:
                # Once anything in a process has marked a step, torch waits for marks; gradients are cleared before,
                # as they lie in the memory of the graphs.
                torch.compiler.cudagraph_mark_step_begin()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()

    return train


def in_hasten(values: int = 0, **arguments: Any) -> Callable[[Stamped], None]:
    def train(batches: Stamped) -> None:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="gpu" if batches.device.type == "cuda" else "cpu",
            devices=1,
            **OFF,
            **arguments,
        )
        trainer.fit(Tiny(values), batches)

    return train


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000, help="timed steps of a run (default: 2000)")
    parser.add_argument("--rounds", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    logging.getLogger("hasten").setLevel(logging.WARNING)
    device = torch.device(options.device)
    graphs = "reduce-overhead"
    loops = {
        "plain loop": by_hand(),
        "hasten": in_hasten(),
        "hasten, five values logged": in_hasten(values=5),
        "plain loop, reduce-overhead": by_hand(graphs),
        "hasten, reduce-overhead": in_hasten(compile={"mode": graphs}),
        "hasten, reduce-overhead, five values": in_hasten(values=5, compile={"mode": graphs}),
    }
    if device.type == "cpu":
        loops = {name: loop for name, loop in loops.items() if graphs not in name}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.rounds + 1):
        for name, loop in loops.items():
            batches = Stamped(device, options.steps)
            loop(batches)
            # The first turn pays for loading and compiling.
            if turn:
                seconds[name].append(batches.seconds / options.steps)
    first = seconds["plain loop"]
    rows = []
    print(f"{'loop':<40}{'us a step':>10}{'ratio':>8}")
    for name, taken in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(taken, first, strict=True))
        rows.append({"loop": name, "microseconds": 1e6 * statistics.median(taken), "ratio": ratio})
        print(f"{name:<40}{rows[-1]['microseconds']:>10.1f}{ratio:>8.2f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {**hardware(), "device": str(device)}
        if device.type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(device)
        whole = {"command": shlex.join(["python", *sys.argv]), "hardware": facts, "rows": rows}
        options.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
