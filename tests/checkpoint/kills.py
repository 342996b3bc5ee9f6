"""A program that starts savers, kills them at random moments and looks at what they leave behind.

``python kills.py FOLDER KILLS`` prints the number of the last checkpoint, and how many kills left files behind.
``kill_savers`` is its loop, for any kind of checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint import files

# (number of the newest checkpoint, number of the kill) -> the processes that save from now on
Start = Callable[[int, int], list[int]]


def kill_savers(
    path: Path,
    kills: int,
    start: Start,
    read: Callable[[], dict[str, Any]],
    *,
    wait_seconds: float,
    is_enough: Callable[[int], bool] = lambda in_the_middle: True,
    most: int = 1,
) -> None:
    """Kill one saver after another; the newest checkpoint is whole each time. Print what came out.

    Args:
        path: the checkpoint, which is there and has number 0.
        kills: how many.
        start: starts the processes that save together, of which one is killed.
        read: returns number and weight of the checkpoint.
        wait_seconds: kill at most so long after the start.
        is_enough: whether so many kills in the middle of a save are enough; if not, there are more.
        most: go on for at most so many times ``kills``.

    """
    torch.set_num_threads(1)
    chance, folder = random.Random(0), path.parent
    number = in_the_middle = 0
    for kill in range(most * kills):
        if kill >= kills and is_enough(in_the_middle):
            break
        children = start(number, kill)
        time.sleep(chance.uniform(0.0, wait_seconds))
        os.kill(chance.choice(children), signal.SIGKILL)
        for child in children:
            # Others find out by themselves.
            os.waitpid(child, 0)
        in_the_middle += len(list(folder.iterdir())) > 1
        contents = read()
        assert contents["number"] >= number, "an older checkpoint came back"
        assert (contents["weight"] == contents["number"]).all(), "parts of two checkpoints"
        number = contents["number"]
        if chance.random() < 0.5:
            files.clean(folder)
            assert [each.name for each in folder.iterdir()] == [path.name]
    files.clean(folder)
    assert [each.name for each in folder.iterdir()] == [path.name]
    print(number, in_the_middle)


def save_for_ever(path: Path, number: int) -> None:
    """Save checkpoints that can be told from one another, until killed."""
    while True:
        number += 1
        files.save({"number": number, "weight": torch.full((40_000,), float(number))}, path)


def main(folder: Path, kills: int) -> None:
    """Kill savers of one file."""
    path = folder / "last.ckpt"
    files.save({"number": 0, "weight": torch.zeros(40_000)}, path)

    def start(number: int, kill: int) -> list[int]:
        child = os.fork()
        if not child:
            save_for_ever(path, number)
        return [child]

    kill_savers(path, kills, start, lambda: files.load(path), wait_seconds=0.04)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
