"""A program that starts savers, kills them at random moments and looks at what they leave behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from hasten.checkpoint import files


def save_for_ever(path: Path, number: int) -> None:
    """Save checkpoints that can be told from one another, until killed."""
    while True:
        number += 1
        files.save({"number": number, "weight": torch.full((40_000,), float(number))}, path)


def main(folder: Path, kills: int) -> None:
    """Kill savers; print how many kills came in the middle of a save."""
    torch.set_num_threads(1)
    chance = random.Random(0)
    path = folder / "last.ckpt"
    files.save({"number": 0, "weight": torch.zeros(40_000)}, path)
    number = in_the_middle = 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            save_for_ever(path, number)
        time.sleep(chance.uniform(0.0, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        in_the_middle += len(list(folder.iterdir())) > 1
        contents = files.load(path)
        assert contents["number"] >= number, "an older checkpoint came back"
        assert (contents["weight"] == contents["number"]).all(), "parts of two checkpoints"
        number = contents["number"]
        if chance.random() < 0.5:
            files.clean(folder)
            assert [each.name for each in folder.iterdir()] == ["last.ckpt"]
    files.clean(folder)
    assert [each.name for each in folder.iterdir()] == ["last.ckpt"]
    print(number, in_the_middle)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
