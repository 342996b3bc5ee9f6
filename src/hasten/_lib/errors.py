"""Exceptions, the parts of their messages and their tracebacks, and classes of Lightning that hasten does not have."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import groupby
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from hasten.extend import frames
from hasten.extend.origin import is_builtin_file

_Error = TypeVar("_Error", bound=BaseException)


class Parts(NamedTuple):
    """The parts of a message: what is wrong, with the value; what to write; the wrong argument. "" for none."""

    what: str
    fix: str = ""
    argument: str = ""


def message_of(what: object, fix: str) -> str:
    """Return the text that users see: what is wrong, and what to write instead.

    Example::

        >>> message_of("Net has no training_step().", "Define it.")
        'Net has no training_step(). Define it.'

    """
    return f"{what} {fix.strip()}" if fix else str(what)


def parts_of(message: BaseException | str) -> Parts:
    """Return the parts of an error or a warning; those of other libraries and of programs say what is wrong alone.

    Example::

        >>> parts_of(make_error(TypeError, "fit(model=3): 3 is an int.", fix="Use a module.", argument="model"))
        Parts(what='fit(model=3): 3 is an int.', fix='Use a module.', argument='model')
        >>> parts_of(TypeError("unhashable type: 'list'"))
        Parts(what="unhashable type: 'list'", fix='', argument='')

    """
    kept = getattr(message, "__dict__", {})
    if "what" in kept and "fix" in kept:
        return Parts(kept["what"], kept["fix"], kept.get("argument", ""))
    return Parts(str(message))


def with_article(kind: type) -> str:
    """Return the name of a type with its article: "a str", "an int"."""
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def make_error(kind: type[_Error], what: str, *, fix: str = "", argument: str = "", **options: Any) -> _Error:
    """Return an exception or a warning that keeps the parts of its message as ``what``, ``fix`` and ``argument``.

    ``what`` is what is wrong, with the value that was given, ``fix`` what to write instead; the text that users see is
    both. Its class needs no such attributes: they are set on the object, and pickled and copied with it.

    Example::

        >>> error = make_error(RuntimeError, "The port is in use.", fix="Choose another one.")
        >>> str(error)
        'The port is in use. Choose another one.'
        >>> error.fix
        'Choose another one.'

    """
    error = kind(message_of(what, fix), **options)
    vars(error).update(what=what, fix=fix.strip(), argument=argument)
    return error


def add_note(error: BaseException, what: str, *, fix: str = "") -> None:
    """Add a note to an error; ``notes_of`` returns its parts."""
    error.add_note(message_of(what, fix).strip())
    noted: dict[str, Parts] = vars(error).setdefault("_hasten_notes", {})
    noted[error.__notes__[-1]] = Parts(what, fix)


def notes_of(error: BaseException) -> list[Parts]:
    """Return the notes of an error in parts; those that others have added say what is wrong alone.

    Example::

        >>> error = RuntimeError("CUDA out of memory.")
        >>> add_note(error, "The batch is too large.", fix="Use micro_batch='auto'.")
        >>> error.add_note("Seen on a Monday.")
        >>> [note.fix for note in notes_of(error)]
        ["Use micro_batch='auto'.", '']

    """
    noted: dict[str, Parts] = getattr(error, "_hasten_notes", {})
    return [noted.get(note, Parts(note)) for note in getattr(error, "__notes__", ())]


class ErrorWithFix(Exception):
    """An exception whose message has parts; ``str`` of it is the whole message."""

    def __init__(self, what: object = "", *others: object, fix: str = "", argument: str = "") -> None:
        super().__init__(message_of(what, fix), *others)
        self.what = str(what)
        self.fix = fix.strip()
        self.argument = argument


class MisconfigurationException(ErrorWithFix, ValueError):
    """Raised for arguments that cannot work, alone or together; ``fix`` says what to change."""


class WrongType(MisconfigurationException, TypeError):
    """Raised for an argument of a wrong type; programs catch either name."""


class NotPartOfLightning2(MisconfigurationException, NotImplementedError):
    """Raised for features that were removed, where Lightning raises a ``NotImplementedError``."""


class MisconfigurationRuntimeError(MisconfigurationException, RuntimeError):
    """Raised for a setup that cannot work, where programs expect a ``RuntimeError``."""


class MissingPackage(MisconfigurationException, ModuleNotFoundError):
    """Raised for a setup that needs a package which is not installed, ``name``; programs catch either class."""

    def __init__(self, what: object = "", *, name: str | None = None, **parts: str) -> None:
        super().__init__(what, **parts)
        self.name = name


class NoDataloader(MisconfigurationException, NotImplementedError):
    """Raised by a ``*_dataloader`` hook that a class does not define."""


class BadLossError(ErrorWithFix, FloatingPointError):
    """The run ended because a loss or its gradient is not finite; the weights are those before that step."""


class CheckpointDamaged(ErrorWithFix, RuntimeError):
    """Raised for a file or folder that is not a whole checkpoint."""


class CheckpointRefused(ErrorWithFix, RuntimeError, pickle.UnpicklingError):
    """Raised for a file that cannot be read without running code from it; torch.load raises the last class."""


def absent(name: str, base: type, *, home: str, instead: str, why: str = "is not in this version of hasten") -> Any:
    """Return a class for ``import``, type hints, subclasses and ``isinstance``, whose constructor raises.

    ``home`` is the module that offers it, ``instead`` a sentence that says what to use, ``why`` the reason, as the rest
    of a sentence about the name.

    Example::

        >>> Exotic = absent("Exotic", dict, home="here", instead="Use dict.")
        >>> isinstance({}, Exotic)
        False
        >>> Exotic()
        Traceback (most recent call last):
            ...
        hasten._lib.errors.NotPartOfLightning2: Exotic is not in this version of hasten. Use dict.

    """

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise NotPartOfLightning2(f"{name} {why}.", fix=instead)

    members = {
        "__new__": refuse,
        "__module__": home,
        "__qualname__": name,
        "__doc__": f"Not in this version of hasten. {instead}",
        "__absent__": True,
    }
    return type(name, (base,), members)


def is_absent(kind: object) -> bool:
    """Return whether ``kind`` is a class made by ``absent``."""
    return isinstance(kind, type) and "__absent__" in vars(kind)


# -- shorter tracebacks: without most of hasten's frames between a call of the program and its error

# Set it to anything to see all frames.
SHOW_ALL = "HASTEN_FULL_TRACEBACK"

_TORCH_CALLS = os.path.join("torch", "nn", "modules", "module.py")
# Of consecutive frames of hasten, the first and the last are kept; the last calls the program's code or raises the
# error. The first group of frames, which leads to the loop, keeps one more.
_KEPT, _KEPT_OF_FIRST = 2, 3


def shorten(error: BaseException) -> None:
    """Remove most of hasten's frames, and torch's calls of ``forward``, from the traceback of an error and its causes.

    All frames stay if an assertion of hasten failed. A debugger that stops where an error is raised sees all frames.
    """
    if os.environ.get(SHOW_ALL) or _is_bug_of_ours(error):
        return
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        one.__traceback__ = _shortened(one.__traceback__)


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    shown_ones = (entry for entry in _entries(trace) if not is_call_of_torch(entry.tb_frame))
    for ours, entries in groupby(shown_ones, key=_is_ours):
        row = list(entries)
        most = _KEPT if kept else _KEPT_OF_FIRST
        kept += row[:1] + row[1 - most :] if ours and len(row) > most else row
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_bug_of_ours(error: BaseException) -> bool:
    *_, last = [None, *_entries(error.__traceback__)]
    return isinstance(error, AssertionError) and last is not None and _is_ours(last)


def is_call_of_torch(frame: FrameType) -> bool:
    """Return whether a frame is of the functions through which torch calls ``forward``."""
    return frames.name_of(frame) in ("_wrapped_call_impl", "_call_impl") and frames.file_of(frame).endswith(
        _TORCH_CALLS
    )


def _is_ours(entry: TracebackType) -> bool:
    return is_builtin_file(frames.file_of(entry.tb_frame))
