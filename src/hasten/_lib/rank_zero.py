"""Messages and functions of the first process only."""

from __future__ import annotations

import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from hasten._lib.errors import make_error
from hasten.extend import frames
from hasten.extend.origin import FOLDERS

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger("hasten")
log.setLevel(logging.INFO)
if not log.handlers and not logging.getLogger().handlers:
    # Messages go to stderr, unless the program configures logging itself.
    log.addHandler(logging.StreamHandler())
    log.propagate = False


def _rank() -> int:
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        value = os.environ.get(name)
        if value is not None and value.isdigit():
            return int(value)
    return 0


class RankZeroOnly(Protocol):
    """The type of ``rank_zero_only``: a function that has the number of this process, which programs may set."""

    rank: int

    def __call__(self, function: Callable[_P, _T], default: Any = None) -> Callable[_P, _T]:
        """Wrap ``function`` to return ``default`` without a call on all processes but the first."""


def _with_rank(function: Callable[..., Any]) -> RankZeroOnly:
    decorator = cast("RankZeroOnly", function)
    decorator.rank = _rank()
    return decorator


@_with_rank
def rank_zero_only(function: Callable[_P, _T], default: Any = None) -> Callable[_P, _T]:
    """Wrap ``function`` to return ``default`` without a call on all processes but the first."""

    @functools.wraps(function)
    def on_first(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if rank_zero_only.rank == 0:
            return function(*args, **kwargs)
        absent: _T = default
        return absent

    return on_first


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return ``message`` with the rank in front, if there is one."""
    return message if rank is None else f"[rank: {rank}] {message}"


def get_rank() -> int | None:
    """Return the rank of this process that a launcher has set; None if none has."""
    # SLURM_PROCID may be set where SLURM starts no processes.
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


@rank_zero_only
def rank_zero_info(message: Any, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message at level INFO, once; ``stacklevel`` and ``kwargs`` as for ``logging``."""
    log.info(message, *args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_debug(message: Any, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message at level DEBUG, once; ``stacklevel`` and ``kwargs`` as for ``logging``."""
    log.debug(message, *args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(
    message: Any, category: type[Warning] = UserWarning, stacklevel: int | None = None, *, fix: str = "", **kwargs: Any
) -> None:
    """Warn, on the first process.

    Args:
        message: the message; with ``fix``, the part of it that says what is wrong.
        category: the kind of warning.
        stacklevel: as for ``warnings.warn``; by default the line of the user's program.
        fix: what to write instead. It is the end of the message, and an attribute of the warning.
        kwargs: for ``warnings.warn``.

    """
    if fix:
        message = make_error(category, message, fix=fix)
    warnings.warn(message, category, stacklevel=_users_level() if stacklevel is None else stacklevel, **kwargs)


def _users_level() -> int:
    """Return the stacklevel, seen from the caller, of the first frame outside this package."""
    running = enumerate(frames.outwards(frames.caller()), 1)
    return next((level for level, frame in running if not frames.file_of(frame).startswith(FOLDERS)), 1)


class LightningDeprecationWarning(DeprecationWarning):
    """A feature that will go away; Python's ``DeprecationWarning`` under Lightning's name."""


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of a deprecated feature."""
    warnings.warn(message, **{"category": LightningDeprecationWarning, **kwargs}, stacklevel=stacklevel)


class PossibleUserWarning(UserWarning):
    """A warning of something that may be intended."""


# Which warnings were given, and of which object if they are about one.
_warned: dict[str, weakref.ref[Any] | None] = {}


@contextmanager
def messages_later() -> Iterator[None]:
    """Suppress messages in the block; ``warn_once`` repeats its warnings from the block after it."""

    def silent(record: object) -> bool:
        return False

    before = dict(_warned)
    log.addFilter(silent)
    try:
        yield
    finally:
        log.removeFilter(silent)
        _warned.clear()
        _warned.update(before)


def forget_warnings() -> None:
    """Have ``warn_once`` give each warning once more."""
    _warned.clear()


def warn_once(
    key: str, message: str, category: type[Warning] = UserWarning, *, fix: str = "", of: object = None
) -> None:
    """Warn once per process for each ``key``, and with ``of`` for each object; the others as in ``rank_zero_warn``."""
    # An id alone would be that of another object after this one is gone.
    name = key if of is None else f"{key} {id(of)}"
    seen = _warned.get(name)
    if name not in _warned or (seen is not None and seen() is not of):
        _warned[name] = None if of is None else weakref.ref(of)
        rank_zero_warn(message, category, fix=fix)
