"""Data in memory and several processes: each reads its own part, as it does from the loader itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten.data import LengthBatching, pad_collate, rebatch, resident
from hasten.data.loaders import prepare
from tests.models import Numbered

SAMPLES = 21


INDEX_LISTS = ([3, 1], [0, 2, 4], list(range(5, SAMPLES)))
LOADERS = {
    "in order": lambda: DataLoader(Numbered(SAMPLES), 4),
    "shuffled": lambda: DataLoader(Numbered(SAMPLES), 4, shuffle=True),
    "dropped": lambda: DataLoader(Numbered(SAMPLES), 4, shuffle=True, drop_last=True),
    "index lists": lambda: DataLoader(Numbered(SAMPLES), batch_sampler=INDEX_LISTS),
}


def indices(loader: Any) -> list[list[int]]:
    """Return the samples of each batch."""
    return [batch[2].tolist() for batch in loader]


@pytest.mark.parametrize("stage", ["train", "validate"])
@pytest.mark.parametrize("name", LOADERS)
def test_each_process_reads_what_it_reads_without(name: str, stage: str) -> None:
    parts = []
    for rank in range(2):
        found = []
        for make in (lambda loader: loader, resident):
            torch.manual_seed(rank)
            ready = prepare(make(LOADERS[name]()), stage=stage, num_replicas=2, rank=rank, seed=7)
            ready.sampler.set_epoch(1) if hasattr(ready.sampler, "set_epoch") else None
            found.append(indices(ready))
        assert found[0] == found[1]
        parts += [index for batch in found[1] for index in batch]
    if stage == "validate" and name != "dropped":
        assert sorted(parts) == list(range(SAMPLES))


def test_batches_by_length_of_held_data_are_shared_out_once() -> None:
    data = [torch.full((1 + index * 7 % 13,), index) for index in range(24)]
    made = rebatch(resident(DataLoader(data, 4, shuffle=True, collate_fn=pad_collate)), LengthBatching())
    seen = []
    for rank in range(2):
        for batch in prepare(made, num_replicas=2, rank=rank, seed=0):
            seen += batch[:, 0].tolist()
    assert sorted(seen) == list(range(24))
