"""Durations as users write them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

_UNITS = {
    "s": "seconds", "sec": "seconds", "second": "seconds", "seconds": "seconds",
    "m": "minutes", "min": "minutes", "minute": "minutes", "minutes": "minutes",
    "h": "hours", "hour": "hours", "hours": "hours",
    "d": "days", "day": "days", "days": "days",
    "w": "weeks", "week": "weeks", "weeks": "weeks",
}  # fmt: skip


def parse_duration(value: str | dict[str, Any] | timedelta, *, argument: str) -> timedelta:
    """Read "DD:HH:MM:SS", "90min", a dict of timedelta's arguments, or a timedelta.

    Args:
        value: what the user wrote.
        argument: whose value it is, for the message.

    Raises:
        ValueError: it cannot be read.

    Example::

        >>> parse_duration("00:12:00:00", argument="max_time")
        datetime.timedelta(seconds=43200)
        >>> parse_duration("90min", argument="max_time")
        datetime.timedelta(seconds=5400)

    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, dict):
        try:
            return timedelta(**value)
        except TypeError as error:
            raise ValueError(f"{argument} got {value!r}: {error}. Use timedelta's arguments.") from None
    text = value.strip().lower()
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text)
    if clock:
        days, hours, minutes, seconds = (int(part) for part in clock.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if amount and amount.group(2) in _UNITS:
        return timedelta(**{_UNITS[amount.group(2)]: float(amount.group(1))})
    raise ValueError(
        f"{argument} got {value!r}: write 'DD:HH:MM:SS', for instance '00:12:00:00', or '90min', '2h'."
    )
