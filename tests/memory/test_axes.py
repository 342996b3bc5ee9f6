"""``memory=`` where layers, sequences and stages are divided over processes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib import torch_private
from hasten._lib.tree import is_absent
from hasten.loops import micro_batches
from hasten.memory import offloaded
from hasten.strategies import MeshStrategy
from hasten.strategies.context import attention
from tests.models import quiet


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.drop, self.down = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Decoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 11)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trained(strategy: MeshStrategy, memory: Any) -> dict[str, Tensor]:
    """Return what this process has of the weights."""
    tokens = torch.randint(0, 11, (8, 9), generator=torch.Generator().manual_seed(1))
    module = Decoder()
    quiet(devices=2, strategy=strategy, memory=memory, gradient_clip_val=0.1).fit(
        module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 4)
    )
    present = {name: value for name, value in module.named_parameters() if not is_absent(value)}
    return {name: torch_private.local_part(value.detach()) for name, value in present.items()}


@pytest.mark.world_size(2)
def test_memory_changes_no_bit_on_any_axis() -> None:
    # As on a GPU, where activations leave the device.
    on_gpu = mock.patch.multiple(
        micro_batches, is_host=lambda device: False, offloaded=functools.partial(offloaded, smallest_bytes=0)
    )
    plan = {"blocks.*.up": "colwise", "blocks.*.drop": "split_dropout", "blocks.*.down": "rowwise"}
    for axes, ways in (
        ({"tensor": 2, "plan": plan}, ("selective", "offload")),
        ({"context": 2}, ("full", "offload")),
        ({"pipeline": 2}, ("selective", "full", "offload")),
    ):
        expected = trained(MeshStrategy(**axes), None)  # type: ignore[arg-type]
        for memory in ways:
            with on_gpu:
                found = trained(MeshStrategy(**axes), memory)  # type: ignore[arg-type]
            for name, value in expected.items():
                assert torch.equal(found[name], value), (axes, memory, name)
