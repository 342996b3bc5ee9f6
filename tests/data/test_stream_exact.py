"""A run that is stopped anywhere and goes on in a new process sees what an uninterrupted plain loop sees."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import programs
from tests.data.programs import make, names_for, plain_run, stream_run

IN_PROCESS = names_for("0 workers")
ROOT = Path(__file__).parents[2]


def through_a_file(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def reads_ahead(name: str) -> bool:
    """Say whether the end is not known beforehand: then fetching is one batch ahead of training."""
    return name == "own class" or (name.startswith("iterable") and "length" not in name)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("name", [name for name in IN_PROCESS if not reads_ahead(name)])
def test_uninterrupted_stream_equals_the_plain_loop(name: str, limit: int | None) -> None:
    assert stream_run(make(name, "0 workers"), limit)[0] == plain_run(make(name, "0 workers"), limit)


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if reads_ahead(name) and name != "own class"])
def test_stream_of_unknown_length_has_the_samples_of_the_plain_loop(name: str) -> None:
    seen, _ = stream_run(make(name, "0 workers"))
    plain = plain_run(make(name, "0 workers"))
    assert [int(step[0]) for step in seen] == [int(step[0]) for step in plain]


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_resumed_stream_goes_on_as_if_nothing_happened(name: str, limit: int | None) -> None:
    expected, states = stream_run(make(name, "0 workers"), limit)
    assert not programs.differing(name, "0 workers", limit, expected, through_a_file(states))


def some(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return few states of different kinds: at the end of an epoch, in the middle of one, before a step."""
    after = [state for state in states if not state["again"]]
    first_end = next(place for place, state in enumerate(after) if state["ended"])
    return [after[first_end], after[first_end + 3], states[2]]


EPHEMERAL = [
    "in order",
    "shuffled",
    "own generator",
    "with replacement",
    "weighted",
    "eager sampler",
    "sampler with state",
    "batch sampler",
    "not batched",
    "iterable",
    "iterable with state",
    "subclass with its own iteration",
    "own worker_init_fn",
]
PERSISTENT = [
    "shuffled",
    "own generator",
    "weighted, own generator",
    "sampler by epoch",
    "batch sampler",
    "not batched",
    "iterable, not batched",
    "iterable with state",
    "subclass with its own iteration",
]


@pytest.mark.parametrize(
    ("workers", "names", "limit"),
    [
        ("2 workers", EPHEMERAL, None),
        ("2 persistent workers", PERSISTENT, None),
        ("2 persistent workers", ["shuffled", "own generator", "iterable"], 3),
        ("3 workers, 1 ahead", ["shuffled", "iterable with state"], None),
    ],
    ids=["ephemeral", "persistent", "persistent, limited", "three"],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_workers_go_on_in_a_new_process(
    workers: str, names: list[str], limit: int | None, tmp_path: Path
) -> None:
    cases = []
    for name in names:
        seen, states = stream_run(make(name, workers), limit)
        assert seen == plain_run(make(name, workers), limit), name
        cases.append([name, workers, limit, seen, some(states)])
    path = tmp_path / "cases.pt"
    torch.save(cases, path)
    program = [sys.executable, "-W", "ignore", "-m", "tests.data.programs", str(path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    result = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
