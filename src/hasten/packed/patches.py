"""What is put into modules for a while, such that their copies are modules as they were.

A module may be copied or pickled in the middle of a run: a teacher that follows a student, the best model so far. Had
a copy the hooks and methods of the run, it would compute with the original's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Method:
    """Stands in the place of a method of one module; a copy of the module has the method itself again.

    Args:
        module: whose method it is.
        name: of the method.

    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module, self.name = module, name
        # What somebody else had put there; the method of the class if nobody did.
        self.own: Callable[..., Any] | None = vars(module).get(name)

    def before(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was there before."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was there before; others do more."""
        return self.before(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Of the copied module, which is still without this: its class's method, bound to the copy."""
        return (getattr, (self.module, self.name)) if self.own is None else (same, (self.own,))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand there, as long as this is open."""
        # Not setattr: a module would look whether it is a parameter or a part.
        vars(self.module)[self.name] = self
        try:
            yield
        finally:
            self.take_away()

    def take_away(self) -> None:
        """Put back what was there before; may be called again."""
        if self.own is None:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = self.own


class Hook:
    """A hook of a module; a copy of the module has one that does nothing.

    Args:
        function: what torch is to call.

    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing is left of it in a copy."""
        return Nothing, ()


class Nothing:
    """A hook that does nothing."""

    def __call__(self, *_args: Any) -> None:
        """Leave arguments and outputs alone."""


class Name(str):
    """A name that stands for another for a while; its copies are that other one.

    Args:
        name: what it reads as.
        before: what copies are.

    """

    before: str | None

    def __new__(cls, name: str, before: str | None) -> Name:
        """Return the name, which knows the other."""
        made = super().__new__(cls, name)
        made.before = before
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Give the other one to copies."""
        return same, (self.before,)


def same(value: Any) -> Any:
    """Return what is given: how a copy gets something that is there already."""
    return value
