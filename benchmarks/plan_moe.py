"""A mixture of experts with the shapes of Mixtral 8x22B (141 billion parameters), for ``hasten plan``.

    hasten plan --devices 1024 --memory 80GB --mesh 16,64,1 benchmarks/plan_moe.py --memory full
    hasten plan --devices 1024 --memory 80GB --mesh auto benchmarks/plan_moe.py --memory full

Each token goes to two of the eight experts of a block. An expert takes at most ``CAPACITY`` times its share of the
tokens, so all shapes are known without values, as a plan needs it; tokens beyond that pass by. Of the program's own
options, ``--layers`` and ``--tokens`` make it smaller, and ``--memory`` recomputes activations.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from plan_70b import Attention, Llama, Shape, fit

SIZES = {"8x22b": Shape(6144, 48, 8, 16_384, 56, 32_768)}
EXPERTS, CHOSEN, CAPACITY = 8, 2, 1.25


class Expert(nn.Module):
    """A gated feed-forward part."""

    tp_plan: ClassVar[dict[str, str]] = {"gate": "colwise", "up": "colwise", "down": "rowwise"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, width) from the same."""
        computed: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return computed


class Mixture(nn.Module):
    """Experts, of which a router chooses some for each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        capacity = math.ceil(CAPACITY * CHOSEN * len(tokens) / EXPERTS)
        expert = chosen.flatten()
        # The place of each token in its expert's queue.
        is_for = expert[:, None] == torch.arange(EXPERTS, device=x.device)
        place = (is_for.long().cumsum(0) - 1).gather(1, expert[:, None]).squeeze(1)
        # Tokens without a place have the last row, which no expert sees.
        last = EXPERTS * capacity
        row = torch.where(place < capacity, expert * capacity + place, last)
        queued = tokens.new_zeros(last + 1, tokens.shape[1]).index_copy(0, row, tokens.repeat_interleave(CHOSEN, dim=0))
        parts = queued[:last].unflatten(0, (EXPERTS, capacity)).unbind()
        computed = [one(part) for one, part in zip(self.experts, parts, strict=True)]
        computed.append(computed[0].new_zeros(1, tokens.shape[1]))
        added = torch.cat(computed)[row] * shares.flatten()[:, None].to(computed[0].dtype)
        return added.unflatten(0, (-1, CHOSEN)).sum(1).unflatten(0, x.shape[:2])


class Block(nn.Module):
    """Attention and a mixture of experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.mixture = Attention(shape), Mixture(shape)
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mixture(self.norm2(x))
        return added


class Mixtral(Llama):
    """The same language model with other blocks."""

    block = Block


if __name__ == "__main__":
    fit(Mixtral, SIZES, "8x22b")
