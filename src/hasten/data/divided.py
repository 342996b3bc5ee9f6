"""An ``IterableDataset`` divided among processes: by itself, or by taking every n-th of its samples."""

from __future__ import annotations

import copy
import dis
import functools
import hashlib
import importlib
import inspect
import itertools
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hasten._lib import torch_private
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.data.first_samples import FirstSample, compare_first, digest_of, first_of_worker
from hasten.data.loader_parts import has_state, is_hugging_face, overrides_iter, with_attributes
from hasten.data.memory.dataset_parts import changed, comparable, fingerprint, parts
from hasten.data.memory.read import DatasetProxy
from hasten.data.resume.workers import SeedByRank
from hasten.extend.origin import ROOTS
from hasten.machine import agreement
from hasten.seed import collect_rng_state, restore_rng_state

# Datasets of these packages, and of these classes only, divide themselves by the ranks that they find out.
_DIVIDE_THEMSELVES = {"webdataset": None, "litdata": None, "streaming": "StreamingDataset"}
# What code reads that finds out which process it runs in, and the variables that launchers set.
_RANK_NAMES = frozenset(
    {
        *("get_rank", "get_world_size", "get_node_local_rank", "get_local_rank", "world_size", "num_replicas"),
        *("global_rank", "local_rank", "node_rank", "data_parallel_rank", "data_parallel_size"),
        *("process_index", "num_processes"),
    }
)
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"}
)
# Packages whose code is not looked at.
_NEVER = sys.stdlib_module_names - {"__main__"} | ROOTS | {"torch", "numpy", "lightning"}
# Names of parts that say in which way a dataset is another one on each process.
_DIVISION = re.compile("rank|replica|shard|split|part|process|node|world|distributed")
# The processes get here at about the same time, unless one of them makes its data first.
_PATIENCE_SECONDS = 600.0
_counts: Counter[str] = Counter()


def divided(loader: DataLoader[Any], num_replicas: int, rank: int, *, name: str, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of an ``IterableDataset`` that reads this process's part of the samples.

    A dataset that divides itself is left alone: its code asks for the rank, it is another one on each process, or
    ``split_dataset_by_node`` of Hugging Face made it. One that can be divided is: Hugging Face's, and those with
    ``shard(num_shards, index)`` or ``set_rank(rank, world_size)``. Of any other, each process reads everything and
    keeps every n-th sample.

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
    if why := divides_itself(dataset) or _loader_divides(loader):
        _say_once(f"{name}: each process reads all that its {kind} gives, because {why}.")
        return loader
    if (where := _differing_part(dataset, name)) is not None:
        message = (
            f"{name}: each process reads all that its {kind} gives, because it is not the same on all processes"
            f"{f' ({where} differs)' if where else ''} and so may be divided already."
        )
        if _DIVISION.search(where.lower()):
            _say_once(message)
        else:
            rank_zero_warn(f"{message} Pass use_distributed_sampler=False if it is, else make it the same.")
        return loader
    own = _own_part(dataset, num_replicas, rank)
    if own is None:
        workers = " in each of its workers" if loader.num_workers > 1 else ""
        if workers and asks_for_worker(loader):
            workers = ", divided among its workers if these divide them,"
        rank_zero_warn(
            f"{name}: each of {num_replicas} processes reads all samples of {kind}{workers} and keeps its share. To "
            f"read only that, give {kind} a method shard(num_shards, index), or divide the samples yourself and pass "
            "use_distributed_sampler=False."
        )
        return _in_parts(loader, dataset, Share(num_replicas, rank, seed, name=name, setup=_counts[name]))
    if is_hugging_face(own):
        # Divides itself among workers too.
        return with_attributes(loader, dataset=own)
    return _in_parts(loader, own, Share(1, 0, f"{seed} rank {rank}", is_part=True))


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


def asks_for_worker(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset of a loader may divide itself among workers."""
    return _users_init(loader) is not None or bool(mentioned(users_dataset(loader), frozenset({"get_worker_info"})))


def _in_parts(loader: DataLoader[Any], dataset: Any, share: Share) -> DataLoader[Any]:
    if not has_state(dataset):
        share.block = loader.batch_size or 1
    if loader.num_workers and loader.persistent_workers:
        share.epoch.share_memory_()
    made = (DividedWithState if has_state(dataset) else DividedDataset)(dataset, share)
    init = DetectDivision(loader.worker_init_fn)
    return with_attributes(loader, dataset=made, worker_init_fn=init if loader.num_workers else loader.worker_init_fn)


# -- who divides


def divides_itself(dataset: object) -> str:
    """Return why a dataset is taken to give each process other samples; empty if nothing says so."""
    for part in (part for _, part in parts(dataset) if isinstance(part, IterableDataset)):
        if vars(part).get("_distributed") is not None:
            return "split_dataset_by_node has divided it"
        for kind in type(part).__mro__:
            package = _package(kind)
            if package in _DIVIDE_THEMSELVES and _DIVIDE_THEMSELVES[package] in (None, kind.__name__):
                return f"{package} divides it"
        if _has_sharding_filter(part):
            return "its sharding_filter divides it"
    found = "" if is_hugging_face(dataset) else mentioned(dataset, _RANK_NAMES, _RANK_VARIABLES)
    return f"its code reads {found} and so divides it" if found else ""


def _loader_divides(loader: DataLoader[Any]) -> str:
    """Return why the loader is taken to give each process other samples of the dataset; empty if nothing says so."""
    function = _users_init(loader)
    found = mentioned(function, _RANK_NAMES, _RANK_VARIABLES)
    # Many ask for the rank only to seed.
    if found and mentioned(function, frozenset({"dataset"})):
        return f"worker_init_fn reads {found} and so divides it"
    found = mentioned(type(loader), _RANK_NAMES, _RANK_VARIABLES) if overrides_iter(loader) else ""
    return f"{type(loader).__name__} reads {found} and so divides it" if found else ""


def _users_init(loader: DataLoader[Any]) -> Any:
    """Return the user's ``worker_init_fn`` of a loader, or None."""
    function: Any = loader.worker_init_fn
    while isinstance(function, (DetectDivision, SeedByRank)):
        function = function.user_function
    return function


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


def _own_part(dataset: Any, num_replicas: int, rank: int) -> Any:
    """Return this process's part of a dataset that knows how to give one; None for any other."""
    if is_hugging_face(dataset):
        huggings: Any = importlib.import_module("datasets.distributed")
        return huggings.split_dataset_by_node(dataset, rank=rank, world_size=num_replicas)
    # Methods of its class: what an object passes on to another one would give a part of that one.
    if _takes(type(dataset), "shard", "num_shards", "index"):
        return dataset.shard(num_shards=num_replicas, index=rank)
    if _takes(type(dataset), "set_rank", "rank", "world_size"):
        own = copy.copy(dataset)
        own.set_rank(rank=rank, world_size=num_replicas)
        return own
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


def _differing_part(dataset: Any, name: str) -> str | None:
    """Return the place of a part of a dataset that differs between two processes; None if all have the same."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    values = comparable(dataset)
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
    _counts[name] += 1
    place = f"dataset/{name}/{_counts[name]}"
    found = agreement.exchange(place, digest, what=f"setting up {name}", patience_seconds=_PATIENCE_SECONDS)
    absent = [rank for rank, each in enumerate(found) if each is None]
    if absent:
        raise RuntimeError(
            f"{name}: {agreement.format_ranks(absent)} did not set it up within {_PATIENCE_SECONDS:.0f} s, so "
            f"{type(dataset).__name__} cannot be divided. Set it up on all processes, or pass "
            "use_distributed_sampler=False."
        )
    if len(set(found)) == 1:
        return None
    # Which part differs is asked of two processes only: there may be thousands.
    other = next(rank for rank, each in enumerate(found) if each != found[0])
    own = values if dist.get_rank() in (0, other) else {}
    both = agreement.exchange(f"{place}/parts", own, what=f"setting up {name}", patience_seconds=_PATIENCE_SECONDS)
    first, second = both[0] or {}, both[other] or {}
    return next((each for each in {**first, **second} if first.get(each) != second.get(each)), "")


def mentioned(dataset: object, names: frozenset[str], texts: frozenset[str] = frozenset()) -> str:
    """Return the first of ``names``, or of the strings ``texts``, in the code that iterating over a dataset may run.

    Or in that of a function. Looked at are the methods of its classes but ``__init__``, the datasets and functions that
    it holds, and what they call, as far as it is not of installed packages other than the dataset's own.
    """
    search = _CodeSearch(names, texts, {_package(type(dataset))} - _NEVER, [dataset])
    while search.waiting:
        if found := search.look_at(search.waiting.pop()):
            return found
    return ""


@dataclass
class _CodeSearch:
    names: frozenset[str]
    texts: frozenset[str]
    packages: set[str]
    waiting: list[Any] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)

    def look_at(self, thing: object) -> str:
        if id(thing) in self._seen or len(self._seen) > 5000:
            return ""
        self._seen[id(thing)] = thing
        if isinstance(thing, (list, tuple)):
            self.waiting.extend(thing[:100])
        elif isinstance(thing, dict):
            self.waiting.extend(list(thing.values())[:100])
        elif isinstance(thing, types.MethodType):
            self.waiting += [thing.__func__, thing.__self__]
        elif isinstance(thing, types.FunctionType):
            return self._function(thing)
        elif isinstance(thing, type):
            for kind in filter(self._is_users, thing.__mro__):
                for name, member in vars(kind).items():
                    function = _function_of(member)
                    if isinstance(function, types.FunctionType):
                        # What the object is given has a value, too.
                        self._held.update(_assigned(function.__code__))
                        if name != "__init__":
                            self.waiting.append(function)
                    elif not isinstance(member, property):
                        self._held.add(name)
        elif isinstance(thing, functools.partial):
            self.waiting += [thing.func, thing.args, thing.keywords]
        elif "__wrapped__" in getattr(thing, "__dict__", ()):
            self.waiting.append(vars(thing)["__wrapped__"])
        elif isinstance(thing, IterableDataset) or self._is_users(type(thing)):
            held = dict(getattr(thing, "__dict__", {}))
            # Values that an object holds are compared among the processes.
            self._held.update(held)
            self.waiting += [type(thing), held]
        return ""

    def _function(self, function: types.FunctionType) -> str:
        if not self._is_users(function):
            return ""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        for cell in cells.values():
            if cell != types.CellType():
                self.waiting.append(cell.cell_contents)
        codes = [function.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            texts = {each for each in code.co_consts if isinstance(each, str)}
            called = set(code.co_names)
            if found := sorted((called & self.names) - self._held) + sorted(texts & self.texts):
                return found[0]
            for name in called:
                value = function.__globals__.get(name)
                if isinstance(value, types.ModuleType) and self._is_users(value):
                    self.waiting.extend(getattr(value, each, None) for each in called)
                elif isinstance(value, (type, types.FunctionType)):
                    self.waiting.append(value)
        return ""

    def _is_users(self, thing: Any) -> bool:
        package = _package(thing)
        if package in self.packages:
            return True
        module = sys.modules.get(package)
        file = getattr(module, "__file__", None) or ""
        return package not in _NEVER and "site-packages" not in file


def _function_of(member: Any) -> Any:
    """Return the function behind a member of a class, if there is one."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, functools.cached_property):
        return member.func
    return getattr(member, "__dict__", {}).get("__wrapped__", member)


def _assigned(code: types.CodeType) -> set[str]:
    """Return the names of the attributes that a function assigns."""
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def _package(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return str(name).partition(".")[0]


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
    """An epoch that other processes have begun.

    Args:
        after: what they read of it, one after the other.
        seed: theirs.
        rng: the states of the random generators in which one process alone began it; None for several.

    """

    after: tuple[Reads, ...]
    seed: int | str
    rng: dict[str, Any] | None = None


@dataclass
class Share:
    """Which samples of a dataset a process keeps.

    Args:
        num_replicas: the number of processes.
        rank: which of them this is.
        seed: of the random numbers that the dataset draws, with the epoch.
        splits_workers: whether workers divide what the dataset does not divide among them itself.
        block: samples to read at once; 1 of a dataset whose position must be known after each.
        epoch: the number of the epoch; in memory that persistent workers share.
        goes_on: what the next iteration continues.
        name: what to call the loader in messages; empty where the processes need not read the same.
        setup: how many loaders of this name this process has made ready.
        is_part: whether the dataset is one process's part already, and only workers are left to divide it.
        by_workers: whether the dataset divides itself among workers; False as long as that is not known.

    """

    num_replicas: int
    rank: int
    seed: int | str
    splits_workers: bool = True
    block: int = 1
    epoch: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    goes_on: GoesOn | None = None
    name: str = ""
    setup: int = 0
    is_part: bool = False
    by_workers: bool = False


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
        return len(range(share.rank, len(self._hasten_dataset), share.num_replicas))

    def __repr__(self) -> str:
        share, kind = self._hasten_share, type(self._hasten_dataset).__name__
        if share.num_replicas == 1:
            return repr(self._hasten_dataset)
        return f"every {_ordinal(share.num_replicas)} sample of {kind} from {share.rank}"

    def draw_for(self, epoch: int) -> None:
        """Draw other random numbers in another epoch."""
        self._hasten_share.epoch.fill_(epoch)

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
        self._after = goes_on.after
        self._seed = f"{goes_on.seed} epoch {int(share.epoch)}"
        info = get_worker_info()
        self._workers, self._worker = (1, 0) if info is None else (info.num_workers, info.id)
        self._by_workers: bool | None = loaded.get("by_workers")
        # How many samples the dataset gives until the next one that is kept; None for the first of all.
        self._skip: int | None = loaded.get("skip")
        self._kept: list[Any] = []
        self.ended = False
        self._own: Iterator[Any] | None = None
        self._random = _random_states()
        with self._own_random_numbers():
            if (rng := loaded.get("rng", goes_on.rng)) is not None:
                restore_rng_state(rng)
            else:
                _seed_all(self._seed)
            with _watched_worker_info() as asked:
                self._samples: Iterator[Any] = iter(dataset)
        self._asked = asked

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        if not self._kept:
            with self._own_random_numbers():
                # As many as the loader asks for in a row: to change the random generators costs 30 us.
                self._kept = list(itertools.islice(self._own or self._begin(), self._share.block))
            self._kept.reverse()
            self.ended = len(self._kept) < self._share.block
        if not self._kept:
            raise StopIteration
        return self._kept.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return where the reading is."""
        assert not self._kept, "the position is known between two batches only"
        step, _ = self._step()
        skip = self._skip if self._own is None else step - 1
        with self._own_random_numbers():
            rng = collect_rng_state(cuda=False)
        return {"dataset": self._dataset.state_dict(), "rng": rng, "skip": skip, "by_workers": self._by_workers}

    def _begin(self) -> Iterator[Any]:
        samples = self._samples
        if self._by_workers is None:
            # A dataset that divides itself among workers has asked which one it is in to give its first sample.
            with _watched_worker_info(self._asked):
                first_one = list(itertools.islice(samples, 1))
            samples = itertools.chain(first_one, samples)
            self._by_workers = self._share.by_workers or bool(self._asked)
            if self._by_workers:
                # Other random numbers for other samples.
                _seed_all(f"{self._seed} worker {self._worker}")
            if first_one and self._share.name:
                self._note_first(first_one[0])
        if self._after:
            samples = self._remaining(samples)
        step, first = self._step()
        if self._skip is not None:
            first = self._skip
        self._own = itertools.islice(samples, first, None, step)
        return self._own

    def _note_first(self, sample: Any) -> None:
        share, kind = self._share, type(self._dataset).__name__
        first = FirstSample(share.name, share.setup, kind, self._worker, digest_of(sample))
        if get_worker_info() is None:
            compare_first(first)
        else:
            # Only the main process can compare it.
            first_of_worker.append(first)

    def _step(self) -> tuple[int, int]:
        share = self._share
        if self._by_workers or not share.splits_workers:
            return share.num_replicas, share.rank
        # So that the numbers of batches differ by one at most: each worker's samples end before those of the next.
        return share.num_replicas * self._workers, self._worker * share.num_replicas + share.rank

    def _remaining(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples that nobody has had in this epoch."""
        kind = type(self._dataset).__name__
        if not self._by_workers:
            if self._workers > 1 and not self._share.splits_workers:
                raise RuntimeError(
                    f"each of {self._workers} workers reads all samples of {kind}, so the rest of the epoch cannot be "
                    "read once. Resume with num_workers=0, or with as many processes as before."
                )
            for reads in self._after:
                samples = _not_had(samples, reads)
            return samples
        for reads in self._after:
            if reads.workers != self._workers:
                raise RuntimeError(
                    f"{kind} divides its samples among workers, so what {reads.workers} worker(s) have read of the "
                    f"epoch is not known to {self._workers}. Resume with num_workers={reads.workers}, or with as many "
                    "processes as before."
                )
            most = reads.replicas * reads.batch_size
            had = most * -(-(reads.batches - self._worker) // reads.workers)
            if had - sum(1 for _ in itertools.islice(samples, had)) >= most:
                raise RuntimeError(
                    f"the workers of {kind} do not have the same number of samples, so what is left of the epoch is "
                    "not known. Resume with as many processes as before."
                )
        return samples

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        outside = _random_states()
        _set_random_states(self._random)
        try:
            yield
        finally:
            self._random = _random_states()
            _set_random_states(outside)


def _not_had(samples: Iterator[Any], reads: Reads) -> Iterator[Any]:
    """Leave out what processes and workers had that took turns at samples."""
    rounds, more = divmod(reads.batches, reads.workers)
    turn = reads.replicas * reads.workers
    samples = itertools.islice(samples, turn * reads.batch_size * rounds, None)
    # The first workers have had one batch more.
    last: Iterator[Any] = itertools.islice(samples, turn * reads.batch_size) if more else iter(())
    kept = (sample for number, sample in enumerate(last) if number % turn >= more * reads.replicas)
    return itertools.chain(kept, samples)


def _random_states() -> tuple[Any, Tensor, Any]:
    numpy = sys.modules.get("numpy")
    held = None if numpy is None else numpy.random.get_state(legacy=False)
    return random.getstate(), torch.get_rng_state(), held


def _set_random_states(states: tuple[Any, Tensor, Any]) -> None:
    python, torchs, numpys = states
    random.setstate(python)
    torch.set_rng_state(torchs)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def _seed_all(text: str) -> None:
    mixed = random.Random(text)
    random.seed(mixed.getrandbits(64))
    torch.default_generator.manual_seed(mixed.getrandbits(63))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([mixed.getrandbits(32) for _ in range(4)])


# -- whether a dataset divides itself among workers


class _Asked:
    """Stands for the information about a worker, and remembers whether something was read from it."""

    def __init__(self, info: Any) -> None:
        self._info, self._was_read = info, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._was_read = True
        return getattr(self._info, name)

    def __bool__(self) -> bool:
        return True


class _WasAsked:
    """Whether a dataset has asked which worker it is in."""

    def __init__(self) -> None:
        self.infos: list[_Asked] = []

    def __bool__(self) -> bool:
        return any(info._was_read for info in self.infos)


@contextmanager
def _watched_worker_info(asked: _WasAsked | None = None) -> Iterator[_WasAsked]:
    asked = _WasAsked() if asked is None else asked
    info: Any = torch_private.worker_info()
    if info is None:
        yield asked
        return
    watched = _Asked(info)
    asked.infos.append(watched)
    torch_private.set_worker_info(watched)
    try:
        yield asked
    finally:
        torch_private.set_worker_info(info)


@dataclass(eq=False)
class DetectDivision:
    """A ``worker_init_fn`` that notices whether the user's one gives the dataset another part in each worker."""

    user_function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        if self.user_function is None:
            return
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        held = getattr(dataset, "_hasten_dataset", dataset)
        before = fingerprint(held)
        self.user_function(worker_id)
        if isinstance(dataset, DividedDataset) and changed(before, fingerprint(held)):
            dataset._hasten_share.by_workers = True


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
