"""Frames of the call stack: which functions are running, for warnings, hyper-parameters and tracebacks."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any


def caller(depth: int = 1) -> FrameType:
    """Return the frame of the function that called the one that asks; with 2 the one that called that, and so on.

    Raises:
        ValueError: there are not so many.

    Example::

        >>> def asks():
        ...     return name_of(caller())
        >>> def calls():
        ...     return asks()
        >>> calls()
        'calls'

    """
    return sys._getframe(depth + 1)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, the one that called it, and so on up to the start of the program."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def first_outside(frame: FrameType | None, is_inside: Callable[[str], bool]) -> FrameType | None:
    """Return the first frame outwards of a file that is not inside; None if there is none."""
    return next((each for each in outwards(frame) if not is_inside(file_of(each))), None)


def lines_around(frame: FrameType) -> Iterator[str]:
    """Yield the lines of the files of a program whose functions run in a frame and outwards of it."""
    files = {file_of(each) for each in outwards(frame)}
    return (line for file in files if "site-packages" not in file for line in linecache.getlines(file))


def file_of(frame: FrameType) -> str:
    """Return the file of the function that runs in a frame."""
    return frame.f_code.co_filename


def name_of(frame: FrameType) -> str:
    """Return the name of the function that runs in a frame, without its class."""
    return frame.f_code.co_name


def full_name_of(frame: FrameType) -> str:
    """Return the name of the function that runs in a frame, with its class."""
    return frame.f_code.co_qualname


def asked_by_find_spec() -> bool:
    """Return, in a finder, whether ``importlib.util.find_spec`` asks, which returns None for a missing module."""
    code = getattr(importlib.util.find_spec, "__code__", None)
    return any(frame.f_code is code for frame in islice(outwards(caller(2)), 3))


def method_owner(frame: FrameType) -> Any:
    """Return the object whose method runs in a frame, its argument ``self``; None for another function."""
    code = frame.f_code
    return frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None


def made_in(frame: FrameType) -> Any:
    """Return the object whose ``__init__`` runs in a frame; None for another function."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_argcount else None


def arguments_of(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the method that runs in a frame: all but the first, those in ``**kwargs`` among them."""
    names = inspect.getargvalues(frame)
    found = {name: names.locals[name] for name in names.args[1:] if name in names.locals}
    return found | (names.locals.get(names.keywords, {}) if names.keywords else {})
