"""The share of the peak: every product counted, and divided by the peak of its own type."""

from __future__ import annotations

import pytest

from hasten.demo import arithmetic
from hasten.demo.arithmetic import Arithmetic
from hasten.demo.task import Switches
from hasten.demo.vit import Vit

PEAKS = {"float32": 1e10, "tf32": 4e10, "bfloat16": 8e10}


@pytest.mark.parametrize(
    ("switches", "share"),
    [
        (Switches(), 0.8),
        (Switches(tf32=True), 0.2),
        (Switches(tf32=True, precision="bf16-mixed"), 0.1),
    ],
)
def test_a_row_is_compared_with_the_peak_of_its_own_type(switches: Switches, share: float) -> None:
    assert Arithmetic(8e10, PEAKS).mfu(switches, seconds=10.0) == pytest.approx(share)


def test_attention_of_a_transformer_counts() -> None:
    options = {"random_images": True, "limit": 60, "width": 64, "depth": 1, "say": lambda line: None}
    narrow, wide = (Vit(side=side, **options) for side in (64, 128))  # type: ignore[arg-type]
    (few, more) = ((task.side // 16) ** 2 for task in (narrow, wide))
    one, other = (arithmetic._counted(task, 0) for task in (narrow, wide))
    # Two products of (tokens, tokens, width), and twice as many backward; the rest grows with the tokens alone.
    extra = [3 * 2 * 2 * 64 * tokens**2 for tokens in (few, more)]
    assert other - extra[1] < 1.1 * (one - extra[0]) * more / few
    assert one > extra[0]
    assert other / one > more / few
