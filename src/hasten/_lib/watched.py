"""A list whose owner wants to know when it changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self, SupportsIndex, TypeVar

T = TypeVar("T")


class WatchedList(list[T]):
    """A list that says when it changes; copies are plain lists.

    Args:
        items: what it holds at first.
        changed: called after each change.

    """

    def __init__(self, items: Iterable[T], changed: Callable[[], None]) -> None:
        super().__init__(items)
        self._changed = changed

    def append(self, item: T) -> None:
        super().append(item)
        self._changed()

    def extend(self, items: Iterable[T]) -> None:
        super().extend(items)
        self._changed()

    def insert(self, index: SupportsIndex, item: T) -> None:
        super().insert(index, item)
        self._changed()

    def remove(self, item: T) -> None:
        super().remove(item)
        self._changed()

    def pop(self, index: SupportsIndex = -1) -> T:
        item = super().pop(index)
        self._changed()
        return item

    def clear(self) -> None:
        super().clear()
        self._changed()

    def reverse(self) -> None:
        super().reverse()
        self._changed()

    def sort(self, **options: Any) -> None:
        super().sort(**options)
        self._changed()

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self._changed()

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(index)
        self._changed()

    def __iadd__(self, items: Iterable[T]) -> Self:  # type: ignore[override,misc]
        self.extend(items)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return [copy.deepcopy(item, memo) for item in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))
