"""The tasks that classify images: a small Vision Transformer on digits, and one of the usual size on photographs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten._lib.device import is_host
from hasten._lib.errors import make_error
from hasten._lib.files import cache_folder
from hasten._lib.optional import need
from hasten_tools.demo.download import Remote, download, read_files
from hasten_tools.demo.task import (
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
    shuffled,
)
from hasten_tools.demo.text_models import from_files
from hasten_tools.speed.safety import Safety

# Both tasks have ten.
CLASSES = 10
ARCHIVE = Remote(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size_bytes=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
SHAPE = (3, 32, 32)
# One byte of label, then the red, green and blue pixels, row by row.
RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
PRETRAINED = "google/vit-base-patch16-224-in21k"
PATCH = 16


class Images(Dataset[dict[str, Tensor]]):
    """Images ``(count, channels, side, side)`` and their labels ``(count,)``; samples by a number or by several.

    Example::

        >>> images = Images(torch.zeros(5, 1, 8, 8), torch.arange(5))
        >>> images[2]["labels"], images[[1, 3]]["images"].shape
        (tensor(2), torch.Size([2, 1, 8, 8]))

    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def part(self, places: Tensor) -> Images:
        """Return the images at these places, ``(images,)``."""
        return Images(self.images[places], self.labels[places])


class VisionTransformer(nn.Module):
    """A Vision Transformer: patches with learned positions, transformer blocks, and a classifier of their mean.

    Sizes of image and patch are in pixels, and a block has ``hidden`` features between its two layers.

    Example::

        >>> VisionTransformer(8, patch=2)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929

    """

    def __init__(
        self,
        side: int,
        *,
        patch: int,
        channels: int = 1,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        hidden: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        # As large as the patches' own features: the mean over tokens forgets the order, so where a patch was has
        # to count from the start. With the usual 0.02 these few images teach 5 points less.
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.3)
        block = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, channels, side, side)`` to logits ``(batch, classes)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return cast(Tensor, self.head(self.blocks(tokens).mean(dim=1)))


class ImageTask(Task):
    """Classify images, which all have the same number of tokens."""

    train_data: Images
    validation_data: Images
    test_data: Images
    tokens_per_image: int

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast(Tensor, model(batch["images"]))

    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, generator=order)

    def held_out(self) -> dict[str, DataLoader[Any]]:
        parts = {"validation": self.validation_data, "test": self.test_data}
        return {name: DataLoader(part, batch_size=128) for name, part in parts.items()}

    def lengths(self, variant: RowVariant) -> Sequence[int]:
        return [self.tokens_per_image] * len(self.train_data)

    def single(self, sample: int) -> Batch:
        return self.train_data[[sample]]


class Digits(ImageTask):
    """Classify scikit-learn's 1,797 handwritten digits: 1,257 train, 180 validate, 360 test.

    Example::

        >>> digits = Digits()
        >>> len(digits.train_data), len(digits.validation_data), len(digits.test_data)
        (1257, 180, 360)

    """

    name: ClassVar[str] = "digits"
    imports = ("sklearn.datasets",)
    epochs = 10
    batch_size = 32
    learning_rate = 1e-3
    tokens_per_image = 16

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        data = need("sklearn.datasets", purpose="the digits task of `hasten demo`").load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
        digits = Images(images, torch.tensor(data.target, dtype=torch.int64))
        parts = shuffled(len(digits)).split([1257, 180, 360])
        self.train_data, self.validation_data, self.test_data = map(digits.part, parts)
        self.title = (
            f"a small Vision Transformer from scratch on scikit-learn's digits: {len(self.train_data):,} images, "
            f"{self.epochs} epochs of batches of {self.batch_size}"
        )
        faster = ["pages kept", "packed attention", "cheap dropout masks", "bf16", "compiled"]
        if not is_host(self.device):
            faster = ["bf16", "compiled", "CUDA graphs", "packed attention"]
        without_dropout = LadderRow(
            "no attention dropout",
            "nn.MultiheadAttention(dropout=0.0)",
            changes={"attention_dropout": False},
            safety=Safety.OTHER_MATHS,
        )
        levers = lever_rows("data in memory", "fused AdamW", *faster)
        self.rows = [*first_rows(self.epochs), *levers, without_dropout]

    def build(self, variant: RowVariant) -> nn.Module:
        model = VisionTransformer(8, patch=2)
        if not variant.attention_dropout:
            for layer in model.modules():
                if isinstance(layer, nn.MultiheadAttention):
                    layer.dropout = 0.0
        return model


class Resized(nn.Module):
    """Photographs of bytes, made ``side`` pixels large and centered on their device, then classified by ``model``."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, photographs: Tensor) -> Tensor:
        """Photographs ``(batch, 3, 32, 32)`` uint8 to logits ``(batch, classes)``."""
        centered = photographs.float() / 127.5 - 1.0
        found = self.model(F.interpolate(centered, size=self.side, mode="bilinear", antialias=False))
        return cast(Tensor, getattr(found, "logits", found))


class Vit(ImageTask):
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
        say: called with a line on what takes long.

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
        say: Say = print,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        if side % PATCH or side < PATCH:
            raise make_error(
                ValueError, f"side={side}:", fix=f"use a multiple of {PATCH}, such as 224.", argument="side"
            )
        if limit is not None and limit < 60:
            what = f"limit={limit}: too few images to split in three."
            raise make_error(ValueError, what, fix="Use 60 or more, or leave it out.", argument="limit")
        self.pretrained, self.side, self.width, self.depth = pretrained, side, width, depth
        self.tokens_per_image = (side // PATCH) ** 2
        if random_images:
            train, test = random_photographs(50_000, seed=1), random_photographs(10_000, seed=2)
        else:
            data = data or download(ARCHIVE, cache or cache_folder())
            say("Reading the photographs.")
            train, test = read_photographs(data)
        share = 1.0 if limit is None else min(1.0, limit / (len(train) + len(test)))
        used = shuffled(len(train))[: round(share * len(train))]
        held_out = max(1, len(used) // 10)
        self.train_data, self.validation_data = train.part(used[held_out:]), train.part(used[:held_out])
        self.test_data = test.part(shuffled(len(test))[: max(1, round(share * len(test)))])
        self.title = (
            f"a Vision Transformer of {depth} blocks of {width} features, "
            f"{'fine-tuned' if pretrained else 'from scratch'}, on {'noise' if random_images else 'CIFAR-10'} made "
            f"{side} pixels wide: {len(self.train_data):,} train / {len(self.validation_data):,} validation / "
            f"{len(self.test_data):,} test, {plural(self.epochs, 'epoch')} of batches of {self.batch_size}"
        )
        on_cpu = is_host(self.device)
        faster = ["pages kept", "bf16", "compiled"] if on_cpu else ["TF32", "bf16", "compiled", "CUDA graphs"]
        self.rows = [*first_rows(self.epochs), *lever_rows("data in memory", "fused AdamW", *faster)]

    def build(self, variant: RowVariant) -> nn.Module:
        if self.pretrained:
            kind = "ViTForImageClassification"
            model = from_files(kind, PRETRAINED, "leave --pretrained out", num_labels=CLASSES)
            # It comes in evaluation mode, and a Trainer leaves that unchanged.
            return Resized(model.train(), self.side)
        model = VisionTransformer(
            self.side,
            patch=PATCH,
            channels=3,
            width=self.width,
            depth=self.depth,
            heads=self.width // 64,
            hidden=4 * self.width,
            dropout=0.0,
        )
        return Resized(model, self.side)


def random_photographs(count: int, *, seed: int = 0) -> Images:
    """Return images of noise with labels at random: the same work, nothing to learn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)
    return Images(images, torch.randint(0, CLASSES, (count,), generator=generator))


def read_photographs(data: Path) -> tuple[Images, Images]:
    """Return the training and the test images of ``cifar-10-binary.tar.gz``, or of the folder it unpacks to."""
    names = (*TRAIN_FILES, *TEST_FILES)
    files = read_files(data, ARCHIVE, lambda path: Path(path).name in names)
    found = {Path(path).name: content for path, content in files}
    if missing := [name for name in names if name not in found]:
        what = f"--data {data}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in it."
        fix = f"Give {ARCHIVE.name} (the version for C programs, {ARCHIVE.url}) or the folder it unpacks to."
        raise make_error(DemoError, what, fix=fix)
    for name, content in found.items():
        if not content or len(content) % RECORD_BYTES:
            what = f"--data {data}: {name} has {len(content):,} bytes, not a whole number of images."
            raise make_error(DemoError, what, fix="Fetch the archive again.")
        if max(content[::RECORD_BYTES]) >= CLASSES:
            raise DemoError(f"--data {data}: {name} has a label above 9, which CIFAR-10 does not have.")
    train, test = (b"".join(found[name] for name in part) for part in (TRAIN_FILES, TEST_FILES))
    return _images(train), _images(test)


def _images(content: bytes) -> Images:
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD_BYTES)
    return Images(records[:, 1:].reshape(-1, *SHAPE).clone(), records[:, 0].long())
