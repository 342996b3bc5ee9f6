"""Mark hooks that this configuration of a callback does not use, so they are never called."""

from __future__ import annotations

import types

from hasten.module.callback import Callback


def disable_hooks(callback: Callback, owner: type[Callback], *hooks: str) -> None:
    """Replace hooks of ``callback`` by those of ``Callback``, which the loop does not call.

    A subclass of ``owner`` that overrides a hook keeps it.
    """
    for name in hooks:
        if getattr(type(callback), name) is getattr(owner, name):
            setattr(callback, name, types.MethodType(getattr(Callback, name), callback))


def enable_hooks(callback: Callback, *hooks: str) -> None:
    """Undo ``disable_hooks``."""
    for name in hooks:
        method = callback.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__func__ is getattr(Callback, name):
            delattr(callback, name)
