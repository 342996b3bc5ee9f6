"""Train a small transformer on two processes under each strategy, and write what a step held and sent.

Run as ``python on_two_processes.py FOLDER``; the test of plans imports the model and the data.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # Before the forks.
import torch.distributed.tensor.parallel
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

import hasten as L
from hasten._lib.tree import is_absent
from hasten.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from hasten_tools.plan import Ledger

WORDS, WIDTH, TOKENS = 300, 96, 40
# The steps that are measured. What threads of gloo free late is not in all of them.
STEPS = range(2, 7)
SOON = timedelta(seconds=60)


class Transformer(L.LightningModule):
    """Blocks, an embedding and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, batch: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.embedding(batch))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.hidden(batch))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Experts(nn.Module):
    """Four experts, of which each gets as many tokens as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = hidden.repeat_interleave(chosen.shape[-1], 0)[order].unflatten(0, (self.num_experts, -1))
        found = ((rows @ self.up.mT).relu() @ self.down.mT).flatten(0, 1)
        back = torch.zeros_like(found).index_copy(0, order, found)
        return (back * weights.flatten()[:, None]).unflatten(0, chosen.shape).sum(1)


class Mixture(Transformer):
    """The same with experts after the blocks, to which tokens go in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), _Experts()

    def hidden(self, batch: Tensor) -> Tensor:
        x = super().hidden(batch)
        rows = x.flatten(0, 1)
        turns = torch.arange(2 * len(rows)).view(-1, 2) % self.experts.num_experts
        mixed: Tensor = x + self.experts(rows, turns, self.router(rows).softmax(-1)).view(x.shape)
        return mixed


def strategies() -> dict[str, Any]:
    return {
        "ddp": DDPStrategy(timeout=SOON),
        "ddp_sharded": DDPStrategy(shard_optimizer=True, timeout=SOON),
        "fsdp2": FSDPStrategy(timeout=SOON),
        "tensor parallel": ModelParallelStrategy(tensor_parallel_size=2, plan="auto", timeout=SOON),
    }


def loader() -> DataLoader[Tensor]:
    tokens = torch.randint(0, WORDS, (96, TOKENS), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=8)  # type: ignore[arg-type]


def trainer(**given: Any) -> L.Trainer:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", max_steps=STEPS.stop, gradient_clip_val=1.0, **off, **given)


class _Watch(L.Callback):
    """Counts what a step sends, and marks it for the profiler."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.found: dict[str, Any] = {}
        self.held = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in STEPS:
            self.ledger.restart()
            self.held = self.ledger.live
            self.mark = record_function("STEP")
            self.mark.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in STEPS:
            self.mark.__exit__(None, None, None)
            sent = {name: [one.calls, one.payload_bytes, one.ring_bytes] for name, one in self.ledger.sent.items()}
            links = {name: one.links() for name, one in self.ledger.sent.items()}
            own = [(name, p) for name, p in pl_module.named_parameters() if not is_absent(p)]
            parts = {name: getattr(p, "_local_tensor", p) for name, p in own}
            shards = {name: list(part.shape) for name, part in parts.items()}
            self.found |= {"sent": sent, "links": links, "shards": shards}


def main(
    folder: str,
    strategies: dict[str, Any],
    devices: int,
    per_machine: int | None = None,
    modules: Mapping[str, Callable[[], Transformer]] | None = None,
    measured: Mapping[str, Collection[int]] | None = None,
) -> None:
    """Train under each strategy on ``devices`` processes, as if ``per_machine`` of them were on each machine.

    The ranks of ``measured``, or the first, write what they held and sent to a file each.
    """
    rank, found = int(os.environ.get("LOCAL_RANK", "0")), {}
    for name, strategy in strategies.items():
        gc.collect()
        make: Callable[[], Transformer] = (modules or {}).get(name, Transformer)
        if rank not in (measured or {}).get(name, (0,)):
            trainer(devices=devices, strategy=strategy).fit(make(), loader())
            continue
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            Ledger(per_machine) as ledger,
        ):
            data: Any = loader()
            watch = _Watch(ledger)
            trainer(devices=devices, strategy=strategy, callbacks=[watch]).fit(make(), data)
        # Samples that are not in a batch do not count.
        peak = watch.held - data.dataset.nbytes + _growth(profiler.profiler)
        found[name] = {**watch.found, "peak": peak}
    if found:
        Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _growth(profiler: Any) -> int:
    """Return the least that the allocator held in a step more than at its start, which the ledger has no part in.

    What was held before cannot be taken from the allocator: the threads of gloo free tensors, too, and are not seen.
    Buffers that gloo makes for itself, within an exchange or in its threads, are left out: each backend has its own.
    """
    steps: list[Any] = []
    allocations: list[tuple[Any, bool]] = []

    def note(events: Any, is_exchange: bool) -> None:
        for event in events:
            if event.name == "[memory]":
                allocations.append((event, is_exchange))
            elif event.name == "STEP":
                steps.append(event)
            note(event.children, is_exchange or event.name.startswith("c10d::"))

    note(profiler.kineto_results.experimental_event_tree(), False)
    found, live, left_out = [0] * len(steps), 0, {}
    steps.sort(key=lambda step: step.start_time_ns)
    step = -1
    for event, is_exchange in sorted(allocations, key=lambda one: one[0].start_time_ns):
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            left_out[address] = is_exchange or event.start_tid != steps[0].start_tid
        if step + 1 < len(steps) and event.start_time_ns >= steps[step + 1].start_time_ns:
            step, live = step + 1, 0
        if step >= 0 and event.start_time_ns <= steps[step].end_time_ns and not left_out.get(address):
            live += size
            found[step] = max(found[step], live)
    return min(found)


def in_copies(count: int, work: Callable[..., None], *args: Any) -> int:
    """Call ``work`` in copies of this process, as torchrun starts processes; return the largest exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(rank: int) -> None:
        sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ |= {name: str(size) for name, size in sizes.items()}
        os.environ |= {"TORCHELASTIC_RUN_ID": "plan", "MASTER_ADDR": "127.0.0.1"}
        work(*args)

    # Imports are most of the time of a short run, some of the first trainer: the copies find them done.
    trainer(devices=1)
    started = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return max(abs(process.exitcode or 0) for process in started)


if __name__ == "__main__":
    sys.exit(in_copies(2, main, sys.argv[1], strategies(), 2))
