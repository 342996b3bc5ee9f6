"""A transformer with the shapes of a Llama of 70 billion parameters, for ``hasten plan``.

    hasten plan --devices 1024 --memory 80GB benchmarks/plan_70b.py --memory full
    hasten plan --devices 1024 --memory 80GB --mesh auto benchmarks/plan_70b.py --memory full

It is made in ``configure_model``, so that it takes no memory here. Its modules name the layers that ``plan="auto"``
splits (``tp_plan``). Of the program's own options, ``--size`` chooses the shapes of a Llama of 1, 8 or 70 billion
parameters, ``--layers``, ``--tokens`` and ``--batch`` change their number, and ``--memory`` recomputes activations.
"""

from __future__ import annotations

import argparse
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hasten as L
from hasten.strategies.context import attention


class Shape(NamedTuple):
    """The sizes of a language model."""

    width: int
    heads: int
    key_heads: int
    hidden: int
    layers: int
    words: int = 128_256


SIZES = {
    "1b": Shape(2048, 32, 8, 8192, 16),
    "8b": Shape(4096, 32, 8, 14_336, 32),
    "70b": Shape(8192, 64, 8, 28_672, 80),
}


class Attention(nn.Module):
    """Causal attention in which several heads share their keys and values.

    Args:
        shape: the sizes of the model.

    """

    # Each process has some of the heads.
    tp_plan: ClassVar[dict[str, str]] = {"query": "colwise", "key": "colwise", "value": "colwise", "output": "rowwise"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.size = width // shape.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shape.key_heads * self.size, bias=False)
        self.value = nn.Linear(width, shape.key_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended tokens; both are (batch, tokens, width)."""
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        # Over whole sequences, also where processes share them.
        attended = attention(query, key, value, is_causal=True, enable_gqa=True)
        joined: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return joined


class Block(nn.Module):
    """Attention and a gated feed-forward part."""

    tp_plan: ClassVar[dict[str, str]] = {"gate": "colwise", "up": "colwise", "down": "rowwise"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.attention = Attention(shape)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        added: Tensor = x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))
        return added


class Llama(L.LightningModule):
    """A language model."""

    block: type[nn.Module] = Block

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks: nn.Sequential | None = None
        self.tp_plan = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}

    def configure_model(self) -> None:
        """Make the layers where the strategy wants them."""
        if self.blocks is None:
            shape = self.shape
            self.embedding = nn.Embedding(shape.words, shape.width)
            self.blocks = nn.Sequential(*(self.block(shape) for _ in range(shape.layers)))
            self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        assert self.blocks is not None
        tokens, following = batch
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of zeros, and the tokens that follow: a plan reads shapes only."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(self.count, dtype=torch.long)
        return zeros, zeros


def fit(module: type[Llama], sizes: dict[str, Shape], default: str) -> None:
    """Train with what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=sizes, default=default)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--memory", default=None)
    given = parser.parse_args()
    shape = sizes[given.size]
    if given.layers is not None:
        shape = shape._replace(layers=given.layers)
    trainer = L.Trainer(
        max_steps=10, precision="bf16-mixed", strategy="fsdp2", gradient_clip_val=1.0, memory=given.memory
    )
    trainer.fit(module(shape), DataLoader(Tokens(given.tokens), batch_size=given.batch))


if __name__ == "__main__":
    fit(Llama, SIZES, "70b")
