"""`hasten demo` from the command line to its files."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hasten.commands import main

PROGRAM = (sys.executable, "-c", "import sys; from hasten.commands import main; sys.exit(main())")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def reviews(path: Path) -> Path:
    """An archive of 60 reviews in the layout of aclImdb_v1.tar.gz."""
    with tarfile.open(path, "w:gz") as archive:
        for part in ("train", "test"):
            for kind, word in (("pos", "wonderful"), ("neg", "dreadful")):
                for number in range(15):
                    content = f"{word} film number {number} {'and more ' * number}".encode()
                    entry = tarfile.TarInfo(f"aclImdb/{part}/{kind}/{number}_5.txt")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return path


def test_digits_ladder_ends_with_table_chart_csv_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--task", "digits", "--epochs", "2", "--row-seconds", "0.6", "--rounds", "1"]
    for row in ("compiled", "bf16", "fused AdamW", "pages kept", "cheap dropout masks"):
        options += ["--skip", row]
    assert main(["demo", *options, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 200
    assert "\r" not in shown
    assert "\x1b" not in shown
    rows = rows_of(tmp_path / "out" / "digits.csv")
    assert [row["row"] for row in rows][:2] == ["plain PyTorch loop", "the same in hasten"]
    assert all(row["row"] in shown for row in rows)
    assert all(float(row["seconds"]) > 0 for row in rows if row["basis"] != "refused")
    assert float(rows[0]["speed"]) == 1.0
    tested = [float(row["test_accuracy"]) for row in rows if row["test_accuracy"]]
    assert tested
    assert min(tested) > 0.5
    assert "The line to write:\ntrainer = L.Trainer(" in shown
    whole = json.loads((tmp_path / "out" / "digits.json").read_text())
    assert whole["command"].startswith("hasten demo --task digits --epochs 2")
    assert whole["hardware"]["threads"] == 1
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_docstrings_ladder_ends_with_the_line_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default: nothing to download, the accuracy of the first and the last row, and the line to write."""
    from hasten.demo import docstrings

    monkeypatch.setattr(docstrings, "TEST", 4)
    monkeypatch.setattr(docstrings, "has_bf16_units", lambda device: False)
    options = [
        "--max-length",
        "32",
        "--limit",
        "16",
        "--row-seconds",
        "0.2",
        "--seeds",
        "2",
        "--random-weights",
    ]
    for row in ("pages kept", "fused AdamW"):
        options += ["--skip", row]
    assert main(["demo", *options, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    rows = rows_of(tmp_path / "out" / "docstrings.csv")
    assert [row["row"] for row in rows][:4] == [
        "plain PyTorch loop",
        "the same in hasten",
        "packed",
        "last block for one token",
    ]
    assert "16 train / 20 test from other modules" in " ".join(shown.split())
    assert rows[0]["test_accuracy"]
    assert any(row["test_accuracy"] for row in rows[1:])
    assert "The line to write:\ntrainer = L.Trainer(" in shown


def test_imdb_ladder_reads_trains_and_tests_reviews(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = reviews(tmp_path / "aclImdb_v1.tar.gz")
    options = ["--limit", "20", "--max-length", "8", "--batch-size", "4", "--row-seconds", "0.2"]
    for row in (
        "fused AdamW",
        "pages kept",
        "cheap dropout masks",
        "bf16",
        "compiled",
        "no attention dropout",
        "lower half frozen",
        "hasten's own choice",
    ):
        options += ["--skip", row]
    places = ["--output", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    command = ["demo", "--task", "imdb", "--random-weights", "--data", str(archive), *options, *places]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "14 train / 2 validation / 44 test" in " ".join(shown.split())
    assert "random weights" in shown
    rows = rows_of(tmp_path / "out" / "imdb.csv")
    assert [row["row"] for row in rows] == [
        "plain PyTorch loop",
        "the same in hasten",
        "batches by length",
        "packed",
        "last block for one token",
        "4 tokens at most",
    ]
    # All reviews have 8 tokens: there is nothing to sort, and the row says so.
    by_length = rows[2]
    assert by_length["basis"] == "refused"
    assert by_length["kept"] == "False"
    assert "was refused: batching: every sample of the train dataloader" in " ".join(shown.split())
    measured = [row for row in rows if row["basis"] != "refused"]
    fastest = max(measured, key=lambda row: float(row["speed"]))
    assert any(row["test_accuracy"] for row in rows)
    assert fastest["test_accuracy"] or any(row["basis"].startswith("trained in full") for row in rows)
    assert [row["same_maths"] for row in rows] == ["True"] * 5 + ["False"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_row_to_skip_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "digits", "--skip", "compile", "--output", str(tmp_path)]) == 1
    assert "--skip 'compile': use one of data in memory" in capsys.readouterr().err


def test_a_missing_package_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.demo import text_models

    monkeypatch.setattr(text_models, "MINILM_PACKAGE", "gt_no_such_package")
    assert main(["demo", "--task", "imdb", "--output", str(tmp_path)]) == 1
    assert "pip install gt_no_such_package" in capsys.readouterr().err


def test_threads_are_as_before_afterwards(tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    assert (
        main(["demo", "--task", "imdb", "--data", str(tmp_path / "none"), "--threads", str(before + 1)]) == 1
    )
    assert torch.get_num_threads() == before


def test_output_that_cannot_be_written_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--task", "digits", "--output", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr()
    assert "--output" in shown.err
    assert shown.out == ""


def test_no_gpu_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["demo", "--task", "digits", "--accelerator", "gpu", "--output", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("row", ["plain PyTorch loop", "the same in hasten"])
def test_ctrl_c_ends_with_130_and_one_line(tmp_path: Path, row: str) -> None:
    """In a real terminal: the key, not a signal sent by hand."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "demo", "--task", "digits", "--row-seconds", "100", "--output", str(tmp_path)],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: _own_terminal(slave),
    )
    try:
        assert process.stdout is not None
        # The line comes when that row was measured: the next is being measured.
        while f"{row}: about" not in process.stdout.readline():
            assert process.poll() is None
        os.write(master, b"\x03")
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "nterrupted" in said


def _own_terminal(slave: int) -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
