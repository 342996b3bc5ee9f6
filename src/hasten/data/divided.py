"""An ``IterableDataset`` divided among processes: by itself, or by taking every n-th of its samples."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.data.first_samples import DIFFERENT, SAME, Meeting, ReaderComparison, digest_of, meet, number_to_compare
from hasten.data.loader_parts import has_state, is_hugging_face, overrides_iter, with_attributes
from hasten.data.memory.dataset_parts import parts
from hasten.data.memory.read import DatasetProxy
from hasten.extend.origin import package_of
from hasten.seed import collect_rng_state, restore_rng_state, seed_from

# Datasets of these packages, and of these classes only, divide themselves by the ranks that they find out.
_DIVIDE_THEMSELVES = {"webdataset": None, "litdata": None, "streaming": "StreamingDataset"}
_counts: Counter[str] = Counter()


def divided(loader: DataLoader[Any], num_replicas: int, rank: int, *, name: str, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of an ``IterableDataset`` that reads this process's part of the samples.

    The first samples that the processes, and their workers, read decide. If they are the same everywhere, each process
    keeps every n-th sample; if they are different ones, or show nothing, each reads what its dataset gives. A dataset
    that is the same on all processes and has ``shard(num_shards, index)`` or ``set_rank(rank, world_size)``, or is
    Hugging Face's, gives each its part.

    Args:
        loader: over an ``IterableDataset``; it does not change.
        num_replicas: the number of processes that share the data.
        rank: which of them this is, from 0.
        name: what to call the loader in messages.
        seed: of the random numbers that the dataset draws, the same on all processes.

    Raises:
        RuntimeError: another process does not set this loader up.

    Example::

        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> loader = DataLoader(Numbers(), batch_size=2)
        >>> [divided(loader, 2, rank, name="loader").dataset for rank in range(2)]
        [every 2nd sample of Numbers from 0, every 2nd sample of Numbers from 1]
        >>> [list(divided(loader, 2, rank, name="loader")) for rank in range(2)]
        [[tensor([0, 2]), tensor([4])], [tensor([1, 3])]]

    Source: `PyTorch, torch.utils.data.IterableDataset
    <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset>`_.

    """
    dataset: Any = loader.dataset
    kind = type(dataset).__name__
    if why := _known_to_divide(dataset):
        _say_once(f"{name}: each process reads all that its {kind} gives, because {why}.")
        return loader
    if overrides_iter(loader):
        rank_zero_warn(
            f"{name}: {type(loader).__name__} makes its batches itself, so each process reads all that it gives.",
            fix="Pass use_distributed_sampler=False if that is right, else give a DataLoader.",
        )
        return loader
    _counts[name] += 1
    meeting, is_same = meet(dataset, name, rank, loader.num_workers, _counts[name])
    part = _part_of(dataset, num_replicas, rank) if is_same else None
    if part is None:
        return _in_parts(loader, dataset, Share(num_replicas, rank, seed, meeting=meeting))
    if is_hugging_face(part):
        # Divides itself among workers too.
        return with_attributes(loader, dataset=part)
    # Of the workers alone is it not known yet whether they divide it.
    alone = Share(1, 0, f"{seed} rank {rank}", is_part=True, meeting=meeting if loader.num_workers > 1 else None)
    return _in_parts(loader, part, alone)


def _say_once(message: str) -> None:
    """Log a message, though loaders may be made ready in every epoch."""
    _counts[message] += 1
    if _counts[message] == 1:
        rank_zero_info(message)


def able_to_go_on(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of an ``IterableDataset`` whose iteration can leave out what other processes have read."""
    if isinstance(loader.dataset, DividedDataset):
        return loader
    return _in_parts(loader, loader.dataset, Share(1, 0, 0, splits_workers=False))


def share_of(loader: DataLoader[Any]) -> Share:
    """Return which samples of an ``IterableDataset`` a loader keeps."""
    dataset = loader.dataset
    return dataset._hasten_share if isinstance(dataset, DividedDataset) else Share(1, 0, 0)


def users_dataset(loader: DataLoader[Any]) -> Any:
    """Return the user's dataset, of which a loader may keep a share."""
    dataset = loader.dataset
    return dataset._hasten_dataset if isinstance(dataset, DividedDataset) else dataset


def _in_parts(loader: DataLoader[Any], dataset: Any, share: Share) -> DataLoader[Any]:
    share.batch_size = loader.batch_size
    if not has_state(dataset):
        share.block = loader.batch_size or 1
    if loader.num_workers:
        share.memory.share_memory_()
    made = (DividedWithState if has_state(dataset) else DividedDataset)(dataset, share)
    return with_attributes(loader, dataset=made)


# -- datasets that say how they are divided


def _known_to_divide(dataset: object) -> str:
    """Return why a dataset is known to give each process other samples; empty if nothing says so."""
    for part in (part for _, part in parts(dataset) if isinstance(part, IterableDataset)):
        if vars(part).get("_distributed") is not None:
            return "split_dataset_by_node has divided it"
        for kind in type(part).__mro__:
            package = package_of(kind)
            if package in _DIVIDE_THEMSELVES and _DIVIDE_THEMSELVES[package] in (None, kind.__name__):
                return f"{package} divides it"
        if _has_sharding_filter(part):
            return "its sharding_filter divides it"
    return ""


def _has_sharding_filter(dataset: Any) -> bool:
    from torch.utils.data import IterDataPipe

    if not isinstance(dataset, IterDataPipe):
        return False
    from torch.utils.data.graph import traverse_dps

    waiting = [traverse_dps(dataset)]
    while waiting:
        for pipe, inside in waiting.pop().values():
            if callable(getattr(pipe, "apply_sharding", None)):
                return True
            waiting.append(inside)
    return False


def _part_of(dataset: Any, num_replicas: int, rank: int) -> Any:
    """Return this process's part of a dataset that knows how to give one; None for any other."""
    if is_hugging_face(dataset):
        huggings: Any = importlib.import_module("datasets.distributed")
        return huggings.split_dataset_by_node(dataset, rank=rank, world_size=num_replicas)
    # Methods of its class: what an object passes on to another one would give a part of that one.
    if _takes(type(dataset), "shard", "num_shards", "index"):
        return dataset.shard(num_shards=num_replicas, index=rank)
    if _takes(type(dataset), "set_rank", "rank", "world_size"):
        part = copy.copy(dataset)
        part.set_rank(rank=rank, world_size=num_replicas)
        return part
    return None


def _takes(kind: type, method: str, *names: str) -> bool:
    function = getattr(kind, method, None)
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind(None, **dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return set(names) <= set(signature.parameters)


# -- every n-th sample


class Reads(NamedTuple):
    """What so many processes with so many workers each have read, taking turns: batches of each process."""

    replicas: int
    workers: int
    batch_size: int
    batches: int

    @property
    def samples(self) -> int:
        """How many samples they had together."""
        return self.replicas * self.batch_size * self.batches


@dataclass
class GoesOn:
    """An epoch that other processes have begun."""

    after: tuple[Reads, ...]  # What they read of it, one after the other.
    seed: int | str  # Theirs.
    # The states of the random generators in which one process alone began it; None for several.
    rng: dict[str, Any] | None = None
    # Whether their workers divided the samples by themselves; None where that is not known.
    by_workers: bool | None = None


# Who divides what the dataset gives to each reader. Workers divide among them what they all get.
UNDECIDED, READERS, PROCESSES, NOBODY = range(4)


@dataclass
class Share:
    """Which samples of a dataset a process keeps."""

    num_replicas: int  # The number of processes.
    rank: int
    seed: int | str  # Of the random numbers that the dataset draws, with the epoch.
    splits_workers: bool = True  # Whether workers divide what the dataset does not divide among them itself.
    block: int = 1  # Samples to read at once; 1 of a dataset whose position must be known after each.
    batch_size: int | None = None  # Of the loader.
    # The number of the epoch, and who divides the samples; shared with the workers.
    memory: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    goes_on: GoesOn | None = None  # What the next iteration continues.
    # Where the readers compare their first samples; None if there is nothing to compare.
    meeting: Meeting | None = None
    is_part: bool = False  # Whether the dataset is one process's part already, and only workers are left to divide it.

    @property
    def decision(self) -> int:
        """Who divides the samples: ``READERS``, ``PROCESSES`` or ``NOBODY``; ``UNDECIDED`` before the first ones."""
        return int(self.memory[1])

    @property
    def by_workers(self) -> bool | None:
        """Whether the dataset divides itself among workers; None as long as that is not known."""
        known = self.meeting is not None and self.decision in (READERS, PROCESSES)
        return self.decision == PROCESSES if known else None


class DividedDataset(DatasetProxy, IterableDataset[Any]):
    """A process's share of the samples of a dataset that every process, and every worker, reads.

    For that the dataset must give the same samples in the same order everywhere. So it draws from random generators
    of its own, seeded alike on all processes and workers, with another seed in each epoch.
    """

    _hasten_share: Share
    _hasten_reading: _Reading | None
    _hasten_loaded: dict[str, Any] | None

    def __init__(self, dataset: object, share: Share) -> None:
        super().__init__(dataset, _hasten_share=share, _hasten_reading=None, _hasten_loaded=None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hasten_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __iter__(self) -> Iterator[Any]:
        loaded = self._hasten_loaded
        reading = _Reading(self._hasten_dataset, self._hasten_share, loaded)
        self.__dict__.update(_hasten_reading=reading, _hasten_loaded=None)
        return reading

    def __len__(self) -> int:
        share = self._hasten_share
        if share.decision == NOBODY:
            return len(self._hasten_dataset)
        return len(range(share.rank, len(self._hasten_dataset), share.num_replicas))

    def __repr__(self) -> str:
        share, kind = self._hasten_share, type(self._hasten_dataset).__name__
        if share.num_replicas == 1 or share.decision == NOBODY:
            return repr(self._hasten_dataset)
        return f"every {_ordinal(share.num_replicas)} sample of {kind} from {share.rank}"

    def draw_for(self, epoch: int) -> None:
        """Draw other random numbers in another epoch."""
        self._hasten_share.memory[0] = epoch

    def set_epoch(self, epoch: int) -> None:
        """Draw other random numbers in another epoch, and tell the dataset if it wants to know."""
        self.draw_for(epoch)
        set_epoch = getattr(self._hasten_dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class DividedWithState(DividedDataset):
    """The share of a dataset that saves its position itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the dataset, and which sample after it is this process's next."""
        reading = self._hasten_reading
        if reading is None or reading.ended:
            return self._hasten_state_between()
        return reading.state_dict()

    def _hasten_state_between(self) -> dict[str, Any]:
        """Return the position from which the next iteration begins, whether this one has ended or not."""
        return self._hasten_loaded or {"dataset": self._hasten_dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there at the next ``iter()``."""
        self._hasten_dataset.load_state_dict(state["dataset"])
        self.__dict__.update(_hasten_loaded=state, _hasten_reading=None)


class _Reading:
    """One iteration over a dataset, of which a share is kept."""

    def __init__(self, dataset: Any, share: Share, loaded: dict[str, Any] | None) -> None:
        loaded = loaded or {}
        self._dataset, self._share = dataset, share
        goes_on, share.goes_on = share.goes_on or GoesOn((), share.seed), None
        self._goes_on = goes_on
        self._seed = f"{goes_on.seed} epoch {int(share.memory[0])}"
        info = get_worker_info()
        self._workers, self._worker = (1, 0) if info is None else (info.num_workers, info.id)
        # How many samples the dataset gives until the next one that is kept; None for the first of all.
        self._skip: int | None = loaded.get("skip")
        # Whether the dataset is where an epoch begins.
        self._is_start = loaded.get("is_start", self._skip is None)
        if decision := loaded.get("decision", _decision_of_earlier_version(loaded)):
            self._take(decision)
        self._kept: list[Any] = []
        # How many samples were kept, and how many the dataset gave before the first of them was.
        self._count = self._ahead = 0
        self.ended = False
        self._own: Iterator[Any] | None = None
        self._random = collect_rng_state(cuda=False)
        with self._own_random_numbers():
            if (rng := loaded.get("rng", goes_on.rng)) is not None:
                restore_rng_state(rng)
            else:
                seed_from(self._seed)
            self._start = self._position() if has_state(dataset) else {}
            self._samples: Iterator[Any] = iter(dataset)

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        if not self._kept:
            with self._own_random_numbers():
                # As many as the loader asks for in a row: to change the random generators costs 30 us.
                self._kept = list(itertools.islice(self._own or self._begin(), self._share.block))
            self._kept.reverse()
            self._count += len(self._kept)
            self.ended = len(self._kept) < self._share.block
        if not self._kept:
            raise StopIteration
        return self._kept.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return where the reading is."""
        assert not self._kept, "the position is known between two batches only"
        decision = self._share.decision
        if self._own is None or not self._count:
            return {**self._start, "skip": self._skip, "is_start": self._is_start, "decision": decision}
        step, first = self._step()
        given = (first if self._skip is None else self._skip) + step * (self._count - 1) + 1
        if given < self._ahead:
            # The dataset is further than what was kept of it.
            return {**self._start, "skip": given - 1 + step, "is_start": True, "decision": decision}
        with self._own_random_numbers():
            return {**self._position(), "skip": step - 1, "is_start": False, "decision": decision}

    def _position(self) -> dict[str, Any]:
        return {"dataset": copy.deepcopy(self._dataset.state_dict()), "rng": collect_rng_state(cuda=False)}

    def _begin(self) -> Iterator[Any]:
        samples, share = self._samples, self._share
        if self._is_start:
            number = number_to_compare(share.batch_size)
            ahead: list[Any] = []
            digests: list[str] = []
            for sample in itertools.islice(samples, number):
                # A dataset that is read one by one may give the same object each time, with other contents.
                ahead.append(sample if (share.batch_size or 1) > 1 else _copied(sample))
                if not share.decision:
                    digests.append(digest_of(sample))
            # At the end of its samples, a dataset may be back at its beginning.
            self._ahead = len(ahead) if len(ahead) == number else sys.maxsize
            samples = itertools.chain(ahead, samples)
            if not share.decision:
                self._take(self._decide(digests))
            if share.decision in (PROCESSES, NOBODY):
                # Other random numbers for other samples.
                rank = f" rank {share.rank}" * (share.decision == NOBODY)
                seed_from(f"{self._seed}{rank} worker {self._worker}")
        if self._goes_on.after:
            samples = self._remaining(samples)
        step, first = self._step()
        if self._skip is not None:
            first = self._skip
        self._own = itertools.islice(samples, first, None, step)
        return self._own

    def _take(self, decision: int) -> None:
        """Remember who divides the samples; readers that have yet to find out need not wait for this one."""
        share = self._share
        if share.meeting is not None and not self._is_start:
            share.meeting.publish(_AS_FOUND[decision])
        share.memory[1] = decision

    def _decide(self, digests: list[str]) -> int:
        """Return who divides the samples, from the first ones that all readers get."""
        share = self._share
        if share.meeting is None:
            return PROCESSES if self._goes_on.by_workers else READERS
        found = share.meeting.compare(self._worker, digests)
        processes = SAME if share.is_part else found.processes
        if (share.meeting.rank, self._worker) == (0, 0):
            _say_who_divides(share, type(self._dataset).__name__, found._replace(processes=processes), self._workers)
        if processes != SAME or found.workers not in (SAME, DIFFERENT):
            return NOBODY
        return READERS if found.workers == SAME else PROCESSES

    def _step(self) -> tuple[int, int]:
        share = self._share
        if share.decision == NOBODY:
            return 1, 0
        if share.decision == PROCESSES or not share.splits_workers:
            return share.num_replicas, share.rank
        # So that the numbers of batches differ by one at most: each worker's samples end before those of the next.
        return share.num_replicas * self._workers, self._worker * share.num_replicas + share.rank

    def _remaining(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples that nobody has had in this epoch."""
        kind, share, after = type(self._dataset).__name__, self._share, self._goes_on.after
        if share.decision == NOBODY:
            had = sum(reads.samples for reads in after) // (share.num_replicas * self._workers)
            warnings.warn(
                f"{kind} does not give all processes the same samples, so it is not known which ones were read "
                f"before the run was interrupted: {had} samples of each process are left out. Resume with as many "
                "processes as before to continue exactly.",
                stacklevel=2,
            )
            return itertools.islice(samples, had, None)
        if share.decision == READERS:
            if self._workers > 1 and not share.splits_workers:
                raise make_error(
                    RuntimeError,
                    f"each of {self._workers} workers reads all samples of {kind}, so the rest of the epoch cannot be "
                    "read once.",
                    fix="Resume with num_workers=0, or with as many processes as before.",
                )
            for reads in after:
                samples = _not_had(samples, reads)
            return samples
        for reads in after:
            if reads.workers != self._workers:
                raise make_error(
                    RuntimeError,
                    f"{kind} divides its samples among workers, so what {reads.workers} worker(s) have read of the "
                    f"epoch is not known to {self._workers}.",
                    fix=f"Resume with num_workers={reads.workers}, or with as many processes as before.",
                )
            most = reads.replicas * reads.batch_size
            had = most * -(-(reads.batches - self._worker) // reads.workers)
            if had - sum(1 for _ in itertools.islice(samples, had)) >= most:
                raise make_error(
                    RuntimeError,
                    f"the workers of {kind} do not have the same number of samples, so what is left of the epoch is "
                    "not known.",
                    fix="Resume with as many processes as before.",
                )
        return samples

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        outside = collect_rng_state(cuda=False)
        restore_rng_state(self._random)
        try:
            yield
        finally:
            self._random = collect_rng_state(cuda=False)
            restore_rng_state(outside)


def _not_had(samples: Iterator[Any], reads: Reads) -> Iterator[Any]:
    """Leave out what processes and workers had that took turns at samples."""
    rounds, more = divmod(reads.batches, reads.workers)
    turn = reads.replicas * reads.workers
    samples = itertools.islice(samples, turn * reads.batch_size * rounds, None)
    # The first workers have had one batch more.
    last: Iterator[Any] = itertools.islice(samples, turn * reads.batch_size) if more else iter(())
    kept = (sample for number, sample in enumerate(last) if number % turn >= more * reads.replicas)
    return itertools.chain(kept, samples)


# What a decision says of the first samples.
_AS_FOUND = {
    READERS: ReaderComparison(SAME, SAME),
    PROCESSES: ReaderComparison(SAME, DIFFERENT),
    NOBODY: ReaderComparison(DIFFERENT, DIFFERENT),
}


def _say_who_divides(share: Share, kind: str, found: ReaderComparison, workers: int) -> None:
    """Say in one process what was decided, and what to write if that is wrong."""
    assert share.meeting is not None
    name = share.meeting.name
    if found.processes == DIFFERENT:
        _say_once(
            f"{name}: each process reads all that its {kind} gives, because the first samples of each are different "
            "ones. If they are the same in another order, give that a seed of its own, so that they can be divided."
        )
    elif found.processes != SAME or found.workers not in (SAME, DIFFERENT):
        rank_zero_warn(
            f"{name}: each process reads all that its {kind} gives, because the first samples repeat, or are the same "
            "on some processes or workers only, and do not show whether it divides them itself.",
            fix=f"Pass use_distributed_sampler=False if it does, else give {kind} a method shard(num_shards, index).",
        )
    elif not share.is_part:
        readers = " in each of its workers" if workers > 1 and found.workers == SAME else ""
        rank_zero_warn(
            f"{name}: each of {share.num_replicas} processes reads all samples of {kind}{readers} and keeps its share.",
            fix=(
                f"To read only that, give {kind} a method shard(num_shards, index), or divide the samples yourself and "
                "pass use_distributed_sampler=False."
            ),
        )


def _decision_of_earlier_version(state: dict[str, Any]) -> int:
    if (by_workers := state.get("by_workers")) is None:
        return UNDECIDED
    return PROCESSES if by_workers else READERS


def _copied(sample: Any) -> Any:
    # What cannot be copied is given as it is.
    with suppress(Exception):
        return copy.deepcopy(sample)
    return sample


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
