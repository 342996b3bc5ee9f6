"""What optimizers and numbers cost: a whole training step of a transformer, each row in turns with its reference.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --device cuda --width 1024 --layers 12 --json optimizers.json
    python benchmarks/optimizers.py --rows fused-adamw in-backward --rounds 15

A figure is the median, over the rounds, of the time of the reference by the time of the row (above 1: the row is
faster); "step" is the optimizer's part alone. On a GPU the peak of the memory is told as well.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.optim import in_backward, muon, use_fused
from hasten.plugins import HalfPrecision
from hasten.precision.matmul import matmul_precision
from measure import hardware

Optimizer = Any


def fused(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, which updates all parameters in one kernel."""
    use_fused(optimizer)
    return optimizer


@dataclass(frozen=True)
class Way:
    """One way to train."""

    optimizer: Callable[[nn.Module], Optimizer]
    plugin: Callable[[], HalfPrecision] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


ADAMW = Way(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4))
FUSED = Way(lambda model: fused(torch.optim.AdamW(model.parameters(), lr=1e-4)))
# name: (the row, its reference, what it is)
ROWS: dict[str, tuple[Way, Way, str]] = {
    "fused-adamw": (FUSED, ADAMW, "AdamW, fused_optimizer=True"),
    "fused-adam": (
        Way(lambda model: fused(torch.optim.Adam(model.parameters(), lr=1e-4))),
        Way(lambda model: torch.optim.Adam(model.parameters(), lr=1e-4)),
        "Adam, fused_optimizer=True",
    ),
    "fused-sgd": (
        Way(lambda model: fused(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))),
        Way(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)),
        "SGD with momentum, fused_optimizer=True",
    ),
    "in-backward": (
        Way(lambda model: in_backward(torch.optim.AdamW, model.parameters(), lr=1e-4)),
        ADAMW,
        "in_backward(AdamW), against AdamW",
    ),
    "muon": (Way(lambda model: muon(model, lr=1e-3)), ADAMW, "muon, against AdamW"),
    "bf16-true": (
        Way(FUSED.optimizer, lambda: HalfPrecision("bf16-true")),
        FUSED,
        "bf16-true, against 32 bits (fused AdamW)",
    ),
    "small-updates": (
        Way(FUSED.optimizer, lambda: HalfPrecision("bf16-true")),
        Way(FUSED.optimizer, lambda: HalfPrecision("bf16-true", keep_small_updates=False)),
        "bf16-true, against bf16-true that loses small updates",
    ),
    "matmul-high": (
        Way(FUSED.optimizer, around=lambda: matmul_precision("high")),
        FUSED,
        "matmul_precision='high'",
    ),
    "matmul-medium": (
        Way(FUSED.optimizer, around=lambda: matmul_precision("medium")),
        FUSED,
        "matmul_precision='medium'",
    ),
}


class Network(nn.Module):
    """A transformer's encoder between an embedding and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8192, width)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits: (batch, 64)."""
        return self.head(self.blocks(self.tokens(tokens)).mean(1))


def make_step(way: Way, options: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """Return a function that trains on one batch and returns (seconds, seconds of the optimizer's part)."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Network(options.width, options.layers)
    plugin = None if way.plugin is None else way.plugin()
    if plugin is not None:
        plugin.convert_module(model)
    model.to(device)
    optimizer = way.optimizer(model)
    if plugin is not None:
        plugin.convert_optimizer(optimizer)
    tokens = torch.randint(8192, (options.batch, options.length), device=device)
    labels = torch.randint(64, (options.batch,), device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def step() -> tuple[float, float]:
        with way.around():
            wait()
            start = time.perf_counter()
            nn.functional.cross_entropy(model(tokens).float(), labels).backward()
            wait()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            wait()
            end = time.perf_counter()
        return end - start, end - middle

    return step


def measure(row: Way, reference: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns."""
    on_gpu = torch.device(options.device).type == "cuda"
    peaks = []
    steps = []
    for way in (reference, row):
        if on_gpu:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        step = make_step(way, options)
        for _ in range(3):
            step()
        steps.append(step)
        if on_gpu:
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    whole: list[float] = []
    part: list[float] = []
    seconds: list[float] = []
    for _ in range(options.rounds):
        times = [[step() for _ in range(options.steps)] for step in steps]
        medians = [[statistics.median(column) for column in zip(*each, strict=True)] for each in times]
        whole.append(medians[0][0] / medians[1][0])
        part.append(medians[0][1] / max(medians[1][1], 1e-9))
        seconds.append(medians[1][0])
    result = {"whole": statistics.median(whole), "step": statistics.median(part), "rounds": whole}
    result["seconds"] = statistics.median(seconds)
    return {**result, "peak_gib": dict(zip(("reference", "row"), peaks, strict=False))}


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256, help="features (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--batch", type=int, default=4, help="rows of a batch (default: 4)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row (default: 32)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (default: 5)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in Network(options.width, options.layers).parameters())
    facts = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "torch": torch.__version__,
        "parameters": parameters,
    }
    for key, value in facts.items():
        print(f"{key:>12}  {value}")
    print(f"\n{'row':<56} {'whole':>6} {'step':>6} {'ms':>8}  peak GiB")
    rows = []
    for name in options.rows:
        row, reference, title = ROWS[name]
        with contextlib.suppress(KeyboardInterrupt):
            result = measure(row, reference, options)
            peak = " -> ".join(f"{gib:.2f}" for gib in result["peak_gib"].values())
            # What steps in backward has no part of its own.
            part = "" if name == "in-backward" else f"{result['step']:.2f}"
            print(
                f"{title:<56} {result['whole']:>6.2f} {part:>6} {1000 * result['seconds']:>8.1f}  {peak}",
                flush=True,
            )
            rows.append({"row": name, "title": title, **result})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
