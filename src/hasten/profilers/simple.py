"""SimpleProfiler: the time of every action, and where the time of a step goes."""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict

from hasten._lib import check
from hasten._lib.names import without_unknown
from hasten.profilers.base import Profiler

# The parts of a run, in the order of a step. What belongs to none of them is "other".
PARTS = (
    "data wait", "transfer", "forward", "backward", "optimizer", "callbacks", "logging", "checkpoint", "validation",
    "other", "start and end",
)  # fmt: skip
# The whole of a run: its time is what the parts sum to.
LOOP = "run_loop"
_OF_A_STEP = "run_training_batch"

# By regular expressions of actions; the first one that matches.
_PART_OF = {
    LOOP: "start and end",
    rf"run_training_epoch|{_OF_A_STEP}": "other",
    r"run_evaluation": "validation",
    r"\[_\w+\]\.\w+_next": "data wait",
    r".*(batch_to_device|on_before_batch_transfer|on_after_batch_transfer)": "transfer",
    r"\[(Strategy|LightningModule)\].*\.(training|validation|test|predict)_step": "forward",
    r"\[(Strategy|LightningModule)\].*\.backward": "backward",
    r"\[(Strategy|LightningModule)\].*\.(optimizer_step|optimizer_zero_grad|configure_gradient_clipping"
    r"|lr_scheduler_step)": "optimizer",
    r"\[Callback\].*": "callbacks",
    r"\[Lightning(Module|DataModule)\].*\.on_\w+": "callbacks",
    r"\[Logging\].*": "logging",
    r"save_checkpoint": "checkpoint",
}


def part_of(action_name: str) -> str | None:
    """Return the part of a step that an action belongs to; None if it belongs to the action around it.

    Example::

        >>> part_of("[_TrainingEpochLoop].train_dataloader_next"), part_of("my own action")
        ('data wait', None)

    """
    return next((part for pattern, part in _PART_OF.items() if re.fullmatch(pattern, action_name)), None)


class SimpleProfiler(Profiler):
    """Record how long each action takes; at the end say where the time of a step went.

    The report has two tables: the parts of the run (data wait, transfer, forward, backward, optimizer,
    callbacks, logging, checkpoint, validation, other, start and end), each moment counted once so that they
    sum to the wall time, and every action with its calls. Actions contain those inside them.

    On a GPU these are the times of the Python program: the device works behind it, and the wait for it shows
    where the program waits. Use PyTorchProfiler for the time of kernels.

    Args:
        dirpath: folder of the file; the folder of the logs by default.
        filename: write the report to a file of this name instead of logging it; ``.txt`` is appended.
        extended: also say how many calls there were, and their share of the time.

    Raises:
        ValueError: an action is started twice, or stopped without a start.

    Example::

        >>> profiler = SimpleProfiler()
        >>> with profiler.profile("sleep"):
        ...     time.sleep(0.01)
        >>> [duration >= 0.01 for duration in profiler.recorded_durations["sleep"]]
        [True]

    """

    @without_unknown
    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        check.declared(SimpleProfiler.__init__, locals())
        super().__init__(dirpath=dirpath, filename=filename)
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.extended = extended
        self.start_time = time.perf_counter()
        # Seconds of each part, and the parts of the actions that are open, the innermost last.
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._open: list[tuple[str, str]] = []
        self._last = 0.0
        self._parts: dict[str, str | None] = {}
        self._before: dict[str, int] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Reset the table of the parts, which is about one run."""
        super().setup(stage, local_rank, log_dir)
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._before = {action: len(durations) for action, durations in self.recorded_durations.items()}
        # Only training has epochs around its batches; in the other stages the whole loop is their work.
        self._parts = {} if stage == "fit" else {LOOP: "other"}

    def start(self, action_name: str) -> None:
        """Begin an action."""
        if action_name in self.current_actions:
            raise ValueError(f"Attempted to start {action_name} which has already started.")
        now = time.perf_counter()
        self.current_actions[action_name] = now
        if self._open or action_name == LOOP:
            self._begin(action_name, now)

    def stop(self, action_name: str) -> None:
        """End an action."""
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        self.recorded_durations[action_name].append(now - self.current_actions.pop(action_name))
        if self._open:
            self._end(action_name, now)

    def _begin(self, action_name: str, now: float) -> None:
        try:
            part = self._parts[action_name]
        except KeyError:
            part = self._parts[action_name] = part_of(action_name)
        if self._open:
            around = self._count(now)
            # Within validation all is validation: a step of training is what the table is about.
            if part is None or around == "validation":
                part = around
        self._open.append((action_name, part or "other"))
        self._last = now

    def _count(self, now: float) -> str:
        """Add the time since the last moment to the innermost part, and return that."""
        part = self._open[-1][1]
        self._seconds[part] += now - self._last
        self._last = now
        return part

    def _end(self, action_name: str, now: float) -> None:
        self._count(now)
        # Usually the last one; a user's action may end out of order.
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == action_name:
                del self._open[index]
                return

    @property
    def part_seconds(self) -> dict[str, float]:
        """Seconds of the run so far by part (data wait, forward, ...), up to now."""
        if self._open:
            self._count(time.perf_counter())
        return dict(self._seconds)

    def summary(self) -> str:
        """Return both tables."""
        lines = [self._title(), ""]
        has_parts = bool(self._new(LOOP))
        if has_parts:
            lines += [*self._table_of_parts(), ""]
        if self.recorded_durations:
            lines += ["Actions (each contains those inside it):"] * has_parts
            lines += [*self._table_of_actions(), ""]
        return "\n".join(lines)

    def _table_of_parts(self) -> list[str]:
        total = math.fsum(self._seconds.values())
        steps = self._new(_OF_A_STEP)
        each = f" of {steps} training batches" if steps else ""
        head = ["Part", "Time (s)", "Share (%)", "Per batch (ms)"]
        rows = [
            [part, f"{s:.5}", f"{100 * s / (total or 1):.1f}", f"{1000 * s / (steps or 1):.3f}"]
            for part, s in [*self._seconds.items(), ("total", total)]
            if s or part == "total"
        ]
        columns = 4 if steps else 3
        table = _table(head[:columns], [row[:columns] for row in rows])
        return [f"Where the time{each} went (each moment is counted once):", *table]

    def _new(self, action_name: str) -> int:
        return len(self.recorded_durations.get(action_name, ())) - self._before.get(action_name, 0)

    def _table_of_actions(self) -> list[str]:
        if not self.extended:
            head = ["Action", "Mean duration (s)", "Total time (s)"]
            means = [[action, f"{mean:.5}", f"{total:.5}"] for action, mean, total in self._make_report()]
            return _table_of_tabs(head, [means])
        head = ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
        report, calls, seconds = self._make_report_extended()
        rows = [
            [action, f"{mean:.5}", str(count), f"{total:.5}", f"{share:.5}"]
            for action, mean, count, total, share in report
        ]
        return _table_of_tabs(head, [[["Total", "-", str(calls), f"{seconds:.5}", "100 %"]], rows])

    # -- subclasses with a report of their own use these

    def _make_report(self) -> list[tuple[str, float, float]]:
        """Return action, mean seconds and total seconds of each action, those with the longest mean first."""
        totals = {action: math.fsum(times) for action, times in self.recorded_durations.items()}
        rows = [(action, total / len(self.recorded_durations[action]), total) for action, total in totals.items()]
        return sorted(rows, key=lambda row: row[1], reverse=True)

    def _make_report_extended(self) -> tuple[list[tuple[str, float, int, float, float]], int, float]:
        """Return rows of action, mean, calls, total and share in percent; the number of calls; the seconds so far."""
        seconds = time.perf_counter() - self.start_time
        rows = []
        for action, times in self.recorded_durations.items():
            total = math.fsum(times)
            rows.append((action, total / len(times), len(times), total, 100 * total / seconds))
        rows.sort(key=lambda row: row[4], reverse=True)
        return rows, sum(row[2] for row in rows), seconds


def _table_of_tabs(head: list[str], groups: list[list[list[str]]]) -> list[str]:
    """Return groups of rows under a heading, in the columns that programs which read Lightning's report expect."""
    width = max(len(row[0]) for rows in [[head], *groups] for row in rows)

    def line(cells: list[str]) -> str:
        first, *others = cells
        return "\t|".join(["|  " + f"{first:<{width}}", *(f"  {cell:<15}" for cell in others), ""])

    rule = "-" * (len(line(head).expandtabs()) + 1)
    lines = [rule, line(head), rule]
    for rows in groups:
        lines += [*map(line, rows), rule]
    return lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return rows under a heading, the last one set apart."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *others = cells
        numbers = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        return "|  " + "  |  ".join([f"{first:<{widths[0]}}", *numbers]) + "  |"

    rule = "-" * (sum(widths) + 5 * len(widths) + 1)
    *body, last = map(line, rows)
    return [rule, line(head), rule, *body, rule, last, rule]
