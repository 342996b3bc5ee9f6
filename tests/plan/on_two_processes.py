"""Train a small transformer on two processes under each strategy, and write what a step held and sent.

Run as ``python on_two_processes.py FILE``; the test of plans imports the model and the data.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

import hasten as L
from hasten.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from hasten.strategies.mesh.stages import is_absent
from hasten_tools.plan import Ledger

WORDS, WIDTH, TOKENS, STEP = 300, 96, 40, 2
SOON = timedelta(seconds=60)


class Transformer(L.LightningModule):
    """Three blocks, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.embedding(batch)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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
    return L.Trainer(accelerator="cpu", max_steps=STEP + 1, gradient_clip_val=1.0, **off, **given)


class _Watch(L.Callback):
    """Counts what one step sends, and marks it for the profiler."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger
        self.found: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEP:
            self.ledger.restart()
            self.found["held"] = self.ledger.live
            self.mark = record_function(f"STEP {self.name}")
            self.mark.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEP:
            self.mark.__exit__(None, None, None)
            sent = {name: [one.calls, one.payload_bytes, one.ring_bytes] for name, one in self.ledger.sent.items()}
            links = {name: one.links() for name, one in self.ledger.sent.items()}
            own = [(name, p) for name, p in pl_module.named_parameters() if not is_absent(p)]
            parts = {name: getattr(p, "_local_tensor", p) for name, p in own}
            shards = {name: list(part.shape) for name, part in parts.items()}
            self.found |= {"sent": sent, "links": links, "shards": shards}


def main(file: str, strategies: dict[str, Any], devices: int, per_machine: int | None = None) -> None:
    """Train under each strategy on ``devices`` processes, as if ``per_machine`` of them were on each machine."""
    found: dict[str, Any] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for name, strategy in strategies.items():
            gc.collect()
            with Ledger(per_machine) as ledger:
                watch = _Watch(name, ledger)
                run = trainer(devices=devices, strategy=strategy, callbacks=[watch])
                run.fit(Transformer(), loader())
            found[name] = watch.found
    if not run.is_global_zero:
        return
    assert profiler.profiler is not None
    for name, growth in _growth(profiler.profiler.kineto_results.events()).items():
        found[name]["peak"] = found[name]["held"] + growth
    Path(file).write_text(json.dumps(found), encoding="utf-8")


def _growth(events: Any) -> dict[str, int]:
    """Return how much more than at its start the allocator held in each step, which the ledger has no part in.

    What was held before cannot be taken from the allocator: the threads of gloo free tensors, too, and are not seen.
    """
    found: dict[str, int] = {}
    name, end, live = "", 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        word, _, rest = event.name().partition(" ")
        if word == "STEP":
            name, end, live = rest, event.end_ns(), 0
            found[name] = 0
        elif word == "[memory]" and event.start_ns() <= end:
            live += event.nbytes()
            found[name] = max(found[name], live)
    return found


if __name__ == "__main__":
    main(sys.argv[1], strategies(), devices=2)
