"""Tokenized texts, batches of them, and what the tasks that classify texts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten.demo.task import Batch, RowVariant, Settings, Task
from hasten.demo.text_models import ModelSource

EVALUATION_BATCH = 32


@dataclass(frozen=True)
class Tokens:
    """Tokenized texts, all in one flat tensor.

    Args:
        ids: token numbers of all texts one after another, int32, shape ``(tokens,)``.
        starts: where each text begins in ``ids``, and the end of the last, int64, shape ``(texts + 1,)``.
        labels: the class of each text, int64, shape ``(texts,)``.

    Example::

        >>> tokens = Tokens.of([[101, 7, 102], [101, 102]], labels=[1, 0])
        >>> len(tokens), tokens[1].tolist()
        (2, [101, 102])

    """

    ids: Tensor
    starts: Tensor
    labels: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], labels: Sequence[int]) -> Tokens:
        """Return the token numbers of texts as one object."""
        ids = torch.cat([torch.tensor(row, dtype=torch.int32) for row in rows])
        return cls(ids, torch.tensor([0, *map(len, rows)]).cumsum(0), torch.tensor(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[int(self.starts[index]) : int(self.starts[index + 1])]


class TextDataset(Dataset[dict[str, Any]]):
    """Some of the tokenized texts, one sample each: ``{"input_ids": (tokens,) int32, "label": int}``.

    Example::

        >>> tokens = Tokens.of([[101, 7, 102], [101, 102]], labels=[1, 0])
        >>> TextDataset(tokens, [1])[0]
        {'input_ids': tensor([101, 102], dtype=torch.int32), 'label': 0}

    """

    def __init__(self, tokens: Tokens, chosen: Sequence[int], *, max_length: int | None = None) -> None:
        self.tokens, self.chosen = tokens, list(chosen)
        lengths = tokens.starts.diff()[torch.tensor(self.chosen, dtype=torch.int64)]
        self.lengths: list[int] = (lengths if max_length is None else lengths.clamp(max=max_length)).tolist()

    def cut(self, max_length: int | None) -> TextDataset:
        """Return the same texts, of at most so many tokens."""
        return TextDataset(self.tokens, self.chosen, max_length=max_length)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, length = self.chosen[index], self.lengths[index]
        ids = self.tokens[text]
        if len(ids) > length:
            # As a tokenizer cuts: the token that ends a text stays.
            ids = torch.cat([ids[: length - 1], ids[-1:]])
        return {"input_ids": ids, "label": int(self.tokens.labels[text])}


class Pad:
    """Join samples to a batch: input_ids and attention_mask ``(batch, width)`` and labels ``(batch,)``, int64.

    Args:
        width: pad every batch to so many tokens; None pads each batch to its longest text.

    Example::

        >>> Pad(3)([{"input_ids": torch.tensor([101, 102]), "label": 1}])["input_ids"]
        tensor([[101, 102,   0]])

    """

    def __init__(self, width: int | None) -> None:
        self.width = width

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        width = self.width or max(lengths)
        padded = [
            F.pad(sample["input_ids"], (0, width - length))
            for sample, length in zip(samples, lengths, strict=True)
        ]
        return {
            "input_ids": torch.stack(padded).long(),
            "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }


class TextTask(Task):
    """Fine-tune a language model to classify texts, padded to the longest that it reads."""

    imports = ("transformers",)
    epochs = 1
    learning_rate = 1e-4
    train_data: TextDataset
    validation_data: TextDataset | None = None
    test_data: TextDataset

    def __init__(self, source: ModelSource, max_length: int, settings: Settings) -> None:
        super().__init__(settings)
        self.source, self.max_length = source, max_length

    def configuration(self, variant: RowVariant) -> dict[str, Any]:
        """Return what the model's configuration changes."""
        return {} if variant.attention_dropout else {self.source.attention_dropout_field: 0.0}

    def build(self, variant: RowVariant) -> nn.Module:
        model = self.source.build(**self.configuration(variant))
        if variant.frozen:
            self.source.freeze_lower_half(model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits

    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        return DataLoader(
            self.train_data.cut(variant.max_length),
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=Pad(variant.max_length or self.max_length),
        )

    def lengths(self, variant: RowVariant) -> Sequence[int]:
        return self.train_data.cut(variant.max_length).lengths

    def single(self, sample: int) -> Batch:
        return Pad(None)([self.train_data[sample]])

    def held_out(self) -> dict[str, DataLoader[Any]]:
        found = {"test": _evaluation_loader(self.test_data)}
        if self.validation_data is not None:
            found["validation"] = _evaluation_loader(self.validation_data)
        return found

    @property
    def text_share(self) -> float:
        """Share of the plain loop's tokens that are text, 0 to 1."""
        return sum(self.train_data.lengths) / (len(self.train_data) * self.max_length)


def _evaluation_loader(data: TextDataset) -> DataLoader[Any]:
    """Return the texts by length, so that little of a batch is padding: the answers are the same, sooner."""
    order = sorted(range(len(data)), key=data.lengths.__getitem__)
    batches = [order[start : start + EVALUATION_BATCH] for start in range(0, len(order), EVALUATION_BATCH)]
    return DataLoader(data, batch_sampler=batches, collate_fn=Pad(None))
