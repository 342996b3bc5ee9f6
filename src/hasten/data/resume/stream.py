"""Streams of batches, of one loader or several read as one, whose position can be saved and restored exactly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten._lib.errors import make_error, with_article
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten.batching.samplers import PlannedBatches
from hasten.data.combined import CombinedLoader, joint_length
from hasten.data.divided import able_to_go_on, users_dataset
from hasten.data.first_samples import DIVIDE_AMONG_WORKERS, begin_alike, digest_of
from hasten.data.loader_parts import (
    ShardSampler,
    epoch_setters,
    generators_of,
    has_state,
    index_sampler,
    is_iterable,
    length_of,
    overrides_iter,
    stateful_sampler,
)
from hasten.data.memory.resident import is_resident
from hasten.data.resume.order import NotKnown, Rest, rest_of, state_of, state_of_rest
from hasten.data.resume.sources import BatchSource, nothing, source_of
from hasten.data.worker_count import with_workers_of
from hasten.extend.origin import ROOTS, comes_from, package_of
from hasten.machine.signals import LeaveRun
from hasten.seed import collect_rng_state, generator_state, isolate_rng, restore_rng_state, set_generator_state

_END: Any = object()


def nothing_read(loader: Iterable[Any], name: str) -> tuple[str, str]:
    """Return what is wrong with a loader that had no batch to give, and what to write instead."""
    if reads_once(loader):
        return (
            f"{name} gave no batches: it is {with_article(type(loader))}, which has been read to its end.",
            "Give a DataLoader, a list of batches, or an object whose __iter__() starts from the beginning.",
        )
    if not isinstance(loader, DataLoader) or not is_iterable(loader):
        return f"{name} gave no batches.", "Give data, and a sampler, that have samples in each epoch."
    kind = type(users_dataset(loader)).__name__
    return (
        f"{name} gave no batches: the {kind} has too few samples for one.",
        f"Look at the data that it reads, and let {kind}.__iter__() start from the beginning each time it is called.",
    )


def reads_once(loader: Iterable[Any]) -> bool:
    """Return whether a loader is an iterator, such as a generator, whose batches can be read once."""
    return isinstance(loader, Iterator) and not isinstance(loader, CombinedLoader) and iter(loader) is loader


class Stream:
    """The batches of one loader, epoch after epoch.

    Uninterrupted, it gives what ``for batch in loader`` gives. From its state, taken between two batches, a new process
    continues with the same samples, and the same random numbers drawn for them: also in the middle of an epoch, with
    shuffling, with worker processes and in the epochs after.

    Not restored: an ``IterableDataset`` without ``state_dict`` that draws in the main process from the same generator
    as training, and a sampler that draws from it in the middle of an epoch. Give these objects their own generator, or
    ``state_dict`` and ``load_state_dict``.

    Args:
        loader: a ``DataLoader``, or anything that can be iterated over several times.
        name: what to call it in messages.
        replays: whether a position inside an epoch may be saved; without it, draws of a loader that is not a
            ``DataLoader`` are not recorded.
        marks_last: whether the last batch has to be marked also if the loader ends before its length. That
            costs reading the random generators for each batch.
        ends_at_length: read no more batches than the length of the loader, if it has one, and none ahead; and do not
            ask for the end, at which samplers may draw from the user's generator.

    Example::

        >>> stream = Stream(["a", "b", "c"])
        >>> batches = stream.batches()
        >>> next(batches)
        ('a', False)
        >>> state = stream.state_dict(consumed=1)
        >>> again = Stream(["a", "b", "c"])
        >>> again.load_state_dict(state)
        >>> list(again.batches())
        [('b', False), ('c', True)]

    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str = "train_dataloader",
        replays: bool = True,
        marks_last: bool = True,
        ends_at_length: bool = False,
    ) -> None:
        self.loader = loader
        self.name = name
        self.epoch: int | None = None
        self._position = _Position()
        self._replays, self._marks_last, self._ends_at_length = replays, marks_last, ends_at_length
        self._source: BatchSource = self._source_of(loader)
        self._generators = generators_of(loader)
        # A loaded state to continue from, and the random state in which its epoch began.
        self._loaded: dict[str, Any] | None = None
        self._start: dict[str, Any] | None = None
        # Whether fetching draws from random generators that training draws from too.
        self._draws = False
        # The iterators at a loaded position, of the current epoch, and of an epoch begun early.
        self._resumed: Iterator[Any] | None = None
        # Whether ``begin`` has begun the epoch.
        self._begun_early = False
        self._current: Iterator[Any] | None = None
        self._next_epoch: NextEpoch | None = None
        # The rest of an epoch that was begun with another number of processes, or another batch size.
        self._rest: Rest | None = None
        # Why it is not known which samples of a loaded state's epoch were read.
        self.not_known = ""

    @property
    def length(self) -> int | None:
        """The length of the loader in batches; None if it has none."""
        batches = None if self._rest is None else self._rest.batches
        return length_of(self.loader) if batches is None else len(batches)

    @property
    def certain_length(self) -> int | None:
        """The number of batches that an epoch is sure to have; None if it is known only at the end."""
        return self.length if ends_at_its_length(self.loader) else None

    @property
    def consumed(self) -> int:
        """How many batches of its epoch were yielded."""
        return self._position.consumed

    @property
    def finished(self) -> bool:
        """Whether the epoch is over."""
        return self._position.finished

    @property
    def position(self) -> int:
        """How many batches of its epoch a loaded state has behind it; 0 between epochs."""
        state = self._loaded
        if state is None:
            return 0 if self._position.finished else self._position.consumed
        if "again" in state:
            return int(state["consumed"]) - 1
        return 0 if state["ended"] else state["consumed"]

    # -- the batches

    def batches(self, limit: int | None = None) -> Generator[tuple[Any, bool], None, None]:
        """Yield ``(batch, is_last)`` of a new epoch, or of the rest of the one that a loaded state is in.

        All batches of the loader are read, whatever its length says, unless ``ends_at_length``. If the length is not
        certain, one more batch is fetched before a batch is yielded, unless ``marks_last`` is False or fetching draws
        random numbers in this process: training would get other numbers than in the plain loop. Then an epoch that ends
        before its length ends without a last batch.

        ``limit`` ends the epoch after so many batches, counted from its start.

        Raises:
            RuntimeError: a loaded state cannot be reached in this loader, because its data has changed.

        A note at errors of the dataset names dataset, batch and sample.
        """
        if self._loaded is None and self._resumed is None:
            self._rest = None
        batches = self._iterate_to(limit, self.certain_length)
        loader: Any = self.loader
        if not self.epoch and getattr(loader, "num_workers", 0) > 1 and is_iterable(loader):
            return self._compared(batches, loader.num_workers)
        return batches

    def _compared(self, batches: Generator[tuple[Any, bool], None, None], workers: int) -> Generator[Any, None, None]:
        """Yield the batches, and warn if all workers begin with the same two, and so read the same samples."""
        seen: list[str] = []
        for batch, is_last in itertools.islice(batches, 2 * workers):
            seen.append(digest_of(batch))
            yield batch, is_last
        if begin_alike(seen, workers):
            what = (
                f"{self.name}: each of its {workers} workers reads all samples: they come {workers} times in an epoch."
            )
            rank_zero_warn(what, fix=DIVIDE_AMONG_WORKERS)
        yield from batches

    def _last_of_epoch(self, limit: int | None, certain: int | None) -> int | None:
        length = self.length if self._ends_at_length else None
        return min((number for number in (certain, length, limit) if number is not None), default=None)

    def _iterate_to(self, limit: int | None, certain: int | None) -> Generator[tuple[Any, bool], None, None]:
        end = self._last_of_epoch(limit, certain)
        early, self._begun_early = self._begun_early, False
        iterator = self._current = self._begin()
        if early and self._start is not None:
            # Others may have drawn since. A sampler draws its order with the first batch.
            self._start = {**self._start, "first": self._random_state()}
        position, exhausts = self._position, certain is not None and end == certain
        length = self.length if certain is None else certain
        may_end_at = self._may_end_at(length)
        batch, position.repeated = position.repeated, _END
        # A batch that is yielded again was counted already.
        number = position.fetching = position.consumed + (batch is _END)
        try:
            while end is None or number <= end:
                if batch is _END:
                    position.fetching = number
                    if position.prefetched_state is not None:
                        batch = position.take_prefetched()
                    elif number == 1 and certain is None:
                        batch = self._first_of(iterator)
                        # Which part of a stream this process reads, its first samples have shown.
                        end, length = self._last_of_epoch(limit, certain), self.length
                        may_end_at = self._may_end_at(length)
                    else:
                        batch = next(iterator, _END)
                    if batch is _END:
                        position.exhausted = True
                        self._compare_with_length(number - 1, length, certain)
                        break
                is_last = number == end
                if certain is None and not is_last and number >= may_end_at:
                    is_last = self._ends_with(number, length, iterator)
                elif is_last and exhausts:
                    self._end_data(number, iterator)
                position.consumed, position.last, position.finished = number, batch, is_last
                yield batch, is_last
                if is_last:
                    # As in the plain loop, unless it has ended or the next epoch is begun.
                    if exhausts and not self._generators and self._current is iterator:
                        next(iterator, None)
                    break
                number, batch = number + 1, _END
            position.prefetched, position.prefetched_state = _END, None
            position.finished = True
        except Exception as error:
            self._explain(error, position.fetching)
            raise
        finally:
            self._stop(iterator)

    def _stop(self, iterator: Iterator[Any]) -> None:
        if self._position.finished:
            self._rest = None
        if self._current is iterator:
            self._leave()

    def _first_of(self, iterator: Iterator[Any]) -> Any:
        """Return the first batch, and find out whether fetching it draws from the generators of training."""
        before = collect_rng_state(cuda=False)
        batch = next(iterator, _END)
        self._draws = collect_rng_state(cuda=False) != before
        if batch is _END and not self._replays:
            what, fix = nothing_read(self.loader, self.name)
            warn_once("no-batches", what, fix=fix, of=self)
        return batch

    def _compare_with_length(self, count: int, length: int | None, certain: int | None = None) -> None:
        """Warn of data that have ended before their length, which may be ``certain``."""
        if certain is not None:
            rank_zero_warn(
                f"{self.name} ended after {count} of its {certain} batches: its dataset or collate function raised "
                "StopIteration, which ends an epoch without an error.",
                fix="Raise another error there, and call next(iterator, None) instead of next(iterator).",
            )
        # Each worker of a stream may drop its last samples.
        elif count + getattr(self.loader, "num_workers", 0) < (length or 0):
            warn_once(
                f"fewer-batches-{self.name}-{length}",
                f"{self.name} ends after {count} batches, and its length says {length}: schedules and progress bars "
                "count those.",
                fix="Correct its __len__, or that of its dataset.",
            )

    def _may_end_at(self, length: int | None) -> int:
        """Return the number of the first batch that may be the last, as far as the length is trusted."""
        trusts_length = self._draws or self._ends_at_length or not self._marks_last
        return (length or 0) if trusts_length else 0

    def _ends_with(self, number: int, length: int | None, iterator: Iterator[Any]) -> bool:
        """Return whether batch ``number`` is the last of a loader that may end anywhere."""
        # Only the end of the data shows which batch is the last.
        position = self._position
        position.fetching = number + 1
        if position.prefetched_state is None:
            # A run that resumes here has to fetch that batch again, under the present random state. To
            # read the generators costs 8 us, and is needed only if fetching draws from them.
            state = self._random_state(reads=self._replays and self._source.draws())
            position.prefetched_state = {**state, "source": self._source.state(number)}
            position.prefetched = next(iterator, _END)
        is_last = position.exhausted = position.prefetched is _END
        if is_last:
            self._compare_with_length(number, length)
        elif number == length and self._replays:
            warn_once(
                f"more-batches-{self.name}",
                f"{self.name} gives more batches than its length of {length} says, and all are read. "
                f"limit_train_batches={length} ends an epoch there.",
            )
        return is_last

    def _end_data(self, number: int, iterator: Iterator[Any]) -> None:
        """Record that batch ``number``, which comes next, is the last of the data."""
        self._position.exhausted, self._position.fetching = True, number + 1
        if self._generators and not self._ends_at_length:
            # The user's generator moves once more when its sampler ends, as it does in the plain loop. That
            # belongs to this epoch's state, so it must have happened when the state is taken.
            next(iterator, None)

    def begin(self) -> None:
        """Begin the next epoch now: what is drawn to make an iterator is drawn here and not in ``batches``."""
        if self._loaded is None and self._resumed is None and self._next_epoch is None:
            self._resumed, self._begun_early = self._begin(), True

    # -- the position

    def open(self) -> None:
        """Go to the position of a loaded state now, if there is one: start workers, skip what was consumed.

        The random generators of this process keep their states.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._draws = state.get("draws", False)
        position = self._position
        again = state.get("again", _END)
        iterator: Iterator[Any] = iter(())
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        if state["ended"] and not state["rebuild"]:
            _set_random_state(self._generators, state)
            self._source.restore_between_epochs(state["source"])
        else:
            self._source.continue_with(self._rest)
            rest = _RestOfEpoch(self._source, self._generators)
            rest.load_state_dict(state)
            iterator, self._start = rest.batches, rest.start
            position.prefetched, position.prefetched_state = rest.prefetched, rest.prefetched_state
        # Which part of a stream this process reads, and so its length, is known by the first samples.
        length = self.length
        if not state["ended"] and state["length"] != length:
            warn_once(
                f"resume-length-{self.name}",
                f"{self.name} has {length} batches, and had {state['length']} when the checkpoint was written in the "
                "middle of an epoch, whose rest will differ.",
                fix="Resume with the same data, batch size and processes.",
            )
        position.consumed, position.finished = state["consumed"], again is _END and state["ended"]
        if position.finished:
            position.exhausted = state["exhausted"]
        else:
            position.repeated, self._resumed = again, iterator

    def start_at(self, consumed: int) -> None:
        """Begin the next epoch after its first ``consumed`` batches, in a new order if the loader shuffles."""
        self.load_state_dict(self._skipping(consumed))

    def _skipping(self, consumed: int) -> dict[str, Any]:
        state = {**self._end(), "consumed": consumed, "ended": False, "generators": []}
        return {**state, "start": None, "ahead": None, "source": None}

    def keep_indices(self) -> None:
        """Remember the indices of the latest batches, for ``batch_indices``."""
        self._source.keeps_indices = True

    def batch_indices(self, batch_idx: int) -> list[int]:
        """Return the indices in the dataset of the samples of batch ``batch_idx`` (from 0), which was just yielded.

        Empty if they are not known: without a ``DataLoader``, or with an ``IterableDataset``.

        """
        indices = self._source.indices
        found = None if indices is None else indices.batches.get(batch_idx + 1)
        if found is None:
            return []
        found = found if isinstance(found, (list, tuple)) else [found]
        return [] if None in found else list(found)

    def finish(self) -> None:
        """Give up the rest of the epoch of a loaded state; the next batches begin a new epoch."""
        if self._loaded is not None:
            if not self._source.survives and not self._source.between_epochs():
                # Nothing of it is left. To read a stream again needs all processes, and some may be at its end.
                self._loaded = {**self._loaded, "ended": True, "rebuild": False, "source": {}}
            self.open()
            self._position.repeated, self._position.finished = _END, True
            self._position.drop_prefetched()
            self._leave()
        self._rest = None

    def replace_held(self, change: Callable[[Any], Any]) -> None:
        """Change the last batch for ``state_dict(again=True)``."""
        self._position.last = change(self._position.last)

    def drop_held_unless(self, may_be_stored: Callable[[Any], bool]) -> None:
        """Have ``state_dict(again=True)`` read the last batch again if it may not be stored, where the loader can."""
        if self._source.goes_back and not may_be_stored(self._position.last):
            self._position.last = _END

    def state_dict(self, consumed: int, *, again: bool = False) -> dict[str, Any]:
        """Return the position after ``consumed`` batches of this epoch, as plain data.

        These are all batches yielded; or with ``again`` one fewer, to yield the last one again. It is then part of the
        state, and must be something that ``torch.load(..., weights_only=True)`` reads.

        Raises:
            ValueError: ``consumed`` is another number.

        """
        if self._loaded is not None:
            return self._loaded
        if self._start is None:
            return {**self._end(), "source": self._source.between_epochs()}
        again = _yields_again(self, consumed, again)
        position = self._position
        if again and position.last is _END:
            return self._before_last()
        repeated = {"again": position.last} if again else {}
        if self._next_epoch is not None:
            return {**self._next_epoch.end_before, "epoch": self.epoch, **repeated}
        order = self._order(position.consumed - again) if again or not position.finished else None
        state = {**self._end(), **repeated, "consumed": position.consumed, "order": order}
        if position.finished and (self._rest is not None or not self._source.survives):
            # Nothing is left of an epoch that ran to its end; one cut short by a limit may leave a place behind.
            return {**state, "source": {} if position.exhausted else self._source.between_epochs()}
        before = position.prefetched_state
        return {
            **state,
            "ended": position.finished,
            "rebuild": position.finished,
            "start": self._start,
            "ahead": before,
            "source": self._source.state(position.consumed) if before is None else before["source"],
        }

    def _before_last(self) -> dict[str, Any]:
        """Return the position before the last batch that was yielded."""
        rank_zero_warn(
            f"{self.name}: the batch holds objects that a checkpoint cannot store, so the resumed run reads it again; "
            "random numbers that reading draws will differ."
        )
        before = self._position.consumed - 1
        source = self._source.state(before)
        state = {**self._end(), "consumed": before, "order": self._order(before), "ended": False, "exhausted": False}
        # The first batch, with which samplers draw their order, is fetched at once after the epoch has begun again.
        ahead = None if before else {"generators": [], "source": source}
        return {**state, "start": self._start, "ahead": ahead, "source": source}

    def load_state_dict(self, state: dict[str, Any], *, moved: bool = False) -> None:
        """Continue from where ``state_dict`` was taken, at the next ``open()`` or ``batches()``.

        If the loader now divides the samples in another way than at the beginning of the epoch, the rest is read in the
        original order, and ``position`` is counted in batches of this loader.

        The state is of this process, or of the first one. If another number of processes shared the data (``moved``)
        and the order of the epoch cannot be drawn again, as ``not_known`` says then, as many batches as were done are
        left out in a new order.
        """
        self.close()
        loader = with_workers_of(self.loader, state)
        if loader is not self.loader:
            self.loader, self._source = loader, self._source_of(loader)
        self._rest, self.not_known = None, ""
        if self._replays and (moved or state.get("order") is not None):
            state = self._continued(state, moved)
        self._loaded, self._start = state, None
        self._position.last = self._position.repeated = _END
        self._position.drop_prefetched()

    def _continued(self, state: dict[str, Any], moved: bool) -> dict[str, Any]:
        """Return the state from which this process continues; if the epoch is divided again, the state of its rest."""
        again = "again" in state
        if state["ended"] and not again:
            return {**state, "rebuild": False, "source": {}} if moved else state
        done = state["consumed"] - again
        try:
            if moved and (state["source"] or {}).get("notes"):
                raise NotKnown("its random numbers come from a generator that training draws from, too")
            self._rest = rest_of(state.get("order"), self.loader, done, self._as_begun, moved=moved)
        except NotKnown as why:
            if moved:
                self.not_known = str(why)
                return self._skipping(done)
            warn_once(
                f"resume-order-{self.name}",
                f"{self.name}: the rest of the epoch in which the checkpoint was saved has other samples, because "
                f"{why}.",
                fix="Resume with the same loader to train on each sample once.",
            )
            return state
        rest = self._rest
        if rest is not None and rest.goes_on is not None:
            self.loader = able_to_go_on(cast("DataLoader[Any]", self.loader))
            self._source = self._source_of(self.loader)
        if rest is None or rest.state is state["order"]:
            return state
        kept = {name: state[name] for name in ("epoch", "generators")}
        return {**self._skipping(rest.state["begun"]), **kept, "order": rest.state}

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch(epoch)`` of the loader's samplers and dataset; the first epoch is 0."""
        self.epoch = epoch
        for each in epoch_setters(self.loader):
            each.set_epoch(epoch)

    def begin_next(self, epoch: int) -> None:
        """Make running workers fetch the first batches of the next epoch now, while validation runs.

        For the last batch of an epoch. Done only if it makes no difference: the workers are persistent, and the order
        of the next epoch depends on nothing that happens until then. ``state_dict`` still gives the end of this epoch.
        """
        iterator, position = self._current, self._position
        ends, survives = position.finished and position.exhausted, self._source.survives
        if iterator is None or not (ends and survives and begins_early(self.loader)):
            return
        if not self._generators:
            next(iterator, None)
        self._leave()
        end_before = self.state_dict(position.consumed)
        for each in epoch_setters(self.loader):
            each.set_epoch(epoch)
        self._next_epoch = NextEpoch(end_before, _epochs_of(self.loader), self._source.open())

    def close(self) -> None:
        """End the worker processes now, also persistent ones; the next epoch starts new ones."""
        self._resumed, self._begun_early = None, False
        begun, self._next_epoch = self._next_epoch, None
        if begun is not None:
            _set_random_state(self._generators, begun.end_before)
        self._source.close()

    # -- internal functions

    def _source_of(self, loader: Iterable[Any]) -> BatchSource:
        source = source_of(loader, replays=self._replays)
        if self._replays and isinstance(loader, DataLoader) and not _has_known_order(loader):
            # The indices of the last batch tell later whether the sampler draws the same order again.
            source.keeps_indices = True
        return source

    def _order(self, done: int) -> dict[str, Any] | None:
        """Return what draws the order of this epoch, of which ``done`` batches are done; None if nobody asks."""
        if self._rest is not None or not self._replays:
            return None if self._rest is None else state_of_rest(self._rest, self.loader)
        assert self._start is not None
        indices = self._source.indices
        last = None if indices is None else indices.batches.get(done)
        return state_of(self.loader, self._start, last, has_workers_from_before=self._source.has_workers_from_before)

    @contextmanager
    def _as_begun(self, start: dict[str, Any]) -> Iterator[None]:
        """Return a context with the random state in which an epoch began."""
        before = {"generators": self._generator_states()}
        with isolate_rng(include_cuda=False):
            _set_random_state(self._generators, start)
            try:
                yield
            finally:
                _set_random_state(self._generators, before)

    def _begin(self) -> Iterator[Any]:
        self.open()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            return resumed
        if self._next_epoch is not None and self._next_epoch.epochs != _epochs_of(self.loader):
            # The user has set another epoch than the one that follows.
            self.close()
        begun, self._next_epoch = self._next_epoch, None
        self._start = self._random_state()
        self._position.restart()
        if begun is not None:
            self._start["generators"] = begun.end_before["generators"]
            return begun.batches
        try:
            self._source.continue_with(None)
            return self._source.open()
        except Exception as error:
            self._explain(error, 1)
            raise

    def _leave(self) -> None:
        # Keep everything that the state needs: a checkpoint may be taken after the loop was left in the middle of an
        # epoch.
        self._resumed = self._current = None
        self._source.leave()

    def _end(self) -> dict[str, Any]:
        """Return the entries that every state has, with their values between epochs."""
        return {
            "consumed": 0,
            "epoch": self.epoch,
            "length": self.length,
            "ended": True,
            "rebuild": False,
            "exhausted": self._position.exhausted,
            "draws": self._draws,
            "generators": self._generator_states(),
        }

    def _random_state(self, *, reads: bool = True) -> dict[str, Any]:
        return {"rng": collect_rng_state(cuda=False) if reads else None, "generators": self._generator_states()}

    def _generator_states(self) -> list[bytes]:
        return [generator_state(generator) for generator in self._generators]

    def _explain(self, error: Exception, number: int) -> None:
        error.add_note(f"in {self.name}: {self._source.describe(error, number)}")


@dataclass
class _Position:
    """Where a stream is in its epoch."""

    # The number of batches yielded, and the last one.
    consumed: int = 0
    last: Any = None
    # Whether the epoch and the data have ended; a limit ends an epoch before the data.
    finished: bool = False
    exhausted: bool = False
    # A batch to yield once more.
    repeated: Any = _END
    # The prefetched batch and the position before it; ``_END`` after the last batch.
    prefetched: Any = _END
    prefetched_state: dict[str, Any] | None = None
    # The number of the batch that is fetched, for messages.
    fetching: int = 0

    def restart(self) -> None:
        self.consumed, self.finished, self.exhausted = 0, False, False
        self.repeated = self.prefetched = _END
        self.prefetched_state = None

    def take_prefetched(self) -> Any:
        batch, self.prefetched, self.prefetched_state = self.prefetched, _END, None
        return batch

    def drop_prefetched(self) -> None:
        self.prefetched, self.prefetched_state = _END, None


@dataclass
class _RestOfEpoch:
    """The part of an interrupted epoch that a stream has not read yet."""

    source: BatchSource
    generators: list[torch.Generator]
    # The random state in which the epoch began, and the rest of its batches.
    start: dict[str, Any] | None = None
    batches: Iterator[Any] = field(init=False)
    # The prefetched batch, and the position before it.
    prefetched: Any = _END
    prefetched_state: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fetch the batches up to the position again, if necessary; random generators keep their states."""
        generators, source = self.generators, self.source
        self.start = state["start"] or {
            "rng": collect_rng_state(cuda=False),
            "generators": [generator_state(each) for each in generators],
        }
        with isolate_rng(include_cuda=False):
            _set_random_state(generators, self.start)
            if first := self.start.get("first"):
                source.before_first = functools.partial(_set_random_state, generators, first)
            try:
                self.batches = source.reopen(state["source"], state["consumed"])
            finally:
                source.before_first = nothing
            if state["ended"]:
                if state["exhausted"]:
                    next(self.batches, None)
            elif state["ahead"] is not None:
                _set_random_state(generators, state["ahead"])
                self.prefetched, self.prefetched_state = next(self.batches, _END), state["ahead"]
        if state["source"] is None or not source.is_changed(state["source"]):
            # The dataset may have drawn from them too, and skipped batches do not draw.
            _set_random_state(generators, state)


def _set_random_state(generators: list[torch.Generator], state: dict[str, Any]) -> None:
    """Set the user's generators, and the generators of this process if the state has them."""
    restore_rng_state(state.get("rng") or {})
    for generator, saved in zip(generators, state["generators"], strict=False):
        set_generator_state(generator, saved)


# -- where a loader's epoch ends, and whether its next one can begin before this one is over


def ends_at_its_length(loader: Iterable[Any]) -> bool:
    """Return whether a loader is sure to give as many batches as ``len(loader)`` says.

    Sure is a length that torch or hasten computes from the samplers it reads. An ``IterableDataset`` may give another
    number of batches than its length says (with workers even one that counts its samples right), and so may any class
    that defines ``__len__`` itself.
    """
    if not isinstance(loader, DataLoader):
        return type(loader) in (list, tuple, range)
    kind = type(loader)
    iterates = kind._get_iterator is DataLoader._get_iterator or is_resident(loader)
    is_torchs = iterates and kind.__len__ is DataLoader.__len__ and not overrides_iter(loader)
    if is_iterable(loader) or not (is_torchs or comes_from(kind, "torchdata")):
        return False
    return _has_known_order(loader)


def _has_known_order(loader: DataLoader[Any]) -> bool:
    """Return whether all samplers of a loader belong to torch or hasten."""
    return all(
        type(each) in _SAMPLERS or package_of(type(each)) in {"torchdata", *ROOTS} for each in _orders_of(loader)
    )


_SAMPLERS = (
    list,
    BatchSampler,
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


def _orders_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the sampler that a loader takes its indices from, and those inside it that the order comes from."""
    sampler = index_sampler(loader)[1]
    while sampler is not None:
        yield sampler
        wraps = type(sampler) in (BatchSampler, ShardSampler) or isinstance(sampler, PlannedBatches)
        sampler = getattr(sampler, "sampler", None) if wraps else None


@dataclass(frozen=True)
class NextEpoch:
    """An epoch that was begun before the previous one ended."""

    # The state of the stream before it began, the epoch that each part of the loader was set to, and its batches.
    end_before: dict[str, Any]
    epochs: list[Any]
    batches: Iterator[Any]


def _epochs_of(loader: Iterable[Any]) -> list[Any]:
    """Return the epoch that was last set in each part of a loader."""
    return [getattr(each, "epoch", None) for each in epoch_setters(loader)]


def begins_early(loader: Iterable[Any]) -> bool:
    """Return whether a loader's next epoch can begin at any time after the last batch, with the same batches.

    Its workers must live on: new ones would be copies of a dataset that a callback may still change. Its order must
    come from its own generator, from the epoch, or not from chance at all: validation may draw from torch's generator.
    """
    if not isinstance(loader, DataLoader) or overrides_iter(loader) or not ends_at_its_length(loader):
        return False
    lives_on = loader.num_workers > 0 and loader.persistent_workers and loader.in_order
    if not lives_on or has_state(loader.dataset) or stateful_sampler(loader) is not None:
        return False
    orders = list(_orders_of(loader))
    seeded = any(type(each) is ShardSampler for each in orders)
    return all(_is_settled(each, seeded) for each in orders)


def _is_settled(sampler: Any, seeded: bool) -> bool:
    """Return whether a sampler's order is fixed before an epoch; ``seeded``: a ``ShardSampler`` seeds it."""
    if isinstance(sampler, PlannedBatches):
        several = getattr(sampler, "num_replicas", 1) > 1
        return not sampler.shuffle or several or sampler.seed is not None or sampler.generator is not None
    if type(sampler) is RandomSampler:
        return seeded or sampler.generator is not None
    return type(sampler) in (ShardSampler, BatchSampler, SequentialSampler, DistributedSampler)


class CombinedStream:
    """The batches of a ``CombinedLoader``, epoch after epoch, with the methods of ``Stream``.

    Example::

        >>> loader = CombinedLoader([range(3), range(2)], mode="max_size_cycle")
        >>> stream = CombinedStream(loader, [Stream(range(3)), Stream(range(2))])
        >>> list(stream.batches())
        [([0, 0], False), ([1, 1], False), ([2, 0], True)]

    """

    def __init__(self, loader: CombinedLoader, streams: list[Stream], *, name: str = "train_dataloader") -> None:
        self.loader = loader
        self.name = name
        self.consumed = 0
        self._readers = [_Reader(stream) for stream in streams]
        self.streams = streams
        self._loaded: dict[str, Any] | None = None
        self.finished = self._resumes = False

    @property
    def length(self) -> int | None:
        return joint_length(self.loader.mode, [reader.stream.length for reader in self._readers])

    @property
    def certain_length(self) -> int | None:
        lengths = [reader.stream.certain_length for reader in self._readers]
        return None if None in lengths else joint_length(self.loader.mode, lengths)

    @property
    def position(self) -> int:
        if self._loaded is not None:
            return 0 if self._loaded["ended"] else self._loaded["consumed"]
        return 0 if self.finished else self.consumed

    # -- the batches

    def batches(self, limit: int | None = None) -> Generator[tuple[Any, bool], None, None]:
        self.open()
        if not self._resumes:
            self.consumed = 0
            for reader in self._readers:
                reader.restart()
        self._resumes, self.finished = False, False
        end = min((number for number in (self.certain_length, limit) if number is not None), default=None)
        rounds = self._one_by_one if self.loader.mode == "sequential" else self._side_by_side
        try:
            if end is None or self.consumed < end:
                for batch, is_last in rounds(end):
                    self.consumed += 1
                    self.finished = is_last or self.consumed == end
                    yield batch, self.finished
                    if self.finished:
                        break
            self.finished = True
        finally:
            for reader in self._readers:
                reader.leave()

    def begin(self) -> None:
        if self._loaded is None and not self._resumes:
            for reader in self._readers[: 1 if self.loader.mode == "sequential" else None]:
                reader.stream.begin()

    def _side_by_side(self, end: int | None) -> Iterator[tuple[Any, bool]]:
        cycles, shortest = self.loader.mode == "max_size_cycle", self.loader.mode == "min_size"
        while True:
            try:
                batches = [reader.next(end, self.consumed, cycles=cycles) for reader in self._readers]
            except LeaveRun as leaves:
                leaves.can_save = len(self._readers) == 1
                raise
            over = [batch is _END for batch in batches]
            if all(over) or (shortest and any(over)):
                return
            is_last = (any if shortest else all)(reader.done for reader in self._readers)
            yield self.loader.combine([None if batch is _END else batch for batch in batches]), is_last

    def _one_by_one(self, end: int | None) -> Iterator[tuple[Any, bool]]:
        for reader in self._readers:
            for other in self._readers:
                other.took = False
            while (batch := reader.next(end, self.consumed)) is not _END:
                yield batch, reader.at_end and reader is self._readers[-1]

    # -- the position

    def open(self) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        for reader, saved in zip(self._readers, state["readers"], strict=True):
            reader.at_end, reader.done, reader.count = saved["at_end"], saved["done"], saved["count"]
            if saved["at_end"] or state["ended"]:
                reader.stream.finish()
            else:
                reader.stream.open()
        self.consumed, self.finished = state["consumed"], state["ended"]
        self._resumes = not state["ended"]

    def replace_held(self, change: Callable[[Any], Any]) -> None:
        for reader in self._readers:
            reader.stream.replace_held(change)

    def drop_held_unless(self, may_be_stored: Callable[[Any], bool]) -> None:
        for reader in self._readers:
            reader.stream.drop_held_unless(may_be_stored)

    def state_dict(self, consumed: int, *, again: bool = False) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        again = _yields_again(self, consumed, again)
        return {
            "consumed": self.consumed - again,
            "ended": self.finished and not again,
            "readers": [reader.state_dict(again) for reader in self._readers],
        }

    @property
    def not_known(self) -> str:
        found = {index: reader.stream.not_known for index, reader in enumerate(self._readers)}
        return ", ".join(f"in loader {index} {why}" for index, why in found.items() if why)

    def load_state_dict(self, state: dict[str, Any], *, moved: bool = False) -> None:
        readers = state.get("readers", [])
        if len(readers) != len(self._readers):
            what = (
                f"{self.name}: the checkpoint was written with {max(1, len(readers))} loader(s), and there are "
                f"{len(self._readers)} now."
            )
            raise make_error(ValueError, what, fix="Resume with the same loaders.", argument="train_dataloader")
        for reader, saved in zip(self._readers, readers, strict=True):
            reader.restart()
            reader.stream.load_state_dict(saved["stream"], moved=moved and not state["ended"])
        self._loaded = state if state["ended"] else self._recounted(state)

    def _recounted(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state counted in batches of the streams' present size, which may have changed."""
        saved, streams = state["readers"], [reader.stream for reader in self._readers]
        counts = [one["count"] if one["at_end"] else each.position for one, each in zip(saved, streams, strict=True)]
        if counts == [one["count"] for one in saved]:
            return state
        lengths = [stream.length for stream in streams]
        left = [
            None if length is None else 0 if one["at_end"] else length - count
            for one, length, count in zip(saved, lengths, counts, strict=True)
            if self.loader.mode == "min_size" or not one["done"]
        ]
        whole, rest = joint_length(self.loader.mode, lengths), joint_length(self.loader.mode, left)
        consumed = state["consumed"] if whole is None or rest is None else max(0, whole - rest)
        readers = [{**one, "count": count} for one, count in zip(saved, counts, strict=True)]
        return {**state, "consumed": consumed, "readers": readers}

    def start_at(self, consumed: int) -> None:
        mode, left = self.loader.mode, consumed
        states: list[dict[str, Any]] = []
        for reader in self._readers:
            length, count = reader.stream.length, consumed
            done = length is not None and consumed >= length
            if length is not None and mode == "sequential":
                count = min(left, length)
                left, done = left - count, count == length
            elif length and mode != "min_size":
                count = consumed % length if mode == "max_size_cycle" else min(consumed, length)
            reader.stream.start_at(count)
            at_end = done and mode in ("max_size", "sequential")
            stream = reader.stream.state_dict(count)
            states.append({"stream": stream, "at_end": at_end, "done": done, "count": count})
        self._loaded = {"consumed": consumed, "ended": False, "readers": states}

    def finish(self) -> None:
        if self._loaded is not None:
            self._loaded = {**self._loaded, "ended": True}
            self.open()
            self.finished = True

    def set_epoch(self, epoch: int) -> None:
        for reader in self._readers:
            reader.stream.set_epoch(epoch)

    def close(self) -> None:
        for reader in self._readers:
            reader.leave()
            reader.stream.close()


def _yields_again(stream: Stream | CombinedStream, consumed: int, again: bool) -> bool:
    """Return whether a position after ``consumed`` batches is one before the last batch that was yielded."""
    yielded, finished = stream.consumed, stream.finished
    again = again or (consumed == yielded - 1 and not (finished and consumed == 0))
    if not again and consumed != yielded and not finished:
        what = f"{stream.name}: state_dict(consumed={consumed}), but {yielded} batches were handed out."
        fix = f"Use {yielded}, or {max(0, yielded - 1)} to yield the last one again."
        raise make_error(ValueError, what, fix=fix, argument="train_dataloader")
    return again


class _Reader:
    """One of the streams, and how much of it the joint epoch has read."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.restart()

    def restart(self) -> None:
        """Start at the beginning of a joint epoch."""
        self.again()
        self.done = self.took = self.was_done = False

    def again(self) -> None:
        """Begin the stream's next own epoch inside a joint one."""
        self.batches: Generator[tuple[Any, bool], None, None] | None = None
        self.count, self.at_end = 0, False

    def next(self, end: int | None, consumed: int, *, cycles: bool = False) -> Any:
        """Return the next batch; ``_END`` past the end, unless it ``cycles``."""
        self.took, self.was_done = not self.at_end, self.done
        if not self.at_end:
            if self.batches is None:
                # The joint epoch may end before this stream's own: with the limit, its state says that the epoch has
                # ended.
                left = None if end is None else end - (consumed - self.count)
                length = self.stream.certain_length
                cuts = left is not None and (length is None or left < length)
                self.batches = self.stream.batches(left if cuts else None)
            for batch, is_last in self.batches:
                self.count += 1
                self.at_end = is_last
                self.done = self.done or is_last
                return batch
            # The end came before the stream's length.
            self.at_end = self.done = True
            self.took = False
        if not cycles:
            return _END
        self.again()
        return self.next(end, consumed)

    def leave(self) -> None:
        """Stop reading the stream without ending its epoch."""
        batches, self.batches = self.batches, None
        if batches is not None:
            batches.close()

    def state_dict(self, again: bool) -> dict[str, Any]:
        """Return the stream's position; ``again``: before the last joint batch."""
        back = again and self.took
        count = self.count - back
        return {
            "stream": self.stream.state_dict(count, again=back) if self.count else self.stream.state_dict(0),
            "at_end": self.at_end and not back,
            "done": self.was_done if back else self.done,
            "count": count,
        }
