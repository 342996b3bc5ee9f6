"""CSVLogger: one table whatever is logged, at a cost that does not grow, whole after a kill."""

from __future__ import annotations

import copy
import csv
import gc
import math
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hasten.loggers import CSVLogger, TensorBoardLogger
from tests.refusals import refused, warned


def table(logger: CSVLogger) -> list[dict[str, str]]:
    """Return the rows of the file as any reader of CSV sees them."""
    with open(logger.experiment.metrics_file_path, newline="") as file:
        return list(csv.DictReader(file))


def bytes_written_by_this_process() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("wchar")).split()[1])


def test_rows_have_the_values_and_steps_given_and_columns_are_sorted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="run")
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25)}, step=3)
    logger.save()
    logger.log_metrics({"loss": 0.1 + 0.2}, step=4)
    logger.log_metrics({"nan": math.nan, "inf": math.inf, 'a,"b': "x\ny", "naïve": True}, step=5)
    for twin in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert twin.version == logger.version
        with open(twin.experiment.metrics_file_path) as file:
            assert len(file.readlines()) == 5  # one value has a line break
        twin.finalize("success")  # rows that wait are written by one logger alone
    logger.finalize("success")
    with open(logger.experiment.metrics_file_path, newline="") as file:
        header, *found = csv.reader(file)
    assert header == ['run-a,"b', "run-acc", "run-inf", "run-loss", "run-nan", "run-naïve", "step"]
    assert found == [
        ["", "0.25", "", "0.5", "", "", "3"],
        ["", "", "", repr(0.1 + 0.2), "", "", "4"],
        ["x\ny", "", "inf", "", "nan", "True", "5"],
    ]
    logger.log_hyperparams({"lr": 0.1, "layers": (1, 2), "path": Path("data"), "nested": {"act": torch.relu}})
    logger.log_hyperparams({"seed": 3})
    with refused(TypeError, "params", fix="a dict"):
        logger.log_hyperparams(3)
    text = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert yaml.safe_load(text) == {"lr": 0.1, "layers": [1, 2], "path": "data", "nested": {"act": "relu"}, "seed": 3}


def test_folders_and_versions(tmp_path: Path) -> None:
    (tmp_path / "exp" / "version_0").mkdir(parents=True)
    (tmp_path / "exp" / "version_7").mkdir()
    (tmp_path / "exp" / "version_x").mkdir()
    logger = CSVLogger(tmp_path, name="exp")
    assert logger.version == 8
    assert Path(logger.log_dir) == tmp_path / "exp" / "version_8"
    assert Path(logger.root_dir) == tmp_path / "exp"
    assert Path(logger.save_dir) == tmp_path
    assert Path(CSVLogger(tmp_path, name=None).root_dir) == tmp_path
    assert Path(CSVLogger(tmp_path, version="best").log_dir) == tmp_path / "lightning_logs" / "best"
    assert not Path(logger.log_dir).exists()  # asking makes no folder
    (tmp_path / "exp" / "version_8_best").mkdir()
    (tmp_path / "exp" / "version_9").touch()
    assert CSVLogger(tmp_path, name="exp").version == 9


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_folder_can_be_changed(tmp_path: Path, kind: Any) -> None:
    class Below(kind):  # type: ignore[misc]
        @property
        def root_dir(self) -> str:
            return os.path.join(self.save_dir, "below")

    (tmp_path / "below" / "version_2").mkdir(parents=True)
    assert Path(Below(tmp_path).log_dir) == tmp_path / "below" / "version_3"
    moved = kind(tmp_path / "a", name="exp")
    moved._root_dir = str(tmp_path / "b")
    assert Path(moved.log_dir) == tmp_path / "b" / "exp" / "version_0"


def test_rows_are_flushed_by_steps_or_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    path = Path(logger.experiment.metrics_file_path)
    for step in range(9):
        logger.log_metrics({"loss": 1.0}, step=step)
    assert not path.exists()
    logger.log_metrics({"loss": 1.0}, step=9)
    assert len(table(logger)) == 10
    logger.log_metrics({"loss": 1.0}, step=50)  # ten steps later, though only one row
    assert len(table(logger)) == 11


def test_rows_that_wait_are_written_when_nothing_has_the_logger_anymore(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=0)
    logger.save()
    logger.log_metrics({"loss": 0.25}, step=1)
    path = Path(logger.experiment.metrics_file_path)
    if (child := os.fork()) == 0:
        del logger  # A copy of the process: the rows are not its own.
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_text() == "loss,step\n0.5,0\n"
    del logger
    gc.collect()
    assert path.read_text() == "loss,step\n0.5,0\n0.25,1\n"


def test_a_run_in_the_same_version_continues_the_file_without_its_torn_last_line(tmp_path: Path) -> None:
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_bytes(b"loss,step\n1.0,0\n0.123,1\n0.4")
    logger = CSVLogger(tmp_path, version=0)
    with warned(UserWarning, says="rows"):
        logger.log_metrics({"loss": 2.0, "acc": 0.5}, step=2)
    logger.finalize("success")
    found = [(row["loss"], row["acc"], row["step"]) for row in table(logger)]
    assert found == [("1.0", "", "0"), ("0.123", "", "1"), ("2.0", "0.5", "2")]


def test_a_row_costs_the_same_however_long_the_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    written = []
    for step in range(3000):
        row = {"train_loss": step * 0.001, "epoch": step // 1000} | ({"new": 1.5} if step == 2000 else {})
        before = bytes_written_by_this_process()
        logger.log_metrics(row, step=step)
        written.append(bytes_written_by_this_process() - before)
    size = os.path.getsize(logger.experiment.metrics_file_path)
    # A new name rewrites the file, once.
    assert written.pop(2000) < size
    assert max(written) < 200
    rows = table(logger)
    assert [int(row["step"]) for row in rows] == list(range(3000))
    assert [row["new"] for row in rows[1999:2002]] == ["", "1.5", ""]
    logger.finalize("success")
    again = CSVLogger(tmp_path, version=logger.version)
    with warned(UserWarning, fix="version="):
        again.experiment
    before = bytes_written_by_this_process()
    again.log_metrics({"train_loss": 7.0}, step=3000)
    again.finalize("success")
    assert bytes_written_by_this_process() - before < 200
    assert (len(table(again)), table(again)[-1]["train_loss"]) == (3001, "7.0")


def write_for_ever(folder: Path) -> None:
    logger = CSVLogger(folder, flush_logs_every_n_steps=7)
    for step in range(10**9):
        row: dict[str, float] = {"loss": step * 0.5, "check": step * 3}
        if step % 50 == 0:
            row[f"name_{step % 2500}"] = step
        logger.log_metrics(row, step=step)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_killed_writer_leaves_whole_rows_in_order(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(tmp_path)
        finally:
            os._exit(1)
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    until = time.monotonic() + 600
    while not path.exists() or path.stat().st_size < 100_000:
        assert time.monotonic() < until
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # The system may stop a write between two pages: an unfinished last line is cut off by the next logger.
    again = CSVLogger(tmp_path, version=0)
    with warned(UserWarning, fix="version="):
        again.log_metrics({"loss": 1.0, "check": 2}, step=10**9)
    again.finalize("success")
    assert path.read_bytes().endswith(b"\n")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[-1]["step"], rows[-1]["loss"], rows.pop()["check"]) == (str(10**9), "1.0", "2")
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    for step, row in enumerate(rows):
        assert None not in row
        assert (float(row["loss"]), int(row["check"])) == (step * 0.5, step * 3)
        if step % 50 == 0:
            assert int(row[f"name_{step % 2500}"]) == step


def test_a_full_disk_is_named_and_leaves_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.0}, step=0)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 3:
            return real(descriptor, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)  # a full disk takes a part of what it is given
    with pytest.raises(OSError, match="No space left") as caught:
        logger.log_metrics({"loss": 2.0}, step=1)
    monkeypatch.undo()
    assert caught.value.filename == logger.experiment.metrics_file_path
    assert [row["loss"] for row in table(logger)] == ["1.0"]
    logger.save()  # what could not be written was kept
    assert [row["loss"] for row in table(logger)] == ["1.0", "2.0"]
