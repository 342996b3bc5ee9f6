"""Where a stream's batches come from, and how each kind of loader is opened in the middle of an epoch."""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten._lib.rank_zero import warn_once
from hasten.data.resume.indices import Indices, has_state, stateful_sampler
from hasten.data.resume.replay import Replay
from hasten.data.resume.workers import Begin, Received, Receiver, Ship
from hasten.seed import generator_state, set_generator_state

State = dict[str, Any]


class Source(Protocol):
    """One kind of loader.

    ``goes_on`` says whether something survives from one epoch to the next that a new process has to rebuild,
    ``keeps_indices`` asks for ``indices``.
    """

    goes_on: bool
    keeps_indices: bool

    @property
    def indices(self) -> Indices | None:
        """The index batches, where there are any."""

    def open(self) -> Iterator[Any]:
        """Begin an epoch."""

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch after its first ``consumed`` batches; without a state as well as can be."""

    def is_changed(self, state: State) -> bool:
        """Return whether ``state`` comes from a loader that worked in another way."""

    def state(self, count: int) -> State:
        """Return what ``reopen`` needs after ``count`` batches of this epoch, as plain data."""

    def between_epochs(self) -> State:
        """Return what has to be restored before the next epoch."""

    def restore_between_epochs(self, state: State) -> None:
        """Restore what ``between_epochs`` returned."""

    def describe(self, error: Exception, number: int) -> str:
        """Say where an error in fetching batch ``number`` (from 1) happened."""

    def leave(self) -> None:
        """Let go of an epoch that is over or broken off."""

    def close(self) -> None:
        """End worker processes, also persistent ones."""


def source_of(loader: Any, *, replays: bool = True) -> Source:
    """Return the source for a loader; ``replays``: a place inside an epoch may be asked for."""
    if has_state(loader):
        return OwnState(loader)
    if not isinstance(loader, DataLoader):
        return Plain(loader, replays=replays)
    return Workers(loader) if loader.num_workers > 0 else InProcess(loader)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user gave to a loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def with_attributes(loader: Any, **attributes: Any) -> Any:
    """Return a shallow copy of a ``DataLoader`` with other attributes.

    Making a new one from its arguments would fail for subclasses with an ``__init__`` of their own.
    """
    new = copy.copy(loader)
    # Around __setattr__, which protects some of them against just this; here nobody has the copy yet.
    new.__dict__.update(attributes)
    return new


def drop(batches: Iterator[Any], count: int) -> None:
    """Fetch ``count`` batches and forget them."""
    deque(islice(batches, count), maxlen=0)


class Plain:
    """A list of batches, or anything else that can be iterated over: gone through again up to the place."""

    goes_on = False
    keeps_indices = False
    indices: Indices | None = None

    def __init__(self, loader: Any, *, replays: bool = True) -> None:
        self._loader = loader
        # A list draws no random numbers; and where no place is asked for, nobody has to know what was drawn.
        self._just_skips = isinstance(loader, (list, tuple)) or not replays
        self._replay: Replay | None = None

    def open(self) -> Iterator[Any]:
        """Begin an epoch."""
        if self._just_skips:
            return iter(self._loader)
        self._replay = Replay(iter(self._loader))
        return self._replay

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch after its first batches."""
        if self._just_skips:
            return islice(iter(self._loader), consumed, None)
        self._replay = Replay(iter(self._loader))
        self._replay.go_to(consumed, (state or {}).get("notes", []))
        return self._replay

    def is_changed(self, state: State) -> bool:
        """Say no: there is but one way to go through a list."""
        return False

    def state(self, count: int) -> State:
        """Return what going through the loader again needs to know besides the count."""
        return {} if self._replay is None else {"notes": self._replay.notes(count)}

    def between_epochs(self) -> State:
        """Return nothing."""
        return {}

    def restore_between_epochs(self, state: State) -> None:
        """Do nothing."""

    def describe(self, error: Exception, number: int) -> str:
        """Say which batch it was."""
        return f"batch {number - 1} of {type(self._loader).__name__}"

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class OwnState(Plain):
    """A loader that saves its position itself, such as torchdata's ``StatefulDataLoader``."""

    def open(self) -> Iterator[Any]:
        """Begin an epoch."""
        return iter(self._loader)

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch where the loader's own state says."""
        if state is not None and "loader" in state:
            self._loader.load_state_dict(state["loader"])
            return self.open()
        batches = self.open()
        drop(batches, consumed)
        return batches

    def state(self, count: int) -> State:
        """Return the loader's own state."""
        return {"loader": copy.deepcopy(self._loader.state_dict())}

    def between_epochs(self) -> State:
        """Return the loader's own state."""
        return self.state(0)

    def restore_between_epochs(self, state: State) -> None:
        """Give the loader its state back."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])

    def close(self) -> None:
        """Shut down what an iterator kept by the loader still runs."""
        shut_down(self._loader)


class InProcess:
    """A ``DataLoader`` without workers: index batches are skipped, the dataset is not touched."""

    goes_on = False
    keeps_indices = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._dataset = loader.dataset
        self._replays = _replays(loader)
        self._dataset_state = has_state(loader.dataset) and not _overrides_iter(loader)
        self._sampler = stateful_sampler(loader)
        self.indices: Indices | None = None
        self._replay: Replay | None = None

    def open(self) -> Iterator[Any]:
        """Begin an epoch."""
        if self._replays:
            self._replay = Replay(iter(self._loader))
            return self._replay
        counts = self._sampler is not None or (self.keeps_indices and not _is_iterable(self._loader))
        return iter(self._counting() if counts else self._loader)

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch after its first batches."""
        if state is None or self.is_changed(state):
            state = {}
        if self._replays or (_is_iterable(self._loader) and "dataset" not in state):
            self._replay = Replay(iter(self._loader))
            self._replay.go_to(consumed, state.get("notes", []))
            return self._replay
        if self._dataset_state and "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        loader = self._counting()
        assert self.indices is not None
        _place(self.indices, self._sampler, state, consumed, skip=not _is_iterable(self._loader))
        batches: Iterator[Any] = iter(loader)
        self.indices.opened()
        return batches

    def is_changed(self, state: State) -> bool:
        """Return whether the epoch was begun with workers; warn if so."""
        return _is_other_number(state.get("num_workers", 0), 0, is_iterable=_is_iterable(self._loader))

    def state(self, count: int) -> State:
        """Return the states of the dataset and the sampler, if they have any."""
        state: State = {}
        if self._dataset_state:
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]
        if self._sampler is not None and self.indices is not None:
            state["sampler"] = self.indices.state(count)
        if self._replay is not None:
            state["notes"] = self._replay.notes(count)
        return state

    def between_epochs(self) -> State:
        """Return the states of the dataset and the sampler, if they have any."""
        state: State = {}
        if self._dataset_state:
            state["dataset"] = copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]
        if self._sampler is not None:
            state["sampler"] = copy.deepcopy(self._sampler.state_dict())
        return state

    def restore_between_epochs(self, state: State) -> None:
        """Give dataset and sampler their states back."""
        if self._dataset_state and "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        if self._sampler is not None and "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])

    def describe(self, error: Exception, number: int) -> str:
        """Say which dataset, batch and, if known, which sample it was."""
        where = f"batch {number - 1} of the dataset {_name(self._dataset)}"
        sample = _sample_in(error)
        return where if sample is None else f"{where}, sample {sample}"

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _counting(self) -> Any:
        key, sampler = _index_sampler(self._loader)
        self.indices = Indices(sampler, stateful=self._sampler, keep=4)
        return with_attributes(self._loader, **{key: self.indices})


class Workers:
    """A ``DataLoader`` with worker processes, each of which sends its random state along with its batches.

    The order in which the main process gives work to its workers begins anew, at the first, with each iterator.
    So an epoch is entered where it was last the first worker's turn, and the batches from there to the place
    are fetched once more and dropped: each worker keeps its own number.
    """

    keeps_indices = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.goes_on = loader.persistent_workers
        self._loader = loader
        self._dataset = loader.dataset
        self._count = loader.num_workers
        self._is_iterable = _is_iterable(loader)
        self._dataset_state = has_state(loader.dataset) and not _overrides_iter(loader)
        self._replays = _replays(loader)
        self._sampler = stateful_sampler(loader)
        self._received = Received(self._count)
        # What an IterableDataset does when it ends is not seen from here, so the workers tell how they begin.
        self._asks_starts = self._is_iterable and self.goes_on
        self._begin = Begin(loader.worker_init_fn, report_starts=self._asks_starts)
        ship = Ship(
            loader.collate_fn,
            rng=not (self._replays and self._is_iterable),
            dataset_state=self._dataset_state,
            batch_size=loader.batch_size if self._is_iterable else None,
        )
        key, sampler = _index_sampler(loader)
        issued_ahead = (loader.prefetch_factor or 2) * self._count
        self.indices = Indices(sampler, stateful=self._sampler, keep=2 * issued_ahead + self._count + 4)
        self._issued_ahead = issued_ahead
        self._rigged = with_attributes(
            loader,
            **{key: self.indices},
            collate_fn=ship,
            worker_init_fn=self._begin,
            _iterator=None,
        )
        self._rigged._get_iterator = self._make_iterator
        self._iterator: Iterator[Any] | None = None
        # The state of the generator that the workers' seed was drawn from, and whether that was in an
        # epoch before this one.
        self._birth: bytes | None = None
        self._born_before = False
        self._asked_for = 0.0

    @property
    def start_seconds(self) -> float | None:
        """How long the processes took to start, the last time they did; None until a batch has come from them."""
        ready = self._received.ready
        return None if ready is None else max(0.0, ready - self._asked_for)

    def open(self) -> Iterator[Any]:
        """Begin an epoch; persistent workers go on from where they are."""
        if self._iterator is not None and self.goes_on:
            self._fetch_issued()
            self._received.start_epoch(0, self._received.states(self._received.number))
            self._born_before = True
            self._iterator = iter(self._rigged)
            return self._with_starts_known(self._iterator) if self._asks_starts else self._iterator
        self._begin.states = []
        self._received.start_epoch(0, [None] * self._count)
        self._birth, self._born_before = None, False
        self._received.ready, self._asked_for = None, time.time()
        self._iterator = iter(self._rigged)
        return self._iterator

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch after its first batches, with the workers as they were."""
        if state is None or self.is_changed(state):
            state = {
                "base": 0 if self._replays or self._is_iterable else consumed,
                "workers": [],
                "birth": None,
            }
        elif not self._loader.in_order:
            warn_once(
                "resume-in-order",
                "a DataLoader with in_order=False does not tell which batches had arrived: a few may come again or "
                "not at all after resuming within an epoch. Use in_order=True to go on exactly.",
            )
        base, workers, birth = state["base"], state["workers"], state["birth"]
        self._begin.states = workers
        self._received.start_epoch(base, workers or [None] * self._count)
        _place(self.indices, self._sampler, state, base, skip=not self._is_iterable, once=birth is not None)
        self._birth, self._born_before = birth, birth is not None
        self._received.ready, self._asked_for = None, time.time()
        rigged, generator = self._rigged, self._loader.generator
        if birth is not None:
            # This epoch drew no seed for its workers, but they need the one they were born with.
            rigged.generator = torch.Generator()
            set_generator_state(rigged.generator, birth)
        self._iterator = iter(rigged)
        self.indices.opened()
        drop(self._iterator, consumed - base)
        rigged.generator = generator
        return self._iterator

    def is_changed(self, state: State) -> bool:
        """Return whether the epoch was begun with another number of workers; warn if so."""
        return _is_other_number(state.get("num_workers", 0), self._count, is_iterable=self._is_iterable)

    def state(self, count: int) -> State:
        """Return the states of the workers when it was last the first one's turn."""
        if self._replays:
            base, workers = 0, self._received.starts()
        else:
            base = self._received.base(count) if self._loader.in_order else count
            workers = self._received.states(base)
        state: State = {
            "num_workers": self._count,
            "base": base,
            "workers": workers,
            "birth": self._birth if self._born_before else None,
        }
        if self._sampler is not None:
            state["sampler"] = self.indices.state(base)
        return state

    def between_epochs(self) -> State:
        """Return the sampler's state; living workers are told of by ``state``."""
        return {} if self._sampler is None else {"sampler": copy.deepcopy(self._sampler.state_dict())}

    def restore_between_epochs(self, state: State) -> None:
        """Give the sampler its state back."""
        if self._sampler is not None and "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])

    def describe(self, error: Exception, number: int) -> str:
        """Say which dataset, batch and indices it was; PyTorch's own message names the worker."""
        where = f"batch {number - 1} of the dataset {_name(self._dataset)}"
        indices = None if self._is_iterable else self.indices.batch(number)
        if indices is None:
            return where
        text = repr(indices)
        return f"{where}, indices {text if len(text) < 200 else text[:200] + '...'}"

    def leave(self) -> None:
        """Let go of an epoch; persistent workers live on."""
        if not self.goes_on:
            self.close()

    def close(self) -> None:
        """End the worker processes now."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            shut_down(iterator)
        shut_down(self._rigged)

    def _make_iterator(self) -> Receiver:
        # The index sampler is asked for its iterator right before the seed of the workers is drawn.
        self.indices.on_iter = self._remember_birth if self.goes_on else None
        return Receiver(type(self._rigged)._get_iterator(self._rigged), self._received)

    def _remember_birth(self) -> None:
        self.indices.on_iter = None
        if self._birth is None:
            self._birth = generator_state(self._rigged.generator or torch.default_generator)

    def _fetch_issued(self) -> None:
        """Let the workers finish what they were given ahead, to know the states they end the epoch in."""
        assert self._iterator is not None
        self.indices.stop()
        for _ in range(self._issued_ahead + self._count):
            try:
                next(self._iterator)
            except StopIteration:
                return
            except Exception:
                # Of a batch that nobody asked for; a worker that died is reported by the next epoch.
                continue

    def _with_starts_known(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Fetch a round of batches, with which the workers tell the states they began the epoch in."""
        return chain(list(islice(batches, self._count)), batches)


def shut_down(owner: Any) -> None:
    """End the workers of a loader's iterator, or of the iterator that a loader keeps."""
    iterator = getattr(owner, "_iterator", None)
    for each in (owner, iterator):
        end = getattr(each, "_shutdown_workers", None) or getattr(each, "close", None)
        if end is not None:
            end()
    if iterator is not None:
        owner._iterator = None


def _is_other_number(saved: int, now: int, *, is_iterable: bool) -> bool:
    if saved != now:
        warn_once(
            f"resume-num-workers-{saved}-{now}",
            f"an epoch begun with num_workers={saved} goes on with num_workers={now}: until its end, random numbers "
            f"drawn for the samples{' and their order' if is_iterable else ''} differ from those of an "
            f"uninterrupted run. Use num_workers={saved} to go on exactly.",
        )
    return saved != now


def _place(
    indices: Indices, sampler: Any, state: State, number: int, *, skip: bool, once: bool = False
) -> None:
    """Make ``indices`` begin at index batch ``number``, by the sampler's own state if it has one."""
    if sampler is not None and state.get("sampler") is not None:
        sampler.load_state_dict(state["sampler"])
        skip = False
    indices.start_at(number, skip=skip, once=once)


def _index_sampler(loader: DataLoader[Any]) -> tuple[str, Any]:
    batches = loader.batch_sampler
    return ("sampler", loader.sampler) if batches is None else ("batch_sampler", batches)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _overrides_iter(loader: DataLoader[Any]) -> bool:
    return type(loader).__iter__ is not DataLoader.__iter__


def _replays(loader: DataLoader[Any]) -> bool:
    """Return whether a place in the middle can only be reached by fetching everything before it."""
    return _overrides_iter(loader) or (_is_iterable(loader) and not has_state(loader.dataset))


def _name(dataset: Any) -> str:
    kind = type(dataset)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _sample_in(error: Exception) -> Any:
    """Return the index of the sample whose fetching raised ``error``, from the frames of PyTorch's fetcher."""
    found, trace = None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.endswith(os.path.join("data", "_utils", "fetch.py")):
            found = frame.f_locals.get("idx", found)
        trace = trace.tb_next
    return found
