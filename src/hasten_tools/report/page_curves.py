"""The curves of a report: which names share a panel, and few enough points to draw them at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hasten_tools.report.curves import panel_of, thinned, title_of
from hasten_tools.report.read import RecordedRun
from hasten_tools.report.rows import RecordedColumn

# Points of a curve at most: more cannot be seen before zooming in, and the page stays light.
POINTS = 2000
# Panels for which the page has room; what is logged besides is named.
PANELS = 60
_RATE = "Learning rate"
# Panel, unit and name of the figures of a run, except learning rates.
_FIGURES = {
    "samples_per_sec": ("Samples per second", "", "samples/s"),
    "tokens_per_sec": ("Tokens per second", "", "tokens/s"),
    "data wait": ("Waiting for data", "% of the time", "data wait"),
    "MFU": ("MFU", "%", "MFU"),
    "memory": ("Memory of the device", "GiB, peak", "memory"),
}


@dataclass
class Panel:
    """One figure of the page: all curves of a quantity, as plain data for its script."""

    title: str
    # What the numbers are, if the title does not say it.
    unit: str = ""
    curves: list[dict[str, Any]] = field(default_factory=list)


class Epochs:
    """Where steps are within epochs, of which ``ends`` are the largest steps: 2.5 is the middle of the third."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        self._ends = ends
        self._newest = max(ends, default=0)

    def __call__(self, step: int, epoch: int | None) -> float | None:
        if epoch is None:
            return None
        before = self._ends.get(epoch - 1, -1 if epoch == 0 else step - 1)
        length = self._ends.get(epoch, step) - before
        if epoch == self._newest and epoch - 1 in self._ends:
            # It may be going on: as long as the one before, at least.
            length = max(length, self._ends[epoch - 1] - self._ends.get(epoch - 2, -1))
        return epoch + min(1.0, (step - before) / length) if length > 0 else float(epoch)


def panels(runs: Sequence[RecordedRun]) -> tuple[list[Panel], list[Panel], list[str]]:
    """Return the panels of what was logged, those of speed and learning rate, and sentences about what was left out."""
    logged: dict[str, Panel] = {}
    rates: dict[str, Panel] = {}
    longest = 0
    for place, run in enumerate(runs):
        epochs = Epochs(run.rows.ends())
        # The epoch and the step say nothing themselves.
        names = [name for name in run.rows.names() if name not in ("epoch", "step")]
        has_rate = any(panel_of(name)[0].partition("-")[0] == "lr" for name in names)
        for name in names:
            column = run.rows.column(name)
            assert column is not None
            longest = max(longest, len(column.values))
            quantity, stage = panel_of(name)
            is_rate = quantity == "lr" or quantity.startswith("lr-")
            title = _RATE if is_rate else title_of(quantity)
            panel = (rates if is_rate else logged).setdefault(title, Panel(title))
            panel.curves.append(_curve(run, place, name, stage, column, epochs))
        for title, unit, name, column in _of_speed(run, has_rate=has_rate):
            panel = rates.setdefault(title, Panel(title, unit))
            panel.curves.append(_curve(run, place, name, "training", column, epochs))
    notes = []
    if longest > POINTS:
        notes.append(
            f"Curves of more than {POINTS:,} values are drawn with the smallest and the largest value of each of "
            f"{(POINTS - 2) // 2:,} stretches. All values are in the files of the run."
        )
    shown = sorted(logged.values(), key=_rank)
    if len(shown) > PANELS:
        left_out = [curve["name"] for panel in shown[PANELS:] for curve in panel.curves]
        notes.append(f"{len(shown) - PANELS} more quantities are not drawn, such as {left_out[0]!r}.")
    order = [title for title, _, _ in _FIGURES.values()]
    speeds = sorted(rates.values(), key=lambda panel: order.index(panel.title) if panel.title in order else len(order))
    return shown[:PANELS], speeds, notes


def _of_speed(run: RecordedRun, *, has_rate: bool) -> Iterator[tuple[str, str, str, RecordedColumn]]:
    """Yield panel, unit, name and values of each figure of a run, without learning rates that were logged anyway."""
    for name, column in run.figures().items():
        title, unit, label = _FIGURES.get(name, (_RATE, "", name))
        if title != _RATE or not has_rate:
            yield title, unit, label, column


def _rank(panel: Panel) -> tuple[bool, bool]:
    # What training and validation share comes first, and losses before other things.
    stages = {curve["stage"] for curve in panel.curves}
    return "loss" not in panel.title.lower(), len(stages) < 2


def _curve(
    run: RecordedRun, place: int, name: str, stage: str, column: RecordedColumn, epochs: Epochs
) -> dict[str, Any]:
    kept = thinned(column.values, POINTS)
    steps = column.steps[kept].tolist()
    places = [None if math.isnan(one) else int(one) for one in column.epochs[kept].tolist()]
    in_epochs = [epochs(step, epoch) for step, epoch in zip(steps, places, strict=True)]
    times = column.times[kept].tolist()
    finite = column.values[np.isfinite(column.values)]
    return {
        "run": place,
        "name": name,
        "stage": stage,
        "step": steps,
        "epoch": [None if one is None else round(one, 4) for one in in_epochs],
        "time": [None if math.isnan(one) else round(run.elapsed(one), 3) for one in times],
        "y": [_with_six_digits(one) for one in column.values[kept].tolist()],
        "count": len(column.values),
        "not_finite": len(column.values) - len(finite),
        "last": _with_six_digits(column.values[-1]),
        "least": _with_six_digits(finite.min()) if len(finite) else None,
        "most": _with_six_digits(finite.max()) if len(finite) else None,
    }


def _with_six_digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
