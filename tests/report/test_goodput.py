"""Goodput: where the time of all attempts of a run went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.commands import main
from hasten.loggers import CSVLogger
from hasten_tools.report import page
from hasten_tools.report.goodput import TimeOfRun
from hasten_tools.report.read import read_run
from tests.models import Classifier, loader, quiet


def start(time: float, step: int, process_began: float | None) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "epoch": 0, "process_began": process_began}


def speed(time: float, step: int, seconds: float, data: float = 0.0, compiled: float = 0.0) -> dict[str, Any]:
    return {
        "kind": "speed", "time": time, "step": step, "epoch": 0, "seconds": seconds, "data_seconds": data,
        "compile_seconds": compiled,
    }  # fmt: skip


def first_step(time: float, step: int, compiled: float = 0.0) -> dict[str, Any]:
    return {"kind": "first_step", "time": time, "step": step, "epoch": 0, "compile_seconds": compiled}


# A run that is killed after 120 s, at step 20, and continues 30 s later from the checkpoint of step 10.
TWO_ATTEMPTS = [
    start(1005.0, 0, 1000.0),
    first_step(1020.0, 0, compiled=8.0),
    speed(1060.0, 9, 40.0, data=4.0),
    {"kind": "validation", "time": 1070.0, "step": 9, "epoch": 0, "seconds": 10.0},
    {"kind": "checkpoint", "time": 1075.0, "step": 9, "epoch": 0, "path": "a.ckpt", "seconds": 5.0},
    speed(1120.0, 19, 45.0, data=5.0),
    start(1160.0, 10, 1150.0),
    first_step(1165.0, 10, compiled=2.0),
    speed(1200.0, 19, 34.0, data=3.0, compiled=1.0),
    {"kind": "end", "time": 1201.0, "step": 20, "epoch": 1, "reason": "completed", "message": None},
]


def time_of(lines: list[dict[str, Any]]) -> TimeOfRun:
    time = TimeOfRun()
    for line in lines:
        time.add(line)
    return time


def test_each_second_of_all_attempts_is_in_one_part() -> None:
    time = time_of(TWO_ATTEMPTS)
    assert time.seconds() == {
        "training": 36.0 + 30.0, "data": 4.0 + 3.0, "validation": 10.0, "checkpoints": 5.0, "compile": 8.0 + 2.0 + 1.0,
        "start": 12.0 + 13.0, "repeated": 45.0, "restarts": 30.0, "other": 2.0,
    }  # fmt: skip
    assert sum(time.seconds().values()) == 201.0
    assert time.goodput() == pytest.approx(66 / 201)


def test_a_fit_that_continues_in_the_same_process_has_no_second_start() -> None:
    lines = [*TWO_ATTEMPTS[:6], start(1200.0, 20, 1000.0), first_step(1201.0, 20), speed(1211.0, 29, 10.0)]
    assert time_of(lines).seconds()["restarts"] == 80.0
    assert time_of(lines).seconds()["start"] == 12.0 + 1.0


def test_records_without_these_lines_are_read_too() -> None:
    lines = [
        {key: value for key, value in line.items() if key not in ("process_began", "compile_seconds")}
        for line in TWO_ATTEMPTS
        if line["kind"] != "first_step"
    ]
    found = time_of(lines).seconds()
    assert (found["training"], found["start"], found["restarts"]) == (36.0 + 31.0, 15.0 + 6.0, 40.0)
    assert time_of(lines[:1]).goodput() is None


def test_the_page_shows_the_parts_and_the_share(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TWO_ATTEMPTS))
    html = page.render([read_run(tmp_path)])
    assert "Where the time of the run goes" in html
    assert "3 min 21 s in 2 attempts; 33% of it is goodput." in html
    assert html.count('class="part time-') == 9
    assert "Repeated steps" in html


def test_an_attempt_in_another_folder_is_found_by_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "version_0", tmp_path / "version_1"
    (before / "checkpoints").mkdir(parents=True)
    after.mkdir()
    later = [start(1300.0, 10, 1290.0), speed(1400.0, 19, 90.0)]
    lines = [*TWO_ATTEMPTS[:6], *later]
    (before / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = {**TWO_ATTEMPTS[6], "cwd": str(tmp_path), "resumed_from": "version_0/checkpoints/a.ckpt"}
    (after / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (resumed, *TWO_ATTEMPTS[7:])))
    assert read_run(after).spent.seconds() == time_of(TWO_ATTEMPTS).seconds()
    assert main(["report", str(after)]) == 0
    assert f"hasten report {before} {after} shows both" in capsys.readouterr().err
    assert main(["report", str(before), str(after), "-o", str(tmp_path / "both.html")]) == 0
    assert "shows both" not in capsys.readouterr().err
    # The folder may be gone.
    (before / "run.jsonl").unlink()
    assert len(read_run(after).spent.attempts) == 1


def test_attempts_of_a_real_run_add_up(tmp_path: Path) -> None:
    for epochs, path in ((1, None), (2, "last")):
        logger = CSVLogger(tmp_path, name="logs", version=0)
        trainer = quiet(max_epochs=epochs, logger=logger, enable_checkpointing=True, default_root_dir=tmp_path)
        trainer.fit(Classifier(), loader(8), ckpt_path=path)
    run = read_run(tmp_path / "logs" / "version_0")
    assert len(run.spent.attempts) == len(run.starts) == 2
    seconds = run.spent.seconds()
    assert seconds["training"] > 0
    assert seconds["start"] > 0
    began = run.starts[0]["process_began"]
    assert began is not None
    assert began < run.starts[0]["time"]
    assert sum(seconds.values()) == pytest.approx((run.last_time or 0.0) - began, abs=0.01)
