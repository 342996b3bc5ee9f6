"""Goodput: the share of a run's time, over all its attempts, in which it trained steps that it kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The parts of a run's time, in the order in which they are shown.
PARTS = {
    "training": "Training",
    "data": "Waiting for data",
    "validation": "Validation",
    "checkpoints": "Checkpoints",
    "compile": "Compiling",
    "start": "Start",
    "repeated": "Repeated steps",
    "restarts": "Between attempts",
    "other": "Other",
}


@dataclass
class _Attempt:
    """What one attempt says about its time; moments in seconds since 1970."""

    # When its process was started, as far as that is known, and when its fit was called.
    process_began: float | None
    began: float
    last: float
    # When its first step was done.
    ready: float | None = None
    validation: float = 0.0
    checkpoints: float = 0.0
    compile: float = 0.0
    # For each line about speed: step, seconds, of these waiting for data and compiling.
    speeds: list[tuple[int, float, float, float]] = field(default_factory=list)
    repeated: float = 0.0


class TimeOfRun:
    """Adds up where the time of a run goes, from the lines of its record in their order.

    Example::

        >>> time = TimeOfRun()
        >>> time.add({"kind": "start", "time": 100.0, "process_began": 98.0, "step": 0})
        >>> time.add({"kind": "first_step", "time": 104.0, "step": 0, "compile_seconds": 1.0})
        >>> time.add({"kind": "speed", "time": 114.0, "step": 9, "seconds": 10.0, "data_seconds": 2.0})
        >>> time.seconds()
        {'training': 8.0, 'data': 2.0, 'compile': 1.0, 'start': 5.0}
        >>> time.goodput()
        0.5

    """

    def __init__(self) -> None:
        self.attempts: list[_Attempt] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of the record."""
        kind, moment = line["kind"], float(line["time"])
        if kind == "start":
            self._drop_from(int(line.get("step") or 0))
            began = line.get("process_began")
            self.attempts.append(_Attempt(float(began) if isinstance(began, int | float) else None, moment, moment))
        if not self.attempts:
            return
        attempt = self.attempts[-1]
        # Clocks may be set back.
        attempt.last = max(attempt.last, moment)
        if kind == "first_step" and attempt.ready is None:
            attempt.ready = moment
            attempt.compile += _seconds(line, "compile_seconds")
        elif kind == "speed":
            seconds = _seconds(line, "seconds")
            if attempt.ready is None:
                # Records of earlier versions do not say when the first step was done.
                attempt.ready = max(attempt.began, moment - seconds)
            waited, compiled = _seconds(line, "data_seconds"), _seconds(line, "compile_seconds")
            attempt.speeds.append((int(line.get("step") or 0), seconds, waited, compiled))
        elif kind == "validation" and attempt.ready is not None:
            attempt.validation += _seconds(line, "seconds")
        elif kind == "checkpoint" and attempt.ready is not None:
            attempt.checkpoints += _seconds(line, "seconds")

    def _drop_from(self, step: int) -> None:
        """Count what was trained after ``step`` steps as repeated: the attempt that begins trains it again."""
        for attempt in self.attempts:
            kept = [speed for speed in attempt.speeds if speed[0] < step]
            attempt.repeated += sum(speed[1] for speed in attempt.speeds) - sum(speed[1] for speed in kept)
            attempt.speeds = kept

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part that took time, by its key in ``PARTS``."""
        total = dict.fromkeys(PARTS, 0.0)
        before: _Attempt | None = None
        for attempt in self.attempts:
            for part, seconds in _parts_of(attempt, before).items():
                total[part] += seconds
            before = attempt
        return {part: seconds for part, seconds in total.items() if seconds > 0}

    def goodput(self) -> float | None:
        """Return the share of the time that trained steps which were kept, without waits; None before the first."""
        found = self.seconds()
        total = sum(found.values())
        return found.get("training", 0.0) / total if total > 0 and any(one.ready for one in self.attempts) else None


def _parts_of(attempt: _Attempt, before: _Attempt | None) -> dict[str, float]:
    """Return the seconds of an attempt and of the pause since the one before."""
    process_began = attempt.began if attempt.process_began is None else min(attempt.process_began, attempt.began)
    starts, paused = process_began, 0.0
    if before is not None:
        # In the process of the attempt before, the pause ends where fit is called again.
        ends = process_began if process_began > before.last else max(attempt.began, before.last)
        starts, paused = ends, ends - before.last
    ready = attempt.last if attempt.ready is None else attempt.ready
    first_compile = min(attempt.compile, max(0.0, ready - starts))
    trained = sum(seconds for _, seconds, _, _ in attempt.speeds)
    waited = sum(waited for _, _, waited, _ in attempt.speeds)
    compiled = sum(compiled for _, _, _, compiled in attempt.speeds)
    parts = {
        "training": max(0.0, trained - waited - compiled), "data": waited, "validation": attempt.validation,
        "checkpoints": attempt.checkpoints, "compile": first_compile + compiled,
        "start": max(0.0, ready - starts - first_compile), "repeated": attempt.repeated, "restarts": paused,
    }  # fmt: skip
    parts["other"] = max(0.0, attempt.last - starts + paused - sum(parts.values()))
    return parts


def _seconds(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0
