"""Arguments that would be noticed late, or never: a folder that is a file, names of checkpoints, a time."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from hasten.callbacks import ModelCheckpoint, Timer
from hasten.loggers import CSVLogger
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


@pytest.fixture
def taken(tmp_path: Path) -> str:
    (tmp_path / "taken").write_text("")
    return str(tmp_path / "taken")


@pytest.mark.parametrize("below", ["", "/logs/here"])
def test_a_folder_that_is_a_file_is_refused_before_training(below: str, taken: str) -> None:
    for name, make in (
        ("default_root_dir", lambda: quiet(default_root_dir=taken + below)),
        ("save_dir", lambda: CSVLogger(taken + below)),
    ):
        with refused(NotADirectoryError, name):
            make()
    trained: list[int] = []

    class Counting(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)

    with refused(NotADirectoryError, "dirpath"):
        quiet(enable_checkpointing=True, callbacks=ModelCheckpoint(taken + below)).fit(Counting(), loader())
    assert trained == []


def said(*callbacks: ModelCheckpoint) -> list[str]:
    """Train, and return the warnings about checkpoints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(enable_checkpointing=True, callbacks=list(callbacks)).fit(Classifier(), loader(), loader())
    return [str(each.message) for each in caught if "ModelCheckpoint" in str(each.message)]


def test_two_callbacks_that_write_the_same_names_are_reported_once(tmp_path: Path) -> None:
    (text,) = said(
        ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True), ModelCheckpoint(tmp_path, save_last=True)
    )
    assert f"Two ModelCheckpoints write '{{epoch}}-{{step}}' and 'last' to {tmp_path}" in text
    assert said(ModelCheckpoint(tmp_path / "a", monitor="val_loss"), ModelCheckpoint(tmp_path / "b")) == []
    named = ModelCheckpoint(tmp_path / "c", filename="best-{epoch}", monitor="val_loss")
    assert said(named, ModelCheckpoint(tmp_path / "c", save_last=True)) == []


def test_a_field_that_nothing_logs_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    (text,) = said(ModelCheckpoint(tmp_path, filename="{epoch}-{step}-{val_lss:.2f}"))
    assert "nothing has logged 'val_lss', which is 0 in the name" in text
    assert "Did you mean 'val_loss'?" in text


def test_a_limit_of_time_is_said_as_it_was_understood(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quiet(max_time="1h").fit(Classifier(), loader(8))
        assert "Training ends after 1:00:00 hours at the latest" in caplog.text
        quiet(callbacks=Timer("01:00:00:00")).fit(Classifier(), loader(8))
        assert "Training ends after 1 day, 0:00:00 hours at the latest" in caplog.text
