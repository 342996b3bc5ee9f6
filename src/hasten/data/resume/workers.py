"""What hasten adds to a loader's worker processes: each sends its random state along with its batches."""

from __future__ import annotations

import copy
import ctypes
import functools
import multiprocessing
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from hasten.data.resume.indices import has_state
from hasten.seed import (
    collect_rng_state,
    generator_state,
    isolate_rng,
    numpy_state,
    python_state,
    restore_rng_state,
)


class RngWatch:
    """Reads the states of the random generators of this process, repeatedly and cheaply."""

    def __init__(self) -> None:
        self._numpy: dict[str, Any] | None = None
        self._numpy_memory = b""

    def state(self) -> dict[str, Any]:
        """Return what ``collect_rng_state(cuda=False)`` returns."""
        python = _python_state_in_memory() if _is_readable_in_memory() else python_state()
        state: dict[str, Any] = {"python": python, "torch": generator_state(torch.default_generator)}
        if "numpy" in sys.modules:
            state["numpy"] = self._numpy_state()
        return state

    def _numpy_state(self) -> dict[str, Any]:
        # numpy needs 60 us to tell its state, many times as long as all else together, and most programs do not
        # draw from it. The memory of its Mersenne twister tells whether anything was drawn since; only a
        # normal deviate that is held back (has_gauss) could be used up without touching it.
        generator = sys.modules["numpy"].random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return numpy_state()
        memory = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
        if self._numpy is None or self._numpy["has_gauss"] or memory != self._numpy_memory:
            self._numpy, self._numpy_memory = numpy_state(), memory
        return self._numpy


def _python_state_in_memory() -> list[Any]:
    """Return ``python_state()`` in 1 us instead of 30: its 625 words follow the head of the generator, place first."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    words = ctypes.string_at(id(generator) + object.__basicsize__, 625 * 4)
    return [generator.VERSION, words[4:] + words[:4], generator.gauss_next]


@functools.cache
def _is_readable_in_memory() -> bool:
    """Return whether this Python keeps the state of ``random`` as expected: ask it both ways, and after a draw."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return False
    if type(generator).__basicsize__ < object.__basicsize__ + 625 * 4:
        return False
    with isolate_rng(include_cuda=False):
        first = _python_state_in_memory() == python_state()
        random.gauss(0, 1)
        return first and _python_state_in_memory() == python_state()


class Shipped:
    """A batch on its way from a worker, and what the worker's state was after it."""

    __slots__ = ("batch", "state", "worker")

    def __init__(self, batch: Any, worker: int, state: dict[str, Any] | None) -> None:
        self.batch, self.worker, self.state = batch, worker, state

    def pin_memory(self) -> Shipped:
        """Pin the batch; the loader's pinning thread calls this."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch)
        return self


class Ship:
    """The collate function of a worker: the user's, then the worker's state is put beside the batch.

    Args:
        collate: the user's function.
        rng: send the states of the random generators when they have changed.
        dataset_state: send the dataset's ``state_dict``.
        batch_size: a list of fewer samples is the last batch of the worker's part of an ``IterableDataset``.

    """

    def __init__(
        self, collate: Callable[[Any], Any], *, rng: bool, dataset_state: bool, batch_size: int | None
    ) -> None:
        self._collate, self._rng, self._dataset_state = collate, rng, dataset_state
        self._batch_size = batch_size
        self._watch = RngWatch()
        self._last: dict[str, Any] = {}
        self._told_when = False

    def __call__(self, samples: Any) -> Shipped:
        batch = self._collate(samples)
        info = get_worker_info()
        assert info is not None
        state: dict[str, Any] = {}
        if self._rng:
            rng = self._watch.state()
            changed = {kind: each for kind, each in rng.items() if each != self._last.get(kind)}
            if changed:
                self._last = rng
                state["rng"] = changed
        if _started:
            state["start"] = _started.pop()
        if not self._told_when:
            self._told_when = True
            state["ready"] = _ready[0] if _ready else None
        if self._dataset_state:
            state["dataset"] = info.dataset.state_dict()  # type: ignore[attr-defined]
            # A dataset at its end may already be back at its beginning, and must not begin again.
            state["ended"] = self._batch_size is not None and len(samples) < self._batch_size
        return Shipped(batch, info.id, state or None)


class Begin:
    """The ``worker_init_fn`` of a worker: the user's, then back to the state the worker was in.

    Args:
        user_function: the user's ``worker_init_fn``, or None.
        report_starts: note the random state whenever the dataset's iteration begins.

    """

    def __init__(self, user_function: Callable[[int], None] | None, *, report_starts: bool) -> None:
        self._user_function, self._report_starts = user_function, report_starts
        self.states: list[dict[str, Any] | None] = []

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != 1 and os.getppid() == 1:
            # The run was killed while this worker started. torch's own watch would take the process that adopted
            # it for the right parent, and the worker would wait for work for ever.
            os._exit(1)
        if self._user_function is not None:
            self._user_function(worker_id)
        info = get_worker_info()
        assert info is not None
        state = self.states[worker_id] if worker_id < len(self.states) else None
        if state is not None:
            if "dataset" in state:
                info.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
            if "rng" in state:
                restore_rng_state(state["rng"])
        _ready[:] = [time.time()]
        ended = state is not None and state.get("ended", False)
        if self._report_starts or ended:
            _observe(info.dataset, ended=ended)


# When this worker was ready to read its first sample.
_ready: list[float] = []
# The state in which the iteration of this worker's dataset began, until it is sent.
_started: list[dict[str, Any]] = []


def _observe(dataset: Any, *, ended: bool) -> None:
    """Make ``iter(dataset)`` note the state it begins in; the object is this worker's own copy.

    Args:
        dataset: an ``IterableDataset``.
        ended: the first iteration was at its end already.

    """
    kind = type(dataset)
    give_nothing = [ended]

    def begin(self: Any) -> Iterator[Any]:
        if give_nothing.pop() if give_nothing else False:
            return iter(())
        state = {"rng": collect_rng_state(cuda=False)}
        if has_state(self):
            state["dataset"] = copy.deepcopy(self.state_dict())
        _started[:] = [state]
        return iter(kind.__iter__(self))

    try:
        dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": begin, "__module__": kind.__module__})
    except TypeError:
        # A class with a layout of its own cannot be changed. Then later epochs of persistent workers begin
        # with the state of their first epoch.
        return


class SeedByRank:
    """A ``worker_init_fn`` that gives the workers of each rank random numbers of their own.

    Without it, the workers of all ranks draw the same numbers when the ranks were seeded alike. Rank 0 keeps
    the numbers that PyTorch gives it.

    Args:
        user_function: called afterwards, or None.
        rank: the rank, from 0.

    """

    def __init__(self, user_function: Callable[[int], None] | None, rank: int) -> None:
        self._user_function, self._rank = user_function, rank

    def __call__(self, worker_id: int) -> None:
        if self._rank:
            mixed = random.Random(f"{torch.initial_seed()} rank {self._rank}")
            random.seed(mixed.getrandbits(64))
            torch.manual_seed(mixed.getrandbits(63))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed([mixed.getrandbits(32) for _ in range(4)])
        if self._user_function is not None:
            self._user_function(worker_id)


class Received:
    """What the main process knows of its workers: their states after recent batches.

    Args:
        num_workers: the number of worker processes.

    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        # When the last of them was ready, on the wall clock; None until one has said so.
        self.ready: float | None = None
        self.start_epoch(0, [None] * num_workers)

    def start_epoch(self, number: int, states: list[dict[str, Any] | None]) -> None:
        """Begin with batch ``number``, the workers being in ``states``."""
        self.number = self._first = number
        self._starts = list(states)
        self._last_worker = -1
        self._rounds: deque[int] = deque([number], maxlen=16)
        self._states: list[deque[tuple[int, dict[str, Any]]]] = [deque(maxlen=8) for _ in states]

    def add(self, shipped: Shipped) -> None:
        """Note the state that came with a batch."""
        worker, state = shipped.worker, shipped.state
        if worker <= self._last_worker and self._rounds[-1] != self.number:
            self._rounds.append(self.number)
        self._last_worker = worker
        self.number += 1
        if worker == self._num_workers - 1:
            self._rounds.append(self.number)
        ready = state.pop("ready", None) if state is not None else None
        if ready is not None:
            self.ready = max(ready, self.ready or ready)
        if state is not None and "start" in state:
            start = state.pop("start")
            if self._first == 0:
                self._starts[worker] = start
        if state:
            # What is not sent has not changed.
            known = self._states[worker]
            latest = (known[-1][1] if known else self._starts[worker]) or {}
            rng = {**latest.get("rng", {}), **state.get("rng", {})}
            known.append((self.number, {**latest, **state, "rng": rng}))

    def base(self, count: int) -> int:
        """Return the last number of batches, at most ``count``, after which it was the first worker's turn."""
        return max((number for number in self._rounds if number <= count), default=count)

    def starts(self) -> list[dict[str, Any] | None]:
        """Return the state in which each worker began the epoch; None as PyTorch seeded it."""
        return self._starts

    def states(self, count: int) -> list[dict[str, Any] | None]:
        """Return each worker's state after ``count`` batches, which must be among the latest."""
        return [
            next((state for number, state in reversed(known) if number <= count), start)
            for known, start in zip(self._states, self._starts, strict=True)
        ]


class Receiver:
    """Iterates over a loader's batches as its own iterator does, and unpacks them."""

    def __init__(self, iterator: Any, received: Received) -> None:
        self._hasten_iterator, self._hasten_received = iterator, received

    def __iter__(self) -> Receiver:
        return self

    def __next__(self) -> Any:
        shipped = next(self._hasten_iterator)
        self._hasten_received.add(shipped)
        return shipped.batch

    def __len__(self) -> int:
        return len(self._hasten_iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_hasten"):
            raise AttributeError(name)
        return getattr(self._hasten_iterator, name)


def with_own_type(error: Exception) -> Exception:
    """Return an error of a worker as the type that it had there.

    PyTorch makes it anew from its text alone, and makes a ``RuntimeError`` of one that takes other arguments.

    """
    trace, kind = error.__traceback__, None
    while trace is not None:
        wrapper = trace.tb_frame.f_locals.get("self")
        if isinstance(wrapper, ExceptionWrapper):
            kind = wrapper.exc_type
        trace = trace.tb_next
    if kind is None or isinstance(error, kind) or not issubclass(kind, Exception):
        return error
    text = str(error)
    namespace = {
        "__init__": lambda self, text: Exception.__init__(self, text),
        "__str__": lambda self: text,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    try:
        same: Exception = type(kind.__name__, (kind,), namespace)(text)
    except Exception:
        return error
    return same.with_traceback(error.__traceback__)
