"""How results are shown: factors that say something, and a verdict that fits on a page."""

from __future__ import annotations

import math
import re

import pytest

from hasten_tools.speed.advice import Advice, Line, Row
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import speed_text


@pytest.mark.parametrize(
    ("speed", "low", "high", "text"),
    [
        (1.8, 1.6, 2.0, "1.8x (1.6x to 2.0x)"),
        (1.066, 1.049, 1.08, "1.07x (1.05x to 1.08x)"),
        (2.0, 2.0, 2.0, "2.0x"),
        # Seen on busy machines.
        (174.0, 72.47, 419.83, "at least 72x"),
        (0.73, 0.02, 27.0, ""),
        (1.0, 0.0, 139537.0, ""),
        (3.0, 0.0, math.inf, ""),
        (0.2, 0.01, 0.6, "at most 0.60x"),
        (3.0, None, None, "3.0x"),
        (None, None, None, ""),
        (math.nan, 1.0, 2.0, ""),
        (math.inf, 1.0, math.inf, ""),
        (0.0, 0.0, 0.0, ""),
    ],
)
def test_a_factor_is_named_as_far_as_it_is_known(
    speed: float | None, low: float | None, high: float | None, text: str
) -> None:
    assert speed_text(speed, low, high) == text


def advice(*, noise: float = 0.05, rows: int = 40, long: str = "") -> Advice:
    verdicts = ["wins", "no gain", "slower", "wrong", "refused", "failed", "no time", "unclear", "not here", "needed"]
    found = [
        Row(
            f"lever {number}{long}", f"L.Trainer(..., lever_{number}=True)", Safety.ROUNDING,
            verdicts[number % len(verdicts)], reason="why" * 90, gain=1.5, speed=12345.678, low=10000.123, high=20000.0,
            step_seconds=98765.4321, samples_per_second=123456789.0, one_time_seconds=-1234.5, mfu=0.123,
        )
        for number in range(rows)
    ]  # fmt: skip
    names = [row.name for row in found[:9]]
    line = "L.Trainer(..., " + ", ".join(f"argument_{number}=True" for number in range(9)) + ")"
    lines = [
        Line(safety, line, names, speed, speed * 0.9, speed * 1.1, speed * 0.85)
        for safety, speed in ((Safety.ROUNDING, 2.0), (Safety.OTHER_BATCHES, 3.0), (Safety.OTHER_MATHS, 4.0))
    ]
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0, step_seconds=123456.789)
    facts = {"device": "AMD EPYC 9R14 96-Core Processor" * 3, "device_type": "cpu", "threads": 96, "torch": "2.13"}
    return Advice(
        f"train{long}.py", unchanged, found, lines=lines, facts=facts, noise=noise, needed_seconds=300.0, seconds=89.0
    )


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("long", ["", " with quite a long name " * 4])
@pytest.mark.parametrize("noise", [0.05, 1.5])
def test_the_verdict_fits_on_ten_lines(width: int, long: str, noise: float) -> None:
    found = advice(noise=noise, long=long)
    lines = found.summary(width).splitlines()
    if width >= 80:
        assert len(lines) <= 10
    assert ".py: at least 1.7x" in lines[0] if noise > 1 else ".py: 2.0x (1.8x to 2.2x)" in lines[0]
    assert max(map(len, lines)) <= width
    text = " ".join(line.strip() for line in lines)
    # Every line to write is whole.
    assert text.count("argument_8=True)") == 2
    # What does not apply is left to the table; a speed-up is named once.
    assert "lever 8" not in text
    names = re.findall(r"lever (\d+)", text)
    assert len(names) == len(set(names))


def test_columns_do_not_run_into_each_other() -> None:
    for width in (80, 100):
        table = advice(long=" with a long name").table(width)
        assert max(map(len, table.splitlines())) <= width
        row = next(line for line in table.splitlines() if line.startswith("lever 0 "))
        cells = re.split(r"  +", row)
        assert cells[1:3] == ["wins", "12,346x (10,000x to 20,000x)"]
        assert len(cells) == (4 if width == 80 else 5)


def test_figures_of_a_noisy_machine_are_ends_that_several_turns_agree_on() -> None:
    assert advice(noise=1.51).summary().startswith("train.py: at least 1.7x as fast")
    assert "1.8x to 2.2x" in advice().summary()
