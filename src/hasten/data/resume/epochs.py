"""Where a loader's epoch ends, and whether its next one can begin before this one is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.batching.samplers import PlannedBatches
from hasten.data.loader_parts import (
    ShardSampler,
    epoch_setters,
    has_state,
    index_sampler,
    is_iterable,
    overrides_iter,
    stateful_sampler,
)
from hasten.data.memory.resident import is_resident

_COLLECTIONS = (list, tuple, range)
_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def ends_at_its_length(loader: Any) -> bool:
    """Return whether a loader is sure to give as many batches as ``len(loader)`` says.

    Sure is a length that torch or hasten computes from the samplers it reads. An ``IterableDataset`` may give another
    number of batches than its length says (with workers even one that counts its samples right), and so may any class
    that defines ``__len__`` itself.
    """
    kind = type(loader)
    if kind in _COLLECTIONS:
        return True
    if not isinstance(loader, DataLoader) or is_iterable(loader):
        return False
    counts = not overrides_iter(loader) and kind.__len__ is DataLoader.__len__
    iterates = kind._get_iterator is DataLoader._get_iterator or is_resident(loader)
    if not (counts and iterates) and not _is_from(kind, "torchdata"):
        return False
    return _gives_its_length(index_sampler(loader)[1])


def _gives_its_length(sampler: Any) -> bool:
    kind = type(sampler)
    if kind in (BatchSampler, ShardSampler):
        return _gives_its_length(sampler.sampler)
    if isinstance(sampler, PlannedBatches):
        inner = getattr(sampler, "sampler", None)
        return _is_from(kind, "hasten") and (inner is None or _gives_its_length(inner))
    return kind in _SAMPLERS or _is_from(kind, "torchdata")


def _is_from(kind: type, package: str) -> bool:
    return kind.__module__.startswith(f"{package}.")


@dataclass(frozen=True)
class NextEpoch:
    """An epoch that was begun while the one before was not over."""

    # The states of the loader's generators and of its source before it began, and the epoch of each sampler.
    generators: list[bytes]
    source: dict[str, Any]
    epochs: list[Any]
    batches: Iterator[Any]


def epochs_of(loader: Any) -> list[Any]:
    """Return the epoch that was last set in each part of a loader."""
    return [getattr(each, "epoch", None) for each in epoch_setters(loader)]


def begins_early(loader: Any) -> bool:
    """Return whether a loader's next epoch can begin at any time after the last batch, with the same batches.

    Its workers must live on: new ones would be copies of a dataset that a callback may still change. Its order must
    come from its own generator, from the epoch, or not from chance at all: validation may draw from torch's generator.
    """
    return (
        isinstance(loader, DataLoader)
        and not overrides_iter(loader)
        and loader.num_workers > 0
        and loader.persistent_workers
        and loader.in_order
        and not is_iterable(loader)
        and not has_state(loader.dataset)
        and stateful_sampler(loader) is None
        and _is_settled(index_sampler(loader)[1])
    )


def _is_settled(sampler: Any) -> bool:
    """Return whether a sampler's next order is the same whenever it is drawn."""
    kind = type(sampler)
    if kind is BatchSampler:
        return _is_settled(sampler.sampler)
    if isinstance(sampler, PlannedBatches):
        seeded = not sampler.shuffle or sampler.seed is not None or sampler.generator is not None
        shared = getattr(sampler, "num_replicas", 1) > 1
        inner = getattr(sampler, "sampler", None)
        return (seeded or shared) and (inner is None or _is_settled(inner))
    if kind is ShardSampler:
        return _is_settled(sampler.sampler) or type(sampler.sampler) is RandomSampler
    if kind is RandomSampler:
        return sampler.generator is not None
    return kind is SequentialSampler or kind is DistributedSampler
