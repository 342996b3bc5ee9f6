"""The nearest name to one that does not exist."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable


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
