"""What was measured of a workload, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workloads.columns import LOWER_PRECISION

# Losses of so many steps are compared, and how far they may differ from the plain loop's, relative to them.
COMPARED_STEPS = 6
TOLERANCE, LOWER_TOLERANCE = 1e-3, 5e-2


@dataclass
class Column:
    """The turns of one column.

    Args:
        start_seconds: from the start of the process to the end of the first step: imports, data and compiling.
        losses: of all steps.

    """

    start_seconds: float
    losses: list[float]
    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    turn_steps: int = 1
    qualities: list[float] = field(default_factory=list)
    steps_to_goal: int | None = None
    seconds_to_goal: float | None = None

    def add(self, report: dict[str, Any], steps: int, *, is_reached: bool) -> None:
        """Add the report of a turn."""
        self.turn_steps = steps
        self.wall_seconds.append(report["wall_seconds"])
        self.cpu_seconds.append(report["cpu_seconds"])
        self.losses += report["losses"]
        if self.peak_bytes is None:
            # Of the first turn: later ones include evaluations.
            self.peak_bytes = report["peak_bytes"]
        if "quality" in report:
            self.qualities.append(report["quality"])
        if is_reached and self.steps_to_goal is None:
            self.steps_to_goal = len(self.losses)
            self.seconds_to_goal = self.start_seconds + sum(self.wall_seconds)

    @property
    def step_seconds(self) -> float:
        """The median time of a step, without the first turn."""
        return statistics.median(self.wall_seconds[1:] or self.wall_seconds) / self.turn_steps


@dataclass
class Measured:
    """All columns of a workload."""

    name: str
    title: str
    goal_text: str
    max_steps: int
    useful_flops: float
    columns: dict[str, Column] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def factor(self, column: str, over: str) -> float | None:
        """Return how many times as fast a column is as another one: the median over the rounds."""
        if over not in self.columns:
            return None
        pairs = list(zip(self.columns[over].wall_seconds, self.columns[column].wall_seconds, strict=False))
        return statistics.median(theirs / mine for theirs, mine in pairs[1:] or pairs)

    def engineer(self, column: str) -> str:
        """Return the engineer's column of the same precision."""
        return "engineer-bf16" if column in LOWER_PRECISION else "engineer"

    def distance(self, column: str) -> float | None:
        """Return how far the first losses are from the plain loop's, relative to them."""
        reference = self.columns.get("tutorial") or self.columns.get("lightning")
        if reference is None:
            return None
        pairs = zip(reference.losses[:COMPARED_STEPS], self.columns[column].losses[:COMPARED_STEPS], strict=False)
        return max(abs(mine - theirs) / abs(theirs) for theirs, mine in pairs)

    def is_equal(self, column: str) -> bool:
        """Say whether the first losses are the plain loop's within the tolerance of the precision."""
        distance = self.distance(column)
        return distance is None or distance <= (LOWER_TOLERANCE if column in LOWER_PRECISION else TOLERANCE)

    def share(self, column: str, peaks: dict[str, float | None]) -> float | None:
        """Return the share of the measured peak that is useful arithmetic."""
        peak = peaks["bfloat16" if column in LOWER_PRECISION else "float32"]
        return self.useful_flops / self.columns[column].step_seconds / peak if peak and self.useful_flops else None

    def as_json(self, peaks: dict[str, float | None]) -> dict[str, Any]:
        """Return everything measured."""
        rows = {}
        for name, column in self.columns.items():
            rows[name] = {
                "step_ms": column.step_seconds * 1e3,
                "over_tutorial": self.factor(name, "tutorial"),
                "over_engineer": self.factor(name, self.engineer(name)),
                "over_lightning": self.factor(name, "lightning"),
                "share_of_peak": self.share(name, peaks),
                "loss_distance": self.distance(name),
                **vars(column),
            }
        facts = {"name": self.name, "title": self.title, "goal": self.goal_text, "useful_flops": self.useful_flops}
        return {**facts, "columns": rows, "left_out": self.left_out}


LINE = "{:<14} {:>9} {:>9} {:>9} {:>10} {:>7} {:>8} {:>7} {:>6} {:>6}  {}"
HEAD = LINE.format(
    *("column", "ms/step", "tutorial", "engineer", "lightning", "steps", "seconds", "MiB", "start", "peak", "loss")
)


def heading(facts: dict[str, Any]) -> str:
    """Return where the figures come from."""
    peaks = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in facts["peaks"].items() if peak)
    machine = ", ".join(f"{key} {value}" for key, value in facts["hardware"].items())
    return f"{facts['command']}\n{machine}, torch {facts['torch']}\nmeasured peaks: {peaks}"


def text_of(measured: Measured, peaks: dict[str, float | None]) -> str:
    """Return the table of a workload.

    Factors are over the columns named above them; engineer's is the one of the same precision. "steps" and "seconds",
    from the start of the process, are those to the stated quality. "loss" is the largest distance of the first losses
    from the plain loop's.
    """
    lines = ["", f"{measured.name}: {measured.title}; to {measured.goal_text}", HEAD]
    for name, column in measured.columns.items():
        distance, share = measured.distance(name), measured.share(name, peaks)
        factors = [measured.factor(name, over) for over in ("tutorial", measured.engineer(name), "lightning")]
        lines.append(
            LINE.format(
                name,
                f"{column.step_seconds * 1e3:.2f}",
                *("" if factor is None else f"{factor:.2f}x" for factor in factors),
                "" if column.steps_to_goal is None else column.steps_to_goal,
                "" if column.seconds_to_goal is None else f"{column.seconds_to_goal:.1f}",
                "" if column.peak_bytes is None else f"{column.peak_bytes / 2**20:.0f}",
                f"{column.start_seconds:.1f}",
                "" if share is None else f"{share:.0%}",
                "" if distance is None else f"{distance:.0e}{'' if measured.is_equal(name) else ' !'}",
            ).rstrip()
        )
    lines += [f"{name}: left out ({reason})" for name, reason in measured.left_out.items()]
    return "\n".join(lines)


def profile_of(column: str, events: Sequence[tuple[str, float, int]], steps: int, rows: int = 14) -> str:
    """Return the operations that take most of a step, by their own time on the CPU."""
    total = sum(microseconds for _, microseconds, _ in events)
    lines = [f"\n{column}: {total / steps / 1e3:.2f} ms a step under the profiler"]
    for name, microseconds, count in sorted(events, key=lambda event: -event[1])[:rows]:
        lines.append(f"  {microseconds / total:>4.0%}  {count / steps:>7.1f} times a step  {name[:70]}")
    return "\n".join(lines)
