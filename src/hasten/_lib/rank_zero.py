"""Messages and functions of the first process only."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hasten.extend.origin import caller_outside, is_builtin_file

_F = TypeVar("_F", bound=Callable[..., Any])

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


def rank_zero_only(function: _F, default: Any = None) -> _F:
    """Wrap ``function`` to return ``default`` without a call on all processes but the first."""

    @functools.wraps(function)
    def on_first(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if rank_zero_only.rank == 0 else default  # type: ignore[attr-defined]

    return on_first  # type: ignore[return-value]


rank_zero_only.rank = _rank()  # type: ignore[attr-defined]


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
    message: Any, category: type[Warning] = UserWarning, stacklevel: int | None = None, **kwargs: Any
) -> None:
    """Warn, on the first process.

    Args:
        message: the message.
        category: the kind of warning.
        stacklevel: as for ``warnings.warn``; by default the line of the user's program.
        kwargs: for ``warnings.warn``.

    """
    warnings.warn(
        message, category, stacklevel=caller_outside(is_builtin_file)[0] if stacklevel is None else stacklevel, **kwargs
    )


class LightningDeprecationWarning(DeprecationWarning):
    """A feature that will go away; Python's ``DeprecationWarning`` under Lightning's name."""


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of a deprecated feature."""
    warnings.warn(message, **{"category": LightningDeprecationWarning, **kwargs}, stacklevel=stacklevel)


class PossibleUserWarning(UserWarning):
    """A warning of something that may be intended."""


_warned: set[str] = set()


@contextmanager
def messages_later() -> Iterator[None]:
    """Keep messages quiet in the block, and let ``warn_once`` warn again after it of what it has warned in it."""

    def silent(record: object) -> bool:
        return False

    before = set(_warned)
    log.addFilter(silent)
    try:
        yield
    finally:
        log.removeFilter(silent)
        _warned.clear()
        _warned.update(before)


def warn_once(key: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warn once per process for each ``key``."""
    if key not in _warned:
        _warned.add(key)
        rank_zero_warn(message, category)
