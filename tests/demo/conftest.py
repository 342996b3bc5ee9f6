"""A tiny archive in the layout of aclImdb_v1.tar.gz, and rows that are faked or trained in this process."""

from __future__ import annotations

import math
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.speed.copies import trials_are_copies

from hasten_tools.demo import row
from hasten_tools.demo.task import RowVariant, Task
from hasten_tools.demo.text import Imdb
from hasten_tools.demo.text_models import ModelSource, find
from hasten_tools.speed.trial_processes import TrialError, Turn

__all__ = ["trials_are_copies"]

Seconds = Callable[[int], float]

WORDS = {"pos": ["wonderful", "moving", "brilliant"], "neg": ["boring", "dreadful", "clumsy"]}


def review(kind: str, number: int) -> str:
    chance = random.Random(f"{kind}{number}")
    words = [chance.choice([*WORDS[kind], "the", "film", "was", "a"]) for _ in range(chance.randint(4, 60))]
    return " ".join([*words, f"number {number}"])


def make_folder(folder: Path) -> Path:
    """80 labeled reviews, and files without a label."""
    texts = {
        f"{part}/{kind}/{number}_7.txt": review(kind, number + (1000 if part == "test" else 0))
        for part in ("train", "test")
        for kind in ("pos", "neg")
        for number in range(20)
    }
    others = {"train/unsup/0_0.txt": "an unlabeled review", "train/urls_pos.txt": "http://example.com"}
    for name, text in (texts | others).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def pack(path: Path, folder: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "unpacked" / "aclImdb")


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    return pack(tmp_path / "aclImdb_v1.tar.gz", folder)


def silent(line: str) -> None:
    """Say nothing."""


class Small(ModelSource):
    """Two blocks of 48 numbers: six of 384 take seconds a step in bfloat16 without instructions for it."""

    def build(self, **changes: Any) -> torch.nn.Module:
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
        return super().build(**sizes, **changes)


def imdb(data: Path, **options: Any) -> Imdb:
    """The task on a small model of random weights; tokens are kept beside the data."""
    source = Small(**vars(find("minilm", random_weights=True)))
    return Imdb(data, source, **{"max_length": 16, "cache": data.parent, "say": silent, **options})


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


class FakeTrial:
    """A row whose steps take a stated time, at each of its turns."""

    def __init__(self, task: Task, variant: RowVariant, seconds: Seconds) -> None:
        self.tokens = sum(task.lengths(RowVariant())) * task.epochs // task.steps(variant)
        self.seconds, self.turns, self.closed = seconds, 0, False

    def ready(self) -> dict[str, Any]:
        return {}

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        self.turns += 1
        seconds, tokens = self.seconds(self.turns), self.tokens * steps
        return Turn(seconds * steps, [seconds] * steps, tokens=tokens, slots=2 * tokens)

    def ask(self, name: str, **options: Any) -> dict[str, float]:
        return {"validation": 0.8, "test": 0.9}

    def close(self) -> None:
        self.closed = True


class FakeStarter:
    """Starts a fake trial for each variant, given the seconds of its steps or why it refuses."""

    def __init__(self, seconds_of: Callable[[RowVariant], float | Seconds | TrialError]) -> None:
        self.seconds_of = seconds_of
        self.started: list[tuple[RowVariant, int, FakeTrial]] = []

    def start(self, target: str, task: Task, variant: RowVariant, threads: int, name: str = "") -> FakeTrial:
        row = self.seconds_of(variant)
        if isinstance(row, TrialError):
            raise row
        seconds = row if callable(row) else lambda turn: row
        self.started.append((variant, task.seed, FakeTrial(task, variant, seconds)))
        return self.started[-1][2]

    def __enter__(self) -> FakeStarter:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def preload(self, modules: Sequence[str]) -> None:
        pass
