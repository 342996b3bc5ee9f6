"""A causal language model of 10.9 M parameters on the bytes of Python's own library: sources with their docstrings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from benchmarks.workloads.task import SEED, Workload, index_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten_tools.demo.text import SKIPPED, find_sources

VOCABULARY, CONTEXT, WIDTH, DEPTH, HEADS = 256, 256, 384, 6, 6
TRAIN_BYTES, HELD_OUT_BYTES = 4_000_000, 32 * CONTEXT


class Attention(nn.Module):
    """Causal attention, written out as tutorials do, or in one kernel."""

    def __init__(self, *, one_kernel: bool) -> None:
        super().__init__()
        self.one_kernel = one_kernel
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.inputs(x).view(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        if self.one_kernel:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5
            y = scores.masked_fill(~self.mask[:time, :time], float("-inf")).softmax(-1) @ v
        return cast(Tensor, self.output(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Attention and two layers, each on the normalized input and added to it."""

    def __init__(self, *, one_kernel: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), Attention(one_kernel=one_kernel)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return cast(Tensor, x + self.layers(self.norm_2(x)))


class GPT(nn.Module):
    """Bytes ``(batch, time)`` to logits of the next byte ``(batch, time, 256)``."""

    def __init__(self, *, one_kernel: bool) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(one_kernel=one_kernel) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return cast(Tensor, self.head(self.norm(self.blocks(self.bytes(x) + self.places(places)))))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the text side by side, and the same moved by one byte."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def read_text() -> Tensor:
    """Return the sources of Python's library one after another, as bytes, in an order that stays."""
    root = find_sources("python")
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED.intersection(path.relative_to(root).parts))
    random.Random(SEED).shuffle(paths)
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) > TRAIN_BYTES + HELD_OUT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


class Language(Workload):
    """Eight windows of 256 bytes a step; none is padded."""

    name = "language"
    title = "GPT (10.9 M parameters) on the bytes of Python's library, batches of 8 x 256"
    goal, goal_text, smaller_is_better = 3.25, "3.25 nats a byte on other files", True
    batch_size, learning_rate = 8, 4e-4
    max_steps, turn_steps, quick_steps = 100, 10, 3
    attends = True
    best: ClassVar[Mapping[str, Any]] = {"resident": True, "allocator": "keep", "fused_optimizer": True}

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        text = read_text()
        self.train_data, self._held_out = Windows(text[:-HELD_OUT_BYTES]), Windows(text[-HELD_OUT_BYTES - 1 :])

    def build(self, *, modern: bool) -> nn.Module:
        return GPT(one_kernel=modern)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    def engineers_batches(self) -> Iterator[Any]:
        """Cut windows from the text, which is one tensor on the device."""
        text = self.train_data.text.to(self.device)
        window = torch.arange(CONTEXT + 1)
        for indices in index_batches(len(self.train_data), self.batch_size):
            windows = text[(indices[:, None] * CONTEXT + window).to(self.device)].long()
            yield windows[:, :-1], windows[:, 1:]

    def quality(self, model: nn.Module) -> float:
        return self.mean_loss(model, DataLoader(self._held_out, 32))
