"""The vit task: photographs from the archive or its folder, and the same model in every row."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

from hasten.demo import vit
from hasten.demo.task import DemoError, RowVariant
from hasten.demo.vit import Vit

from .conftest import weights_of

COUNT = 20


def records(seed: int) -> tuple[bytes, list[int]]:
    """One file of the archive: labels and pixels."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 256, (COUNT, vit.RECORD_BYTES), dtype=torch.uint8, generator=generator)
    whole[:, 0] %= vit.CLASSES
    return bytes(whole.flatten().tolist()), whole[:, 0].tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cifar-10-batches-bin"
    made.mkdir()
    for seed, name in enumerate((*vit.TRAIN_FILES, *vit.TEST_FILES)):
        (made / name).write_bytes(records(seed)[0])
    (made / "batches.meta.txt").write_text("airplane\n")
    return made


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, arcname="cifar-10-batches-bin")
    return path


def test_archive_and_folder_give_the_same_photographs(archive: Path, folder: Path) -> None:
    (train, test), (other, _) = vit.read_photographs(archive), vit.read_photographs(folder)
    assert torch.equal(train.images, other.images)
    assert torch.equal(train.labels, other.labels)
    assert (len(train), len(test)) == (5 * COUNT, COUNT)
    assert test.labels.tolist() == records(5)[1]
    first = (folder / vit.TRAIN_FILES[0]).read_bytes()
    sample = train[1]
    assert sample["images"].shape == (3, 32, 32)
    # The second record: its green pixels begin 1 + 1,024 bytes after it.
    assert sample["images"][1, 0, 0] == first[vit.RECORD_BYTES + 1 + 1024]
    assert sample["labels"] == first[vit.RECORD_BYTES]


def test_what_is_no_such_archive_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no such file"):
        vit.read_photographs(tmp_path / "absent.tar.gz")
    (tmp_path / "torn.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DemoError, match="not a whole tar archive"):
        vit.read_photographs(tmp_path / "torn.tar.gz")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DemoError, match=r"test_batch.bin is not in it"):
        vit.read_photographs(folder)
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(DemoError, match="not a whole number of images"):
        vit.read_photographs(folder)
    with tarfile.open(tmp_path / "other.tar", "w") as file:
        file.addfile(tarfile.TarInfo("readme"), io.BytesIO())
    with pytest.raises(DemoError, match=r"data_batch_1.bin.* are not in it"):
        vit.read_photographs(tmp_path / "other.tar")


def small(data: Path | None = None, **options: object) -> Vit:
    return Vit(data, side=32, width=64, depth=1, epochs=1, batch_size=15, say=lambda line: None, **options)


def test_splits_are_apart_and_in_proportion(archive: Path) -> None:
    task = small(archive)
    assert (len(task.train_data), len(task.validation_data), len(task.test_data)) == (90, 10, 20)
    limited = small(archive, limit=60)
    assert (len(limited.train_data), len(limited.validation_data), len(limited.test_data)) == (45, 5, 10)
    rows = {bytes(image.flatten().tolist()) for image in limited.train_data.images}
    assert not any(bytes(image.flatten().tolist()) in rows for image in limited.validation_data.images)


def test_rows_train_the_same_weights(archive: Path) -> None:
    task = small(archive)
    plain, same = (weights_of(task, variant) for variant in (RowVariant(), RowVariant(trainer={})))
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert task.model(RowVariant())(task.train_data.images[:2]).shape == (2, vit.CLASSES)
    assert [row.name for row in task.rows][-2:] == ["bf16", "compiled"]


def test_noise_needs_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.demo.vit.download", lambda *a, **k: pytest.fail("it was downloaded"))
    task = small(random_images=True, limit=60)
    assert "noise" in task.title
    assert len(task.train_data) == 45


@pytest.mark.parametrize(("name", "value"), [("side", 30), ("limit", 20)])
def test_senseless_sizes_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Vit(random_images=True, **{name: value})
