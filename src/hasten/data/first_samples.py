"""Check that all processes that divide a stream among themselves read the same stream."""

from __future__ import annotations

import hashlib
import warnings
from typing import NamedTuple

import torch.distributed as dist

from hasten._lib.tree import leaves
from hasten.data.memory.dataset_parts import contents_of
from hasten.machine import agreement


class FirstSample(NamedTuple):
    """The first sample of an epoch in one process, or in one of its workers.

    Args:
        loader: its name.
        setup: how many loaders of this name this process has made ready.
        dataset: the class of the dataset.
        worker: the number of the worker.
        digest: of the sample.

    """

    loader: str
    setup: int
    dataset: str
    worker: int
    digest: str


# In a worker: what it has not sent yet.
first_of_worker: list[FirstSample] = []

_compared: set[str] = set()


def compare_first(first: FirstSample) -> None:
    """Warn if another process has begun the first epoch with another sample."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    place = f"first/{first.loader}/{first.setup}/{first.worker}"
    if place in _compared:
        return
    _compared.add(place)
    other = agreement.differs_from_neighbor(place, first.digest)
    if other is not None:
        # By process: the samples that are known.
        warnings.warn(
            f"{first.loader}: {first.dataset} begins with another sample on rank {dist.get_rank()} than on rank "
            f"{other}, so some samples are read twice and others not at all. Give it the same order on all processes, "
            "with a seed of its own, or pass use_distributed_sampler=False.",
            stacklevel=2,
        )


def digest_of(sample: object) -> str:
    """Return a text that is the same for equal samples."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(sample):
        digest.update(repr(contents_of(leaf)).encode())
    return digest.hexdigest()
