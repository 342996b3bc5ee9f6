"""A program of two processes, started in every way there is, that can go wrong in every way there is.

Arguments: strategy, what happens, folder for what the processes note.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten.machine.signals import StopRequests
from hasten.resolve import runtime
from hasten.runtime import Runtime

STEPS = 20


def train(run: Runtime, mode: str, folder: str) -> list[float]:
    """Train a linear model on each process's half of the data; return its weights."""
    rank = run.global_rank
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.place(model)
    wrapped = run.wrap(model)
    forward = run.bind(lambda x: model(x).pow(2).mean(), module=model, wrapped=wrapped, training=True)
    step, zero_grad = run.make_step(optimizer), run.make_zero_grad(optimizer)
    generator = torch.Generator().manual_seed(1)
    with StopRequests(run.all_reduce if run.world_size > 1 else None) as stop:
        for i in range(STEPS if mode != "endless" else 100_000):
            x = torch.randn(8, 4, generator=generator)[rank :: run.world_size]
            zero_grad()
            run.backward(forward(x))
            step()
            if i == 3:
                Path(folder, f"started-{rank}").touch()
                misbehave(mode, rank)
            if mode == "endless":
                time.sleep(0.002)
                if stop.due(i) and (number := stop.agreed()) is not None:
                    Path(folder, f"stopped-{rank}").write_text(f"{number} {i}")
                    run.barrier()
                    raise SystemExit(128 + number)
    return [float(value) for value in model.weight.detach().flatten()]


def misbehave(mode: str, rank: int) -> None:
    """Do what ``mode`` describes: "rank1 dies", "rank1 exits", "rank0 raises", or "rank1 exits, others sleep"."""
    if mode.endswith("others sleep") and not mode.startswith(f"rank{rank}"):
        time.sleep(600)
    if not mode.startswith(f"rank{rank} "):
        return
    if "dies" in mode:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exits" in mode:
        os._exit(3)
    if "raises" in mode:
        raise KeyError("a mistake of the user's")


def train_here(mode: str, folder: str) -> list[float]:
    """Train in a process that is one of two already."""
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    weights: list[float] = run.launch(train, run, mode, folder)
    return weights


def main() -> None:
    strategy, mode, folder = sys.argv[1:4]
    devices: Any = "auto" if strategy == "auto" else 2
    run = runtime(accelerator="cpu", devices=devices, strategy=strategy)
    weights = run.launch(train, run, mode, folder)
    if strategy == "ddp":
        assert weights == run.launch(train, run, mode, folder)  # In the processes that run already.
    local_rank = os.environ.get("LOCAL_RANK", "0")
    Path(folder, f"weights-{local_rank}").write_text(" ".join(value.hex() for value in weights))


if __name__ == "__main__":
    main()
