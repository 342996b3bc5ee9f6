"""A transformer with the shapes of a Llama of 70 billion parameters, for ``hasten plan``.

    hasten plan --devices 1024 --memory 80GB benchmarks/plan_70b.py --memory full
    hasten plan --devices 1024 --memory 80GB --mesh auto benchmarks/plan_70b.py --memory full

It is made in ``configure_model``, so that it takes no memory here. Its modules name the layers that ``plan="auto"``
splits (``tp_plan``). Of the program's own options, ``--layers`` and ``--tokens`` make it smaller, and ``--memory``
recomputes activations.
"""

from __future__ import annotations

import argparse
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hasten as L

WIDTH, HEADS, KEY_HEADS, HIDDEN, WORDS = 8192, 64, 8, 28672, 128_256


class Attention(nn.Module):
    """Causal attention in which several heads share their keys and values.

    Args:
        width: of a token.
        heads: of queries.
        key_heads: of keys and values.

    """

    # Each process has some of the heads.
    tp_plan: ClassVar[dict[str, str]] = {"query": "colwise", "key": "colwise", "value": "colwise", "output": "rowwise"}

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended tokens; both are (batch, tokens, width)."""
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        joined: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return joined


class Block(nn.Module):
    """Attention and a gated feed-forward part."""

    tp_plan: ClassVar[dict[str, str]] = {"gate": "colwise", "up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, KEY_HEADS)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        added: Tensor = x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))
        return added


class Llama(L.LightningModule):
    """A language model."""

    block: type[nn.Module] = Block
    width, words = WIDTH, WORDS

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.net: nn.Sequential | None = None
        # The embedding, and the head after the last norm.
        self.tp_plan = {"net.0": "embedding_rowwise", f"net.{layers + 2}": "colwise_gather_output"}

    def configure_model(self) -> None:
        """Make the layers where the strategy wants them."""
        if self.net is None:
            blocks = [self.block() for _ in range(self.layers)]
            head = nn.Linear(self.width, self.words, bias=False)
            self.net = nn.Sequential(nn.Embedding(self.words, self.width), *blocks, nn.RMSNorm(self.width), head)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        assert self.net is not None
        logits = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tokens(Dataset[Tensor]):
    """Sequences of zeros: a plan reads shapes only."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(self.count + 1, dtype=torch.long)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--memory", default=None)
    given = parser.parse_args()
    trainer = L.Trainer(
        max_steps=10, precision="bf16-mixed", strategy="fsdp2", gradient_clip_val=1.0, memory=given.memory
    )
    trainer.fit(Llama(given.layers), DataLoader(Tokens(given.tokens), batch_size=1))
