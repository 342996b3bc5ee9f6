"""Batches move as they are: same types, and the same object where nothing moves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hasten.data.transfer import move


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_structure_and_leaves_stay() -> None:
    batch = {"pair": Pair(torch.ones(2), "a"), "list": [torch.zeros(1), 3]}
    moved = move(batch, "meta")
    assert type(moved["pair"]) is Pair
    assert moved["pair"].x.device.type == moved["list"][0].device.type == "meta"
    assert (moved["pair"].name, moved["list"][1]) == ("a", 3)
    assert batch["pair"].x.device.type == "cpu"
