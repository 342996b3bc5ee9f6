"""Who wants to know when a hook is replaced on an instance, as tests and notebooks do."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Follower(Protocol):
    """Something that keeps what it once found on other objects."""

    def replaced(self, owner: object) -> None:
        """Learn that a hook of ``owner`` was replaced."""


_followers: weakref.WeakSet[Any] = weakref.WeakSet()


def follow(follower: Follower) -> None:
    """Tell ``follower`` about replaced hooks for as long as it lives."""
    _followers.add(follower)


def replaced(owner: object) -> None:
    """Tell every follower that a hook of ``owner`` was set or removed."""
    for follower in list(_followers):
        follower.replaced(owner)
