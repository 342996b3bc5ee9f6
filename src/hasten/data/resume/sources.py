"""Sources of a stream's batches: how each kind of loader is opened in the middle of an epoch."""

from __future__ import annotations

import copy
import os
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import log, warn_once
from hasten.data.divided import share_of, users_dataset
from hasten.data.loader_parts import (
    has_state,
    index_sampler,
    is_hugging_face,
    is_iterable,
    overrides_iter,
    shut_down,
    state_between,
    stateful_sampler,
    with_attributes,
)
from hasten.data.resume.order import Rest
from hasten.data.resume.workers import StateCollate, UnpackingIterator, WorkerInit, WorkerStates
from hasten.extend.frames import arguments_of, file_of, name_of
from hasten.extend.origin import full_name
from hasten.machine.signals import LeaveRun, StopRequests
from hasten.seed import collect_rng_state, generator_state, restore_rng_state, set_generator_state

State = dict[str, Any]

# How long no batch may come from the workers before that is said, and before a run that is to stop does not wait.
_SAY_SECONDS, _GRACE_SECONDS = 120.0, 15.0


def source_of(loader: Iterable[Any], *, replays: bool = True) -> BatchSource:
    """Return the source for a loader; ``replays``: a position inside an epoch may be saved."""
    if has_state(loader):
        return StatefulSource(loader)
    if isinstance(loader, DataLoader):
        return WorkerSource(loader, trains=replays) if loader.num_workers > 0 else InProcessSource(loader)
    # A list draws no random numbers, and without resuming the draws do not matter.
    return BatchSource(loader, replays=replays and not isinstance(loader, (list, tuple)))


def nothing() -> None:
    """Do nothing; the default of ``before_first``."""


class BatchSource:
    """The batches of one kind of loader; this base class reads any iterable again up to the position.

    ``replays``: a position can be reached only by fetching everything before it, with the same random numbers.
    """

    # Whether state survives from one epoch to the next that a new process has to rebuild.
    survives = False
    # Whether ``indices`` is needed.
    keeps_indices = False
    # The index batches, where there are any.
    indices: CountingSampler | None = None
    # Index batches to read in place of the sampler's, in an epoch that ``reopen`` begins.
    rest: list[Any] | None = None
    # The batches that other processes had of an epoch of an ``IterableDataset``, counted in batches of this loader.
    begun = 0
    begun_elsewhere = False
    # Whether the workers were there before this epoch, so that no seed was drawn for them in it.
    has_workers_from_before = False

    def __init__(self, loader: Iterable[Any], *, replays: bool = False) -> None:
        self._loader: Any = loader
        self._replays = replays
        # Objects that save their position themselves, by their names in the state.
        self._stateful: dict[str, Any] = {}
        # The iterator of an epoch that is replayed.
        self._replay: Replay | None = None
        # Called by ``reopen`` between the beginning of an epoch and its first batch.
        self.before_first: Callable[[], object] = nothing

    def continue_with(self, rest: Rest | None) -> None:
        """Make the next ``reopen`` read the rest of an epoch; None for a whole epoch."""
        goes_on = None if rest is None else rest.goes_on
        self.rest = None if rest is None else rest.batches
        self.begun = 0 if rest is None or goes_on is None else rest.state["begun"]
        if goes_on is not None or self.begun_elsewhere:
            share_of(self._loader).goes_on = goes_on
        self.begun_elsewhere = goes_on is not None

    def open(self) -> Iterator[Any]:
        """Begin an epoch."""
        return self._replayed() if self._replays else iter(self._loader)

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        """Begin an epoch after its first ``consumed`` batches; without a state as closely as possible."""
        return self._replayed(consumed, state) if self._replays else islice(self.open(), consumed, None)

    def is_changed(self, state: State) -> bool:
        """Return whether ``state`` comes from a loader with another way of working."""
        return False

    def state(self, count: int) -> State:
        """Return what ``reopen`` needs after ``count`` batches of this epoch, as plain data."""
        return {} if self._replay is None else {"notes": self._replay.notes(count)}

    @property
    def goes_back(self) -> bool:
        """Whether ``state`` is known one batch before the last one, too: nothing in this process has moved on."""
        return self._stateful.keys() <= {"sampler"}

    def between_epochs(self) -> State:
        """Return what has to be restored before the next epoch."""
        return {name: copy.deepcopy(state_between(part)) for name, part in self._stateful.items()}

    def restore_between_epochs(self, state: State) -> None:
        """Restore what ``between_epochs`` returned."""
        for name, part in self._stateful.items():
            if state.get(name) is not None:
                part.load_state_dict(state[name])

    def draws(self) -> bool:
        """Return whether fetching may draw from the random generators of this process."""
        return self._replay is not None and not self._replay.is_quiet

    def describe(self, error: Exception, number: int) -> str:
        """Return a description of where fetching batch ``number`` (from 1) failed."""
        return f"batch {number - 1} of {type(self._loader).__name__}"

    def leave(self) -> None:
        """Release an epoch that is over or broken off."""

    def close(self) -> None:
        """End worker processes, also persistent ones."""

    def _replayed(self, consumed: int = 0, state: State | None = None) -> Replay:
        """Begin an epoch, and fetch and drop its first batches."""
        self._replay = Replay(iter(self._loader))
        self.before_first()
        return self._replay.skip(consumed, (state or {}).get("notes", []), begun=self.begun)


class StatefulSource(BatchSource):
    """A loader that saves its position itself, such as torchdata's ``StatefulDataLoader``."""

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader)
        self._stateful["loader"] = loader

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        if state is not None and "loader" in state:
            self.restore_between_epochs(state)
            consumed = 0
        batches = self.open()
        self.before_first()
        drop(batches, consumed)
        return batches

    def state(self, count: int) -> State:
        return self.between_epochs()

    def draws(self) -> bool:
        return True

    def close(self) -> None:
        shut_down(self._loader)


class _DataLoaderSource(BatchSource):
    """Base class of sources for a ``DataLoader`` with and without workers."""

    _iterator: Iterator[Any] | None = None

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset: Any = loader.dataset
        self._is_iterable = is_iterable(loader)
        stateful, own_iter = has_state(loader.dataset), overrides_iter(loader)
        super().__init__(loader, replays=own_iter or (self._is_iterable and not stateful))
        self._stateful_dataset = stateful and not own_iter
        sampler = stateful_sampler(loader)
        if self._stateful_dataset and not loader.num_workers:
            self._stateful["dataset"] = loader.dataset
        if sampler is not None:
            self._stateful["sampler"] = sampler

    def is_changed(self, state: State) -> bool:
        """Return whether the epoch was begun with another number of workers; warn if so."""
        saved, now = state.get("num_workers", 0), self._loader.num_workers
        if saved != now:
            order = " and their order" if self._is_iterable else ""
            warn_once(
                f"resume-num-workers-{saved}-{now}",
                f"an epoch begun with num_workers={saved} continues with num_workers={now}: its other random "
                f"numbers{order} differ from those of an uninterrupted run.",
                fix=f"Use num_workers={saved} to continue exactly.",
            )
        return bool(saved != now)

    def draws(self) -> bool:
        return self._replay is None or super().draws()

    def _with_indices(self, *, keep: int, **attributes: object) -> Any:
        """Return the loader with other attributes, and with ``indices`` in place of its index sampler."""
        key, sampler = index_sampler(self._loader)
        self.indices = CountingSampler(sampler, stateful=self._stateful.get("sampler"), keep=keep)
        return with_attributes(self._loader, **{key: self.indices}, **attributes)

    def _opened_at(self, number: int, state: State, loader: Iterable[Any], *, once: bool = False) -> Iterator[Any]:
        """Begin an epoch of a loader at index batch ``number``, by the sampler's own state if it has one."""
        assert self.indices is not None
        self.restore_between_epochs(state)
        is_there = "sampler" in self._stateful and state.get("sampler") is not None
        self.indices.start_at(number, skip=not (is_there or self._is_iterable), once=once, instead=self.rest)
        self._iterator = iter(loader)
        self.before_first()
        self.indices.opened()
        return self._iterator

    def _place(self, number: int) -> str:
        kind = full_name(type(users_dataset(self._loader))).removeprefix("builtins.")
        return f"batch {number - 1} of the dataset {kind}"


class InProcessSource(_DataLoaderSource):
    """A ``DataLoader`` without workers: index batches are skipped, the dataset is not touched."""

    def open(self) -> Iterator[Any]:
        self._replay = None
        if self._replays:
            return self._replayed()
        if "sampler" not in self._stateful and (self._is_iterable or not self.keeps_indices):
            # The indices of a resumed epoch do not belong to the next one.
            self.indices = None
            return iter(self._loader)
        return iter(self._with_indices(keep=4))

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        if state is None or self.is_changed(state):
            state = {}
        if self._replays or (self._is_iterable and "dataset" not in state):
            return self._replayed(consumed, state)
        return self._opened_at(consumed, state, self._with_indices(keep=4))

    def state(self, count: int) -> State:
        state = {name: copy.deepcopy(part.state_dict()) for name, part in self._stateful.items()}
        state |= super().state(count)
        if "sampler" in state:
            # An epoch that is read from the loader itself has none.
            state["sampler"] = None if self.indices is None else self.indices.state_after(count)
        return state

    def describe(self, error: Exception, number: int) -> str:
        found, in_fetcher = None, False
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if found is None and in_fetcher and name_of(frame) == "__getitem__":
                # Python 3.12 and newer run the comprehension that reads the samples in the frame of ``fetch``.
                found = next(iter(arguments_of(frame).values()), None)
            in_fetcher = file_of(frame).endswith(os.path.join("data", "_utils", "fetch.py"))
            found = frame.f_locals.get("idx", found) if in_fetcher else found
        place = self._place(number) + ("" if found is None else f", sample {found}")
        if found is not None and isinstance(error, IndexError) and not self._is_iterable:
            place += f" of the {len(self._dataset)} that its __len__() says: correct it if there are fewer"
        return place


# Attributes that our copy of the loader sets itself, or that are fixed once it is built.
_KEPT = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn", "num_workers", "prefetch_factor", "_iterator")


def _needs_new_workers(loader: DataLoader[Any]) -> bool:
    """Return whether workers must be restarted in each epoch, because ``set_epoch`` would not reach their dataset."""
    dataset = users_dataset(loader)
    # Those of Hugging Face have the epoch in memory that all processes share.
    if not callable(getattr(dataset, "set_epoch", None)) or is_hugging_face(dataset):
        return False
    kind = type(dataset).__name__
    warn_once(
        f"set-epoch-{kind}",
        f"the workers of the loader of {kind} are restarted in each epoch: persistent workers keep the dataset that "
        "they were started with, and set_epoch() does not reach it.",
        fix="Write persistent_workers=False.",
    )
    return True


class WorkerSource(_DataLoaderSource):
    """A ``DataLoader`` with worker processes, each of which sends its random state along with its batches.

    With each new iterator, the main process starts handing out work at the first worker again. So an epoch is entered
    where it was last the first worker's turn, and the batches from there to the position are fetched again and dropped:
    each worker keeps its number.
    """

    keeps_indices = True
    indices: CountingSampler

    def __init__(self, loader: DataLoader[Any], *, trains: bool) -> None:
        super().__init__(loader)
        self.survives = loader.persistent_workers and not (trains and _needs_new_workers(loader))
        self._count = loader.num_workers
        self._states = WorkerStates(self._count)
        # The behavior of an IterableDataset at its end is not visible here, so its workers report how they begin.
        self._reports_starts = self._is_iterable and self.survives
        self._init = WorkerInit(loader.worker_init_fn, report_starts=self._reports_starts)
        self._collate = StateCollate(
            loader.collate_fn,
            rng=not (self._replays and self._is_iterable),
            dataset_state=self._stateful_dataset,
            batch_size=loader.batch_size if self._is_iterable else None,
        )
        self._issued_ahead = (loader.prefetch_factor or 2) * self._count
        self._loader_with_states: Any = self._with_indices(
            keep=2 * self._issued_ahead + self._count + 4,
            collate_fn=self._collate,
            worker_init_fn=self._init,
            persistent_workers=self.survives,
            _get_iterator=self._make_iterator,
        )
        self._followed = dict(vars(loader))
        # The state of the generator that the workers' seed was drawn from.
        self._birth: bytes | None = None
        # For how long no batch has come, after how many.
        self._idle_seconds, self._idle_after = 0.0, -1

    def open(self) -> Iterator[Any]:
        """Begin an epoch; persistent workers continue from where they are."""
        self._follow()
        if self._iterator is None or not self.survives:
            self._expect_new_workers(0, [], None)
            self._iterator = iter(self._loader_with_states)
            return self._iterator
        self._finish_issued()
        self._states.start_epoch(0, self._states.after(self._states.number))
        self.has_workers_from_before = True
        batches = self._iterator = iter(self._loader_with_states)
        # A round of batches: with them the workers send the states in which they began the epoch.
        return chain(list(islice(batches, self._count)), batches) if self._reports_starts else batches

    def reopen(self, state: State | None, consumed: int) -> Iterator[Any]:
        if state is None or self.is_changed(state):
            base = self.begun if self._replays or self._is_iterable else consumed
            state = {"base": base, "workers": [], "birth": None}
        elif not self._loader.in_order:
            warn_once(
                "resume-in-order",
                "a DataLoader with in_order=False does not report which batches had arrived: a few may be repeated or "
                "missing after resuming within an epoch.",
                fix="Use in_order=True to continue exactly.",
            )
        base, birth = state["base"], state["birth"]
        self._follow()
        self._expect_new_workers(base, state["workers"], birth)
        loader = self._loader_with_states
        if birth is not None:
            # This epoch drew no seed for its workers, but they need the seed with which they were started.
            loader.generator = torch.Generator()
            set_generator_state(loader.generator, birth)
        batches = self._opened_at(base, state, loader, once=birth is not None)
        drop(batches, consumed - base)
        loader.generator = self._loader.generator
        return batches

    def state(self, count: int) -> State:
        """Return the states of the workers when it was last the first one's turn."""
        if self._replays:
            base, workers = self.begun, self._states.starts
        else:
            base = self._states.base(count) if self._loader.in_order else count
            workers = self._states.after(base)
        state: State = {
            "num_workers": self._count,
            "base": base,
            "workers": workers,
            "birth": self._birth if self.has_workers_from_before else None,
        }
        if "sampler" in self._stateful:
            state["sampler"] = self.indices.state_after(base)
        return state

    def draws(self) -> bool:
        # For an IterableDataset no sampler draws, and the samples come from other processes.
        return not self._is_iterable or overrides_iter(self._loader)

    def describe(self, error: Exception, number: int) -> str:
        indices = None if self._is_iterable else self.indices.batches.get(number)
        if indices is None:
            return self._place(number)
        text = repr(indices)
        return f"{self._place(number)}, indices {text if len(text) < 200 else text[:200] + '...'}"

    def leave(self) -> None:
        if not self.survives:
            self.close()

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            shut_down(iterator)
        shut_down(self._loader_with_states)

    def _follow(self) -> None:
        """Take over what was changed in the user's loader, such as its ``collate_fn``, or the epoch of a subclass."""
        self._collate.collate, self._init.user_function = self._loader.collate_fn, self._loader.worker_init_fn
        before, self._followed = self._followed, dict(vars(self._loader))
        changed = {name: each for name, each in self._followed.items() if each is not before.get(name, self)}
        vars(self._loader_with_states).update({name: each for name, each in changed.items() if name not in _KEPT})

    def _expect_new_workers(self, base: int, states: list[State | None], birth: bytes | None) -> None:
        """Expect workers that begin after ``base`` batches of an epoch; for ``birth`` see ``_birth``."""
        self._birth, self.has_workers_from_before = birth, birth is not None
        self._init.states = states
        self._states.start_epoch(base, states or [None] * self._count)

    def _make_iterator(self) -> UnpackingIterator:
        # A loader calls iter() of its index sampler right before it draws the seed of the workers.
        self.indices.on_iter = self._remember_birth if self.survives else None
        loader = self._loader_with_states
        iterator = type(loader)._get_iterator(loader)
        idle = weakref.WeakMethod(self._note_idle)
        torch_private.call_when_idle(iterator, lambda seconds: (note := idle()) and note(seconds))
        return UnpackingIterator(iterator, self._states)

    def _note_idle(self, seconds: float) -> None:
        """Say that no batch comes, once for each; leave a run of one process that was asked to stop meanwhile."""
        number = self._states.number
        if number != self._idle_after:
            self._idle_seconds, self._idle_after = 0.0, number
        before, self._idle_seconds = self._idle_seconds, self._idle_seconds + seconds
        stop = StopRequests.active
        if stop is not None and stop.agreed_signal is not None and self._idle_seconds >= _GRACE_SECONDS:
            raise LeaveRun(stop.agreed_signal)
        if before < _SAY_SECONDS <= self._idle_seconds:
            log.warning(
                f"{self._place(number + 1)} has not arrived from the {self._count} worker processes for "
                f"{self._idle_seconds:.0f} s, and the run waits for it. DataLoader(timeout=600) would end it."
            )

    def _remember_birth(self) -> None:
        self.indices.on_iter = None
        if self._birth is None:
            self._birth = generator_state(self._loader_with_states.generator or torch.default_generator)

    def _finish_issued(self) -> None:
        """Let the workers finish the work already issued, to know the states in which they end the epoch."""
        assert self._iterator is not None
        self.indices.stopped = True
        for _ in range(self._issued_ahead + self._count):
            try:
                next(self._iterator)
            except StopIteration:
                return
            except Exception:
                # The error is in a batch that is not used; the next epoch reports a worker that died.
                continue


def drop(batches: Iterator[Any], count: int) -> None:
    """Fetch ``count`` batches and forget them."""
    deque(islice(batches, count), maxlen=0)


class CountingSampler:
    """Replaces the index sampler of a loader: the same index batches, counted, from any place on.

    The latest ``keep`` of them are in ``batches`` by their numbers (from 1), and the states that the sampler
    ``stateful`` had after them are known. ``stopped``: give no more in this epoch.
    """

    def __init__(self, sampler: Iterable[Any], *, stateful: object = None, keep: int = 2) -> None:
        self.sampler_of_loader: Any = sampler
        self.on_iter: Callable[[], None] | None = None
        self.stopped = False
        self.batches: dict[int, Any] = {}
        self._stateful: Any = stateful
        self._keep = keep
        self._first = self._skip = self._to_skip = 0
        self._once = False
        self._instead: Iterable[Any] | None = None
        self._ended_at = -1
        self._current: Iterator[Any] | None = None
        self._states: dict[int, Any] = {}

    def start_at(self, number: int, *, skip: bool, once: bool = False, instead: Iterable[Any] | None = None) -> None:
        """Begin the next epoch at index batch ``number``.

        ``skip`` draws the batches before it from the sampler; without it, the sampler is already at that position.
        ``once``: in the interrupted epoch the loader called iter() once, and now it calls it twice. ``instead``:
        index batches to give in that epoch in place of the sampler's.
        """
        self._first, self._skip, self._once, self._instead = number, number if skip else 0, once, instead

    def __iter__(self) -> Iterator[Any]:
        if self._once and self._current is not None:
            self._once = False
            return self._current
        self.stopped, self._ended_at, self._to_skip = False, -1, self._skip
        self.batches.clear()
        self._states.clear()
        self._drawn = iter(self.sampler_of_loader if self._instead is None else self._instead)
        self._remember_state(self._first)
        self._current = self._counted(self._first)
        if self.on_iter is not None:
            self.on_iter()
        return self._current

    def __len__(self) -> int:
        return len(self.sampler_of_loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "sampler_of_loader":
            raise AttributeError(name)
        return getattr(self.sampler_of_loader, name)

    def opened(self) -> None:
        """Skip now, under the random state of the start of the epoch, and begin the next epoch at its start."""
        self._skip_now()
        self.start_at(0, skip=False)

    def state_after(self, number: int) -> Any:
        """Return the sampler's state after index batch ``number``, if known; None at its end, maybe its start."""
        return None if number == self._ended_at else self._states.get(number)

    def _skip_now(self) -> None:
        count, self._to_skip = self._to_skip, 0
        for drawn in range(count):
            if next(self._drawn, self) is self:
                raise make_error(
                    RuntimeError,
                    f"cannot resume after {count} batches: the sampler ended after {drawn}. The data is shorter than "
                    "when the checkpoint was written;",
                    fix="resume with the same dataset, batch size and sampler.",
                )

    def _counted(self, number: int) -> Iterator[Any]:
        self._skip_now()
        while not self.stopped and (indices := next(self._drawn, self)) is not self:
            number += 1
            self.batches[number] = indices
            self.batches.pop(number - self._keep, None)
            self._remember_state(number)
            yield indices
        if not self.stopped:
            self._ended_at = number

    def _remember_state(self, number: int) -> None:
        if self._stateful is not None:
            self._states[number] = copy.deepcopy(self._stateful.state_dict())
            self._states.pop(number - self._keep, None)


# About 5 KB each. A loader whose draws go further back than these cannot be replayed.
_KEPT_NOTES = 1000
# Stop watching a loader for this epoch after this many batches without a draw. Most loaders draw nothing at all, and
# reading the generators costs some 15 us.
_QUIET = 64


class Replay:
    """Iterates over a loader that cannot skip, and records what is needed to read it again in the same way.

    A loader that draws from the random generators of this process gets other numbers the second time, unless they
    are restored. Within an epoch that is needed only if something else, such as dropout, drew in between.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._number = 0
        self._expected = collect_rng_state(cuda=False)
        self._moved: set[str] = set()
        self._notes: deque[list[Any]] = deque(maxlen=_KEPT_NOTES)
        self._quiet = 0
        # Whether nothing has drawn lately, neither the loader nor anything else.
        self._still = False

    def __iter__(self) -> Replay:
        return self

    @property
    def is_quiet(self) -> bool:
        """Whether the loader is no longer watched."""
        return self._quiet >= _QUIET

    def __next__(self) -> Any:
        if self._quiet >= _QUIET:
            self._number += 1
            return next(self._batches)
        before = collect_rng_state(cuda=False)
        if before != self._expected:
            self._moved.update(kind for kind in before if before[kind] != self._expected.get(kind))
            if self._still:
                # Perhaps the batch before was not quiet.
                self._quiet, self._still = 0, False
        self._quiet += self._still
        batch = next(self._batches)
        self._number += 1
        if self._still:
            # If this batch draws, its numbers follow from earlier ones: nothing has to be restored for it, and the next
            # reading shows it.
            return batch
        self._expected = after = collect_rng_state(cuda=False)
        if after == before:
            # While all is still, a batch counts as quiet when the next one begins.
            self._still = not self._moved
            self._quiet += not self._still
            return batch
        self._quiet = 0
        drawn = [kind for kind in before if after[kind] != before[kind] and kind in self._moved]
        if drawn:
            self._notes.append([self._number, {kind: before[kind] for kind in drawn}])
            self._moved.difference_update(drawn)
        return batch

    def notes(self, count: int) -> list[list[Any]]:
        """Return the states to restore within the first ``count`` batches."""
        return [note for note in self._notes if note[0] <= count]

    def skip(self, count: int, notes: list[list[Any]], *, begun: int = 0) -> Replay:
        """Fetch batches up to number ``count`` and forget them, drawing what was drawn when ``notes`` were taken.

        ``begun``: the number of the batch before the first one of the loader.
        """
        states = dict(notes)
        for number in range(begun + 1, count + 1):
            if number in states:
                restore_rng_state(states[number])
            next(self._batches, None)
        self._number = count
        self._notes.extend(notes)
        self._expected = collect_rng_state(cuda=False)
        self._moved.clear()
        return self
