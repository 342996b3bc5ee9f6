"""Parse durations and intervals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hasten._lib.check import shown
from hasten._lib.errors import MisconfigurationException

# A unit is one letter, a word, or "sec" and "min".
_UNITS = {
    name: unit
    for unit in ("seconds", "minutes", "hours", "days", "weeks")
    for name in (unit, unit[:-1], unit[:1], *({"sec", "min"} & {unit[:3]}))
}
_COUNTS = {"ep": "epochs", "epoch": "epochs", "epochs": "epochs", "st": "steps", "step": "steps", "steps": "steps"}


# Of a number of epochs or steps: more would be a mistake.
_DIGITS = 18


# For ever: a longer time can be added to no other.
_LONGEST = timedelta(days=1_000_000)


@dataclass(frozen=True)
class Period:
    """A number of epochs or optimizer steps, or a time: one of the three."""

    epochs: int | None = None
    steps: int | None = None
    time: timedelta | None = None

    @property
    def unit(self) -> str:
        """Which of the three it is: "epochs", "steps" or "time"."""
        return "epochs" if self.epochs is not None else "steps" if self.steps is not None else "time"


def parse_interval(value: str | dict[str, Any] | timedelta, *, argument: str) -> Period:
    """Read "2ep", "500st", or a time as ``parse_duration`` does.

    Example::

        >>> parse_interval("2ep", argument="max_epochs")
        Period(epochs=2, steps=None, time=None)
        >>> parse_interval("500st", argument="val_check_interval").steps
        500

    """
    count = re.fullmatch(r"(\d+)\s*([a-z]+)", value.strip().lower()) if isinstance(value, str) else None
    if count is None or count.group(2) not in _COUNTS:
        also = "" if _name_of(argument) == "max_time" else "a whole number, "
        return Period(time=parse_duration(value, argument=argument, also=also))
    number = int(count.group(1)[:_DIGITS])
    if number == 0 or len(count.group(1)) > _DIGITS:
        what = f"{argument} got {shown(value)}: it must be {'less than that' if number else 'more than zero'}."
        raise MisconfigurationException(what, argument=_name_of(argument))
    return Period(epochs=number) if _COUNTS[count.group(2)] == "epochs" else Period(steps=number)


def parse_duration(value: str | dict[str, Any] | timedelta, *, argument: str, also: str = "") -> timedelta:
    """Read "DD:HH:MM:SS", "90min", a dict of timedelta's arguments, or a timedelta.

    ``argument`` is how the message shows it, its name last; ``also`` is what else may be written.

    Example::

        >>> parse_duration("00:12:00:00", argument="max_time")
        datetime.timedelta(seconds=43200)
        >>> parse_duration("90min", argument="max_time")
        datetime.timedelta(seconds=5400)

    """
    if not isinstance(value, str):
        return _duration(value, value, argument)
    text = value.strip().lower()
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text)
    if clock:
        parts = zip(("days", "hours", "minutes", "seconds"), map(float, clock.groups()), strict=True)
        return _duration(dict(parts), value, argument)
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if amount and amount.group(2) in _UNITS:
        return _duration({_UNITS[amount.group(2)]: float(amount.group(1))}, value, argument)
    hint = f" A number is written without quotes: {text}." if text.isdecimal() and len(text) <= _DIGITS else ""
    raise MisconfigurationException(
        f"{argument} got {shown(value)}:",
        fix=(
            f"write {also}'DD:HH:MM:SS', for instance '00:12:00:00', or '90min', '2h' (epochs and optimizer steps, "
            f"where they can be given: '2ep', '500st').{hint}"
        ),
        argument=_name_of(argument),
    )


def _duration(parts: dict[str, Any] | timedelta, given: object, argument: str) -> timedelta:
    try:
        time = parts if isinstance(parts, timedelta) else timedelta(**parts)
        if time < timedelta(0) or (not parts and isinstance(parts, dict)):
            raise ValueError("that is no time")
        return min(time, _LONGEST)
    except (TypeError, ValueError, OverflowError) as error:
        what, fix = f"{argument} got {shown(given)}: {error}.", "Use timedelta's arguments, up to timedelta.max."
        raise MisconfigurationException(what, fix=fix, argument=_name_of(argument)) from None


def _name_of(argument: str) -> str:
    """Return the name in an argument as it is shown: "max_time" in "Trainer(max_time=...)"."""
    return argument.removesuffix("=...)").replace("(", " ").rpartition(" ")[2]
