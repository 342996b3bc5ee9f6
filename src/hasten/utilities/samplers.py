"""Samplers for several processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that gives every sample exactly once: processes may get different numbers.

    Example::

        >>> [list(UnrepeatedDistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_samples = len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]
        self.total_size = len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        indices = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class _Drawn:
    """What a sampler draws, as a dataset."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: list[Any] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self) -> None:
        self._drawn = list(self._sampler)

    def __getitem__(self, index: int) -> Any:
        return self._drawn[index]


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Give each process its part of what another sampler draws; all processes must draw the same."""

    def __init__(self, sampler: Sampler[Any] | Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Drawn(sampler), *args, **kwargs)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        assert isinstance(self.dataset, _Drawn)
        self.dataset.draw()
        return (self.dataset[index] for index in super().__iter__())


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed python and numpy in a loader's worker from torch's seed there, so that no two draw the same.

    Args:
        worker_id: which worker.
        rank: of the process; 0 by default.

    """
    seed = (torch.initial_seed() + worker_id + 1_000_003 * (rank or 0)) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    np.random.seed(seed)
