"""``num_workers="auto"``: measure how many worker processes pay off for a loader."""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import operator
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.files import cache_folder, read_json, remember_json
from hasten._lib.rank_zero import rank_zero_info
from hasten.data.loader_parts import check_dataloader, length_of, required_in_training, shut_down, with_attributes
from hasten.extend.origin import source_of
from hasten.machine.host import usable_cores
from hasten.seed import isolate_rng

# More workers have to gain so much: below it, another process costs memory for nothing.
GAIN = 1.03
# Before these many batches have come, workers hand out what they made in advance.
AT_LEAST = 6
# An epoch that is over so soon is not worth starting processes for.
SHORT_SECONDS = 0.3
# Index batches that are read over and over.
_BATCHES = 64
_T = TypeVar("_T")


def auto_workers(loader: _T, *, seconds: float = 4.0, stage: str = "train", name: str | None = None) -> _T:
    """Return the loader with as many worker processes as pay off, which may be none.

    ``Trainer(num_workers="auto")`` does this with every loader. Batches are fetched for a short while with 0, 1, 2, ...
    workers, as long as more of them still gain, and the number that reads an epoch fastest is taken. This happens in
    separate processes: random states, samplers and the dataset do not change. The result is remembered for the next
    run with the same data on the same machine.

    Order and batches stay the same. As always with workers, random numbers for a sample come from its worker's
    generators, and differ from a run without workers. Workers live for an epoch unless the loader has
    ``persistent_workers=True``.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        seconds: about the longest time to spend on measuring.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``. In training it is an error if the loader
            cannot have workers; otherwise the reason is logged, and the loader is returned unchanged.
        name: what to call the loader in messages.

    Raises:
        TypeError: it is not a ``DataLoader``, or its dataset is an ``IterableDataset``.
        ValueError: ``seconds`` is not positive.
        RuntimeError: workers are spawned, and the program is not under ``if __name__ == "__main__":``.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> auto_workers(loader).num_workers
        0

    Source: `PyTorch, Multi-process data loading
    <https://docs.pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading>`_.

    """
    check.number("auto_workers", "seconds", seconds, above=0, unit="seconds", error=ValueError)
    name = name or f"the {stage} dataloader"
    return required_in_training(lambda: _with_best(loader, seconds, name), loader, stage, name)


def with_workers(loader: _T, num_workers: int, *, stage: str = "validate", name: str = "the dataloader") -> _T:
    """Return a ``DataLoader`` with another number of worker processes; all else stays.

    Args:
        loader: any loader; one that is not a ``DataLoader`` is returned unchanged, except in training.
        num_workers: 0 for none.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        name: what to call the loader in messages.

    Raises:
        TypeError: workers were asked for in training, and the loader is not a ``DataLoader``.

    Example::

        >>> with_workers(DataLoader([1, 2, 3]), 2).num_workers
        2

    """
    if num_workers and stage == "train":
        check_dataloader(loader, f"num_workers={num_workers}", name, batches=False, iteration=False)
    if not isinstance(loader, DataLoader) or loader.num_workers == num_workers:
        return loader
    changed: dict[str, Any] = {"num_workers": num_workers}
    if num_workers == 0:
        changed |= WITHOUT_WORKERS
    elif loader.prefetch_factor is None:
        changed["prefetch_factor"] = 2  # DataLoader's default with workers.
    return with_attributes(loader, **changed)


# The attributes of a DataLoader without workers.
WITHOUT_WORKERS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "_DataLoader__multiprocessing_context": None,
}


def with_workers_of(loader: _T, state: dict[str, Any]) -> _T:
    """Return a loader with the number of workers in a stream's state, if ``auto_workers`` chose the loader's number."""
    number = (state.get("source") or {}).get("num_workers", 0)
    if state.get("ended", True) or not getattr(loader, "hasten_found_workers", False):
        return loader
    return with_workers(loader, number)


def _with_best(loader: Any, seconds: float, name: str) -> Any:
    check_dataloader(loader, "num_workers='auto'", name, batches=False, numbered=True)
    batches = length_of(loader)
    if batches is None:
        batches = 1_000_000
    if not batches:
        return loader  # An empty loader is reported later.
    file = cache_folder("workers") / f"{_key(loader)}.json"
    best = _recall(file)
    if best is None:
        began = perf_counter()
        costs, failure = measure(loader, batches, seconds)
        if not costs:
            rank_zero_info(f"num_workers='auto': {name} keeps num_workers={loader.num_workers}: {failure}")
            return loader
        least = min(costs.values())
        best = min(number for number, cost in costs.items() if cost <= least * GAIN)
        shown = ", ".join(f"{number}: {batches / cost:.4g}" for number, cost in costs.items())
        rank_zero_info(
            f"num_workers='auto': {name} gets num_workers={best} (batches a second with {shown}; measured in "
            f"{perf_counter() - began:.1f} s). {failure}".rstrip()
        )
        remember_json(file, {"num_workers": best})
    # torch warns of more workers than cores; these were measured to pay off.
    new = with_workers(loader, best)
    return with_attributes(new, hasten_found_workers=True, check_worker_number_rationality=_nothing)


def _nothing() -> None:
    """Check nothing."""


def measure(loader: DataLoader[Any], batches: int, seconds: float) -> tuple[dict[int, float], str]:
    """Return the seconds of an epoch for each number of workers worth a look, and what went wrong."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # Processes cannot be started here. Going on without would train in the worker of another process.
        what = "num_workers='auto': a worker process that is spawned runs the program again."
        fix = 'Put what the program does under `if __name__ == "__main__":`.'
        raise make_error(RuntimeError, what, fix=fix, argument="num_workers")
    costs: dict[int, float] = {}
    with isolate_rng(include_cuda=False):
        if loader.batch_sampler is None:
            return {}, "it has batch_size=None, so it makes no batches."
        try:
            # In another process: the samplers do not move here.
            index_batches = _in_a_worker(loader, functools.partial(_first_batches, loader.batch_sampler))
        except Exception as error:
            return {}, f"its sampler cannot be tried out: {error}"
        if not index_batches:
            return {}, "its sampler gives nothing."
        best, without_gain = math.inf, 0
        for number in _candidates(loader):
            try:
                start, batch = _pace(loader, number, index_batches, seconds / 5, max(batches, AT_LEAST))
            except Exception as error:
                # Of the dataset, or of one that cannot be sent to a process: the run itself reports it better.
                return costs, f"with {number} workers: {type(error).__name__}: {str(error).splitlines()[-1:]}"
            cost = costs[number] = batches * batch + (0.0 if loader.persistent_workers and number else start)
            without_gain = 0 if cost * GAIN < best else without_gain + 1
            best = min(best, cost)
            if without_gain == 2 or (number == 0 and cost < SHORT_SECONDS):
                break
    return costs, ""


def _candidates(loader: DataLoader[Any]) -> list[int]:
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    # Workers that wait for a disk or a network pay off beyond the number of cores.
    most = max(4, 2 * max(1, usable_cores() // processes))
    return sorted({0, loader.num_workers, *(2**power for power in range(most.bit_length()))})


def _first_batches(batches: Iterable[Any]) -> list[Any]:
    return list(islice(batches, _BATCHES))


def _in_a_worker(loader: DataLoader[Any], function: Callable[[], Any]) -> Any:
    """Return the result of a function, called in a separate worker process."""
    calls: Any = [function]
    call: Any = operator.call
    context = loader.multiprocessing_context
    results = iter(DataLoader(calls, None, num_workers=1, collate_fn=call, multiprocessing_context=context))
    try:
        return next(results)
    finally:
        shut_down(results)


@dataclass(eq=False)
class _Repeated:
    """A batch sampler that gives the same index batches over and over."""

    index_batches: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.index_batches)


def _pace(
    loader: DataLoader[Any], number: int, index_batches: list[Any], seconds: float, most: int
) -> tuple[float, float]:
    """Return the seconds to the first batch, and from one batch to the next, with a number of workers."""
    measured: Any = with_attributes(
        with_workers(loader, number),
        sampler=None,
        batch_sampler=_Repeated(index_batches),
        persistent_workers=False,
        pin_memory=False,
        generator=None,
        check_worker_number_rationality=_nothing,
    )
    if number:
        return _pace_of(measured, seconds, number, math.inf)
    # In another process: what the dataset keeps open, counts or caches while it is read stays there.
    first, each = _in_a_worker(loader, functools.partial(_pace_of, measured, seconds, 1, most))
    return min(first, each), each


def _pace_of(loader: DataLoader[Any], seconds: float, free: int, most: float) -> tuple[float, float]:
    """Measure the pace of a loader whose first ``free`` batches are made in advance."""
    clock = perf_counter
    began = clock()
    batches = iter(loader)
    try:
        next(batches)
        first = clock() - began
        for _ in islice(batches, free - 1):
            pass
        began, count, passed = clock(), 0, 0.0
        while count < most and passed < seconds:
            next(batches)
            count += 1
            passed = clock() - began
        return first, passed / count
    finally:
        shut_down(batches)


# -- results of earlier runs


def _recall(file: Path) -> int | None:
    content = read_json(file)
    number = content.get("num_workers") if isinstance(content, dict) else None
    return number if type(number) is int and 0 <= number <= 1024 else None


def _key(loader: DataLoader[Any]) -> str:
    """Return a hash of what decides how fast a loader is: its data, their code and the machine."""
    parts: list[Any] = [platform.node(), os.cpu_count(), torch.__version__, os.environ.get("LOCAL_WORLD_SIZE")]
    dataset: Any = loader.dataset
    while length_of(dataset) is not None:
        # The same class reads one folder or another, small images or large ones.
        attributes = getattr(dataset, "__dict__", {})
        parts += [_code_of(type(dataset)), len(dataset)]
        parts += [(name, _description(value)) for name, value in sorted(attributes.items())]
        dataset = getattr(dataset, "dataset", None)
    parts += [type(loader.batch_sampler).__qualname__, _description(loader.collate_fn)]
    parts += [loader.batch_size, loader.prefetch_factor, loader.persistent_workers, loader.num_workers]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _description(value: Any) -> str:
    """Return a description of an attribute that is the same in every process."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{type(value).__qualname__} {len(value)}"
    # A transform's text has its parameters.
    text = "" if " at 0x" in repr(value) else repr(value)
    return text + _code_of(value if hasattr(value, "__qualname__") else type(value))


def _code_of(thing: Any) -> str:
    return f"{thing.__qualname__} {source_of(thing) or ''}"
