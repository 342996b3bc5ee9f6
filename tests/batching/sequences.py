"""Sequences of many lengths, and a small transformer that reads them padded or packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import hasten as L
from hasten.data import packed_attention

WORDS, LONGEST = 30, 24


def lengths_of(samples: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, LONGEST + 1, (samples,), generator=generator).tolist()


class Sequences(Dataset[Any]):
    """Samples ``{"input_ids": (tokens,), "label": 0 or 1, "index": int}``; counts how often it is read."""

    def __init__(self, samples: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths_of(samples)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"input_ids": self.ids[index], "label": index % 2, "index": index}


class Padded(Sequences):
    """The same samples, each padded to the longest there could be, with a mask."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        ids = sample["input_ids"]
        mask = torch.ones_like(ids)
        more = (0, LONGEST - len(ids))
        return {**sample, "input_ids": functional.pad(ids, more), "attention_mask": functional.pad(mask, more)}


class Transformer(nn.Module):
    """Two blocks with learned positions; takes padded batches with a mask, or packed ones with ``cu_seqlens``."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal = causal
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LONGEST, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, WORDS if causal else 2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return hidden states ``(rows, time, 16)``."""
        ids = batch["input_ids"]
        places = batch.get("position_ids", torch.arange(ids.size(1)).expand_as(ids))
        x = self.words(ids) + self.places(places)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(2, (3, 2, 8)).unbind(2)  # (rows, time, heads, 8)
            x = x + out(torch.tanh(self.attend(q, k, v, batch).flatten(2)))
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: dict[str, Any]) -> Tensor:
        if "cu_seqlens" in batch:
            flat = packed_attention(
                *(each.flatten(0, 1) for each in (q, k, v)),
                batch["cu_seqlens"],
                batch["max_seqlen"],
                causal=self.causal,
            )
            return flat.unflatten(0, q.shape[:2])
        mask = batch["attention_mask"][:, None, None, :].bool()
        if self.causal:
            mask = mask & torch.ones(q.size(1), q.size(1), dtype=torch.bool).tril()
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def sample_losses(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss of each sample from its first token."""
        hidden = self(batch)
        first = hidden.flatten(0, 1)[batch["document_starts"]] if "cu_seqlens" in batch else hidden[:, 0]
        return functional.cross_entropy(self.head(first), batch["label"], reduction="none")


class Reader(L.LightningModule):
    """Trains a transformer; remembers per epoch which samples it saw, their losses, and the batches' shapes."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.model = Transformer()
        self.lr = lr
        self.epochs: list[list[int]] = []
        self.losses: dict[int, float] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.validated: list[int] = []
        self.predicted: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = self.model.sample_losses(batch)
        self.shapes.append(tuple(batch["input_ids"].shape))
        while len(self.epochs) <= self.current_epoch:
            self.epochs.append([])
        self.epochs[-1] += batch["index"].tolist()
        self.losses.update(zip(batch["index"].tolist(), losses.tolist(), strict=True))
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch["index"].tolist()
        self.log("val_loss", self.model.sample_losses(batch).mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.predicted += batch["index"].tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.predicted += batch["index"].tolist()
        return self.model.sample_losses(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
