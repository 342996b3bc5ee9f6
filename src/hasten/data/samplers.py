"""Samplers that give each process its part of the data."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Sampler

from hasten.seed import collect_rng_state, restore_rng_state


class ShardSampler(Sampler[Any]):
    """One process's part of what another sampler, or batch sampler, gives: every ``num_replicas``-th item.

    All processes draw the same order, whatever else they have drawn: the random generators are seeded for it with
    ``seed`` plus the epoch, and restored afterwards.

    Args:
        sampler: gives sample indices, or lists of them.
        num_replicas: the number of processes.
        rank: which of them this is, from 0.
        seed: the same on every process.
        repeat: repeat the first items until all processes have the same number, as training needs it because the
            processes wait for one another at every step. Otherwise every item comes exactly once over all processes,
            and some processes have one more than others.

    Example::

        >>> [list(ShardSampler(range(5), 2, rank, repeat=False)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
        >>> [list(ShardSampler(range(5), 2, rank, repeat=True)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]

    Source: `torch.utils.data.distributed.DistributedSampler
    <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler>`_,
    which repeats always.

    """

    def __init__(self, sampler: Any, num_replicas: int, rank: int, *, seed: int = 0, repeat: bool) -> None:
        self.sampler = sampler
        self.num_replicas, self.rank, self.seed, self.repeat = num_replicas, rank, seed, repeat
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order in another epoch."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.sampler, "__len__"):
            return self._without_length()
        with SharedSeed(self.seed + self.epoch).random_numbers():
            items = list(self.sampler)
        if self.repeat and items:
            items = list(itertools.islice(itertools.cycle(items), self._rounded_up(len(items))))
        return iter(items[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        total = len(self.sampler)
        if self.repeat:
            return self._rounded_up(total) // self.num_replicas
        return len(range(self.rank, total, self.num_replicas))

    def _rounded_up(self, number: int) -> int:
        return -(-number // self.num_replicas) * self.num_replicas

    def _without_length(self) -> Iterator[Any]:
        """Yield from a sampler that may never end."""
        shared = SharedSeed(self.seed + self.epoch)
        with shared.random_numbers():
            items = iter(self.sampler)
        while True:
            with shared.random_numbers():
                turn = list(itertools.islice(items, self.num_replicas))
            if len(turn) < self.num_replicas and (self.repeat or self.rank >= len(turn)):
                return
            yield turn[self.rank]


class SharedSeed:
    """Random numbers that are the same on every process, drawn in several portions."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: dict[str, Any] | None = None

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Draw from the shared numbers within the block; restore the generators afterwards."""
        outside = collect_rng_state(cuda=False)
        try:
            if self._state is None:
                random.seed(self._seed)
                # Not torch.manual_seed, which would also seed the GPUs.
                torch.default_generator.manual_seed(self._seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(self._seed % 2**32)
            else:
                restore_rng_state(self._state)
            yield
            self._state = collect_rng_state(cuda=False)
        finally:
            restore_rng_state(outside)


def drawn_generator() -> torch.Generator:
    """Return a new generator, seeded by one draw from torch's as ``RandomSampler`` does."""
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
