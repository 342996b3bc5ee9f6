"""Hooks that a callback has and, as it was made, does not need."""

from __future__ import annotations

import types

from hasten.module.callback import Callback


def silence(callback: Callback, owner: type[Callback], *hooks: str) -> None:
    """Make ``callback`` look as if it did not override ``hooks``, so that they cost nothing a step.

    A subclass of ``owner`` with its own version of a hook keeps it.
    """
    for name in hooks:
        if getattr(type(callback), name) is getattr(owner, name):
            setattr(callback, name, types.MethodType(getattr(Callback, name), callback))


def unsilence(callback: Callback, *hooks: str) -> None:
    """Undo ``silence``."""
    for name in hooks:
        mine = callback.__dict__.get(name)
        if isinstance(mine, types.MethodType) and mine.__func__ is getattr(Callback, name):
            delattr(callback, name)
