"""A run that is stopped anywhere and goes on in a new process sees what an uninterrupted plain loop sees."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import programs
from tests.data.programs import LOADERS, make, plain_run, stream_run
from tests.programs import fork_python


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


def some(states: list[dict[str, Any]], *, persistent: bool) -> list[dict[str, Any]]:
    """Return states of different kinds: in the middle of an epoch, before a step, at the end of an epoch."""
    after = [state for state in states if not state["again"]]
    first_end = next(place for place, state in enumerate(after) if state["ended"])
    # At the end, workers that do not persist are gone: nothing of them is in the state.
    return [after[first_end + 3], states[2], *([after[first_end]] if persistent else [])]


CASES = {
    "2 workers": (
        "sampler with state",
        "iterable",
        "subclass with its own iteration",
        "own worker_init_fn",
    ),
    "3 workers, 1 ahead": ("shuffled", "iterable with state"),
    "2 persistent workers": (
        "shuffled",
        "sampler by epoch",
        "not batched",
        "iterable with state",
        "subclass with its own iteration",
        "own generator",  # With a limit.
        "iterable, not batched",  # With a limit.
    ),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_workers_go_on_in_a_new_process(tmp_path: Path) -> None:
    cases = []
    for workers, names in CASES.items():
        persistent = "persistent" in workers
        for name in names:
            limit = 3 if persistent and name in names[-2:] else None
            seen, states = stream_run(make(name, workers), limit)
            assert seen == plain_run(make(name, workers), limit), (name, workers)
            cases.append([name, workers, limit, seen, some(states, persistent=persistent)])
    torch.save(cases, tmp_path / "cases.pt")
    result = fork_python("-m", "tests.data.programs", tmp_path / "cases.pt")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
