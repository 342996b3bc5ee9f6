"""Which loaders can begin their next epoch before this one is over, and what is kept of this one meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hasten.batching.lengths import PlannedBatches
from hasten.data.resume.indices import has_state, stateful_sampler
from hasten.data.samplers import Share


@dataclass(frozen=True)
class Begun:
    """An epoch that was begun while the one before was not over.

    Args:
        generators: the states of the loader's generators before it began.
        source: the state of the loader's source before it began.
        epochs: which epoch the samplers were told.
        batches: its batches.

    """

    generators: list[bytes]
    source: dict[str, Any]
    epochs: list[Any]
    batches: Iterator[Any]


def begins_early(loader: Any) -> bool:
    """Return whether a loader's next epoch can begin at any time after the last batch, with the same batches.

    Its workers must live on: new ones would be copies of a dataset that a callback may still change. Its order must
    come from a generator of its own, from the epoch, or not from chance at all: validation may draw from torch's.

    Args:
        loader: a loader that is ready for a run.

    Example::

        >>> begins_early(DataLoader(range(4)))
        False
        >>> begins_early(DataLoader(range(4), num_workers=1, persistent_workers=True))
        True

    """
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.num_workers > 0
        and loader.persistent_workers
        and loader.in_order
        and not isinstance(loader.dataset, IterableDataset)
        and not has_state(loader.dataset)
        and stateful_sampler(loader) is None
        and _is_settled(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    )


def _is_settled(sampler: Any) -> bool:
    """Return whether what a sampler gives next does not depend on when it is asked."""
    kind = type(sampler)
    if kind is BatchSampler:
        return _is_settled(sampler.sampler)
    if isinstance(sampler, PlannedBatches):
        alike = not sampler.shuffle or sampler.seed is not None or sampler.generator is not None
        shared = getattr(sampler, "num_replicas", 1) > 1
        inner = getattr(sampler, "sampler", None)
        return (alike or shared) and (inner is None or _is_settled(inner))
    if kind is Share:
        inner = sampler.sampler
        return _is_settled(inner) or type(inner) is RandomSampler
    if kind is RandomSampler:
        return sampler.generator is not None
    return kind is SequentialSampler or kind is DistributedSampler


def wants_epoch(loader: Any) -> list[Any]:
    """Return the parts of a loader that have ``set_epoch``, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    found: list[Any] = []
    for each in candidates:
        if callable(getattr(each, "set_epoch", None)) and not any(each is other for other in found):
            found.append(each)
    return found


def epochs_of(loader: Any) -> list[Any]:
    """Return the epoch that each part of a loader was told last."""
    return [getattr(each, "epoch", None) for each in wants_epoch(loader)]
