"""What a step on each axis of a mesh costs the processor, against the loop that calls torch's functions by hand.

    python benchmarks/axes_cost.py
    python benchmarks/axes_cost.py --axes shard tensor --rounds 15 --json axes_cost.json

Two gloo processes train the decoder of ``axes.py`` with AdamW, with hasten's Trainer and with a loop that shards,
splits or copies the same layers in the same way. It is so small that the work around the arithmetic shows. Both train
in the same processes, in turns (A B A B), and a figure is the seconds of the processor that a step takes in both
processes together (user and system, all threads), which depend less on what else the machine does than the time does.
"ratio" is the median over the rounds, "weights" the largest difference of the weights that the two end with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hasten as L
from axes import HEADS, PLAN, ROOT, WIDTH, WORDS, Block, largest
from hasten.strategies import MeshStrategy
from measure import hardware

PROCESSES, BATCH, WARM_UP = 2, 8, 20


class Clock:
    """Counts steps, and the seconds of the processor from the end of the warm-up to the last one."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._count = 0
        self._start = self.seconds = 0.0

    def tick(self) -> None:
        """Called when a step begins."""
        self._count += 1
        if self._count == WARM_UP:
            self._start = time.process_time()
        elif self._count == WARM_UP + self._steps:
            self.seconds = (time.process_time() - self._start) / self._steps


class PlainBlock(Block):
    """The same block without hasten: each process attends as the loop says."""

    attend: Callable[..., Tensor] = staticmethod(nn.functional.scaled_dot_product_attention)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        attended = self.attend(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + attended.transpose(1, 2).flatten(-2)
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return hidden


class Exchange(torch.autograd.Function):
    """Exchange tokens for heads among all processes: parts of one dimension go out, those of another come in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: int, into: int) -> Tensor:
        ctx.dims = out, into
        sent = torch.stack(x.chunk(dist.get_world_size(), out))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), into)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out, into = ctx.dims
        return Exchange.forward(ctx, gradients[0], into, out), None, None


class UlyssesBlock(PlainBlock):
    """The same block on a part of each sequence."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        whole = Exchange.apply(torch.stack((q, k, v)), 2, 3)
        attended = nn.functional.scaled_dot_product_attention(*whole.unbind(), is_causal=is_causal)
        part: Tensor = Exchange.apply(attended, 2, 1)
        return part


class Network(nn.Module):
    """The decoder, and its loss."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(block(), block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.words(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def weights(self) -> list[Tensor]:
        """Return the parameters, whole."""
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in self.parameters()]


def data(steps: int) -> TensorDataset:
    """Return tokens and targets for a number of batches on each process."""
    rows = BATCH * PROCESSES * (WARM_UP + steps + 1)
    tokens = torch.randint(0, WORDS, (rows, 17), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


# -- hasten


class Module(L.LightningModule):
    """The network with hasten's attention, which divides sequences where the strategy asks for it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.network = Network(Block)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.tick()
        loss: Tensor = self.network(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# The names of the layers in ``Module``.
LAYERS: Any = {f"network.{name}": style for name, style in PLAN.items()}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "replicate": lambda: MeshStrategy(replicate=2),
    "shard": lambda: MeshStrategy(shard=2),
    "tensor": lambda: MeshStrategy(tensor=2, plan=LAYERS),
    "context": lambda: MeshStrategy(context=2),
    "pipeline": lambda: MeshStrategy(pipeline=2),
}


def with_hasten(axis: str, steps: int) -> tuple[float, list[Tensor]]:
    """Train with hasten; return seconds of the processor and weights."""
    clock = Clock(steps)
    module = Module(clock)
    trainer = L.Trainer(
        max_steps=WARM_UP + steps, accelerator="cpu", devices=PROCESSES, strategy=STRATEGIES[axis](), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(steps), BATCH))
    return clock.seconds, module.network.weights()


# -- torch alone


def copied(network: Network) -> nn.Module:
    return nn.parallel.DistributedDataParallel(network)


def sharded(network: Network, *sizes: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def split(network: Network) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = ColwiseParallel(output_layouts=Replicate())
    names = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(), "colwise_rep": whole}
    plan = {name: names[style] for name, style in PLAN.items()}
    return parallelize_module(network, init_device_mesh("cpu", (PROCESSES,)), plan)


class Pipelined:
    """The stage of this process, called as the network is: its backward does the forward, too."""

    def __init__(self, network: Network) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank = dist.get_rank()
        block = network.blocks[self.rank]
        layers = nn.Sequential(block, network.head) if self.rank else nn.Sequential(network.words, block)
        self.parameters = layers.parameters
        stage = PipelineStage(layers, self.rank, PROCESSES, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, 2 * PROCESSES, loss_fn=self.loss)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def __call__(self, tokens: Tensor, targets: Tensor) -> Pipelined:
        self.batch = tokens, targets
        return self

    def backward(self) -> None:
        tokens, targets = self.batch
        if self.rank:
            self.schedule.step(target=targets, losses=[])
        else:
            self.schedule.step(tokens)


# How a loop divides the network, and its block.
BY_HAND: dict[str, tuple[Callable[[Network], Any], type[Block]]] = {
    "ddp": (copied, PlainBlock),
    "replicate": (lambda network: sharded(network, 2, 1), PlainBlock),
    "shard": (lambda network: sharded(network, 2), PlainBlock),
    "tensor": (split, PlainBlock),
    "context": (lambda network: sharded(network, 2), UlyssesBlock),
    "pipeline": (Pipelined, PlainBlock),
}


def by_hand(axis: str, steps: int) -> tuple[float, list[Tensor]]:
    """Train with torch alone; return seconds of the processor and weights."""
    clock = Clock(steps)
    divide, block = BY_HAND[axis]
    network = Network(block)
    model = divide(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = data(steps)
    reads_alike = axis in ("tensor", "context", "pipeline")
    loader = DataLoader(rows, BATCH, sampler=None if reads_alike else DistributedSampler(rows, shuffle=False))
    for number, (tokens, targets) in enumerate(loader, 1):
        clock.tick()
        if axis == "context":
            tokens, targets = (t.chunk(PROCESSES, 1)[dist.get_rank()].contiguous() for t in (tokens, targets))
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == WARM_UP + steps:
            break
    return clock.seconds, network.weights()


# -- the comparison


def compare(axes: list[str], rounds: int, steps: int) -> None:
    """Train in turns, in each process of torchrun; the first one prints a line of JSON for each axis."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for axis in axes:
        found: dict[str, list[float]] = {"hasten": [], "torch": []}
        difference = 0.0
        for turn in range(rounds + 1):
            (one, ours), (other, theirs) = with_hasten(axis, steps), by_hand(axis, steps)
            seconds = torch.tensor([one, other], dtype=torch.double)
            dist.all_reduce(seconds)
            # The parameters of other stages are not numbers.
            held = [pair for pair in zip(ours, theirs, strict=True) if not pair[0].isnan().any()]
            difference = max(difference, largest(*map(list, zip(*held, strict=True))))
            if turn:  # The first warms up.
                found["hasten"].append(float(seconds[0]))
                found["torch"].append(float(seconds[1]))
        ratios = sorted(a / b for a, b in zip(found["hasten"], found["torch"], strict=True))
        row = {
            "axis": axis,
            "torch_ms": 1e3 * statistics.median(found["torch"]),
            "hasten_ms": 1e3 * statistics.median(found["hasten"]),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "weights": difference,
        }
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    if "RANK" in os.environ:
        compare(options.axes, options.rounds, options.steps)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    words = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    rows = []
    print(f"{'axis':10s} {'torch ms':>9s} {'hasten ms':>9s} {'ratio':>6s} {'quartiles':>11s} {'weights':>8s}")
    for axis in options.axes:
        # Processes of their own: what one axis leaves behind would slow the next one.
        command = [*launcher, __file__, "--axes", axis, *words]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = next(json.loads(line) for line in output.splitlines() if line.startswith("{"))
        rows.append(row)
        low, high = row["quartiles"]
        times = f"{row['torch_ms']:9.2f} {row['hasten_ms']:9.2f} {row['ratio']:6.3f}"
        print(f"{axis:10s} {times} {low:5.2f} {high:5.2f} {row['weights']:8.1e}", flush=True)
    if options.json:
        found = {"hardware": hardware(), "processes": PROCESSES, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
