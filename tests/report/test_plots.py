"""plot_logs: from what a logger wrote to pictures."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest

import hasten
from hasten.loggers import CSVLogger
from hasten.record.file import Record
from hasten_tools.report.plots import curves_by_epoch, labels
from hasten_tools.report.read import read_run
from tests.programs import run_python

pytest.importorskip("matplotlib")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of three epochs with four steps each."""
    logger = CSVLogger(tmp_path, name="exp")
    for epoch in range(3):
        for step in range(4):
            logger.log_metrics({"train_loss_step": 10 * epoch + step, "epoch": epoch}, step=4 * epoch + step)
        logger.log_metrics({"val_loss": 0.5 + epoch, "val_acc": 0.1 * epoch, "epoch": epoch}, step=4 * epoch + 3)
        logger.log_metrics({"train_loss_epoch": 7.0 + epoch, "epoch": epoch}, step=4 * epoch + 3)
    logger.log_metrics({"test_loss": 9.0, "test_acc": 0.9, "epoch": 3}, step=12)
    logger.finalize("success")
    return Path(logger.log_dir)


def test_pictures_are_written(run: Path) -> None:
    paths = hasten.plot_logs(run)
    assert [path.name for path in paths] == ["loss.pdf", "loss.png", "acc.pdf", "acc.png"]
    for path in paths:
        head = path.read_bytes()[:8]
        assert head.startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG")
        assert path.parent == run


def test_curves_take_the_epochs_value_where_there_is_one(run: Path) -> None:
    curves = curves_by_epoch(read_run(run), re.compile("loss"))
    assert labels(curves) == ["training", "validation"]
    training, validation = curves
    assert (training.x, training.y) == ([1, 2, 3], [7.0, 8.0, 9.0])
    assert (validation.x, validation.y) == ([1, 2, 3], [0.5, 1.5, 2.5])


def test_steps_are_averaged_over_their_epoch(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss\n0,0,1\n0,1,3\n1,2,5\n")
    (curve,) = curves_by_epoch(read_run(tmp_path), re.compile("loss"))
    assert (curve.x, curve.y) == ([1, 2], [2.0, 5.0])


def test_several_losses_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,train_aux_loss,val_loss\n0,0,1,2,3\n")
    curves = curves_by_epoch(read_run(tmp_path), re.compile("loss"))
    assert set(labels(curves)) == {"train_loss", "train_aux_loss", "validation"}


def test_output_and_other_ways_to_name_the_run(run: Path, tmp_path: Path) -> None:
    for source in (run / "metrics.csv", run.parent, run):
        assert read_run(source).folder == run
    pictures = tmp_path / "pictures" / "here"
    assert all(path.parent == pictures for path in hasten.plot_logs(run.parent, output=pictures))


def test_the_latest_version_counts(tmp_path: Path) -> None:
    for version in (2, 10):
        (tmp_path / f"version_{version}").mkdir()
        (tmp_path / f"version_{version}" / "metrics.csv").write_text("epoch,step,loss\n0,0,1\n")
    (tmp_path / "version_11").mkdir()
    assert read_run(tmp_path).folder.name == "version_10"


def test_the_run_written_last_counts_however_deep_it_is(tmp_path: Path) -> None:
    for age, name in enumerate(("logs/new/version_0", "logs/old/version_3", "venv/site-packages/version_9")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("epoch,step,loss\n0,0,1\n")
        os.utime(folder / "metrics.csv", (100 - age, 100 - age))
    for source in (tmp_path, tmp_path / "logs", tmp_path / "logs" / "new"):
        assert read_run(source).folder == tmp_path / "logs" / "new" / "version_0"


def test_a_run_of_any_logger_gives_the_same_pictures(run: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "run.jsonl")
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            values = {name: float(text) for name, text in row.items() if text and name not in ("step", "epoch")}
            record.add("row", step=int(row["step"]), epoch=int(row["epoch"]), values=values)
    record.flush()
    for own, other in zip(hasten.plot_logs(run), hasten.plot_logs(tmp_path), strict=True):
        assert own.name == other.name
        assert own.read_bytes() == other.read_bytes()


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"does not exist|no metrics\.csv"):
            hasten.plot_logs(folder)
    for text, message in (
        ("epoch,step,speed\n0,0,1\n", r"its columns are \['epoch', 'speed', 'step'\]"),
        ("step,loss\n0,1\n", r"no accuracy by epoch: its columns are \['loss', 'step'\]"),
        ("epoch,step,loss\n", "no rows yet"),
    ):
        (tmp_path / "metrics.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            hasten.plot_logs(tmp_path)


def test_drawing_leaves_the_users_matplotlib_alone(run: Path) -> None:
    program = (
        "import sys, hasten\n"
        f"hasten.plot_logs({str(run)!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib; assert matplotlib.rcParams['axes.grid'] == matplotlib.rcParamsDefault['axes.grid']\n"
    )
    done = run_python("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr


def test_same_values_same_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss\n0,0,1\n0,1,3\n1,2,5\n")
    first = hasten.plot_logs(tmp_path, output=tmp_path / "a")
    second = hasten.plot_logs(tmp_path, output=tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
