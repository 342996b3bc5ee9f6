"""Ways to divide an optimizer's state over two processes on gloo: the time of a step, and the memory of a process.

    python benchmarks/ddp_sharded.py
    python benchmarks/ddp_sharded.py --rounds 5 --steps 20 --json ddp_sharded.json

Each way trains the same transformer with AdamW in processes of its own, in turns (A B A B). Figures are those of the
first process: the median time of a step and of its share of the CPU, the elements of optimizer state that it holds as a
share of all, and by how much its memory grew at its highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import hasten as L
from hasten.machine.host import process_memory_bytes
from measure import hardware

WAYS = {
    "ddp": "strategy='ddp', the whole state in each process",
    "ddp_sharded": "strategy='ddp_sharded'",
    "zero": "DDP and torch's ZeroRedundancyOptimizer",
    "fully_shard": "fully_shard(reshard_after_forward=False)",
}


class Network(nn.Module):
    """A small language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 4096)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def train(way: str, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train in this process and its partner; return the figures of this process."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_sharded" if way == "ddp_sharded" else "ddp")
    fabric.launch()
    torch.set_num_threads(1)
    # Until here everything that the ways need has been imported.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    before = process_memory_bytes() or 0
    network = Network(width, layers)
    everything = 2 * sum(p.numel() for p in network.parameters())
    model: Any = network
    if way == "fully_shard":
        for block in network.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(network, reshard_after_forward=False)
        optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    elif way == "zero":
        model = fabric.setup(network)
        optimizer = fabric.setup_optimizers(
            ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        )
    else:
        model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True))
    tokens = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(fabric.global_rank))
    seconds, cpu_seconds = [], []
    for _ in range(3 + steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    inner = getattr(optimizer, "optim", optimizer)
    held = sum(_elements(value) for state in inner.state.values() for value in state.values())
    return {
        "step_seconds": statistics.median(seconds[3:]),
        "step_cpu_seconds": statistics.median(cpu_seconds[3:]),
        "optimizer_share": held / everything,
        "peak_bytes": (process_memory_bytes(peak=True) or 0) - before,
        "loss": float(loss.detach()),
    }


def _elements(value: Any) -> int:
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.numel() if isinstance(part, Tensor) and part.numel() > 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        figures = train(options.only, options.width, options.layers, options.steps)
        if int(torch.distributed.get_rank()) == 0:
            print(json.dumps(figures))
        return
    shape = ["--steps", str(options.steps), "--width", str(options.width), "--layers", str(options.layers)]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            command = [sys.executable, __file__, "--only", way, *shape]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(output.splitlines()[-1]))
    millions = sum(p.numel() for p in Network(options.width, options.layers).parameters()) / 1e6
    print(f"{millions:.1f} M parameters, AdamW (fused), 2 processes of 1 thread on gloo")
    print(f"{'':12s} {'step ms':>8s} {'cpu ms':>8s} {'optimizer':>10s} {'peak MB':>8s}  what")
    rows = {}
    for way, rounds in found.items():
        row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        rows[way] = row
        step, cpu, peak = row["step_seconds"] * 1e3, row["step_cpu_seconds"] * 1e3, row["peak_bytes"] / 1e6
        print(f"{way:12s} {step:8.0f} {cpu:8.0f} {row['optimizer_share']:10.2f} {peak:8.0f}  {WAYS[way]}")
    if options.json:
        options.json.write_text(json.dumps({"hardware": hardware(), "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
