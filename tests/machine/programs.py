"""A program of two processes that can go wrong in several ways.

Arguments: strategy, what happens, folder for what the processes note.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from hasten.machine.signals import StopRequests
from hasten.resolve import runtime
from hasten.runtime import Runtime

STEPS = 20


def train(run: Runtime, mode: str, folder: str) -> None:
    """Train a linear model on each process's half of the data."""
    rank = run.global_rank
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.place(model)
    wrapped = run.wrap(model)
    forward = run.bind(lambda x: model(x).pow(2).mean(), module=model, wrapped=wrapped, training=True)
    step, zero_grad = run.engine.make_step(optimizer), run.engine.make_zero_grad(optimizer)
    with StopRequests(run.all_reduce if run.world_size > 1 else None) as stop:
        for i in range(STEPS if mode != "endless" else 100_000):
            zero_grad()
            run.engine.backward(forward(torch.ones(4, 4)))
            step()
            if i == 3:
                Path(folder, f"started-{rank}").touch()
                if mode == f"rank{rank} ends its steps":
                    return
                misbehave(mode, rank)
            if mode == "endless":
                time.sleep(0.002)
                if stop.due(i) and (number := stop.agreed()) is not None:
                    Path(folder, f"stopped-{rank}").write_text(f"{number} {i}")
                    run.barrier()
                    raise SystemExit(128 + number)


def misbehave(mode: str, rank: int) -> None:
    """Do what ``mode`` describes: "rank1 dies", "rank1 exits with 0", or "rank1 exits, others sleep", ...."""
    if mode.endswith("others sleep") and not mode.startswith(f"rank{rank}"):
        time.sleep(600)
    if not mode.startswith(f"rank{rank} "):
        return
    if "dies" in mode:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exits" in mode:
        os._exit(0 if mode.endswith("0") else 3)
    if "is interrupted" in mode:
        raise KeyboardInterrupt
    if "leaves" in mode:
        sys.exit(0)
    if "raises" in mode:
        raise KeyError("a mistake of the user's")


def train_here(mode: str, folder: str) -> None:
    """Train in a process that is one of two already."""
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    run.launch(train, run, mode, folder)


def main() -> None:
    strategy, mode, folder = sys.argv[1:4]
    folder = os.path.abspath(folder)
    # The other processes find the same folder nevertheless.
    os.chdir("/")
    if mode == "rank1 ends before" and os.environ.get("LOCAL_RANK") == "1":
        sys.exit(0)
    run = runtime(accelerator="cpu", devices=2, strategy=strategy)
    run.launch(train, run, mode, folder)


if __name__ == "__main__":
    main()
