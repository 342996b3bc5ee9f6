"""ModelCheckpoint's arguments: all checks and their texts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from hasten._lib.durations import Interval, parse_interval
from hasten._lib.errors import MisconfigurationException
from hasten.callbacks.checkpoint_names import check_template
from hasten.callbacks.monitored import check_mode, check_monitor
from hasten.loggers.folders import is_url, local


def check_arguments(
    *,
    filename: Any,
    monitor: Any,
    save_last: Any,
    save_top_k: Any,
    mode: Any,
    every_n_train_steps: Any,
    train_time_interval: Any,
    every_n_epochs: Any,
) -> tuple[int, int, timedelta | None]:
    """Check arguments; return (steps, epochs, time) between saves, with 0 and None for "does not count".

    Raises:
        TypeError: an argument has a type it cannot have.
        MisconfigurationException: an argument is out of range, or two contradict each other.

    """
    check_mode("ModelCheckpoint", mode)
    if monitor is not None:
        check_monitor("ModelCheckpoint", monitor)
    if filename is not None:
        check_template(filename, "ModelCheckpoint(filename)")
    if save_last not in (None, True, False, "link"):
        raise MisconfigurationException(
            f"ModelCheckpoint(save_last={save_last!r}): use True, False or 'link'."
        )
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise MisconfigurationException(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): Must be >= -1: how many to keep, -1 for all, 0 for none."
        )
    if monitor is None and save_top_k not in (-1, 0, 1):
        raise MisconfigurationException(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: nothing says "
            "which are the best. Give monitor=, or save_top_k=-1 to keep all, 1 to keep the newest."
        )
    given = {
        "every_n_train_steps": every_n_train_steps,
        "every_n_epochs": every_n_epochs,
        "train_time_interval": train_time_interval,
    }
    # "2ep", "500st" and "90min" mean the same wherever they are written.
    units = {name: _interval(name, value) for name, value in given.items()}
    times = [each.time for each in units.values() if each is not None and each.time is not None]
    steps = _sum(each.steps for each in units.values() if each is not None)
    epochs = _sum(each.epochs for each in units.values() if each is not None)
    interval = times[0] if times else None
    if (steps > 0) + (epochs > 0) + (interval is not None) > 1 or len(times) > 1:
        raise MisconfigurationException(
            f"ModelCheckpoint(every_n_train_steps={every_n_train_steps}, every_n_epochs={every_n_epochs}, "
            f"train_time_interval={train_time_interval}): these should be mutually exclusive. Use one "
            "ModelCheckpoint for each."
        )
    if all(each is None for each in units.values()):
        epochs = 1
    return steps, epochs, interval


def check_folder(dirpath: Any) -> str | None:
    """Return ``dirpath`` as an absolute path or URL; None stays None (the logger's folder)."""
    if dirpath is None:
        return None
    if not isinstance(dirpath, (str, os.PathLike)):
        raise TypeError(f"ModelCheckpoint(dirpath={dirpath!r}): use a path, or None for the logger's folder.")
    path = os.fspath(dirpath)
    if not path:
        return None
    return path if is_url(path) else os.path.realpath(os.path.expanduser(local(path)))


def _interval(name: str, value: Any) -> Interval | None:
    if value is None:
        return None
    if isinstance(value, (str, dict, timedelta)):
        return parse_interval(value, argument=f"ModelCheckpoint({name})")
    if name == "train_time_interval":
        raise TypeError(
            f"ModelCheckpoint({name}={value!r}): use a datetime.timedelta, or a text such as '90min'."
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"ModelCheckpoint({name}={value!r}): use a whole number.")
    if value < 0:
        raise MisconfigurationException(f"ModelCheckpoint({name}={value}): Must be >= 0.")
    return Interval(steps=value) if name == "every_n_train_steps" else Interval(epochs=value)


def _sum(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)
