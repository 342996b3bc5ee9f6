"""The index batches of a loader, counted, so that an epoch can begin in its middle."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


def has_state(thing: Any) -> bool:
    """Return whether ``thing`` can save its position and take it back."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def stateful_sampler(loader: Any) -> Any:
    """Return the outermost sampler of ``loader`` that can save its position, or None."""
    batch_sampler = loader.batch_sampler
    for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler):
        if sampler is not None and has_state(sampler):
            return sampler
    return None


class Indices:
    """Stands in a loader for its index sampler: the same index batches, counted, from any place on.

    Args:
        sampler: the batch sampler, or the sampler where the loader does not batch.
        stateful: the sampler whose ``state_dict`` is remembered for each index batch, or None.
        keep: the number of index batches to remember.

    """

    def __init__(self, sampler: Any, *, stateful: Any = None, keep: int = 2) -> None:
        self.sampler_of_loader = sampler
        self.on_iter: Callable[[], None] | None = None
        self._stateful = stateful
        self._keep = keep
        self._skip = 0
        self._first = 0
        self._once = False
        self._current: _Counted | None = None

    def start_at(self, number: int, *, skip: bool, once: bool = False) -> None:
        """Begin the next epoch at index batch ``number``.

        Args:
            number: how many index batches come before.
            skip: draw these from the sampler and drop them; without it the sampler is already there.
            once: the loader asks twice for an iterator where the epoch that is resumed asked once.

        """
        self._first, self._skip, self._once = number, number if skip else 0, once

    def __iter__(self) -> Iterator[Any]:
        if self._once and self._current is not None:
            self._once = False
            return self._current
        self._current = _Counted(self, iter(self.sampler_of_loader), self._first, self._skip)
        if self.on_iter is not None:
            self.on_iter()
        return self._current

    def __len__(self) -> int:
        return len(self.sampler_of_loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sampler_of_loader":
            raise AttributeError(name)
        return getattr(self.sampler_of_loader, name)

    def opened(self) -> None:
        """Skip now, under the random state of the start of the epoch, and begin the next epoch at its start."""
        if self._current is not None:
            self._current.skip_now()
        self._first, self._skip, self._once = 0, 0, False

    def stop(self) -> None:
        """Give no more index batches in this epoch."""
        if self._current is not None:
            self._current.stopped = True

    def batch(self, number: int) -> Any:
        """Return index batch ``number`` (from 1) if it is still known, else None."""
        return self._current.recent.get(number) if self._current is not None else None

    def state(self, number: int) -> Any:
        """Return the sampler's state after index batch ``number``, or None where it is not known or is the end.

        A sampler at its end may already be back at its beginning.

        """
        current = self._current
        if current is None or number == current.ended_at:
            return None
        return current.states.get(number)


class _Counted:
    """Iterates over index batches and remembers the latest."""

    def __init__(self, owner: Indices, iterator: Iterator[Any], first: int, skip: int) -> None:
        self.stopped = False
        self.ended_at: int | None = None
        self.recent: dict[int, Any] = {}
        self.states: dict[int, Any] = {}
        self._iterator, self._skip, self._number = iterator, skip, first
        self._stateful, self._known = owner._stateful, deque[int](maxlen=owner._keep)
        if self._stateful is not None:
            self.states[first] = copy.deepcopy(self._stateful.state_dict())
            self._known.append(first)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._skip:
            self.skip_now()
        if self.stopped:
            raise StopIteration
        try:
            indices = next(self._iterator)
        except StopIteration:
            self.ended_at = self._number
            raise
        self._number += 1
        if len(self._known) == self._known.maxlen:
            oldest = self._known[0]
            self.recent.pop(oldest, None)
            self.states.pop(oldest, None)
        self._known.append(self._number)
        self.recent[self._number] = indices
        if self._stateful is not None:
            self.states[self._number] = copy.deepcopy(self._stateful.state_dict())
        return indices

    def skip_now(self) -> None:
        """Draw and drop what comes before the place to begin at."""
        skip, self._skip = self._skip, 0
        for drawn in range(skip):
            if next(self._iterator, self) is self:
                raise RuntimeError(
                    f"cannot resume after {skip} batches: the sampler ended after {drawn}. The data is shorter than "
                    "when the checkpoint was written; resume with the same dataset, batch size and sampler."
                )
