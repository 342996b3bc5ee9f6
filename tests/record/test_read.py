"""Runs are read also when they go on, were cut off, were resumed, or are those of another library."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
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
    assert (run.keys(), run.series("a")[0], run.series("b")[0]) == (["a", "b"], [9, 19], [9])
    assert math.isnan(run.series("b")[1][0])
    # It belongs to the row before.
    assert run.series("b", "time")[0] == [1.0]
    assert run.series("a", "time") == ([1.0, 4.0], [1.0, -math.inf])
    assert run.series("a", "epoch")[0] == [0.0, 0.0]
    with refused(KeyError, says="'loss'"):
        run.series("loss")


NUMBERS = [
    0.1, -0.25, 1e-05, 5.123456789012345e-07, -3.3e-21, 1e-300, 1.7976931348623157e308, 123456.789, 2.0**53 + 2, 1e22,
    0.0, -0.0, 7, -12, 9007199254740993, 0.30000001192092896, 1764300000.1234567, True, "nan", "-inf", "1e3", "word",
    None, [1],
]  # fmt: skip


def read_by_hand(path: Path, key: str) -> list[tuple[int, float, str]]:
    """Return step, time and value of each row with a key."""
    found: list[tuple[int, float, str]] = []
    before: dict[str, Any] = {"step": -1, "epoch": -1, "time": 0.0, "values": {}}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] != "row":
            continue
        values = {}
        for name, value in line["values"].items():
            with contextlib.suppress(TypeError, ValueError):
                values[name] = float(value)
        same = (line["step"], line["epoch"]) == (before["step"], before["epoch"])
        joins = same and not before["values"].keys() & values.keys()
        before = {**line, "values": values} if not joins else {**before, "values": before["values"] | values}
        if key in values:
            found.append((line["step"], before["time"], repr(values[key])))
    return found


@pytest.mark.parametrize("block_bytes", [100, 1000, 8 << 20])
def test_rows_of_all_kinds_are_read_as_json_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("hasten_tools.report.text.BLOCK_BYTES", block_bytes)
    chance = random.Random(block_bytes)
    forms = [["a"], ["a", 'b"c, {"}: ', "loss"], ["\u00e4", "x" * 30], ["a", "d"], ["loss", "a"], ["12", "1"], []]
    lines = [start(0, -1.0)]
    for step in range(60 if block_bytes == 100 else 400):
        for _ in range(chance.choice((1, 1, 2))):
            kinds = NUMBERS if chance.random() < 0.2 else NUMBERS[:3]
            row_values = {
                name: chance.choice([chance.random(), chance.gauss(0, 1e-6), chance.choice(kinds)])
                for name in chance.choice(forms)
            }
            lines.append(row(step, step + chance.random(), step // 50, **row_values))
        if chance.random() < 0.2:
            lines.append(speed(step, step + 1.0))
    run = read_run(written(tmp_path, *lines))
    keys = {name for form in forms for name in form}
    assert {*run.rows.names()} == keys
    for key in keys:
        steps, values = run.series(key)
        times = [time - 1.0 for time in run.series(key, "time")[0]]
        by_hand = read_by_hand(tmp_path / "run.jsonl", key)
        assert [(step, repr(value)) for step, value in zip(steps, values, strict=True)] == [
            (step, value) for step, _, value in by_hand
        ]
        assert times == pytest.approx([time for _, time, _ in by_hand], abs=1e-9)
    assert run.problems == []


def test_numbers_are_those_of_float_to_the_last_bit(tmp_path: Path) -> None:
    chance = random.Random(0)
    exact = [struct.unpack("d", chance.randbytes(8))[0] for _ in range(3000)]
    single = [
        struct.unpack("f", struct.pack("f", chance.gauss(0, 10.0 ** chance.randint(-9, 9))))[0] for _ in range(3000)
    ]
    texts = [repr(value) for value in (*exact, *single)]
    texts += [f"{chance.gauss(0, 100):.{chance.randint(0, 19)}f}" for _ in range(3000)]
    texts += [str(chance.getrandbits(chance.randint(1, 70))) for _ in range(1000)]
    texts += [
        "",
        ".",
        "-",
        "1.",
        ".5",
        "1.2.3",
        "--5",
        "+5",
        "1e5",
        "1e-5",
        "e-05",
        "abc",
        "1:2",
        "0.1e-44",
        "..",
        " 7",
    ]
    path = tmp_path / "metrics.csv"
    path.write_text("step,a,b\n" + "".join(f"{number},{text},\r\n" for number, text in enumerate(texts)))
    expected = {}
    for number, text in enumerate(texts):
        with contextlib.suppress(ValueError):
            expected[number] = repr(float(text))
    steps, values = read_run(path).series("a")
    assert dict(zip(steps, map(repr, values), strict=True)) == expected


def test_a_table_is_read_as_csv_is(tmp_path: Path) -> None:
    def read(text: str) -> dict[str, Any]:
        (tmp_path / "metrics.csv").write_text(text, newline="")
        run = read_run(tmp_path)
        return {key: run.series(key) for key in run.rows.names()}

    plain = "epoch,step,a,b\n0,9,0.5,\n\n0,19,,0.25\n1,29,1,2,3\n1,39,7\n1,,4,nan?\nx,49,5,6"
    found = {
        "a": ([9.0, 29.0, 39.0, 4.0, 49.0], [0.5, 1.0, 7.0, 4.0, 5.0]),
        "b": ([19.0, 29.0, 49.0], [0.25, 2.0, 6.0]),
    }
    assert read(plain) == found
    # With a quotation mark, lines are not rows any more.
    assert read(plain.replace("nan?", '"two\nlines"')) == found
    assert read(plain.replace("\n", "\r\n")) == found
    assert read('"epoch",step,"a,b"\n0,9,"0.5"\n') == {"a,b": ([9.0], [0.5])}


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
