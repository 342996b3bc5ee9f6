"""The imdb task: fine-tune a language model to tell whether a film review is positive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.demo import models, reviews
from hasten.demo.download import IMDB_ARCHIVE, cache_folder, download
from hasten.demo.plain import Batch
from hasten.demo.task import Ladder, Switches, Task

PAD_ID = 0
EVALUATION_BATCH = 32


class Imdb(Task):
    """Classify IMDB reviews: 35,000 train, 5,000 validate, 10,000 test.

    Args:
        data: ``aclImdb_v1.tar.gz`` or its folder; None downloads it to the cache folder.
        source: which model, from :func:`hasten.demo.models.find`.
        limit: use only so many reviews; see :func:`hasten.demo.reviews.split_reviews`.
        max_length: tokens of a review at most; longer ones are cut.
        epochs: passes over the training reviews.
        batch_size: reviews in a batch.
        learning_rate: of AdamW.
        seed: of the new weights, the order and the split.
        device: where to compute.
        cache: folder for the archive and the tokens; None takes ``hasten`` in the user's cache folder.
        progress: show a bar while downloading.
        say: told in a line what takes long.

    """

    name: ClassVar[str] = "imdb"

    def __init__(
        self,
        data: Path | None,
        source: models.Source,
        *,
        limit: int | None = None,
        max_length: int = 512,
        epochs: int = 1,
        batch_size: int = 12,
        learning_rate: float = 1e-4,
        seed: int = 0,
        device: torch.device | None = None,
        cache: Path | None = None,
        progress: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        self.source = source
        self.max_length = max_length
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.device = device or torch.device("cpu")
        folder = cache_folder(cache)
        if data is None:
            data = download(IMDB_ARCHIVE, folder / "aclImdb_v1.tar.gz", progress=progress)
        tokens = reviews.tokens_of(
            data,
            lambda texts: source.tokenize(texts, max_length=max_length),
            tokenizer_key=source.tokenizer_key(max_length),
            cache=folder,
            say=say,
        )
        split = reviews.split_reviews(len(tokens), limit=limit)
        self.train_data = reviews.ReviewDataset(tokens, split.train)
        self.validation_data = reviews.ReviewDataset(tokens, split.validation)
        self.test_data = reviews.ReviewDataset(tokens, split.test)
        train, validation, test = split.sizes
        useful = sum(self.train_data.lengths) / (train * max_length)
        self.title = (
            f"{source.title} on IMDB reviews: {train:,} train / {validation:,} validation / {test:,} test, "
            f"{epochs} epoch{'s' * (epochs > 1)} of batches of {batch_size}; padded to {max_length} tokens, "
            f"{useful:.0%} of them are text"
        )
        self.rows = self._ladder().rows
        # As they begin, for each seed with and without attention dropout: rows train copies.
        self._models: dict[tuple[int, bool], nn.Module] = {}

    def _ladder(self) -> Ladder:
        ladder = Ladder("loss.backward(); optimizer.step()")
        ladder.add(
            "the same in hasten", f"L.Trainer(max_epochs={self.epochs}).fit(module, loader)", hasten=True
        )
        ladder.add("fused AdamW", "L.Trainer(fused_optimizer=True)", fused=True)
        if self.device.type == "cpu":
            ladder.add("pages kept", 'L.Trainer(allocator="keep")', keep=True)
            ladder.add("batches by length", 'L.Trainer(batching="length")', by_length=True)
            _add_packed(ladder)
            ladder.add("cheap dropout masks", 'L.Trainer(dropout="fast")', fast_dropout=True)
            ladder.add_smaller_and_compiled()
        else:
            ladder.add("TF32", 'L.Trainer(matmul_precision="high")', tf32=True)
            ladder.add("batches by length", 'L.Trainer(batching="length")', by_length=True)
            # A GPU waits for the host with steps this short: less computing pays once the host does not hold it up.
            ladder.add_smaller_and_compiled()
            ladder.add_graphs()
            _add_packed(ladder)
        ladder.add(
            "no attention dropout",
            f"from_pretrained(..., {self.source.attention_dropout_field}=0.0)",
            attention_dropout=False,
        )
        ladder.add("lower half frozen", self.source.freezing, frozen=True)
        shorter = self.max_length // 2
        ladder.add(
            f"{shorter} tokens at most",
            f"tokenizer(..., max_length={shorter})",
            max_length=shorter,
        )
        return ladder

    def model(self, switches: Switches) -> nn.Module:
        variant = self.seed, switches.attention_dropout
        kept = self._models.get(variant)
        if kept is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                kept = self.source.build(attention_dropout=switches.attention_dropout)
            self._models[variant] = kept
        model = copy.deepcopy(kept)
        if switches.frozen:
            self.source.freeze_lower_half(model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits: Tensor = model(**inputs).logits
        return logits

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def users_loader(self, switches: Switches) -> DataLoader[Any]:
        longest = switches.max_length or self.max_length
        data = self.train_data if longest == self.max_length else self.train_data.cut(longest)
        order = torch.Generator().manual_seed(self.seed)
        pad = reviews.Pad(longest, pad_id=PAD_ID)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, generator=order, collate_fn=pad)

    def length(self, switches: Switches, sample: int) -> int:
        return min(self.train_data.lengths[sample], switches.max_length or self.max_length)

    def width(self, switches: Switches, batch: Sequence[int]) -> int:
        if switches.by_length or switches.packed or switches.first_token:
            return super().width(switches, batch)
        return switches.max_length or self.max_length

    def alone(self, sample: int) -> Batch:
        return reviews.Pad(None, pad_id=PAD_ID)([self.train_data[sample]])

    def validation_loader(self) -> DataLoader[Any]:
        return _evaluation_loader(self.validation_data)

    def test_loader(self) -> DataLoader[Any]:
        return _evaluation_loader(self.test_data)


def _add_packed(ladder: Ladder) -> None:
    ladder.add("packed", "L.Trainer(packed=True)", packed=True)
    ladder.add("last block for one token", 'L.Trainer(packed="first_token")', first_token=True)


def _evaluation_loader(data: reviews.ReviewDataset) -> DataLoader[Any]:
    """By length, so that little of a batch is padding: the answers are the same, sooner."""
    order = sorted(range(len(data)), key=data.lengths.__getitem__)
    batches = [order[start : start + EVALUATION_BATCH] for start in range(0, len(order), EVALUATION_BATCH)]
    return DataLoader(data, batch_sampler=batches, collate_fn=reviews.Pad(None, pad_id=PAD_ID))
