"""A mixture of experts with the shapes of Mixtral 8x22B (141 billion parameters), for ``hasten plan``.

    hasten plan --devices 1024 --memory 80GB --mesh replicate=16,expert=8 benchmarks/plan_moe.py --memory full
    hasten plan --devices 1024 --memory 80GB --mesh auto benchmarks/plan_moe.py --memory full

Each token goes to two of the eight experts of a block. An expert takes at most ``CAPACITY`` times its share of the
tokens, so all shapes are known without values, as a plan needs it; tokens beyond that pass by. The program's own
options are those of ``plan_70b.py``.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from plan_70b import Attention, Llama, Shape, fit

SIZES = {"8x22b": Shape(6144, 48, 8, 16_384, 56, 32_768)}
EXPERTS, CHOSEN, CAPACITY = 8, 2, 1.25


class Experts(nn.Module):
    """The gated feed-forward parts of all experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * shape.hidden, shape.width))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, shape.width, shape.hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values that the matrices begin with."""
        for matrices in self.parameters():
            nn.init.normal_(matrices, std=0.02)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return (tokens, width) from tokens of the same shape, their experts and the weights of these, (tokens, k)."""
        count, choices, expert = self.num_experts, chosen.shape[-1], chosen.flatten()
        capacity = math.ceil(CAPACITY * len(expert) / count)
        # The place of each token in its expert's queue.
        is_for = expert[:, None] == torch.arange(count, device=expert.device)
        place = (is_for.long().cumsum(0) - 1).gather(1, expert[:, None]).squeeze(1)
        # Tokens without a place have the last row, which no expert sees.
        last = count * capacity
        row = torch.where(place < capacity, expert * capacity + place, last)
        queued = hidden.new_zeros(last + 1, hidden.shape[1]).index_copy(0, row, hidden.repeat_interleave(choices, 0))
        gate, up = (queued[:last].unflatten(0, (count, capacity)) @ self.gate_up_proj.mT).chunk(2, dim=-1)
        computed = ((nn.functional.silu(gate) * up) @ self.down_proj.mT).flatten(0, 1)
        computed = torch.cat((computed, computed.new_zeros(1, hidden.shape[1])))
        added = computed[row] * weights.flatten()[:, None].to(computed.dtype)
        return added.unflatten(0, (-1, choices)).sum(1)


class Mixture(nn.Module):
    """Experts, of which a router chooses some for each token."""

    tp_plan: ClassVar[dict[str, str]] = {"experts": "moe_tp_experts"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, EXPERTS, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        mixed: Tensor = self.experts(tokens, chosen, shares).unflatten(0, x.shape[:2])
        return mixed


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
