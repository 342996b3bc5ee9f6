"""The nearest name to one that does not exist, who defines a method, and what parameters it has."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name most like ``name``, or None if none is alike.

    Example::

        >>> nearest("max_epoch", ["max_epochs", "min_epochs"])
        'max_epochs'

    """
    return _nearest(str(name), tuple(str(choice) for choice in allowed))


# Tools that look for where a class lives ask a package for the same missing names hundreds of times.
@functools.lru_cache(maxsize=256)
def _nearest(name: str, choices: tuple[str, ...]) -> str | None:
    lowered = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, or nothing if no allowed name is alike.

    Example::

        >>> did_you_mean("cdua", ["cpu", "cuda"])
        " Did you mean 'cuda'?"

    """
    found = nearest(name, allowed)
    return f" Did you mean {found!r}?" if found is not None else ""


def defined_by_program(obj: object, *methods: str) -> bool:
    """Return whether a method of hasten's object ``obj`` was replaced: in a subclass of a program, or on the object.

    Example::

        >>> from torch import nn
        >>> defined_by_program(nn.Linear(2, 2), "forward")
        True

    """
    own = getattr(obj, "__dict__", {})
    for name in methods:
        method = getattr(type(obj), name, None)
        if method is not None and (name in own or not str(getattr(method, "__module__", "")).startswith("hasten.")):
            return True
    return False


def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of this name; False if its signature cannot be read.

    Example::

        >>> has_parameter(lambda batch, batch_idx: None, "batch_idx")
        True

    """
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is not None and not hasattr(plain, "__wrapped__"):
        # What inspect.signature finds, without its 50 calls.
        return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
