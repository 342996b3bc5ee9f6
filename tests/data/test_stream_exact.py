"""A run that is stopped anywhere and goes on in a new process sees what an uninterrupted plain loop sees."""

from __future__ import annotations

import io
import json
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


def test_workers_go_on_in_a_new_process(tmp_path: Path) -> None:
    cases = []
    for workers, names in CASES.items():
        persistent = "persistent" in workers
        for name in names:
            cases.append([name, workers, 3 if persistent and name in names[-2:] else None])
    # Recorded in a small process, too: each worker is a copy of the one that starts it.
    for words in ([json.dumps(cases)], []):
        result = fork_python("-m", "tests.data.programs", tmp_path / "cases.pt", *words)
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
