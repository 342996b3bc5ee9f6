"""Notifications when a hook is replaced on an instance, or a list changes; attributes that are replaced for a time."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Protocol, TypeVar


class Follower(Protocol):
    """An object that caches attributes of other objects."""

    def replaced(self, owner: object, name: str) -> None:
        """Called when the hook ``name`` of ``owner`` was set or removed."""


def set_until(undo: ExitStack, entries: MutableMapping[str, Any], name: str, value: object) -> None:
    """Set an entry until ``undo`` is closed: of the environment, or of an object's dict, past its ``__setattr__``."""
    if name in entries:
        undo.callback(entries.__setitem__, name, entries[name])
    else:
        undo.callback(entries.pop, name, None)
    entries[name] = value


@contextmanager
def set_during(owner: object, /, **values: object) -> Iterator[None]:
    """Return a context in which attributes have other values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


_followers: weakref.WeakSet[Any] = weakref.WeakSet()


def follow(follower: Follower) -> None:
    """Notify ``follower`` of replaced hooks while it exists."""
    _followers.add(follower)


def replaced(owner: object, name: str) -> None:
    """Notify all followers that the hook ``name`` of ``owner`` was set or removed."""
    for follower in list(_followers):
        follower.replaced(owner, name)


class NotifiesOfHooks:
    """Notifies followers when a hook is set or removed on an instance."""

    __hook_names__: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            from hasten._lib.explain import explain

            explain(error)
            raise
        if name in self.__hook_names__:
            replaced(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in self.__hook_names__:
            replaced(self, name)


T = TypeVar("T")


class WatchedList(list[T]):
    """A list that calls a function when it changes; copies are plain lists."""

    def __init__(self, items: Iterable[T], changed: Callable[[], None]) -> None:
        super().__init__(items)
        self._changed = changed

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return [copy.deepcopy(item, memo) for item in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))


def _notifying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self._changed()
        return result

    return changed


_CHANGING = ("append", "extend", "insert", "remove", "pop", "clear", "reverse", "sort")
for _name in (*_CHANGING, "__setitem__", "__delitem__", "__iadd__", "__imul__"):
    setattr(WatchedList, _name, _notifying(getattr(list, _name)))
