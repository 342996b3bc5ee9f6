"""A few inputs for each target, the same in every run; ``make fuzz`` tries 100,000."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.found import ROWS, Row
from tests.fuzz.running import in_empty_folder, quietly, run
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_handled_as_promised(name: str) -> None:
    examples = int(os.environ.get("HASTEN_FUZZ_EXAMPLES", TARGETS[name].in_suite))
    assert run(TARGETS[name], examples, stops=True).tried


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_what_was_found_is_handled_now(row: Row) -> None:
    with quietly(), in_empty_folder():
        TARGETS[row.target].check(row.value)
