"""A program that starts processes which save one sharded checkpoint together, and kills one at a random moment.

``python sharded_kills.py FOLDER KILLS`` prints the number of the last checkpoint, and how many kills left files behind.
With a third word, ``background``, they save as AsyncCheckpointIO does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # The first DTensor imports it; the processes are to have it from here.
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hasten.checkpoint import files
from hasten.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

WORLD = 2
ROWS = 20_000


def save_for_ever(io: CheckpointIO, path: Path, number: int, rank: int, meeting: Path) -> None:
    """Save checkpoints that can be told from one another, until this process or another one is killed."""
    store = dist.FileStore(str(meeting), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    mesh = init_device_mesh("cpu", (WORLD,))
    while True:
        number += 1
        weight = DTensor.from_local(torch.full((ROWS, 2), float(number)), mesh, [Shard(0)])
        io.save_folder({"number": number, "state_dict": {"weight": weight}}, path)


def start(io: CheckpointIO, path: Path, number: int, rank: int, meeting: Path) -> int:
    """Start one of the processes; return its id."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            save_for_ever(io, path, number, rank, meeting)
        finally:
            os._exit(1)
    return child


def main(folder: Path, kills: int, io: CheckpointIO) -> None:
    """Kill one process of those that save, again and again; the newest checkpoint is whole each time."""
    torch.set_num_threads(1)
    chance = random.Random(0)
    path = folder / "last.ckpt"
    number = in_the_middle = 0
    # The same goes for what the first save imports.
    files.save_folder({"number": 0, "state_dict": {"weight": torch.zeros(ROWS * WORLD, 2)}}, path)
    # On a busy machine some kills come between two saves: then there are more of them.
    for kill in range(4 * kills):
        if kill >= kills and in_the_middle > 1:
            break
        meeting = folder.with_name(f"meeting-{kill}")
        children = [start(io, path, number, rank, meeting) for rank in range(WORLD)]
        began = time.monotonic()
        # Until they have begun to save, which takes longest.
        before = set(folder.iterdir())
        while not set(folder.iterdir()) - before:
            assert time.monotonic() - began < 60, "nothing is being saved"
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(chance.choice(children), signal.SIGKILL)
        for child in children:
            # The other one finds out by itself.
            os.waitpid(child, 0)
        in_the_middle += len(list(folder.iterdir())) > 1
        files.verify(path)
        contents = files.load(path).whole()
        assert contents["number"] >= number, "an older checkpoint came back"
        weight = contents["state_dict"]["weight"]
        assert weight.shape == (ROWS * WORLD, 2)
        assert (weight == contents["number"]).all(), "parts of two checkpoints"
        number = contents["number"]
        if chance.random() < 0.5:
            files.clean(folder)
            assert [each.name for each in folder.iterdir()] == ["last.ckpt"]
    files.clean(folder)
    assert [each.name for each in folder.iterdir()] == ["last.ckpt"]
    print(number, in_the_middle)


if __name__ == "__main__":
    in_background = sys.argv[3:] == ["background"]
    main(Path(sys.argv[1]), int(sys.argv[2]), AsyncCheckpointIO() if in_background else TorchCheckpointIO())
