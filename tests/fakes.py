"""Stand-ins for loggers, shared by all tests.

For a callback that does one thing in one hook, use ``LambdaCallback(on_train_start=...)`` of ``hasten.callbacks``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from hasten.callbacks import LambdaCallback
from hasten.loggers import Logger


class RowLogger(Logger):
    """Keeps in memory what it is given: rows of metrics, hyperparameters, models and final statuses."""

    name, version = "rows", 3

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.params: list[dict[str, Any]] = []
        self.graphs: list[Any] = []
        self.statuses: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(isinstance(value, int | float) for value in metrics.values())
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params.append(dict(params))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.graphs.append(model)

    def finalize(self, status: str) -> None:
        self.statuses.append(status)

    def of(self, name: str) -> list[tuple[int | None, Any]]:
        """Return (step, value) of each row that has ``name``; the values compare approximately."""
        return [(step, pytest.approx(row[name])) for step, row in self.rows if name in row]

    def without_epoch(self) -> list[tuple[int | None, dict[str, float]]]:
        """Return the rows without the number of the epoch, which each row has."""
        return [(step, {name: value for name, value in row.items() if name != "epoch"}) for step, row in self.rows]


def watching(note: Callable[[str, Any], object], *hooks: str) -> LambdaCallback:
    """Return a callback that calls ``note(hook, trainer)`` in each of ``hooks``."""

    def in_hook(hook: str, trainer: Any, *_: Any) -> None:
        note(hook, trainer)

    return LambdaCallback(**{hook: functools.partial(in_hook, hook) for hook in hooks})
