"""Which loaders end where their length says."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.batching.lengths import PlannedBatches
from hasten.data.memory.on_device import is_resident
from hasten.data.samplers import Share

_COLLECTIONS = (list, tuple, range)
_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def ends_at_its_length(loader: Any) -> bool:
    """Return whether a loader is sure to give as many batches as ``len(loader)`` says.

    Sure is a length that torch or hasten computes from the samplers it reads. An ``IterableDataset`` may give another
    number of batches than its length says, with workers even one that counts its samples right, and so may any class
    with a ``__len__`` of its own.

    Example::

        >>> ends_at_its_length(DataLoader(range(4), shuffle=True))
        True
        >>> ends_at_its_length(DataLoader(range(4), sampler=map(int, range(4))))
        False

    """
    kind = type(loader)
    if kind in _COLLECTIONS:
        return True
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    counts = kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__
    iterates = kind._get_iterator is DataLoader._get_iterator or is_resident(loader)
    if not (counts and iterates) and not _is_from(kind, "torchdata"):
        return False
    return _gives_its_length(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _gives_its_length(sampler: Any) -> bool:
    kind = type(sampler)
    if kind in (BatchSampler, Share):
        return _gives_its_length(sampler.sampler)
    if isinstance(sampler, PlannedBatches):
        inner = getattr(sampler, "sampler", None)
        return _is_from(kind, "hasten") and (inner is None or _gives_its_length(inner))
    return kind in _SAMPLERS or _is_from(kind, "torchdata")


def _is_from(kind: type, package: str) -> bool:
    return kind.__module__.startswith(f"{package}.")
