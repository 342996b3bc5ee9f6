"""The digits task: a small Vision Transformer, trained from scratch on real handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten._lib.optional import need
from hasten.demo.task import Batch, LadderRow, RowVariant, Settings, Task, first_rows, lever_rows
from hasten.speed.safety import Safety

CLASSES = 10
SIDE = 8


class VisionTransformer(nn.Module):
    """Patches of an image, a learned position for each, transformer blocks, and the mean of them classified.

    Args:
        side: pixels on each side of the image.
        patch: pixels on each side of a patch.
        classes: how many.
        channels: of the image: 1 for grey, 3 for colour.
        width: features of a token.
        depth: transformer blocks.
        heads: attention heads of each block.
        hidden: features between the two layers of a block; default: twice ``width``.
        dropout: share of features dropped in training.

    Example::

        >>> VisionTransformer(8, patch=2, classes=10)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    ModelSource: Dosovitskiy et al., An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929

    """

    def __init__(
        self,
        side: int,
        *,
        patch: int,
        classes: int,
        channels: int = 1,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        # As large as the patches' own features: the mean over tokens forgets the order, so where a patch was has
        # to count from the start. With the usual 0.02 these few images teach 5 points less.
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.3)
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            dim_feedforward=hidden or 2 * width,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, channels, side, side)`` to logits ``(batch, classes)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.blocks(tokens).mean(dim=1))
        return logits


class DigitDataset(Dataset[dict[str, Tensor]]):
    """Images ``(1, 8, 8)`` float32 from -1 to 1, and their labels, by one number or by a list of them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Digits(Task):
    """Classify scikit-learn's 1,797 handwritten digits: 1,257 train, 180 validate, 360 test.

    Example::

        >>> digits = Digits()
        >>> len(digits.train_data), len(digits.validation_data), len(digits.test_data)
        (1257, 180, 360)

    """

    name: ClassVar[str] = "digits"
    epochs = 10
    batch_size = 32
    learning_rate = 1e-3

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        data = need("sklearn.datasets", purpose="the digits task of `hasten demo`").load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
        labels = torch.tensor(data.target, dtype=torch.int64)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, validation, test = order[:1257], order[1257:1437], order[1437:]
        self.train_data = DigitDataset(images[train], labels[train])
        self.validation_data = DigitDataset(images[validation], labels[validation])
        self.test_data = DigitDataset(images[test], labels[test])
        self.title = (
            f"a small Vision Transformer from scratch on scikit-learn's digits: {len(train):,} images, "
            f"{self.epochs} epochs of batches of {self.batch_size}"
        )
        self.rows = self._rows()

    def _rows(self) -> list[LadderRow]:
        names = ["data in memory", "fused AdamW"]
        if self.device.type == "cpu":
            names += ["pages kept", "packed attention", "cheap dropout masks", "bf16", "compiled"]
        else:
            names += ["bf16", "compiled", "CUDA graphs", "packed attention"]
        return [
            *first_rows(self.epochs),
            *lever_rows(*names),
            LadderRow(
                "no attention dropout",
                "nn.MultiheadAttention(dropout=0.0)",
                changes={"attention_dropout": False},
                safety=Safety.OTHER_MATHS,
            ),
        ]

    def model(self, variant: RowVariant) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = VisionTransformer(SIDE, patch=2, classes=CLASSES)
        if not variant.attention_dropout:
            for layer in model.modules():
                if isinstance(layer, nn.MultiheadAttention):
                    layer.dropout = 0.0
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["images"])
        return logits

    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, generator=order)

    def lengths(self, variant: RowVariant) -> Sequence[int]:
        return [SIDE * SIDE] * len(self.train_data)

    def single(self, sample: int) -> Batch:
        return self.train_data[[sample]]

    def validation_loader(self) -> DataLoader[Any]:
        return DataLoader(self.validation_data, batch_size=128)

    def test_loader(self) -> DataLoader[Any]:
        return DataLoader(self.test_data, batch_size=128)
