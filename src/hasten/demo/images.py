"""CIFAR-10's 60,000 small photographs: read from its binary archive, as whole tensors."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hasten.demo.download import Remote
from hasten.demo.errors import DemoError

CIFAR_ARCHIVE = Remote(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size_bytes=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CLASSES = 10
SHAPE = (3, 32, 32)
# One byte of label, then the red, green and blue pixels, row by row.
RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)


class Photographs(Dataset[dict[str, Any]]):
    """Images ``(3, 32, 32)`` uint8 and their labels, int64.

    Example::

        >>> Photographs(torch.zeros(5, 3, 32, 32, dtype=torch.uint8), torch.arange(5))[2]["labels"]
        tensor(2)

    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def part(self, places: Tensor) -> Photographs:
        """Return the images at these places, ``(images,)``."""
        return Photographs(self.images[places], self.labels[places])


def read(data: Path) -> tuple[Photographs, Photographs]:
    """Return the training and the test images.

    Args:
        data: ``cifar-10-binary.tar.gz``, or the folder it unpacks to.

    Raises:
        DemoError: they are not there, or not whole.

    """
    if not data.exists():
        raise DemoError(
            f"--data {data}: there is no such file or folder. Give cifar-10-binary.tar.gz or the folder it "
            "unpacks to."
        )
    found = _in_folder(data) if data.is_dir() else _in_archive(data)
    missing = [name for name in (*TRAIN_FILES, *TEST_FILES) if name not in found]
    if missing:
        raise DemoError(
            f"--data {data}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in it. Give "
            f"cifar-10-binary.tar.gz (the version for C programs, {CIFAR_ARCHIVE.url}) or the folder it unpacks to."
        )
    return _photographs(found, TRAIN_FILES, data), _photographs(found, TEST_FILES, data)


def at_random(count: int, *, seed: int = 0) -> Photographs:
    """Return images of noise with labels at random: the same work, nothing to learn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)
    return Photographs(images, torch.randint(0, CLASSES, (count,), generator=generator))


def _in_folder(folder: Path) -> dict[str, bytes]:
    names = {*TRAIN_FILES, *TEST_FILES}
    return {path.name: path.read_bytes() for path in folder.rglob("*.bin") if path.name in names}


def _in_archive(archive: Path) -> dict[str, bytes]:
    names = {*TRAIN_FILES, *TEST_FILES}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as files:
            for member in files:
                content = files.extractfile(member) if Path(member.name).name in names else None
                if content is not None:
                    found[Path(member.name).name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DemoError(
            f"--data {archive}: not a whole tar archive ({error}). Give cifar-10-binary.tar.gz or the folder it "
            "unpacks to."
        ) from error
    return found


def _photographs(found: dict[str, bytes], names: tuple[str, ...], data: Path) -> Photographs:
    for name in names:
        if not found[name] or len(found[name]) % RECORD_BYTES:
            raise DemoError(
                f"--data {data}: {name} has {len(found[name]):,} bytes, no whole number of images of {RECORD_BYTES:,} "
                "bytes. Fetch the archive again."
            )
    records = torch.frombuffer(bytearray(b"".join(found[name] for name in names)), dtype=torch.uint8)
    records = records.view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if int(labels.max()) >= CLASSES:
        raise DemoError(f"--data {data}: there is a label {int(labels.max())}; CIFAR-10 has 0 to 9.")
    return Photographs(records[:, 1:].reshape(-1, *SHAPE).clone(), labels)
