"""The measured ladder as table, chart, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten_tools.demo import outcome
from hasten_tools.demo.cumulative import Result
from hasten_tools.demo.images import Digits
from hasten_tools.demo.outcome import Arithmetic
from hasten_tools.demo.task import LadderRow, RowVariant, first_rows, lever_rows, rows_by_hand
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import Comparison, Turn

from .conftest import imdb

FACTS = {
    "device": "A processor with a rather long name @ 2.00GHz",
    "cores": 2,
    "threads": 2,
    "torch": "2.13.0+cpu",
    "hasten": "0.1.0",
    "python": "3.11.7",
    "system": "Linux",
}
TASK = Digits()


def turn(seconds: float, tokens: int = 1, slots: int | None = None) -> Turn:
    return Turn(seconds, [seconds], tokens=tokens, slots=slots)


def result(row: LadderRow, base: Result | None, seconds: list[float], **more: Any) -> Result:
    """A row of 117 steps, of which some were measured, in turns with the one it builds on."""
    variant = RowVariant() if base is None else row.on(base.variant)
    found = Result(row, variant, 117, 117, base, turns=[turn(each) for each in seconds], **more)
    if base is not None:
        found.comparison = Comparison()
        for mine, other in zip(found.turns, base.turns, strict=False):
            found.comparison.add(other, mine)
    return found


@pytest.fixture
def results() -> list[Result]:
    plain, same = first_rows(1)
    faster = LadderRow(
        "a switch with a name that is long",
        "from_pretrained(..., attention_probs_dropout_prob=0.0)",
        changes={"attention_dropout": False},
        safety=Safety.OTHER_MATHS,
    )
    (slower,) = lever_rows("bf16")
    first = result(plain, None, [11.0, 12.0, 13.0], ready_seconds=3.0)
    first.turns[0].slots, first.turns[0].tokens = 7, 1
    second = result(same, first, [11.0, 12.0, 13.0])
    third = result(faster, second, [2.75, 3.0, 3.25], full_seconds=362.0, accuracies=[0.852], validation_accuracy=0.84)
    fourth = result(slower, third, [55.0], kept=False)
    return [first, second, third, fourth]


def said(results: list[Result], **options: Any) -> str:
    return " ".join(outcome.table(TASK, results, FACTS, **options).split())


@pytest.mark.parametrize("width", [40, 80, 300])
def test_table_fits_and_says_all(results: list[Result], width: int) -> None:
    text = outcome.table(TASK, results, FACTS, width=width)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= max(72, min(100, width))
    assert text.isascii()
    assert not any(line != line.rstrip() for line in lines)
    flat = " ".join(text.split())
    for part in (
        "~1,404", "1.00x", "351", "4.00x", "85.2%", "0.20x", "2.13.0+cpu", "2 threads", "57%",
        "rows 1, 2, 3: 3 of 117 steps; row 4: 1 of 117 steps",
        "Row 3 was then trained in full, for its accuracy: in 362 s.",
        "* changes the maths",
        "- not faster here, so the rows below do without it: row 4.",
    ):  # fmt: skip
        assert part in flat


def test_what_starting_costs_is_in_the_second_speed(results: list[Result]) -> None:
    results[2].ready_seconds = 351.0
    # 1,404 s and 3 s of starting, against 351 s and as much again.
    assert "4.00x 2.00x" in said(results)


def test_single_rows_have_their_notes(results: list[Result]) -> None:
    (row,) = lever_rows("compiled")
    compiled = result(row, None, [1.0], ready_seconds=23.0)
    assert "Row 2: 23.0 s went by before its steps, compiling." in said([results[0], compiled])
    results[2].accuracies = [0.85, 0.86, 0.87]
    assert "Row 3: accuracy over 3 seeds 86.0% +- 0.6% (85.0%, 86.0%, 87.0%)." in said(results)
    results[2].in_full = True
    assert "351" in said([results[2]])
    assert "~" not in said([results[2]])


def test_the_fastest_row_is_compared_with_the_loop_a_good_engineer_writes(results: list[Result]) -> None:
    first, second, *_ = results
    padded, engineer = rows_by_hand(bf16=True)
    (packed,) = lever_rows("packed")
    by_hand = [result(padded, first, [4.0], kept=False), result(engineer, first, [2.0], kept=False)]
    fastest = result(packed, second, [1.0])
    everything = [first, *by_hand, second, fastest]
    assert f"Row 5 is {by_hand[1].seconds / fastest.seconds:.2f}x as fast as row 3," in said(everything)
    # Only what hasten trains is a line to write.
    (line,) = outcome.lines_to_write([first, by_hand[1], second])
    assert line.startswith("trainer = L.Trainer()")


def test_a_busy_machine_is_said(results: list[Result]) -> None:
    note = "This machine was busy: the same work in row 2 took up to 2.7 times as long."
    assert note not in said(results)
    results[1].turns[1] = turn(30.0)
    assert note in said(results)
    # A turn with more tokens takes longer anyway.
    results[1].turns[1] = turn(30.0, tokens=2)
    assert note not in said(results)


def test_the_lines_to_write_keep_the_maths(results: list[Result]) -> None:
    found = results[:2]
    for row, seconds in zip(lever_rows("packed", "pages kept", "bf16", draws=False), (3.0, 2.0, 1.0), strict=True):
        found.append(result(row, found[-1], [seconds]))
        found[-1].comparison = None
    kept = 'trainer = L.Trainer(packed=True, allocator="keep")  # 6.00x; same maths up to rounding'
    assert outcome.lines_to_write([*found, results[2]]) == [
        kept,
        'trainer = L.Trainer(packed=True, allocator="keep", precision="bf16-mixed")  # 12.0x; lower precision',
    ]
    assert outcome.lines_to_write(found[:4]) == [kept]


def test_files_hold_every_row_and_the_command(results: list[Result], tmp_path: Path) -> None:
    from matplotlib.image import imread

    files = outcome.write(tmp_path / "made", TASK, results, FACTS, "hasten demo --epochs 1")
    assert [path.name for path in files] == ["digits.csv", "digits.json", "digits.png"]
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [result.row.name for result in results]
    assert [float(row["speed"]) for row in rows] == pytest.approx([1.0, 1.0, 4.0, 0.2])
    assert [row["test_accuracy"] for row in rows] == ["", "", "0.852", ""]
    whole = json.loads(files[1].read_text())
    assert whole["command"] == "hasten demo --epochs 1"
    assert whole["hardware"] == FACTS
    assert all(row["sampled"] for row in whole["rows"])
    first, _, third, _ = whole["rows"]
    assert first["step_seconds"] == [11.0, 12.0, 13.0]
    assert first["all_in_seconds"] == pytest.approx(1404 + 3)
    assert first["pad_share"] == pytest.approx(0.5714)
    assert third["full_seconds"] == 362.0
    assert third["same_maths"] is False
    assert [row["kept"] for row in whole["rows"]] == [True, True, True, False]
    # A bar for each row, as long as it is fast.
    pixels = torch.from_numpy(imread(files[2]))
    assert pixels.shape[1] == 1296
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    gray = (pixels[..., :3] - torch.tensor([0.541, 0.561, 0.596])).abs().amax(-1) < 0.02
    assert blue.sum() > gray.sum() > 500


def test_the_share_of_the_peak_counts_useful_work_alone(results: list[Result], tmp_path: Path) -> None:
    # 1,404 s for the plain row and 351 s for the fastest, at 10 GFLOP/s.
    work = Arithmetic(useful_flops=1.404e12, peaks={"float32": 1e10})
    assert "share of this device's peak: row 1 10%, row 3 40%." in said(results, arithmetic=work)
    assert "10 in float32 GFLOP/s" in said(results, arithmetic=work)
    files = outcome.write(tmp_path, TASK, results, FACTS, "hasten demo", arithmetic=work)
    rows = json.loads(files[1].read_text())["rows"]
    assert rows[0]["mfu"] == pytest.approx(0.1)
    # Its numbers are bfloat16, whose peak was not measured.
    assert rows[3]["mfu"] is None


def test_operations_are_those_of_real_tokens(archive: Path) -> None:
    narrow, wide = (imdb(archive, max_length=length, limit=40) for length in (64, 512))
    # No review has 64 tokens: how wide they would be padded is no work.
    assert max(narrow.train_data.lengths) <= 64
    one, other = (outcome.useful_flops(task) for task in (narrow, wide))
    assert one == other
    # Two blocks of four projections and two layers four times as wide, twice each for a product, thrice with backward.
    products = 2 * 12 * 48**2 * 2 * 3 * sum(wide.train_data.lengths)
    assert products < one < 1.25 * products
