"""The vit task: a Vision Transformer of the usual size on photographs, from scratch or fine-tuned."""

from __future__ import annotations

import copy
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten._lib.files import cache_folder
from hasten._lib.optional import need
from hasten.demo.digits import VisionTransformer
from hasten.demo.download import Remote, download
from hasten.demo.task import (
    Batch,
    DemoError,
    LadderRow,
    RowVariant,
    Say,
    Settings,
    Task,
    first_rows,
    lever_rows,
    plural,
)

ARCHIVE = Remote(
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
PRETRAINED = "google/vit-base-patch16-224-in21k"
PATCH = 16
EVALUATION_BATCH = 256


class Resized(nn.Module):
    """Photographs of bytes, made larger and centred on their device, then classified.

    Args:
        model: from images ``(batch, 3, side, side)`` to logits ``(batch, classes)``.
        side: pixels.

    """

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model = model
        self.side = side

    def forward(self, photographs: Tensor) -> Tensor:
        """Photographs ``(batch, 3, 32, 32)`` uint8 to logits ``(batch, classes)``."""
        centred = photographs.float() / 127.5 - 1.0
        found = self.model(F.interpolate(centred, size=self.side, mode="bilinear", antialias=False))
        logits: Tensor = getattr(found, "logits", found)
        return logits


class Vit(Task):
    """Classify CIFAR-10's photographs: 45,000 train, 5,000 validate, 10,000 test.

    Args:
        data: ``cifar-10-binary.tar.gz`` or its folder; None downloads it to the cache folder.
        pretrained: fine-tune ViT-B/16's published weights; else it is trained from scratch.
        random_images: noise instead of photographs: the same work, nothing to fetch, a useless accuracy.
        limit: use only so many images, in the same proportions.
        side: pixels that a photograph is made as large as, a multiple of 16.
        width: features of a token; ViT-B has 768.
        depth: transformer blocks; ViT-B has 12.
        cache: folder for the archive; None takes hasten's cache folder.
        progress: show a bar while downloading.
        say: called with a line on what takes long.
        settings: see :class:`hasten.demo.task.Settings`.

    Raises:
        ValueError: ``side`` is not a multiple of 16, or ``limit`` is below 60.

    """

    name: ClassVar[str] = "vit"
    epochs = 3
    batch_size = 64
    learning_rate = 5e-5

    def __init__(
        self,
        data: Path | None = None,
        *,
        pretrained: bool = False,
        random_images: bool = False,
        limit: int | None = None,
        side: int = 224,
        width: int = 768,
        depth: int = 12,
        cache: Path | None = None,
        progress: bool = True,
        say: Say = print,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        if side % PATCH or side < PATCH:
            raise ValueError(f"side={side}: use a multiple of {PATCH}, such as 224.")
        if limit is not None and limit < 60:
            raise ValueError(
                f"limit={limit}: too few images to split in three. Use 60 or more, or leave it out."
            )
        self.pretrained = pretrained
        self.side, self.width_of_tokens, self.depth = side, width, depth
        if random_images:
            train, test = random_photographs(50_000, seed=1), random_photographs(10_000, seed=2)
        else:
            if data is None:
                data = download(
                    ARCHIVE, (cache or cache_folder()) / "cifar-10-binary.tar.gz", progress=progress
                )
            say("Reading the photographs.")
            train, test = read_photographs(data)
        self._split(train, test, limit)
        kind = "fine-tuned" if pretrained else "from scratch"
        self.title = (
            f"a Vision Transformer of {depth} blocks of {width} features, {kind}, on "
            f"{'noise' if random_images else 'CIFAR-10'} made {side} pixels wide: {len(self.train_data):,} train / "
            f"{len(self.validation_data):,} validation / {len(self.test_data):,} test, "
            f"{plural(self.epochs, 'epoch')} of batches of {self.batch_size}"
        )
        self.rows = self._rows()
        self._models: dict[int, nn.Module] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": {}}

    def _split(self, train: Photographs, test: Photographs, limit: int | None) -> None:
        share = 1.0 if limit is None else min(1.0, limit / (len(train) + len(test)))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        used = order[: round(share * len(train))]
        held_out = max(1, len(used) // 10)
        self.train_data = train.part(used[held_out:])
        self.validation_data = train.part(used[:held_out])
        chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
        self.test_data = test.part(chosen[: max(1, round(share * len(test)))])

    def _rows(self) -> list[LadderRow]:
        names = ["data in memory", "fused AdamW"]
        if self.device.type == "cpu":
            names += ["pages kept", "bf16", "compiled"]
        else:
            names += ["TF32", "bf16", "compiled", "CUDA graphs"]
        return [*first_rows(self.epochs), *lever_rows(*names)]

    def model(self, variant: RowVariant) -> nn.Module:
        kept = self._models.get(self.seed)
        if kept is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                kept = self._models[self.seed] = Resized(self._transformer(), self.side)
        return copy.deepcopy(kept)

    def _transformer(self) -> nn.Module:
        if not self.pretrained:
            return VisionTransformer(
                self.side,
                patch=PATCH,
                classes=CLASSES,
                channels=3,
                width=self.width_of_tokens,
                depth=self.depth,
                heads=self.width_of_tokens // 64,
                hidden=4 * self.width_of_tokens,
                dropout=0.0,
            )
        transformers = need("transformers", purpose="the vit task of `hasten demo` with --pretrained")
        try:
            model: nn.Module = transformers.ViTForImageClassification.from_pretrained(
                PRETRAINED, num_labels=CLASSES
            )
        except OSError as error:
            raise DemoError(
                f"{PRETRAINED} is not on this machine and could not be fetched from the Hugging Face hub "
                f"({str(error).splitlines()[0]}). Without network leave --pretrained out."
            ) from error
        # It comes in evaluation mode, and a Trainer leaves that unchanged.
        return model.train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["images"])
        return logits

    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, generator=order)

    def lengths(self, variant: RowVariant) -> Sequence[int]:
        return [(self.side // PATCH) ** 2] * len(self.train_data)

    def single(self, sample: int) -> Batch:
        return {name: tensor.unsqueeze(0) for name, tensor in self.train_data[sample].items()}

    def validation_loader(self) -> DataLoader[Any]:
        return DataLoader(self.validation_data, batch_size=EVALUATION_BATCH)

    def test_loader(self) -> DataLoader[Any]:
        return DataLoader(self.test_data, batch_size=EVALUATION_BATCH)


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


def read_photographs(data: Path) -> tuple[Photographs, Photographs]:
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
            f"cifar-10-binary.tar.gz (the version for C programs, {ARCHIVE.url}) or the folder it unpacks to."
        )
    return _join(found, TRAIN_FILES, data), _join(found, TEST_FILES, data)


def random_photographs(count: int, *, seed: int = 0) -> Photographs:
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


def _join(found: dict[str, bytes], names: tuple[str, ...], data: Path) -> Photographs:
    for name in names:
        if not found[name] or len(found[name]) % RECORD_BYTES:
            raise DemoError(
                f"--data {data}: {name} has {len(found[name]):,} bytes, not a whole number of images. Fetch the "
                "archive again."
            )
    records = torch.frombuffer(bytearray(b"".join(found[name] for name in names)), dtype=torch.uint8)
    records = records.view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if int(labels.max()) >= CLASSES:
        raise DemoError(f"--data {data}: there is a label {int(labels.max())}; CIFAR-10 has 0 to 9.")
    return Photographs(records[:, 1:].reshape(-1, *SHAPE).clone(), labels)
