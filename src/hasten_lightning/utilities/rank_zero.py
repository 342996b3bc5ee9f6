"""Messages and functions of the first process only."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hasten._lib.rank_zero import (
    LightningDeprecationWarning,
    log,
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from hasten._lib.rank_zero import get_rank as _get_rank  # noqa: F401  (programs import it)

rank_zero_module = sys.modules[__name__]


class WarningCache(set[str]):
    """Warns once of each message.

    Example::

        >>> import warnings
        >>> cache = WarningCache()
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     cache.warn("slow")
        ...     cache.warn("slow")
        >>> len(seen)
        1

    """

    def warn(self, message: str, stacklevel: int | None = None, **kwargs: object) -> None:
        """Warn of ``message``, unless this cache did before."""
        self._once(rank_zero_warn, message, stacklevel=stacklevel, **kwargs)

    def deprecation(self, message: str, stacklevel: int = 5, **kwargs: object) -> None:
        """Warn that ``message`` will go away, unless this cache did before."""
        self._once(rank_zero_deprecation, message, stacklevel=stacklevel, **kwargs)

    def info(self, message: str, **kwargs: object) -> None:
        """Log ``message``, unless this cache did before."""
        self._once(rank_zero_info, message, **kwargs)

    def _once(self, function: Callable[..., None], message: str, **kwargs: object) -> None:
        if message not in self:
            self.add(message)
            function(message, **kwargs)


__all__ = [
    "LightningDeprecationWarning", "WarningCache", "log", "rank_prefixed_message",
    "rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only",
    "rank_zero_warn",
]  # fmt: skip
