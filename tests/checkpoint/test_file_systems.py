"""What a fit does when file systems and loggers fail: the old checkpoint stays, and what is said names the cause."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import background, files
from hasten.loggers import CSVLogger, Logger, TensorBoardLogger
from hasten.plugins import AsyncCheckpointIO
from tests.callbacks.scripted import BATCHES, Scripted, names
from tests.models import quiet
from tests.refusals import refused, warned


def fit(*callbacks: L.Callback, resume: str | None = None, **arguments: Any) -> L.Trainer:
    """Fit on four batches an epoch."""
    trainer = quiet(callbacks=list(callbacks), enable_checkpointing=True, **arguments)
    trainer.fit(Scripted(step=True), BATCHES, ckpt_path=resume)
    return trainer


def fails(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *paths: Path) -> None:
    """Have a function of ``os`` raise an error for these paths, or for all."""
    real = getattr(os, name)

    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        if not paths or Path(os.fspath(path)) in paths:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_a_folder_that_cannot_be_read_is_no_reason_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fit(ModelCheckpoint(tmp_path / "a"))
    for name in ("scandir", "listdir"):
        fails(monkeypatch, name, number, tmp_path / "a")
    with refused(OSError, says=(str(tmp_path / "a"), os.strerror(number))):
        fit(ModelCheckpoint(tmp_path / "a"), resume="last", max_epochs=2)
    monkeypatch.undo()
    assert fit(ModelCheckpoint(tmp_path / "a"), resume="last", max_epochs=2).global_step == 8
    with warned(UserWarning, says="none yet"):
        assert fit(ModelCheckpoint(tmp_path / "b"), resume="last").global_step == 4


def test_where_there_are_no_links_a_copy_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "symlink", errno.EPERM)

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, save_last="link", every_n_train_steps=2)

    first = saves()
    fit(first)
    last = tmp_path / "last.ckpt"
    assert not last.is_symlink()
    assert last.read_bytes() == (tmp_path / "step=4.ckpt").read_bytes()

    def full(source: Any, target: Any, length: int = 0) -> None:
        target.write(source.read(100))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        fit(saves(), resume=str(last), max_epochs=2)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert files.load(last)["global_step"] == 4


def test_a_file_whose_name_differs_in_case_alone_is_not_removed(tmp_path: Path) -> None:
    def saves(name: str, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, name, enable_version_counter=False, **options)

    fit(saves("Best"))
    # On a file system without case, both names are of one file.
    os.link(tmp_path / "Best.ckpt", tmp_path / "best.ckpt")
    fit(saves("best"), resume=str(tmp_path / "best.ckpt"), max_epochs=2)
    assert names(tmp_path) == ["Best.ckpt", "best.ckpt"]


def test_a_copy_that_memory_has_no_room_for_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*size, **options)

    real = torch.empty
    monkeypatch.setattr(background.torch, "empty", no_memory)
    fit(ModelCheckpoint(tmp_path), plugins=AsyncCheckpointIO())
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]
    files.verify(tmp_path / "epoch=0-step=4.ckpt")


def test_an_error_of_a_bucket_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://bucket/{tmp_path.name}"
    fit(ModelCheckpoint(url, "{step}"))

    def refuses(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            raise OSError("503 Slow Down")
        return real(self, path, mode, **options)

    real = MemoryFileSystem._open
    monkeypatch.setattr(MemoryFileSystem, "_open", refuses)
    with refused(OSError, says=("503", f"{url}/step=8.ckpt")):
        fit(ModelCheckpoint(url, "{step}"), resume=f"{url}/step=4.ckpt", max_epochs=2)
    system = fsspec.filesystem("memory")
    assert [path.rpartition("/")[2] for path in system.find(f"/bucket/{tmp_path.name}")] == ["step=4.ckpt"]
    system.rm("/bucket", recursive=True)


# -- loggers


def test_a_table_that_was_removed_begins_anew_with_its_header(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "", 0, flush_logs_every_n_steps=1)

    class Removes(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                shutil.rmtree(tmp_path / "version_0")

    with warned(UserWarning, says="metrics.csv"):
        fit(Removes(), logger=logger, log_every_n_steps=1)
    table = (tmp_path / "version_0" / "metrics.csv").read_text().split()
    assert table == ["epoch,step,step_value", "0,1,1.0", "0,2,2.0", "0,3,3.0"]


def test_a_checkpoint_is_written_also_where_the_table_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                fails(monkeypatch, "write", errno.ENOSPC)

    saves = ModelCheckpoint(tmp_path / "a", "{step}", save_on_exception=True)
    logger = CSVLogger(tmp_path / "b", "", 0, flush_logs_every_n_steps=1)
    with refused(OSError, says=("No space left", "metrics.csv")), warned(UserWarning, says="CSVLogger"):
        fit(saves, Full(), logger=logger, log_every_n_steps=1)
    monkeypatch.undo()
    assert names(tmp_path / "a") == ["step=2.ckpt"]
    files.verify(tmp_path / "a" / "step=2.ckpt")


def test_a_full_disk_is_not_called_a_value_that_cannot_be_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer import event_file_writer

    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.experiment.flush()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(event_file_writer._AsyncWriter, "_check_worker_status", lambda self: _raise(full))
    with refused(OSError, says="No space left"):
        logger.log_metrics({"loss": 1.0}, step=1)
    monkeypatch.undo()
    logger.finalize("failed")


def _raise(error: Exception) -> None:
    raise error


class Closes(CSVLogger):
    """A logger that cannot write when it is closed."""

    fails = True
    closed = ""

    def finalize(self, status: str) -> None:
        self.closed = status
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_logger_that_cannot_be_closed_neither_hides_an_error_nor_keeps_others_open(tmp_path: Path) -> None:
    class Mistake(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("a mistake")

    first, second = Closes(tmp_path / "a"), Closes(tmp_path / "b")
    second.fails = False
    with warned(UserWarning, says=("Closes", "No space left")), pytest.raises(KeyError):
        fit(Mistake(), logger=[first, second])
    assert (first.closed, second.closed) == ("failed", "failed")
    # Without another error it ends the run, after the others are closed.
    with pytest.raises(OSError, match="No space left") as ended:
        fit(logger=[first, second], max_epochs=1)
    assert "Closes" in ended.value.__notes__[0]


class Service(Logger):
    """A logger that writes no files, and has a folder for those of others."""

    name, version = "run", 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def test_a_record_whose_folder_cannot_be_made_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "mkdir", errno.EROFS)
    with warned(UserWarning, says="run.jsonl") as told:
        trainer = quiet(logger=Service(tmp_path / "logs"), max_epochs=1)
        trainer.fit(Scripted(), BATCHES)
    assert trainer.global_step == 4
    assert len([each for each in told if "run.jsonl" in str(each.message)]) == 1
