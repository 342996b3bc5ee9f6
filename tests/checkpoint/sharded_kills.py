"""A program that starts processes which save one sharded checkpoint together, and kills one at a random moment.

``python sharded_kills.py FOLDER KILLS`` prints the number of the last checkpoint, and how many kills left files behind.
It fails at the first checkpoint that is torn. Further words: ``background`` saves as AsyncCheckpointIO does, and a
number is how many processes save together, 2 by default.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The first DTensor imports it; the processes are to have it from here.
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hasten.checkpoint import files
from hasten.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from tests.checkpoint.kills import kill_savers

ROWS = 20_000


def save_for_ever(io: CheckpointIO, path: Path, number: int, rank: int, world: int, meeting: Path) -> None:
    """Save checkpoints that can be told from one another, until this process or another one is killed."""
    store = dist.FileStore(str(meeting), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    mesh = init_device_mesh("cpu", (world,))
    while True:
        number += 1
        weight = DTensor.from_local(torch.full((ROWS, 2), float(number)), mesh, [Shard(0)])
        io.save_folder({"number": number, "state_dict": {"weight": weight}}, path)


def start(io: CheckpointIO, path: Path, number: int, rank: int, world: int, meeting: Path) -> int:
    """Start one of the processes; return its id."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            save_for_ever(io, path, number, rank, world, meeting)
        finally:
            os._exit(1)
    return child


def main(folder: Path, kills: int, io: CheckpointIO, world: int) -> None:
    """Kill one process of those that save a folder together."""
    path = folder / "last.ckpt"
    # The same goes for what the first save imports.
    files.save_folder({"number": 0, "state_dict": {"weight": torch.zeros(ROWS * world, 2)}}, path)

    def start_all(number: int, kill: int) -> list[int]:
        meeting = folder.with_name(f"meeting-{kill}")
        meeting.unlink(missing_ok=True)
        before = set(folder.iterdir())
        children = [start(io, path, number, rank, world, meeting) for rank in range(world)]
        began = time.monotonic()
        # Until they have begun to save, which takes longest.
        while not set(folder.iterdir()) - before:
            assert time.monotonic() - began < 600, "nothing is being saved"
            time.sleep(0.001)
        return children

    def read() -> dict[str, Any]:
        files.verify(path)
        contents = files.load(path).whole()
        weight = contents["state_dict"]["weight"]
        assert weight.shape == (ROWS * world, 2)
        return {"number": contents["number"], "weight": weight}

    # On a busy machine some kills come between two saves: then there are more of them.
    enough = lambda in_the_middle: in_the_middle > 1  # noqa: E731
    # More processes take longer to save.
    kill_savers(path, kills, start_all, read, wait_seconds=0.025 * world**2, is_enough=enough, most=4)


if __name__ == "__main__":
    words = sys.argv[3:]
    numbers = [int(word) for word in words if word.isdigit()]
    plugin = AsyncCheckpointIO() if "background" in words else TorchCheckpointIO()
    main(Path(sys.argv[1]), int(sys.argv[2]), plugin, *(numbers or [2]))
