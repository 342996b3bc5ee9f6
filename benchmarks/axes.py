"""Does a mesh train as one process does? The largest differences, for all sizes of the axes of ``MeshStrategy``.

    python benchmarks/axes.py                  # meshes of 2, 4 and 8 processes on this machine's CPU
    python benchmarks/axes.py --processes 4
    python benchmarks/axes.py --processes 8 --expert 2 4 8 --json benchmarks/results/axes.json

Each mesh trains a small decoder for ten steps in float64, with accumulation and clipping, and one process trains it on
the same batches. With ``expert``, each of its blocks has a mixture of eight experts, too. The table has the largest
difference of a loss, of a gradient norm and of a weight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.strategies import MeshStrategy
from hasten.strategies.context import attention

ROOT = Path(__file__).resolve().parents[1]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.qkv": "colwise_rep", "head": "colwise_rep"}
WIDTH, WORDS, BATCH, HEADS, EXPERTS = 16, 48, 16, 8, 8
# At least so many; a pipeline has one for each of its processes.
BLOCKS = 4


def main() -> int:
    """Print the table; return 1 if a mesh trains something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--expert", type=int, nargs="+", help="only meshes of which this is a size of the axis expert")
    parser.add_argument("--json", type=Path, help="write the table to this file, whose other rows stay")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("processes replicate  shard tensor context pipeline expert      loss grad_norm    weight")
    for processes in options.processes:
        for row in measured(processes, options.expert):
            sizes = " ".join(f"{size:>{width}}" for size, width in zip(row["mesh"], (9, 6, 6, 7, 8, 6), strict=True))
            differences = " ".join(f"{row[name]:>9.1e}" for name in ("loss", "grad_norm", "weight"))
            print(f"{processes:>9} {sizes} {differences}", flush=True)
            rows.append(row)
            if options.json:
                write(options.json, rows)
    return int(any(row["weight"] > 1e-9 for row in rows))


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a file, in the place of those of the same meshes."""
    new = [row["mesh"] for row in rows]
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    every = [row for row in earlier if row["mesh"] not in new] + rows
    every.sort(key=lambda row: (math.prod(row["mesh"][:5]), row["mesh"][5] > 1))
    file.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


def measured(processes: int, expert: list[int] | None) -> Iterator[dict[str, Any]]:
    """Yield the differences for all meshes of a number of processes, which torchrun starts.

    Args:
        processes: the number.
        expert: only meshes with one of these sizes of the axis; None for all.

    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
    command += map(str, expert or ())
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)


def meshes(processes: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield the sizes of the axes for a number of processes."""
    divisors = [size for size in range(1, processes + 1) if processes % size == 0]
    for replicate, shard, tensor, context, pipeline in itertools.product(divisors, repeat=5):
        if replicate * shard * tensor * context * pipeline == processes:
            # Experts are divided over processes of the other axes.
            for expert in divisors if pipeline == 1 else (1,):
                yield replicate, shard, tensor, context, pipeline, expert


def compare(expert: list[int]) -> None:
    """Train on each mesh and on one process, in each process of torchrun; the first one prints a line of JSON each.

    Args:
        expert: only meshes with one of these sizes of the axis; empty for all.

    """
    processes, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    references: dict[tuple[int, bool], Decoder] = {}
    for sizes in meshes(processes):
        if expert and sizes[5] not in expert:
            continue
        kind = max(BLOCKS, sizes[4]), sizes[5] > 1
        strategy = MeshStrategy(*sizes, plan=PLAN if sizes[2] > 1 else None)
        found = train(processes, strategy, BATCH // (sizes[0] * sizes[1]), *kind)
        if kind not in references:
            references[kind] = train(1, "auto", BATCH, *kind)
        alone = references[kind]
        row = {
            "mesh": sizes,
            "loss": largest(found.losses, alone.losses),
            "grad_norm": largest(found.norms, alone.norms),
            "weight": found.largest_difference(alone),
        }
        if rank == 0:
            print(json.dumps(row), flush=True)


def largest(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between tensors."""
    return max((one - other).abs().max().item() for one, other in zip(some, others, strict=True))


class Experts(nn.Module):
    """The matrices of all experts, and what they compute for the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            tokens, place = torch.where(chosen == expert)
            inner = nn.functional.gelu(hidden[tokens] @ self.up[expert].T)
            result = result.index_add(0, tokens, inner @ self.down[expert].T * weights[tokens, place, None])
        return result


class Block(nn.Module):
    """Attention, whose layers are gathered, and a feed-forward part that is split; with a mixture, experts after it."""

    def __init__(self, mixture: bool = False) -> None:
        super().__init__()
        self.router, self.experts = (nn.Linear(WIDTH, EXPERTS), Experts()) if mixture else (None, None)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        attended = attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + attended.transpose(1, 2).flatten(-2)
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        if self.router is None or self.experts is None:
            return hidden
        rows = hidden.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        mixed: Tensor = hidden + self.experts(rows, chosen, weights).view(hidden.shape)
        return mixed


class Decoder(L.LightningModule):
    """A small language model that keeps its losses and gradient norms."""

    def __init__(self, blocks: int = BLOCKS, mixture: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(mixture) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, WORDS)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.head(self.blocks(self.words(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.all_gather(outputs["loss"]).mean())

    def configure_gradient_clipping(self, optimizer: Any, **how: Any) -> None:
        self.norms.append(self.trainer.runtime.engine.clip_norm(self.parameters(), how["gradient_clip_val"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def largest_difference(self, other: Decoder) -> float:
        """Return the largest difference to the parameters of another module, on any process."""
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in self.parameters()]
        # The parameters of other stages are not numbers.
        held = [(one, two) for one, two in zip(weights, other.parameters(), strict=True) if not one.isnan().any()]
        difference = torch.tensor(largest(*map(list, zip(*held, strict=True))))
        return float(self.trainer.strategy.all_reduce(difference, reduce_op="max"))


def train(devices: int, strategy: Any, batch_size: int, blocks: int, mixture: bool) -> Decoder:
    """Train for ten steps of two batches, which are the same for all strategies."""
    tokens = torch.randint(0, WORDS, (20 * BATCH, 17), generator=torch.Generator().manual_seed(1))
    module = Decoder(blocks, mixture).double()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=strategy, accumulate_grad_batches=2,
        gradient_clip_val=0.1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size))
    return module


if __name__ == "__main__":
    if "RANK" in os.environ:
        compare(list(map(int, sys.argv[1:])))
    else:
        sys.exit(main())
