"""Going through a loader again, with the random numbers that were drawn the first time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from hasten.data.resume.workers import RngWatch
from hasten.seed import restore_rng_state

# About 5 KB each. A loader that chooses by more distant draws than these cannot be gone through again.
_KEPT = 1000
# A loader that draws nothing for so many batches in a row, and most draw nothing at all, is no longer watched in
# this epoch: looking costs some 15 us a batch.
_QUIET = 64


class Replay:
    """Iterates over a loader that cannot skip, and notes what has to be known to do it again.

    A loader that draws from the random generators of this process gets other numbers the second time, unless they
    are put back. Within an epoch they only need to be where somebody else, such as dropout, drew in between.

    Args:
        batches: the loader's iterator, at the beginning of an epoch.

    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._watch = RngWatch()
        self._number = 0
        self._expected = self._watch.state()
        self._moved: set[str] = set()
        self._notes: deque[list[Any]] = deque(maxlen=_KEPT)
        self._quiet = 0

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._quiet >= _QUIET:
            batch = next(self._batches)
            self._number += 1
            return batch
        before = self._watch.state()
        self._moved.update(kind for kind in before if before[kind] != self._expected.get(kind))
        batch = next(self._batches)
        self._number += 1
        self._expected = after = self._watch.state()
        self._quiet = self._quiet + 1 if after == before else 0
        drawn = [kind for kind in before if after[kind] != before[kind] and kind in self._moved]
        if drawn:
            self._notes.append([self._number, {kind: before[kind] for kind in drawn}])
            self._moved.difference_update(drawn)
        return batch

    def notes(self, count: int) -> list[list[Any]]:
        """Return the states to put back within the first ``count`` batches."""
        return [note for note in self._notes if note[0] <= count]

    def go_to(self, count: int, notes: list[list[Any]]) -> None:
        """Fetch ``count`` batches and forget them, drawing what was drawn when ``notes`` were taken."""
        states = dict(notes)
        for number in range(1, count + 1):
            if number in states:
                restore_rng_state(states[number])
            next(self._batches, None)
        self._number = count
        self._notes.extend(notes)
        self._expected = self._watch.state()
        self._moved.clear()
