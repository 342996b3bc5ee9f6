"""A few inputs for each target, the same in every run; ``make fuzz`` tries 100,000."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.found import ROWS, Row
from tests.fuzz.running import in_empty_folder, quietly, run
from tests.fuzz.targets import TARGETS
from tests.programs import ROOT, fork_python

# Tests of other files make the names of Lightning, under which arguments are taken as they are.
OWN_PROCESS = "arguments"
IN_THIS_PROCESS = [row for row in ROWS if row.target != OWN_PROCESS]


def examples_of(name: str) -> int:
    """Return how many inputs are tried."""
    return int(os.environ.get("HASTEN_FUZZ_EXAMPLES", TARGETS[name].in_suite))


@pytest.mark.parametrize("name", [name for name in TARGETS if name != OWN_PROCESS])
def test_inputs_are_handled_as_promised(name: str) -> None:
    assert run(TARGETS[name], examples_of(name), stops=True).tried


@pytest.mark.parametrize("row", IN_THIS_PROCESS, ids=range(len(IN_THIS_PROCESS)))
def test_what_was_found_is_handled_now(row: Row) -> None:
    with quietly(), in_empty_folder():
        TARGETS[row.target].check(row.value)


def test_arguments_fit_or_are_refused_by_name() -> None:
    done = fork_python(
        "-m", "tests.fuzz", "--again", "--examples", str(examples_of(OWN_PROCESS)), OWN_PROCESS, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
