"""The vit task: photographs from the archive or its folder, and the same model in every row."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from hasten_tools.demo import images
from hasten_tools.demo.images import Vit
from hasten_tools.demo.task import DemoError, RowVariant

from .conftest import pack, silent, weights_of

COUNT = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cifar-10-batches-bin"
    made.mkdir()
    for seed, name in enumerate((*images.TRAIN_FILES, *images.TEST_FILES)):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(0, 256, (COUNT, images.RECORD_BYTES), dtype=torch.uint8, generator=generator)
        whole[:, 0] %= images.CLASSES
        (made / name).write_bytes(bytes(whole.flatten().tolist()))
    (made / "batches.meta.txt").write_text("airplane\n")
    return made


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    return pack(tmp_path / "cifar-10-binary.tar.gz", folder)


def test_archive_and_folder_give_the_same_photographs(archive: Path, folder: Path) -> None:
    (train, test), (other, _) = images.read_photographs(archive), images.read_photographs(folder)
    assert torch.equal(train.images, other.images)
    assert torch.equal(train.labels, other.labels)
    assert (len(train), len(test)) == (5 * COUNT, COUNT)
    last = (folder / "test_batch.bin").read_bytes()
    assert test.labels.tolist() == list(last[:: images.RECORD_BYTES])
    # The second record: its green pixels begin 1 + 1,024 bytes after it.
    assert test[1]["images"].shape == (3, 32, 32)
    assert test[1]["images"][1, 0, 0] == last[images.RECORD_BYTES + 1 + 1024]


def test_what_is_not_such_an_archive_is_named(folder: Path, tmp_path: Path) -> None:
    def refused(data: Path, said: str) -> None:
        with pytest.raises(DemoError, match=said):
            images.read_photographs(data)

    refused(tmp_path / "absent.tar.gz", "no such file")
    (tmp_path / "torn.tar.gz").write_bytes(b"no archive")
    refused(tmp_path / "torn.tar.gz", "not a whole tar archive")
    with tarfile.open(tmp_path / "other.tar", "w") as file:
        file.addfile(tarfile.TarInfo("readme"))
    refused(tmp_path / "other.tar", r"data_batch_1.bin.* are not in it")
    (folder / "test_batch.bin").write_bytes(b"123")
    refused(folder, "not a whole number of images")
    (folder / "test_batch.bin").unlink()
    refused(folder, r"test_batch.bin is not in it")


def small(data: Path | None = None, **options: object) -> Vit:
    return Vit(data, side=32, width=64, depth=1, epochs=1, batch_size=15, say=silent, **options)


def test_splits_are_apart_and_in_proportion(archive: Path) -> None:
    for options, sizes in (({}, (90, 10, 20)), ({"limit": 60}, (45, 5, 10))):
        task = small(archive, **options)
        assert (len(task.train_data), len(task.validation_data), len(task.test_data)) == sizes
        rows = {bytes(image.flatten().tolist()) for image in task.train_data.images}
        assert not any(bytes(image.flatten().tolist()) in rows for image in task.validation_data.images)


def test_rows_train_the_same_weights(archive: Path) -> None:
    task = small(archive)
    plain, same = (weights_of(task, variant) for variant in (RowVariant(), RowVariant(trainer={})))
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert task.model(RowVariant())(task.train_data.images[:2]).shape == (2, images.CLASSES)
    assert [row.name for row in task.rows][-2:] == ["bf16", "compiled"]


def test_noise_needs_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten_tools.demo.images.download", lambda *a, **k: pytest.fail("it was downloaded"))
    task = small(random_images=True, limit=60)
    assert "noise" in task.title
    assert len(task.train_data) == 45
    with refused(ValueError, "limit", says="limit=20"):
        small(random_images=True, limit=20)
