"""Runs are read also when they go on, were cut off, were resumed, or are those of another library."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from hasten_tools.report.read import read_run
from tests.refusals import refused


def start(step: int, at: float) -> dict[str, Any]:
    return {"kind": "start", "time": at, "format": 1, "step": step, "epoch": 0}


def row(step: int, at: float, epoch: int | None = 0, **values: Any) -> dict[str, Any]:
    return {"kind": "row", "time": at, "step": step, "epoch": epoch, "values": values}


def speed(step: int, at: float, **fields: Any) -> dict[str, Any]:
    known = {"steps": 10, "seconds": 2.0, "samples": 80, "tokens": None, "lr": {"SGD": 0.1}}
    return {"kind": "speed", "time": at, "step": step, "epoch": 0, **known, **fields}


def written(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_rows_of_one_step_are_one_and_values_are_numbers(tmp_path: Path) -> None:
    run = read_run(
        written(tmp_path, start(0, 100.0), row(9, 101.0, a=1), row(9, 102.0, b="nan"), row(19, 104.0, a="-inf"))
    )
    assert [(one.step, sorted(one.values)) for one in run.rows] == [(9, ["a", "b"]), (19, ["a"])]
    assert math.isnan(run.rows[0].values["b"])
    assert run.series("a", "time") == ([1.0, 4.0], [1.0, -math.inf])
    assert run.series("a", "epoch")[0] == [0.0, 0.0]
    with refused(KeyError, says="'loss'"):
        run.series("loss")


def test_speeds_and_learning_rates_are_values_too(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, start(0, 0.0), row(9, 1.0, loss=1), speed(9, 1.0), speed(19, 3.0, tokens=400)))
    assert run.keys() == ["loss", "lr", "samples_per_sec", "tokens_per_sec"]
    assert run.series("samples_per_sec") == ([9.0, 19.0], [40.0, 40.0])
    assert run.series("tokens_per_sec") == ([19.0], [200.0])
    assert run.series("lr")[1] == [0.1, 0.1]


def test_steps_that_were_repeated_are_there_once_and_pauses_do_not_count(tmp_path: Path) -> None:
    end = {"kind": "end", "time": 1012.0, "step": 30, "epoch": 1, "reason": "completed", "message": None}
    lines = [start(0, 0.0), row(9, 10.0, a=1), row(19, 20.0, a=2), speed(19, 20.0)]
    run = read_run(written(tmp_path, *lines, start(10, 1000.0), row(19, 1010.0, a=3), end))
    assert run.series("a", "time") == ([10.0, 30.0], [1.0, 3.0])
    assert (len(run.starts), run.speed, run.state, run.ends) == (2, [], "completed", [None, end])
    # Another fit from the beginning.
    run = read_run(written(tmp_path, *lines, start(0, 2000.0), row(9, 2001.0, a=7)))
    assert run.series("a")[1] == [7.0]
    assert "Several fits" in run.problems[0]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    now = time.time()
    run = read_run(written(tmp_path, start(0, now), row(9, now, a=1), end='garbage\n{"kind": 1}\n{"kind": "row", "ti'))
    assert run.series("a")[1] == [1.0]
    assert run.state == "running"
    assert run.problems == [
        "The last line of run.jsonl is unfinished and was left out.",
        "run.jsonl: lines 3, 4 cannot be read and were left out.",
    ]
    assert read_run(written(tmp_path, start(0, 1.0), row(9, 2.0, a=1))).state == "cut off"
    assert "Nothing was logged" in read_run(written(tmp_path, start(0, 1.0))).problems[0]
    assert "no lines yet" in read_run(written(tmp_path)).problems[0]


def test_runs_without_a_record_and_folders_of_runs(tmp_path: Path) -> None:
    folder = tmp_path / "lightning_logs" / "version_9"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,step,loss,val\n0,9,0.5,\n0,19,,0.25\n1,29,nan,bad\n")
    run = read_run(tmp_path)
    assert run.folder == folder
    assert run.name == "version_9"
    assert run.series("val") == ([19.0], [0.25])
    assert run.state == "unknown"
    assert "There is no run.jsonl" in run.problems[0]
    with refused(ValueError, says="'loss'"):
        run.series("loss", "time")
    newer = written(tmp_path / "lightning_logs" / "version_10", start(0, 1.0), row(1, 2.0, loss=1))
    assert read_run(tmp_path).folder == read_run(newer / "run.jsonl").folder == newer


def test_a_folder_without_a_run_says_what_is_there_until_one_is_below_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_run(tmp_path / "no")
    with refused(FileNotFoundError, says="run.jsonl"):
        read_run(tmp_path)
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(b"")
    with refused(FileNotFoundError, says="TensorBoard"):
        read_run(tmp_path)
    deep = written(tmp_path / "deep" / "er" / "run3", row(1, 1.0, a=1))
    assert read_run(tmp_path).folder == deep
