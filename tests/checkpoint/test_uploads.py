"""Checkpoints are written to the local disk and copied behind a URL, and a bucket that is away loses nothing."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import files
from hasten.plugins import AsyncCheckpointIO, CheckpointIO, UploadedCheckpointIO
from tests.callbacks.scripted import names
from tests.checkpoint.test_background import Large, at_step
from tests.checkpoint.test_files import same
from tests.checkpoint.test_sharded import everything, in_folders
from tests.models import quiet
from tests.refusals import refused, warned


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """Return the URL of an empty folder in memory."""
    url = f"memory://bucket/{tmp_path.name}"
    yield url
    system, inner = fsspec.core.url_to_fs(url)
    if system.exists(inner):
        system.rm(inner, recursive=True)


class Away:
    """A bucket in which nothing can be written while ``error`` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.tries = 0

    def __call__(self, system: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.error is not None and "w" in mode:
            self.tries += 1
            raise self.error
        return _open(system, path, mode, **options)


_open = MemoryFileSystem._open


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Away:
    """Have files of ``memory://`` opened by an ``Away``, and return it."""
    made = Away()

    def opened(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        return made(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    return made


def copies(url: str) -> list[str]:
    """Return the names of everything below a URL, but for the list of the copies."""
    system, inner = fsspec.core.url_to_fs(url)
    found = [str(path).removeprefix(f"{inner}/") for path in system.find(inner)]
    return sorted(name for name in found if name != "uploads.json")


def fit(*callbacks: L.Callback, resume: str | None = None, **arguments: Any) -> L.Trainer:
    """Fit on four batches an epoch."""
    L.seed_everything(0)
    trainer = quiet(callbacks=list(callbacks), enable_checkpointing=True, **arguments)
    trainer.fit(Large(10), [torch.ones(1, 2) for _ in range(4)], ckpt_path=resume)
    return trainer


def uploading(url: str, inner: CheckpointIO | None = None) -> UploadedCheckpointIO:
    return UploadedCheckpointIO(url, inner, retry_seconds=0.0)


@pytest.mark.parametrize("inner", [None, AsyncCheckpointIO])
def test_copies_are_the_local_files_and_go_with_them(tmp_path: Path, bucket: str, inner: Any) -> None:
    plugin = uploading(bucket, inner and inner())
    fit(ModelCheckpoint(tmp_path / "a", "{step}", save_last=True), plugins=plugin, max_epochs=3)
    assert names(tmp_path / "a") == ["last.ckpt", "step=12.ckpt"]
    assert copies(bucket) == ["a/last.ckpt", "a/step=12.ckpt"]
    system, at = fsspec.core.url_to_fs(bucket)
    for name in names(tmp_path / "a"):
        assert system.cat_file(f"{at}/a/{name}") == (tmp_path / "a" / name).read_bytes()


def test_a_file_url_is_a_folder_of_copies_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    fit(ModelCheckpoint(tmp_path / "a"), plugins=uploading(url), max_epochs=1)
    assert names(tmp_path / "bucket" / "a") == names(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    resumed = fit(ModelCheckpoint(tmp_path / "a"), plugins=uploading(url), max_epochs=2, resume="last")
    assert (resumed.global_step, resumed.ckpt_path) == (8, f"{url}/a/epoch=0-step=4.ckpt")


def weights(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize("folders", [False, True])
def test_a_run_resumes_from_the_newest_complete_copy(tmp_path: Path, bucket: str, folders: bool) -> None:
    def run(epochs: int, resume: str | None = None, url: str = bucket) -> L.Trainer:
        saved = ModelCheckpoint(tmp_path / "a", "{step}", save_top_k=-1, save_last=True)
        strategy = in_folders() if folders else "auto"
        return fit(saved, plugins=uploading(url), strategy=strategy, max_epochs=epochs, resume=resume)

    expected = weights(run(3, url=f"{bucket}/whole"))
    shutil.rmtree(tmp_path / "a")
    run(1)
    # The local one, while it is there.
    assert str(run(2, "last").ckpt_path) == str(tmp_path / "a" / "last.ckpt")
    # On a machine whose disk is empty.
    shutil.rmtree(tmp_path / "a")
    resumed = run(3, "last")
    assert resumed.ckpt_path == f"{bucket}/a/last.ckpt"
    assert same(weights(resumed), expected)
    found = {name.partition(".ckpt")[0] for name in copies(bucket) if not name.startswith("whole")}
    assert found == {"a/last", "a/step=4", "a/step=8", "a/step=12"}
    # An older state of the disk, and a newest file that is damaged.
    for path in (tmp_path / "a").iterdir():
        os.utime(path, (1, 1))
    assert str(run(3, "last").ckpt_path).startswith(bucket)
    newest = max((tmp_path / "a").iterdir(), key=os.path.getmtime)
    damaged = newest / "__0_0.distcp" if folders else newest
    os.truncate(damaged, damaged.stat().st_size - 1)
    os.utime(newest, (2, 2))
    with warned(UserWarning, says=(newest.name, "is damaged")):
        assert str(run(3, "last").ckpt_path).startswith(bucket)


def test_a_bucket_that_is_away_loses_nothing(
    tmp_path: Path, bucket: str, away: Away, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    plugin = uploading(bucket)

    def leave() -> None:
        plugin.copies._pending.result()
        away.error = ConnectionError("no route to host")

    def come_back() -> None:
        plugin.copies._pending.result()
        away.error = None

    saved = ModelCheckpoint(tmp_path / "a", "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = fit(saved, at_step(2, leave), at_step(4, come_back), plugins=plugin, max_epochs=1)
    assert trainer.global_step == 4
    assert names(tmp_path / "a") == [f"step={step}.ckpt" for step in range(1, 5)]
    assert copies(bucket) == [f"a/step={step}.ckpt" for step in range(1, 5)]
    lines = [each.message for each in caplog.records if "no route to host" in each.message]
    assert len(lines) == 1
    assert "step=2.ckpt" in lines[0]
    assert "tried again with the next checkpoint" in lines[0]


def test_a_bucket_that_stays_away_is_an_error_at_the_end(tmp_path: Path, bucket: str, away: Away) -> None:
    away.error = ConnectionError("no route to host")
    with refused(OSError, says=("step=4.ckpt", bucket, "no route to host")):
        fit(ModelCheckpoint(tmp_path / "a", "{step}"), plugins=uploading(bucket), max_epochs=1)
    # Three times at the save, and at the end.
    assert away.tries == 6
    files.verify(tmp_path / "a" / "step=4.ckpt")
    away.error = None
    fit(ModelCheckpoint(tmp_path / "a", "{step}"), plugins=uploading(bucket), max_epochs=2, resume="last")
    assert copies(bucket) == ["a/step=8.ckpt"]


def test_copies_that_cannot_be_read_do_not_begin_a_run_anew(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(epochs: int, resume: str | None = None) -> L.Trainer:
        saved = ModelCheckpoint(tmp_path / "a", "{step}")
        return fit(saved, plugins=uploading(bucket), max_epochs=epochs, resume=resume)

    run(1)

    def fails(url: str) -> Any:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(files, "opened_remote", fails)
        with warned(UserWarning, says=("step=4.ckpt", "no answer")):
            resumed = run(1, "last")
        assert resumed.ckpt_path == str(tmp_path / "a" / "step=4.ckpt")
        shutil.rmtree(tmp_path / "a")
        with refused(OSError, says="no answer"):
            run(2, "last")
    assert run(2, "last").global_step == 8


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("no such bucket")])
def test_a_copy_that_is_refused_ends_the_run_at_the_next_step(
    tmp_path: Path, bucket: str, away: Away, error: Exception
) -> None:
    plugin = uploading(bucket)
    away.error = error
    seen: list[int] = []

    def wait() -> None:
        seen.append(1)
        plugin.copies._pending.result()

    saved = ModelCheckpoint(tmp_path / "a", "{step}", every_n_train_steps=2)
    with refused(type(error), says=str(error)):
        fit(saved, at_step(3, wait), at_step(4, lambda: seen.append(2)), plugins=plugin, max_epochs=4)
    assert 2 not in seen
    assert away.tries <= 2
    files.verify(tmp_path / "a" / "step=2.ckpt")


def test_the_next_save_does_not_wait_for_the_upload(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun, upload = threading.Event(), threading.Event(), files.upload
    uploaded: list[str] = []

    def slow(path: str, url: str) -> None:
        begun.set()
        assert may_end.wait(20)
        uploaded.append(os.path.basename(path))
        upload(path, url)

    monkeypatch.setattr(files, "upload", slow)
    plugin, path = uploading(bucket), str(tmp_path / "a.ckpt")
    plugin.save_checkpoint({"number": 0}, path)
    assert begun.wait(20)
    for number in (1, 2, 3):
        plugin.save_checkpoint({"number": number}, path)
    plugin.save_checkpoint({"number": 4}, tmp_path / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "b.ckpt")
    may_end.set()
    plugin.teardown()
    # The states that were replaced while they waited are left out, and so is what was removed.
    assert uploaded == ["a.ckpt", "a.ckpt"]
    assert copies(bucket) == [f"{tmp_path.name}/a.ckpt"]
    assert files.load(f"{bucket}/{tmp_path.name}/a.ckpt") == {"number": 3}


def test_a_folder_that_is_replaced_during_its_upload_leaves_the_copy_before(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.checkpoint import sharded

    plugin, path = uploading(bucket), tmp_path / "a.ckpt"
    url = f"{bucket}/{tmp_path.name}/a.ckpt"

    def contents(number: int) -> dict[str, Any]:
        return {"number": number, "state_dict": {"w": torch.full((9,), float(number))}}

    plugin.save_folder(contents(1), path)
    plugin.copies.finish()
    copy_file = sharded._copy_file
    found: list[Any] = []

    def meddling(*args: Any) -> Any:
        if not found:
            found.append(files.load(url)["number"])
            plugin.checkpoint_io.save_folder(contents(3), path)
        return copy_file(*args)

    monkeypatch.setattr(sharded, "_copy_file", meddling)
    plugin.save_folder(contents(2), path)
    plugin.copies.finish()
    assert found == [1]
    assert files.load(url)["number"] == 1
    files.verify(url)
    plugin.save_folder(contents(4), path)
    plugin.teardown()
    assert files.load(url).whole()["state_dict"]["w"][0] == 4
    assert len([name for name in copies(bucket) if "distcp" in name]) == 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("inner", [None, AsyncCheckpointIO])
def test_the_first_process_uploads_folders_of_all(tmp_path: Path, inner: Any) -> None:
    import torch.distributed as dist

    rank, path = dist.get_rank(), tmp_path / "here" / "a.ckpt"
    plugin = uploading(f"local://{tmp_path}/bucket", inner and inner())
    for number in (1, 2):
        plugin.save_folder(everything(number), path)
    plugin.teardown()
    dist.barrier()
    url = f"local://{tmp_path}/bucket/here/a.ckpt"
    files.verify(url)
    whole = files.load(url).whole()
    assert whole["number"] == 2
    assert (whole["state_dict"]["weight"] == 2).all()
    # An error of the first process is raised by all at the next save.
    plugin.copies._error, plugin.copies._is_refused = (PermissionError("denied") if rank == 0 else None), rank == 0
    with refused(PermissionError, says="denied"):
        plugin.save_folder(everything(3), path)
    dist.barrier()


def test_two_checkpoints_may_not_have_one_copy(tmp_path: Path, bucket: str) -> None:
    plugin = uploading(bucket)
    for folder in ("a/x", "b/x"):
        (tmp_path / folder).mkdir(parents=True)
    plugin.save_checkpoint({"number": 1}, tmp_path / "a/x/last.ckpt")
    with refused(ValueError, "url", fix="filename=", says=("x/last.ckpt", "a/x")):
        plugin.save_checkpoint({"number": 1}, tmp_path / "b/x/last.ckpt")
    plugin.teardown()


@pytest.mark.parametrize(
    ("options", "argument", "fix"),
    [
        ({"url": "bucket/run"}, "url", "s3://bucket/run"),
        ({"url": None}, "url", "s3://bucket/run"),
        ({"url": "s4://bucket/run"}, "url", "s3://bucket/run"),
        ({"tries": 0}, "tries", "at least 1"),
        ({"retry_seconds": -1.0}, "retry_seconds", "at least 0"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], argument: str, fix: str) -> None:
    with refused(ValueError, argument, fix=fix):
        UploadedCheckpointIO(**{"url": "memory://bucket", **options})
