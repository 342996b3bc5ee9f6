"""Temporary patches on modules; deepcopy and pickle of a patched module give an unpatched one.

Programs copy or pickle modules in the middle of a run, for example as a teacher of a student or as the best model so
far. A copy with the hooks and methods of the run would compute with the weights of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class MethodPatch:
    """Replaces a method of one module; a copy of the module has the original method."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module, self.name = module, name
        # An earlier replacement of the method on the instance; None if there is none.
        self.own: Callable[..., Any] | None = vars(module).get(name)

    def original(self, *args: object, **kwargs: object) -> Any:
        """Call the original method."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Call the original method; subclasses do more."""
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy of the module, which has no patch yet, the method of its class, bound to the copy."""
        return (getattr, (self.module, self.name)) if self.own is None else (_identity, (self.own,))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the method inside the block."""
        # Without setattr, which checks for parameters and submodules.
        vars(self.module)[self.name] = self
        try:
            yield
        finally:
            self.remove()

    def remove(self) -> None:
        """Restore the original method; may be called twice."""
        if self.own is None:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = self.own


class HookPatch:
    """A hook of a module; a copy of the module has a hook that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy of the module a hook that leaves arguments and outputs alone."""
        return HookPatch, (_nothing,)


class NamePatch(str):
    """A string that temporarily replaces another, ``original``; its copies are the original string."""

    original: str | None

    def __new__(cls, name: str, original: str | None) -> NamePatch:
        """Return the replacement, which refers to the original."""
        made = super().__new__(cls, name)
        made.original = original
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies the original."""
        return _identity, (self.original,)


def _nothing(*_args: Any) -> None:
    """Do nothing."""


def _identity(value: Any) -> Any:
    """Return ``value``: the constructor of a copy that is an existing object."""
    return value
