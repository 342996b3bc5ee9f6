"""Inputs that were not handled as promised when they were found, and are now: each is tried again."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """An input of a target."""

    target: str
    value: Any


ROWS: list[Row] = []
