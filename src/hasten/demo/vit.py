"""The vit task: a Vision Transformer of the usual size on photographs, from scratch or fine-tuned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten._lib.optional import need
from hasten.demo import images
from hasten.demo.digits import VisionTransformer
from hasten.demo.download import cache_folder, download
from hasten.demo.errors import DemoError
from hasten.demo.images import CIFAR_ARCHIVE, CLASSES, Photographs
from hasten.demo.plain import Batch
from hasten.demo.task import Ladder, Switches, Task

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
        epochs: passes over the training images.
        batch_size: images in a batch.
        learning_rate: of AdamW.
        seed: of the new weights, the order and the split.
        device: where to compute.
        cache: folder for the archive; None takes ``hasten`` in the user's cache folder.
        progress: show a bar while downloading.
        say: told in a line what takes long.

    Raises:
        ValueError: ``side`` is no multiple of 16, or ``limit`` is below 60.

    """

    name: ClassVar[str] = "vit"

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
        epochs: int = 3,
        batch_size: int = 64,
        learning_rate: float = 5e-5,
        seed: int = 0,
        device: torch.device | None = None,
        cache: Path | None = None,
        progress: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        if side % PATCH or side < PATCH:
            raise ValueError(f"side={side}: use a multiple of {PATCH}, such as 224.")
        if limit is not None and limit < 60:
            raise ValueError(
                f"limit={limit}: too few images to split in three. Use 60 or more, or leave it out."
            )
        self.pretrained = pretrained
        self.side, self.width_of_tokens, self.depth = side, width, depth
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.device = device or torch.device("cpu")
        if random_images:
            train, test = images.at_random(50_000, seed=1), images.at_random(10_000, seed=2)
        else:
            if data is None:
                data = download(
                    CIFAR_ARCHIVE, cache_folder(cache) / "cifar-10-binary.tar.gz", progress=progress
                )
            say("Reading the photographs.")
            train, test = images.read(data)
        self._split(train, test, limit)
        kind = "fine-tuned" if pretrained else "from scratch"
        self.title = (
            f"a Vision Transformer of {depth} blocks of {width} features, {kind}, on "
            f"{'noise' if random_images else 'CIFAR-10'} made {side} pixels wide: {len(self.train_data):,} train / "
            f"{len(self.validation_data):,} validation / {len(self.test_data):,} test, {epochs} "
            f"epoch{'s' * (epochs > 1)} of batches of {batch_size}"
        )
        self.rows = self._ladder().rows
        self._models: dict[int, nn.Module] = {}

    def _split(self, train: Photographs, test: Photographs, limit: int | None) -> None:
        share = 1.0 if limit is None else min(1.0, limit / (len(train) + len(test)))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        used = order[: round(share * len(train))]
        held_out = max(1, len(used) // 10)
        self.train_data = train.part(used[held_out:])
        self.validation_data = train.part(used[:held_out])
        chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
        self.test_data = test.part(chosen[: max(1, round(share * len(test)))])

    def _ladder(self) -> Ladder:
        ladder = Ladder("loss.backward(); optimizer.step()")
        ladder.add(
            "the same in hasten", f"L.Trainer(max_epochs={self.epochs}).fit(module, loader)", hasten=True
        )
        ladder.add("data in memory", "L.Trainer(resident=True)", resident=True)
        ladder.add("fused AdamW", "L.Trainer(fused_optimizer=True)", fused=True)
        if self.device.type == "cpu":
            ladder.add("pages kept", 'L.Trainer(allocator="keep")', keep=True)
        else:
            ladder.add("TF32", 'L.Trainer(matmul_precision="high")', tf32=True)
        ladder.add_smaller_and_compiled()
        if self.device.type != "cpu":
            ladder.add_graphs()
        return ladder

    def model(self, switches: Switches) -> nn.Module:
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
                f"{PRETRAINED} is not kept on this machine and could not be fetched from the Hugging Face hub. Without "
                f"network leave --pretrained out: the model is then trained from scratch. "
                f"({str(error).splitlines()[0]})"
            ) from error
        # It comes in evaluation, and a Trainer leaves that as it is.
        return model.train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["images"])
        return logits

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def users_loader(self, switches: Switches) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, generator=order)

    def length(self, switches: Switches, sample: int) -> int:
        return (self.side // PATCH) ** 2

    def width(self, switches: Switches, batch: Sequence[int]) -> int:
        return self.length(switches, 0)

    def validation_loader(self) -> DataLoader[Any]:
        return DataLoader(self.validation_data, batch_size=EVALUATION_BATCH)

    def test_loader(self) -> DataLoader[Any]:
        return DataLoader(self.test_data, batch_size=EVALUATION_BATCH)
