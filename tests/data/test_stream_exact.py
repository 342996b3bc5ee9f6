"""A run that is stopped anywhere and goes on in a new process sees what an uninterrupted plain loop sees."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import programs
from tests.data.programs import LOADERS, make, plain_run, stream_run
from tests.programs import run_python


def through_a_file(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_uninterrupted_and_resumed_streams_equal_the_plain_loop(name: str, limit: int | None) -> None:
    expected, states = stream_run(make(name, "0 workers"), limit)
    plain = plain_run(make(name, "0 workers"), limit)
    if not (name == "own class" or (name.startswith("iterable") and "length" not in name)):
        assert expected == plain
    elif name != "own class" and limit is None:
        # The end is not known beforehand: fetching is one batch ahead of training, and draws other numbers.
        assert [int(step[0]) for step in expected] == [int(step[0]) for step in plain]
    assert not programs.differing(name, "0 workers", limit, expected, through_a_file(states))


def some(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return states of different kinds: at the end of an epoch, in the middle of one, before a step."""
    after = [state for state in states if not state["again"]]
    first_end = next(place for place, state in enumerate(after) if state["ended"])
    return [after[first_end], after[first_end + 3], states[2]]


EPHEMERAL = (
    "shuffled",
    "eager sampler",
    "sampler with state",
    "batch sampler",
    "iterable",
    "iterable with state",
    "subclass with its own iteration",
    "own worker_init_fn",
)
PERSISTENT = (
    "shuffled",
    "weighted, own generator",
    "sampler by epoch",
    "not batched",
    "iterable, not batched",
    "iterable with state",
    "subclass with its own iteration",
)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_workers_go_on_in_a_new_process(tmp_path: Path) -> None:
    cases = []
    for workers, names, limit in (
        ("2 workers", EPHEMERAL, None),
        ("2 persistent workers", PERSISTENT, None),
        ("2 persistent workers", ("own generator", "iterable"), 3),
        ("3 workers, 1 ahead", ("shuffled", "iterable with state"), None),
    ):
        for name in names:
            seen, states = stream_run(make(name, workers), limit)
            assert seen == plain_run(make(name, workers), limit), (name, workers)
            cases.append([name, workers, limit, seen, some(states)])
    torch.save(cases, tmp_path / "cases.pt")
    result = run_python("-W", "ignore", "-m", "tests.data.programs", tmp_path / "cases.pt", timeout=300)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
