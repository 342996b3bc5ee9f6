"""A tiny archive in the layout of aclImdb_v1.tar.gz, and rows trained in this process."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.demo import row
from hasten.demo.task import RowVariant, Task

WORDS = {"pos": ["wonderful", "moving", "brilliant"], "neg": ["boring", "dreadful", "clumsy"]}


def review(kind: str, number: int) -> str:
    chance = random.Random(f"{kind}{number}")
    words = [chance.choice([*WORDS[kind], "the", "film", "was", "a"]) for _ in range(chance.randint(4, 60))]
    return " ".join([*words, f"number {number}"])


def members(count: int) -> dict[str, str]:
    """File names and texts of ``4 * count`` labelled reviews, and two without a label."""
    found = {
        f"aclImdb/{part}/{kind}/{number}_7.txt": review(kind, number + (1000 if part == "test" else 0))
        for part in ("train", "test")
        for kind in ("pos", "neg")
        for number in range(count)
    }
    found["aclImdb/train/unsup/0_0.txt"] = "an unlabelled review"
    found["aclImdb/train/urls_pos.txt"] = "http://example.com"
    found["aclImdb/README"] = "read me"
    return found


def pack(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of 80 labelled reviews."""
    return pack(tmp_path / "aclImdb_v1.tar.gz", members(20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that ``archive`` unpacks to."""
    for name, text in members(20).items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "unpacked" / "aclImdb"


class Finished(BaseException):
    """The whole training is done."""


class InProcess:
    """The session of a row that is trained in this process, for its whole training."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.handlers: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []

    def ready(self) -> None:
        pass

    def after_step(self, loss: torch.Tensor, **counts: Any) -> None:
        self.turns.append({"loss": float(loss.detach()), **counts})
        if len(self.turns) == self.steps:
            raise Finished


def train(task: Task, variant: RowVariant) -> InProcess:
    """Train a row in full."""
    session = InProcess(task.steps(variant))
    with pytest.raises(Finished):
        row.run(session, task, variant, torch.get_num_threads())  # type: ignore[arg-type]
    return session


def weights_of(task: Task, variant: RowVariant) -> dict[str, torch.Tensor]:
    """Return the weights that a row ends with."""
    found: dict[str, torch.Tensor] = train(task, variant).handlers["accuracy"].__self__.weights
    return found
