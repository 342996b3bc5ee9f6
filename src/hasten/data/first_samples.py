"""Compare the first samples that the readers of a stream get: processes, and the workers of each."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from hasten._lib.tree import leaves
from hasten.data.memory.dataset_parts import comparable, contents_of
from hasten.machine import agreement

# What a comparison shows. Equal samples that repeat show nothing: any part of a constant stream looks like that.
SAME, DIFFERENT, REPEATED, MIXED = "same", "different", "repeated", "mixed"
# So many samples of each reader are compared, and a batch if it has more, up to a limit.
_LEAST, _MOST = 4, 32
# The processes get here at about the same time, unless one of them makes its data first.
_PATIENCE_SECONDS = 600.0
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.05


# What to write in a dataset whose workers all read the same samples.
DIVIDE_AMONG_WORKERS = (
    "In __iter__: worker = torch.utils.data.get_worker_info(), and yield every worker.num_workers-th sample from "
    "worker.id on."
)


def begin_alike(batches: Sequence[str], workers: int) -> bool:
    """Return whether all workers, which take turns, begin with the same two batches, which differ from each other."""
    first, second = {*batches[:workers]}, {*batches[workers : 2 * workers]}
    return workers > 1 and len(batches) >= 2 * workers and len(first) == len(second) == 1 and first != second


def number_to_compare(batch_size: int | None) -> int:
    """Return how many samples of each reader are compared."""
    return min(max(batch_size or 1, _LEAST), _MOST)


def digest_of(sample: object) -> str:
    """Return a text that is the same for equal samples, in any process."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(sample):
        contents = contents_of(leaf)
        if contents[1:] == (None,):
            # An object of another class. What cannot be pickled is like any other of its class, and shows nothing.
            try:
                contents = contents[0], pickle.dumps(leaf)
            except Exception:
                contents = contents[0], "unknown"
        digest.update(repr(contents).encode())
    return digest.hexdigest()


def compare(readers: Sequence[Sequence[str]]) -> str:
    """Return what the first samples of some readers show, from their digests.

    ``SAME``: all readers have the same ones, most of which differ from one another. ``REPEATED``: the same ones, with
    too many repeated. ``DIFFERENT``: no two readers have one in common. ``MIXED``: anything else.

    Example::

        >>> [compare(each) for each in (["abcd", "abcd"], ["aaaa", "aaaa"], ["abcd", "efgh"], ["abcd", "dcba"])]
        ['same', 'repeated', 'different', 'mixed']

    """
    first = readers[0]
    if all(list(each) == list(first) for each in readers):
        distinct = len(set(first))
        return SAME if not first or (distinct > 1 and 2 * distinct > len(first)) else REPEATED
    each_once = [set(each) for each in readers]
    return DIFFERENT if sum(map(len, each_once)) == len(set().union(*each_once)) else MIXED


def _joint(found: Iterable[str]) -> str:
    """Return what several comparisons show together."""
    kinds = set(found)
    if kinds <= {SAME, REPEATED}:
        return REPEATED if kinds == {REPEATED} else SAME
    return DIFFERENT if kinds == {DIFFERENT} else MIXED


class ReaderComparison(NamedTuple):
    """What the first samples of all readers show: of the processes, and of the workers within each of them."""

    processes: str
    workers: str


def compare_readers(samples: Mapping[tuple[int, int], Sequence[str]], shares: Sequence[int]) -> ReaderComparison:
    """Compare the digests of all readers, by rank and worker; ranks with the same share read the same samples."""
    of_processes, of_workers = [], []
    for worker in sorted({worker for _, worker in samples}):
        by_share: dict[int, list[Sequence[str]]] = {}
        for rank, share in enumerate(shares):
            if (rank, worker) in samples:
                by_share.setdefault(share, []).append(samples[rank, worker])
        if any(each for alike in by_share.values() for each in alike):
            within = {compare(alike) for alike in by_share.values()}
            between = compare([alike[0] for alike in by_share.values()])
            of_processes.append(between if within <= {SAME, REPEATED} else MIXED)
    for rank in range(len(shares)):
        own = [digests for (of, _), digests in samples.items() if of == rank]
        if len(own) > 1 and any(own):
            of_workers.append(compare(own))
    return ReaderComparison(_joint(of_processes), _joint(of_workers))


class Meeting(NamedTuple):
    """Where the readers of a stream compare their first samples. It can be pickled, for workers."""

    name: str  # Of the loader, in messages.
    # Of the store, see ``agreement.address_of_store``; None where no other process can be asked.
    address: tuple[Any, ...] | None
    token: str  # The name of the place in the store, used for nothing else.
    rank: int
    shares: tuple[int, ...]  # By rank, which share of the data the process is to have.
    workers: tuple[int, ...]  # By rank, how many workers read for it.

    def compare(self, worker: int, digests: list[str]) -> ReaderComparison:
        """Return what the first samples of all readers show, the same for each of them; wait for the others."""
        readers = [(rank, each) for rank, count in enumerate(self.workers) for each in range(max(1, count))]
        if len(readers) == 1:
            return compare_readers({(0, 0): digests}, self.shares)
        if self.address is None:
            return ReaderComparison(MIXED, MIXED)
        messages = agreement.store_at(self.address)
        messages.set(f"{self.token}/{self.rank}/{worker}", json.dumps(digests))
        places = [f"{self.token}/{rank}/{each}" for rank, each in readers]
        began, pause = time.monotonic(), _POLL_SECONDS
        while not messages.check([self.token]):
            if (self.rank, worker) == (0, 0) and messages.check(places):
                samples = zip(readers, map(json.loads, map(messages.get, places)), strict=True)
                messages.set(self.token, json.dumps(compare_readers(dict(samples), self.shares)))
                break
            if time.monotonic() - began > _PATIENCE_SECONDS or (pause == _LONGEST_POLL_SECONDS and _someone_left(self)):
                absent = {rank for (rank, _), place in zip(readers, places, strict=True) if not messages.check([place])}
                raise RuntimeError(_missing(self.name, sorted(absent), "begin to read it"))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return ReaderComparison(*json.loads(messages.get(self.token)))

    def publish(self, known: ReaderComparison) -> None:
        """Have the others know what an earlier run has found out: this reader does not begin at the beginning."""
        if self.address is not None:
            agreement.store_at(self.address).set(self.token, json.dumps(known))


def meet(dataset: IterableDataset[Any], name: str, share: int, workers: int, setup: int) -> tuple[Meeting, bool]:
    """Return where the readers of a loader compare their samples, and whether the dataset is the same everywhere.

    All processes of the group call it; without a group, this process has no other to ask.

    The attributes of the dataset are compared. ``share`` is the share of the data that this process is to have, read by
    so many workers; ``setup`` counts the loaders of this name.
    """
    token = f"first/{uuid.uuid4().hex}"
    if not (dist.is_available() and dist.is_initialized()):
        address = agreement.address_of_store() if workers > 1 else None
        return Meeting(name, address, token, 0, (share,), (workers,)), True
    digest = hashlib.blake2b(repr(comparable(dataset)).encode(), digest_size=8).hexdigest()
    found = agreement.exchange(
        f"dataset/{name}/{setup}",
        [token, share, workers, digest],
        what=f"setting up {name}",
        patience_seconds=_PATIENCE_SECONDS,
    )
    absent = [rank for rank, each in enumerate(found) if each is None]
    if absent:
        raise RuntimeError(_missing(name, absent, "set it up"))
    tokens, shares, counts, digests = zip(*found, strict=True)
    return Meeting(name, agreement.address_of_store(), tokens[0], dist.get_rank(), shares, counts), len(
        set(digests)
    ) == 1


def _someone_left(meeting: Meeting) -> bool:
    """Return whether a process has ended the program, as far as this one can ask: a worker cannot."""
    in_group = dist.is_available() and dist.is_initialized() and get_worker_info() is None
    return in_group and any(map(agreement.has_left, range(len(meeting.shares))))


def _missing(name: str, ranks: list[int], what: str) -> str:
    return (
        f"{name}: {agreement.format_ranks(ranks)} did not {what}, so its samples cannot be divided. Do it on all "
        "processes, or pass use_distributed_sampler=False."
    )
