"""Additions to a loader's worker processes: each sends its random state along with its batches."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hasten._lib import torch_private
from hasten.data.loader_parts import has_state, state_between
from hasten.extend.origin import module_of
from hasten.seed import collect_rng_state, restore_rng_state, seed_from

State = dict[str, Any]


@dataclass(slots=True, eq=False)
class BatchWithState:
    """A batch from a worker, with the worker's state after it."""

    batch: Any
    worker: int
    state: State | None

    def pin_memory(self) -> BatchWithState:
        """Pin the batch; the loader's pinning thread calls this."""
        self.batch = torch_private.pinned(self.batch)
        return self


@dataclass(eq=False)
class StateCollate:
    """The collate function of a worker: returns the user's batch together with the worker's state.

    A list of fewer samples than ``batch_size`` is the last batch of the worker's part of an ``IterableDataset``.
    """

    collate: Callable[[Any], Any]
    rng: bool
    dataset_state: bool
    batch_size: int | None
    _last: State = field(default_factory=dict)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        info = get_worker_info()
        if info is None:
            # A subclass of the loader calls its collate_fn itself.
            return batch
        # Each state is sent once.
        state: State = {name: _to_send.pop(name) for name in list(_to_send)}
        if self.rng:
            rng = collect_rng_state(cuda=False)
            changed = {kind: each for kind, each in rng.items() if each != self._last.get(kind)}
            if changed:
                self._last = rng
                state["rng"] = changed
        if self.dataset_state:
            state["dataset"] = info.dataset.state_dict()  # type: ignore[attr-defined]
            # A dataset at its end may already be back at its beginning, and must not begin again.
            state["ended"] = self.batch_size is not None and len(samples) < self.batch_size
        return BatchWithState(batch, info.id, state or None)


# In a worker: "start", the state in which the iteration of its dataset began.
_to_send: State = {}


@dataclass(eq=False)
class WorkerInit:
    """The ``worker_init_fn`` of a worker: the user's, then the state that the worker continues from.

    ``report_starts`` makes it send the state whenever the iteration of its dataset begins.
    """

    user_function: Callable[[int], None] | None
    report_starts: bool
    states: list[State | None] = field(default_factory=list)

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != 1 and os.getppid() == 1:
            # The run was killed while this worker started. torch's watchdog would take the process that adopted
            # the worker for its parent, and the worker would wait for work for ever.
            os._exit(1)
        if self.user_function is not None:
            self.user_function(worker_id)
        info = get_worker_info()
        assert info is not None
        state = (self.states[worker_id] if worker_id < len(self.states) else None) or {}
        if "dataset" in state:
            info.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        if "rng" in state:
            restore_rng_state(state["rng"])
        ended = state.get("ended", False)
        if self.report_starts or ended:
            _observe(info.dataset, ended=ended)


def _observe(dataset: Any, *, ended: bool) -> None:
    """Make ``iter(dataset)`` send the state it begins in; ``ended``: its first iteration gives nothing."""
    kind = type(dataset)
    skip_first = [ended]

    def begin(self: Any) -> Iterator[Any]:
        if skip_first.pop() if skip_first else False:
            return iter(())
        state = {"rng": collect_rng_state(cuda=False)}
        if has_state(self):
            state["dataset"] = copy.deepcopy(state_between(self))
        _to_send["start"] = state
        return iter(kind.__iter__(self))

    try:
        dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": begin, "__module__": module_of(kind)})
    except TypeError:
        # A class with __slots__, say, cannot be replaced. Then later epochs of persistent workers begin with the
        # state of their first epoch.
        return


@dataclass(eq=False)
class SeedByRank:
    """A ``worker_init_fn`` that gives the workers of each rank different random numbers.

    Without it, the workers of all ranks draw the same numbers when the ranks were seeded alike. Rank 0 keeps
    the numbers that PyTorch gives it.
    """

    user_function: Callable[[int], None] | None
    rank: int

    def __call__(self, worker_id: int) -> None:
        if self.rank:
            seed_from(f"{torch.initial_seed()} rank {self.rank}")
            # A worker may also draw on GPUs.
            torch.manual_seed(torch.initial_seed())
        if self.user_function is not None:
            self.user_function(worker_id)


class WorkerStates:
    """The states of the workers after recent batches, as the main process has received them."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.start_epoch(0, [None] * num_workers)

    def start_epoch(self, number: int, states: list[State | None]) -> None:
        """Begin with batch ``number``, the workers being in ``states``."""
        self.number = self._first = number
        # The state in which each worker began the epoch; None if PyTorch seeded it.
        self.starts = list(states)
        self._last_worker = -1
        self._rounds: deque[int] = deque([number], maxlen=16)
        self._states: list[deque[tuple[int, State]]] = [deque(maxlen=8) for _ in states]

    def add(self, received: BatchWithState) -> None:
        """Keep the state that came with a batch."""
        worker, state = received.worker, received.state
        if worker <= self._last_worker and self._rounds[-1] != self.number:
            self._rounds.append(self.number)
        self._last_worker = worker
        self.number += 1
        if worker == self._num_workers - 1:
            self._rounds.append(self.number)
        if state is None:
            return
        start = state.pop("start", None)
        if start is not None and self._first == 0:
            self.starts[worker] = start
        if state:
            # Workers send only what has changed.
            known = self._states[worker]
            latest = (known[-1][1] if known else self.starts[worker]) or {}
            rng = {**latest.get("rng", {}), **state.get("rng", {})}
            known.append((self.number, {**latest, **state, "rng": rng}))

    def base(self, count: int) -> int:
        """Return the last number of batches, at most ``count``, after which it was the first worker's turn."""
        return max((number for number in self._rounds if number <= count), default=count)

    def after(self, count: int) -> list[State | None]:
        """Return each worker's state after ``count`` batches, which must be among the latest."""
        return [
            next((state for number, state in reversed(known) if number <= count), start)
            for known, start in zip(self._states, self.starts, strict=True)
        ]


class UnpackingIterator:
    """Iterates over a loader's batches as its own iterator does, and keeps the states that come with them."""

    def __init__(self, iterator: Iterator[Any], states: WorkerStates) -> None:
        self._hasten_iterator: Any = iterator
        self._hasten_states = states

    def __iter__(self) -> UnpackingIterator:
        return self

    def __next__(self) -> Any:
        received = next(self._hasten_iterator)
        self._hasten_states.add(received)
        return received.batch

    def __len__(self) -> int:
        return len(self._hasten_iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_hasten"):
            raise AttributeError(name)
        return getattr(self._hasten_iterator, name)
