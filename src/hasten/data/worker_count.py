"""``num_workers="auto"``: as many worker processes as pay on this loader, found by measuring."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hasten._lib.rank_zero import rank_zero_info
from hasten.data.resume.loader_sources import generators_of, shut_down, with_attributes
from hasten.seed import generator_state, isolate_rng, set_generator_state

# More workers have to gain so much: below it, a process more costs memory for nothing.
GAIN = 1.03
# Numbers so close to the best are measured twice.
NEAR = 1.2
# Before these many batches have come, workers hand out what they made in advance.
AT_LEAST = 6
# An epoch that is over so soon is not worth starting processes for.
SHORT_SECONDS = 0.3
_found: dict[str, int] = {}


@dataclass(frozen=True)
class Pace:
    """How fast batches come with a number of workers.

    Args:
        start_seconds: until the first batch is there.
        batch_seconds: from one batch to the next.

    """

    start_seconds: float
    batch_seconds: float

    def mean(self, other: Pace) -> Pace:
        """Return the pace between two measurements."""
        return Pace(
            (self.start_seconds + other.start_seconds) / 2, (self.batch_seconds + other.batch_seconds) / 2
        )

    def epoch_seconds(self, batches: int, *, started_once: bool) -> float:
        """Return how long an epoch takes, or, where the workers live on, one of many."""
        return (0.0 if started_once else self.start_seconds) + batches * self.batch_seconds


def auto_workers(loader: Any, *, seconds: float = 4.0, stage: str = "train", name: str | None = None) -> Any:
    """Return the loader with as many worker processes as pay: none, if none do.

    What ``Trainer(num_workers="auto")`` does with every loader. Batches are fetched for a short while with 0, 1, 2, ...
    workers, as long as more of them still gain, and the number with which an epoch is read fastest is taken. All of it
    happens in processes of its own: random states, samplers and the dataset stay as they are. What was found is
    remembered for the next run with the same data on the same machine.

    Order and batches stay the same. As always with workers, random numbers for a sample are those of its worker, and
    differ from those without. Workers live for an epoch unless the loader says ``persistent_workers=True``.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        seconds: spent on measuring at most, about.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``; only for ``"train"`` is it an error if the
            loader cannot have workers, elsewhere a line says why and it stays.
        name: what to call the loader in messages.

    Raises:
        TypeError: it is no ``DataLoader``, or its dataset is an ``IterableDataset``.
        ValueError: ``seconds`` is not positive.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> auto_workers(loader).num_workers
        0

    Source: `PyTorch, Multi-process data loading
    <https://docs.pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading>`_.

    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"auto_workers(seconds={seconds!r}): use a number of seconds above 0.")
    name = name or f"the {stage} dataloader"
    try:
        return _with_best(loader, seconds, name)
    except TypeError as error:
        if stage == "train":
            raise
        rank_zero_info(f"{name} is read as before. {error}")
        return loader


def with_workers(
    loader: Any, num_workers: int, *, stage: str = "validate", name: str = "the dataloader"
) -> Any:
    """Return a ``DataLoader`` with another number of worker processes; all else stays.

    Args:
        loader: anything; what is no ``DataLoader`` is returned as it is, but for ``"train"``.
        num_workers: 0 for none.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        name: what to call the loader in messages.

    Raises:
        TypeError: workers were asked for to train, and the loader is none that could have them.

    Example::

        >>> with_workers(DataLoader([1, 2, 3]), 2).num_workers
        2

    """
    if num_workers and stage == "train" and not isinstance(loader, DataLoader):
        raise TypeError(
            f"num_workers={num_workers}: {name} is a {type(loader).__name__}, and only a DataLoader has workers. "
            "Give a DataLoader, or leave num_workers out."
        )
    if not isinstance(loader, DataLoader) or loader.num_workers == num_workers:
        return loader
    changed: dict[str, Any] = {"num_workers": num_workers, "_iterator": None}
    if num_workers == 0:
        changed |= {
            "prefetch_factor": None,
            "persistent_workers": False,
            "timeout": 0,
            "_DataLoader__multiprocessing_context": None,
        }
    elif loader.prefetch_factor is None:
        changed["prefetch_factor"] = 2  # What DataLoader has with workers.
    return with_attributes(loader, **changed)


def _with_best(loader: Any, seconds: float, name: str) -> Any:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"num_workers='auto': {name} is a {type(loader).__name__}, and only a DataLoader has workers. Give a "
            "DataLoader, or leave num_workers out."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"num_workers='auto': {name} reads {type(loader.dataset).__name__}, an IterableDataset, which divides its "
            "samples among its workers itself: with another number of them other batches would come. Give the number "
            "to the DataLoader, or use a dataset with __getitem__ and __len__."
        )
    if type(loader).__iter__ is not DataLoader.__iter__ or not hasattr(loader.dataset, "__len__"):
        raise TypeError(
            f"num_workers='auto': {name} ({type(loader).__name__}) iterates in its own way, or its dataset has no "
            "length. Give a plain DataLoader, or leave num_workers out."
        )
    batches = _number_of_batches(loader)
    if not batches:
        return loader  # An empty loader is reported as such.
    key = _key(loader)
    known = _recall(key)
    if known is not None:
        return _marked(with_workers(loader, known))
    began = time.perf_counter()
    paces, failure = _measure(loader, batches, seconds)
    if not paces:
        rank_zero_info(f"num_workers='auto': {name} keeps num_workers={loader.num_workers}: {failure}")
        return loader
    once = loader.persistent_workers
    costs = {n: pace.epoch_seconds(batches, started_once=once and n > 0) for n, pace in paces.items()}
    best = _best(costs)
    shown = ", ".join(f"{n}: {batches / cost:.4g}" for n, cost in costs.items())
    rank_zero_info(
        f"num_workers='auto': {name} gets num_workers={best} (batches a second with {shown}; measured in "
        f"{time.perf_counter() - began:.1f} s)." + (f" {failure}" if failure else "")
    )
    _remember(key, best, on_disk=len(costs) > 1)
    return _marked(with_workers(loader, best))


def _best(costs: dict[int, float]) -> int:
    """Return the smallest number of workers that is as fast as the fastest, but for what is not worth a process."""
    least = min(costs.values())
    return min(n for n, cost in costs.items() if cost <= least * GAIN)


def _measure(loader: DataLoader[Any], batches: int, seconds: float) -> tuple[dict[int, Pace], str]:
    """Return the pace for each number of workers worth a look, and what went wrong."""
    paces: dict[int, Pace] = {}
    with isolate_rng(include_cuda=False), _generators_kept(loader):
        try:
            index_batches = _some_index_batches(loader)
        except Exception as error:
            return {}, f"its sampler cannot be tried out: {error}"
        if not index_batches:
            return {}, "its sampler gives nothing."
        each, enough = seconds / 5, time.perf_counter() + 1.5 * seconds
        best, without_gain = float("inf"), 0
        for number in _candidates(loader):
            try:
                pace = _pace_of(loader, index_batches, number, each, batches)
            except Exception as error:
                # Of the dataset's own, or one that does not go into a process: the run itself tells it better.
                return paces, f"with {number} workers: {type(error).__name__}: {str(error).splitlines()[-1:]}"
            paces[number] = pace
            cost = pace.epoch_seconds(batches, started_once=loader.persistent_workers and number > 0)
            if number == 0 and cost < SHORT_SECONDS:
                break
            without_gain = 0 if cost * GAIN < best else without_gain + 1
            best = min(best, cost)
            if without_gain == 2:
                break
        near = [
            n for n, pace in paces.items() if pace.epoch_seconds(batches, started_once=True) < NEAR * best
        ]
        for number in reversed(near if len(near) > 1 else []):
            # Other programs come and go: what is close is looked at again, in turn.
            if time.perf_counter() > enough:
                break
            with suppress(Exception):
                again = _pace_of(loader, index_batches, number, each, batches)
                paces[number] = paces[number].mean(again)
    return paces, ""


def _candidates(loader: DataLoader[Any]) -> list[int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)))
    numbers, number = {0, loader.num_workers}, 1
    # Workers that wait for a disk or a network pay beyond the number of cores.
    while number <= max(4, 2 * share):
        numbers.add(number)
        number *= 2
    return sorted(numbers)


# -- measuring


class _Timed(IterableDataset[Any]):
    """Fetches batches without workers, in the process that iterates, and tells how long that took."""

    def __init__(
        self, dataset: Any, collate_fn: Any, index_batches: list[Any], seconds: float, batches: int
    ) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn
        self._index_batches, self._seconds, self._batches = index_batches, seconds, batches

    def __iter__(self) -> Iterator[Any]:
        batches = iter(
            DataLoader(
                self._dataset, batch_sampler=_Repeated(self._index_batches), collate_fn=self._collate_fn
            )
        )
        yield _paced(batches, self._seconds, free=1, most=max(self._batches, AT_LEAST))


class _Drawn(IterableDataset[Any]):
    """What a batch sampler gives first, drawn in the process that iterates."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield list(islice(iter(self._batches), 64))


class _Repeated:
    """A batch sampler that gives the same index batches over and over."""

    def __init__(self, index_batches: list[Any]) -> None:
        self._index_batches = index_batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._index_batches


def _pace_of(
    loader: DataLoader[Any], index_batches: list[Any], number: int, seconds: float, batches: int
) -> Pace:
    if number:
        return _pace_with(loader, index_batches, number, seconds)
    # In a worker: what the dataset keeps open, counts or caches when it is read stays there.
    timed = _Timed(loader.dataset, loader.collate_fn, index_batches, seconds, batches)
    first, each = _of_a_worker(loader, timed)
    return Pace(min(first, each), each)


def _of_a_worker(loader: DataLoader[Any], wanted: IterableDataset[Any]) -> Any:
    """Return the first thing an iterable gives in a worker process of its own."""
    made: Any = DataLoader(
        wanted,
        batch_size=None,
        num_workers=1,
        collate_fn=_as_it_is,
        multiprocessing_context=loader.multiprocessing_context,
    )
    things = iter(made)
    try:
        return next(things)
    finally:
        shut_down(things)


def _pace_with(loader: DataLoader[Any], index_batches: list[Any], number: int, seconds: float) -> Pace:
    rigged = with_attributes(
        with_workers(loader, number),
        batch_sampler=_Repeated(index_batches),
        persistent_workers=False,
        pin_memory=False,
        generator=None,
        _iterator=None,
        check_worker_number_rationality=_nothing,
    )
    began = time.perf_counter()
    batches = iter(rigged)
    try:
        # What the workers made while nobody asked comes at once.
        ahead = number * (rigged.prefetch_factor or 2)
        first, each = _paced(batches, seconds, free=min(number, ahead), began=began)
        return Pace(first, each)
    finally:
        shut_down(batches)


def _paced(
    batches: Iterator[Any], seconds: float, *, free: int, began: float | None = None, most: float = math.inf
) -> tuple[float, float]:
    """Return the seconds to the first batch, and between later ones."""
    clock = time.perf_counter
    start = clock() if began is None else began
    next(batches)
    first = clock() - start
    for _ in islice(batches, free - 1):
        pass
    begin, count = clock(), 0
    while True:
        next(batches)
        count += 1
        passed = clock() - begin
        # A slow dataset gets twice as long, for its figures to mean something.
        if (passed >= seconds and count >= AT_LEAST * free) or passed >= 2 * seconds or count >= most:
            return first, passed / count


def _as_it_is(sample: Any) -> Any:
    return sample


def _some_index_batches(loader: DataLoader[Any]) -> list[Any]:
    """Return index batches like the loader's, without touching its samplers."""
    sampler: Any = loader.sampler
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError("it has batch_size=None, so it makes no batches")
    generator = torch.Generator().manual_seed(0)
    if type(batches) is BatchSampler:
        # Spread over the data: what lies together may have been read together.
        order = torch.randperm(_length(loader), generator=generator).tolist()
        if type(sampler) is SequentialSampler:
            order = list(range(min(len(order), 64 * batches.batch_size)))
        elif type(sampler) is not RandomSampler:
            order = order[: len(sampler)] if hasattr(sampler, "__len__") else order
        return list(islice(iter(BatchSampler(order, batches.batch_size, False)), 64))
    drawn: list[Any] = _of_a_worker(loader, _Drawn(batches))
    return drawn


def _length(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]


def _number_of_batches(loader: DataLoader[Any]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 1_000_000


class _generators_kept:  # noqa: N801
    """Leave the generators of a loader and its samplers as they were."""

    def __init__(self, loader: Any) -> None:
        self._generators = generators_of(loader)

    def __enter__(self) -> None:
        self._states = [generator_state(generator) for generator in self._generators]

    def __exit__(self, *error: Any) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            set_generator_state(generator, state)


# -- what was found before


def _marked(loader: Any) -> Any:
    """Return a copy that says its number of workers was found, not given."""
    # torch warns of more workers than cores, and these were seen to pay.
    return with_attributes(loader, hasten_found_workers=True, check_worker_number_rationality=_nothing)


def _nothing() -> None:
    """Check nothing."""


def as_in(loader: Any, state: dict[str, Any]) -> Any:
    """Return a loader with the workers of the run a state is of, where their number was found by measuring.

    Args:
        loader: a loader that may be of ``auto_workers``.
        state: of a stream in the middle of an epoch.

    """
    source = state.get("source") or {}
    number = source.get("num_workers", 0)
    if state.get("ended", True) or not getattr(loader, "hasten_found_workers", False):
        return loader
    return loader if number == loader.num_workers else with_workers(loader, number)


def _key(loader: DataLoader[Any]) -> str:
    """Return what tells how fast a loader is: its data, their code and the machine."""
    parts: list[Any] = [
        platform.node(),
        os.cpu_count(),
        torch.__version__,
        os.environ.get("LOCAL_WORLD_SIZE"),
    ]
    dataset: Any = loader.dataset
    while dataset is not None:
        parts += [type(dataset).__qualname__, _source_of(type(dataset)), len(dataset)]
        # The same class reads one folder or another, small images or large ones.
        parts += [
            (name, _told(value) if callable(value) else _size_of(value))
            for name, value in sorted(getattr(dataset, "__dict__", {}).items())
        ]
        dataset = getattr(dataset, "dataset", None)
    parts += [
        loader.batch_size,
        type(loader.batch_sampler).__qualname__,
        _told(loader.collate_fn),
        loader.prefetch_factor,
        loader.persistent_workers,
        loader.num_workers,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _told(thing: Any) -> str:
    """Return a description without addresses in memory."""
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{thing.__qualname__} {_source_of(thing)}"
    text = repr(thing)
    return text if " at 0x" not in text else f"{type(thing).__qualname__} {_source_of(type(thing))}"


def _size_of(value: Any) -> str:
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    size = len(value) if isinstance(value, (list, tuple, dict, set)) else ""
    return f"{type(value).__qualname__} {size}"


def _source_of(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


def _folder() -> Path:
    chosen = os.environ.get("HASTEN_CACHE")
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return (Path(chosen) if chosen else base / "hasten") / "workers"


def _recall(key: str) -> int | None:
    if key in _found:
        return _found[key]
    with suppress(OSError, ValueError, KeyError, TypeError):
        number = json.loads((_folder() / f"{key}.json").read_text(encoding="utf-8"))["num_workers"]
        return number if type(number) is int and 0 <= number <= 1024 else None
    return None


def _remember(key: str, number: int, *, on_disk: bool) -> None:
    _found[key] = number
    if not on_disk:
        return
    # A cache is never worth an error: the next run measures again.
    with suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), delete=False, encoding="utf-8") as file:
            json.dump({"num_workers": number}, file)
        os.replace(file.name, _folder() / f"{key}.json")
