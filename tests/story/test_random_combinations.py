"""Random combinations of speed-ups, optimizers, loaders, changes in mid-run and resumes equal the loop by hand."""

from __future__ import annotations

import pytest

from tests.story.check_combinations import check
from tests.story.combinations import draw


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--combinations")))


def test_a_combination_equals_the_loop_by_hand(seed: int) -> None:
    check(draw(seed))
