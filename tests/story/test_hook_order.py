"""The documented order of the hooks is the order in which they run."""

from __future__ import annotations

import pytest

from tests.story import hook_order


@pytest.mark.filterwarnings("ignore")
def test_documented_order_is_that_of_a_run() -> None:
    assert hook_order.page() == hook_order.PAGE.read_text(), (
        "The order of the hooks changed. If that is on purpose: python -m tests.story.hook_order --write"
    )
