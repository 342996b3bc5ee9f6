"""The measured ladder as table, chart, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from hasten.demo import outcome
from hasten.demo.digits import Digits
from hasten.demo.ladder import Result
from hasten.demo.task import Ladder

FACTS = {
    "device": "A processor with a rather long name @ 2.00GHz",
    "cores": 2,
    "threads": 2,
    "torch": "2.13.0+cpu",
    "hasten": "0.1.0",
    "python": "3.11.7",
    "system": "Linux",
}


@pytest.fixture
def task() -> Digits:
    return Digits()


@pytest.fixture
def results() -> list[Result]:
    rows = Ladder("loss.backward(); optimizer.step()")
    rows.add("the same in hasten", "L.Trainer(max_epochs=1).fit(module, loader)", hasten=True)
    rows.add(
        "a switch with a name that is long",
        "from_pretrained(..., attention_probs_dropout_prob=0.0)",
        same_maths=False,
        attention_dropout=False,
    )
    rows.add("a switch that loses", "L.Trainer(precision='bf16-mixed')", precision="bf16-mixed")
    plain, same, faster, slower = rows.rows
    return [
        Result(plain, 117, step_seconds=[11.0, 12.0, 13.0]),
        Result(same, 117, step_seconds=[12.0, 12.0, 12.0]),
        Result(
            faster,
            117,
            step_seconds=[3.0, 3.0, 3.0],
            afterwards_seconds=362.0,
            accuracy=0.852,
            validation_accuracy=0.84,
        ),
        Result(slower, 117, step_seconds=[60.0], part_of_batch=2),
    ]


@pytest.mark.parametrize("width", [40, 72, 80, 100, 300])
def test_table_fits_and_says_all(task: Digits, results: list[Result], width: int) -> None:
    text = outcome.table(task, results, FACTS, width=width)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= max(72, min(100, width))
    assert text.isascii()
    assert not any(line != line.rstrip() for line in lines)
    flat = " ".join(text.split())
    for said in ("~1,404", "1.00x", "351", "4.00x", "85.2%", "0.20x", "2.13.0+cpu", "2 threads"):
        assert said in flat
    assert "rows 1, 2, 3: 3 of 117 steps" in flat
    assert "Row 3 was then trained in full, for its accuracy: in 362 s." in flat
    assert "row 4: one step of 2 samples, scaled to all 117 steps" in flat
    assert "* changes the maths" in flat
    assert "Slower here than the row above: row 4." in flat


def test_a_row_trained_in_full_carries_no_mark(task: Digits, results: list[Result]) -> None:
    whole = Result(results[2].row, 117, full_seconds=[350.0, 351.0, 360.0], accuracy=0.852)
    text = outcome.table(task, [whole], FACTS)
    assert "351" in text
    assert "~" not in text


def test_a_busy_machine_is_said(task: Digits, results: list[Result]) -> None:
    said = "This machine was busy: the same work in row 2 took up to 2.5 times as long."
    assert said not in " ".join(outcome.table(task, results, FACTS).split())
    results[1].step_seconds = [12.0, 30.0, 12.0]
    assert said in " ".join(outcome.table(task, results, FACTS).split())
    # Steps of different width may differ as they like.
    results[1].alike = False
    assert said not in " ".join(outcome.table(task, results, FACTS).split())


def test_files_hold_every_row_and_the_command(task: Digits, results: list[Result], tmp_path: Path) -> None:
    files = outcome.write(tmp_path / "made", task, results, FACTS, "hasten demo --epochs 1")
    assert [path.name for path in files] == ["digits.csv", "digits.json", "digits.png"]
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [result.row.name for result in results]
    assert [float(row["speed"]) for row in rows] == pytest.approx([1.0, 1.0, 4.0, 0.2])
    assert [row["test_accuracy"] for row in rows] == ["", "", "0.852", ""]
    whole = json.loads(files[1].read_text())
    assert whole["command"] == "hasten demo --epochs 1"
    assert whole["hardware"] == FACTS
    assert [row["sampled"] for row in whole["rows"]] == [True, True, True, True]
    assert whole["rows"][0]["step_seconds"] == [11.0, 12.0, 13.0]
    assert whole["rows"][2]["afterwards_seconds"] == 362.0
    assert whole["rows"][2]["same_maths"] is False


def test_chart_shows_a_bar_for_each_row(task: Digits, results: list[Result], tmp_path: Path) -> None:
    from matplotlib.image import imread

    outcome.draw(tmp_path / "chart.png", task, results, FACTS)
    pixels = torch.from_numpy(imread(tmp_path / "chart.png"))
    assert pixels.shape[1] == 1296
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    grey = (pixels[..., :3] - torch.tensor([0.541, 0.561, 0.596])).abs().amax(-1) < 0.02
    assert blue.sum() > grey.sum() > 500


def test_hardware_is_that_of_this_process() -> None:
    facts = outcome.hardware(torch.device("cpu"))
    assert facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == torch.__version__
    assert facts["cores"] >= 1
    assert facts["device"]
    assert facts["torch"] in outcome.describe(facts)
