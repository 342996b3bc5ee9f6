"""Which process the others wait for: what each reports about its steps, and the slowest of them.

Processes that train together end each step at the same time, so the length of a step does not show who is late. What
differs is how long each waits for its data, and how long its backward takes, in which it waits for the gradients of the
others: the process that all wait for has the shortest. The numbers travel with the agreement that the processes make
about once a second anyway (``StopRequests``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Reports of less time say nothing about the steps to come.
_LEAST_SECONDS = 0.5
# From which ratio and by how many seconds a step must be slower for its process to be called slow, and for how many
# reports in a row before that is said.
_SLOW, _SLOW_SECONDS = 1.15, 1e-3
_SAID_AFTER = 3
# Processes whose numbers a line of the record has, the slowest first.
_MOST_IN_RECORD = 8
# What each process reports: the seconds of a step, of these those it waited for data, and those of its backward.
_NUMBERS = 3


class StepsDone(NamedTuple):
    """What a process has done so far."""

    steps: int
    # Of training, without validation and checkpoints.
    seconds: float
    # Seconds of these in which the host waited for data.
    waited: float
    # The share of them in which the device waited too: a GPU may be busy with earlier steps.
    device_share: float = 1.0


class RankTime(NamedTuple):
    """The mean step of one process."""

    rank: int
    # Without those in which it waits for other processes.
    own_seconds: float
    # Of these, waiting for data.
    data_seconds: float
    # In which it waits for other processes, at least.
    waiting_seconds: float


class Slowest(NamedTuple):
    """The slowest process of a run."""

    rank: int
    # Its step as a multiple of the median of all processes.
    ratio: float
    # The share of its step in which it waits for data.
    data_share: float
    own_seconds: float
    # Of a step, the median of all processes.
    median_seconds: float

    @property
    def is_slow(self) -> bool:
        """Whether it is so much slower that it is named."""
        return self.ratio >= _SLOW and self.own_seconds - self.median_seconds >= _SLOW_SECONDS

    def sentence(self) -> str:
        """Return it as a sentence.

        Example::

            >>> Slowest(3, 1.8, 0.4, 0.45, 0.25).sentence()
            'Rank 3 takes 1.8 times the median of all ranks for a step (0.45 s, median 0.25 s); waits for data 40 %.'

        """
        return (
            f"Rank {self.rank} takes {self.ratio:.1f} times the median of all ranks for a step "
            f"({self.own_seconds:.2g} s, median {self.median_seconds:.2g} s); waits for data {self.data_share:.0%}."
        ).replace("%", " %")


def rank_times(rows: Sequence[Sequence[float]]) -> list[RankTime]:
    """Return the mean step of each process, by rank.

    A row has the seconds of a step, of its wait for data, and of its backward, 0 where it is not known.

    Example::

        >>> [(one.rank, one.own_seconds) for one in rank_times([(1.0, 0.0, 0.75), (1.0, 0.5, 0.25)])]
        [(0, 0.5), (1, 1.0)]

    """
    shortest = min(backward for _, _, backward in rows)
    found = []
    for rank, (seconds, data, backward) in enumerate(rows):
        waiting = min(backward - shortest, max(0.0, seconds - data))
        found.append(RankTime(rank, seconds - waiting, data, waiting))
    return found


def slowest_of(times: Sequence[RankTime]) -> Slowest:
    """Return the slowest process; ``times`` is what ``rank_times`` returned.

    Where a backward does not show the wait for others, as when the model is divided among the processes, a process is
    slow by what it waits for data longer than the median does.

    Example::

        >>> slowest_of(rank_times([(1.0, 0.0, 0.0), (1.0, 0.5, 0.0)]))[:3]
        (1, 2.0, 0.5)

    """
    # Of two processes, the faster one is the median.
    median = statistics.median_low([one.own_seconds for one in times])
    usual_wait = statistics.median_low([one.data_seconds for one in times])

    def without_delay(one: RankTime) -> float:
        return min(median, one.own_seconds - max(0.0, one.data_seconds - usual_wait))

    last = max(times, key=lambda one: one.own_seconds / max(without_delay(one), 1e-9))
    usual = max(without_delay(last), 1e-9)
    share = last.data_seconds / max(last.own_seconds, 1e-9)
    return Slowest(last.rank, last.own_seconds / usual, share, last.own_seconds, usual)


class RankTimes:
    """What the processes report about their steps; one object in each process.

    Example::

        >>> done = [StepsDone(0, 0.0, 0.0)]
        >>> times = RankTimes(0, 1)
        >>> times.begin(lambda: done[-1])
        >>> done.append(StepsDone(10, 5.0, 1.0))
        >>> times.take(times.values())
        >>> times.last
        [RankTime(rank=0, own_seconds=0.5, data_seconds=0.1, waiting_seconds=0.0)]

    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._count = rank, count
        self._progress: Callable[[], tuple[int, float, float, float] | None] | None = None
        self._before: StepsDone | None = None
        self._backward = 0.0
        # The last reports of all processes; empty before the first.
        self.last: list[RankTime] = []
        self._slow_for: dict[int, int] = {}
        self._said: set[int] = set()
        # Called with the slowest process whenever all have reported.
        self.on_report: Callable[[Slowest], None] | None = None

    def begin(self, progress: Callable[[], tuple[int, float, float, float] | None]) -> None:
        """Report about a fit; ``progress`` returns ``StepsDone`` or its numbers, None before the first step."""
        self._progress = progress
        self._before = self._now()

    def end(self) -> None:
        """Report no longer."""
        self._progress = self.on_report = None

    def _now(self) -> StepsDone | None:
        done = None if self._progress is None else self._progress()
        return None if done is None else StepsDone(*done)

    def add_step(self, parts: Mapping[str, float]) -> None:
        """Take the seconds of a timed step by part; a backward stands for those until the next timed one."""
        self._backward = parts.get("backward", 0.0)

    def values(self) -> list[float]:
        """Return the numbers to exchange, of which the largest count: those of this process, and zeros elsewhere."""
        numbers = [0.0] * (_NUMBERS * self._count)
        now, before = self._now(), self._before
        if now is None:
            return numbers
        if before is None:
            self._before = now
        elif now.steps > before.steps and now.seconds - before.seconds >= _LEAST_SECONDS:
            steps = now.steps - before.steps
            seconds = (now.seconds - before.seconds) / steps
            data = now.device_share * (now.waited - before.waited) / steps
            own = (seconds, min(data, seconds), min(self._backward, seconds))
            numbers[_NUMBERS * self._rank : _NUMBERS * (self._rank + 1)] = own
        return numbers

    def take(self, numbers: Sequence[float]) -> None:
        """Take what all processes report; nothing happens until each of them has a report."""
        rows = [numbers[place : place + _NUMBERS] for place in range(0, len(numbers), _NUMBERS)]
        if self._progress is None or not all(seconds > 0 for seconds, _, _ in rows):
            return
        self._before = self._now()
        if not all(backward > 0 for _, _, backward in rows):
            rows = [(seconds, data, 0.0) for seconds, data, _ in rows]
        self.last = rank_times(rows)
        if self.on_report is not None:
            self.on_report(slowest_of(self.last))

    def to_say(self, slowest: Slowest) -> str:
        """Return the sentence about a process that stays slow, once for each process; else ""."""
        self._slow_for = {slowest.rank: self._slow_for.get(slowest.rank, 0) + 1} if slowest.is_slow else {}
        if self._slow_for.get(slowest.rank, 0) < _SAID_AFTER or slowest.rank in self._said:
            return ""
        self._said.add(slowest.rank)
        return f"{slowest.sentence()} The other ranks wait for it."

    def for_record(self) -> Iterator[tuple[str, list[float]]]:
        """Yield rank and seconds (own, data, waiting for others) of the slowest processes, for a line of the record."""
        for one in sorted(self.last, key=lambda each: -each.own_seconds)[:_MOST_IN_RECORD]:
            yield str(one.rank), [round(seconds, 6) for seconds in one[1:]]
