"""read_run: what a fit has written about itself, for plots and reports; also of a run that goes on or was cut off."""

from __future__ import annotations

import csv
import gc
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from hasten._lib.names import did_you_mean
from hasten.record.file import FILE_NAME
from hasten_tools.report.goodput import TimeOfRun

METRICS = "metrics.csv"
# A run whose file was not written to for so long, and has no end, was cut off.
SILENT_SECONDS = 600.0
# Runs are looked for so many folders down: save_dir/name/version_N, below where the program was started.
_LEVELS = 6
_NO_RUNS = frozenset({"node_modules", "site-packages", "__pycache__"})
# What every fit's speed gives, beside the names that were logged.
SPEEDS = ("samples_per_sec", "tokens_per_sec")


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """The values that were logged at one step.

    Args:
        step: the step.
        epoch: the epoch; None where it was not written.
        time: when, in seconds since 1970; None where it was not written.
        values: numbers by name.

    """

    step: int
    epoch: int | None
    time: float | None
    values: dict[str, float]


@dataclass
class RecordedColumn:
    """Values of a name, and the rows in which they are."""

    rows: list[RecordedRow] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class RecordedRun:
    """A run as it was recorded. Steps that a later attempt repeated are there once, as it made them.

    Args:
        name: the name of the run: its folder.
        folder: the folder.
        rows: what was logged, by step.
        starts: facts of each attempt: arguments, versions, machine, ...; empty for runs of other libraries.
        end: how the last attempt ended; None for a run that goes on or was killed.
        speed: how fast it was, at intervals.
        step_times: the parts of single steps.
        validations: how long each took.
        checkpoints: those saved.
        warnings: those shown.
        ranks: reports about the processes, and which of them was the slowest.
        spent: where the time of all attempts went.
        advice: the advisor's verdict, if there is one.
        ends: how each attempt ended; None where it is not known.
        last_time: when the last line was written, in seconds since 1970.
        problems: sentences about what is missing or could not be read.

    """

    name: str
    folder: Path
    rows: list[RecordedRow] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    speed: list[dict[str, Any]] = field(default_factory=list)
    step_times: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    spent: TimeOfRun = field(default_factory=TimeOfRun)
    advice: dict[str, Any] | None = None
    ends: list[dict[str, Any] | None] = field(default_factory=list)
    last_time: float | None = None
    problems: list[str] = field(default_factory=list)

    def keys(self) -> list[str]:
        """Return what ``series`` can give: the names logged, then learning rates and speeds."""
        names = dict.fromkeys(name for row in self.rows for name in row.values)
        return list(names | dict.fromkeys(self._rates_and_speeds()))

    def series(self, key: str, x: Literal["step", "epoch", "time"] = "step") -> tuple[list[float], list[float]]:
        """Return the values of one key, and where they were logged.

        Args:
            key: one of ``keys()``.
            x: "step", "epoch" (with the share of the epoch where steps of an epoch are known) or "time", seconds
                since the run began, without the pauses between its attempts.

        Raises:
            KeyError: there is no such key.
            ValueError: epochs or times were not written.

        """
        column = self.logged([key]).get(key) or self._rates_and_speeds().get(key)
        if column is None:
            raise KeyError(f"{self.name} has no value {key!r}.{did_you_mean(key, self.keys())}")
        places: list[Any] = [row.step for row in column.rows]
        if x == "epoch":
            places = [row.epoch for row in column.rows]
        elif x == "time":
            places = [None if row.time is None else self.elapsed(row.time) for row in column.rows]
        kept = [(float(place), value) for place, value in zip(places, column.values, strict=True) if place is not None]
        if not kept:
            raise ValueError(f"{self.name}: the {x} of {key!r} was not written; draw it by step.")
        return [place for place, _ in kept], [value for _, value in kept]

    def logged(self, names: Collection[str] | None = None) -> dict[str, RecordedColumn]:
        """Return the values that were logged, by name; with ``names`` of these only."""
        # Rows with the same names together: a million of them are read in seconds.
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(self.rows):
            alike.setdefault(tuple(row.values), []).append(place)
        found: dict[str, list[list[int]]] = {}
        for together, places in alike.items():
            for name in together:
                if names is None or name in names:
                    found.setdefault(name, []).append(places)
        columns: dict[str, RecordedColumn] = {}
        shared: dict[tuple[int, ...], list[RecordedRow]] = {}
        for name, parts in found.items():
            key = tuple(map(id, parts))
            if key not in shared:
                shared[key] = [self.rows[place] for place in (parts[0] if len(parts) == 1 else sorted(chain(*parts)))]
            columns[name] = RecordedColumn(shared[key], [row.values[name] for row in shared[key]])
        return columns

    def figures(self) -> dict[str, RecordedColumn]:
        """Return what the lines about speed say, by name: speeds, waiting, memory, learning rates."""
        columns: dict[str, RecordedColumn] = {}
        several = len({name for line in self.speed for name in line.get("lr") or {}}) > 1
        for line in self.speed:
            row = RecordedRow(int(line["step"]), line.get("epoch"), float(line["time"]), {})
            for name, value in _figures(line, several_rates=several):
                column = columns.setdefault(name, RecordedColumn())
                column.rows.append(row)
                column.values.append(value)
        return columns

    def _rates_and_speeds(self) -> dict[str, RecordedColumn]:
        """Return the figures that ``series`` gives: learning rates, then speeds."""
        figures = self.figures()
        rates = {name: column for name, column in figures.items() if name == "lr" or name.startswith("lr-")}
        return rates | {name: figures[name] for name in SPEEDS if name in figures}

    def elapsed(self, time: float) -> float:
        """Return the seconds of training until ``time``, without the pauses between attempts."""
        seconds = 0.0
        begins = [float(start["time"]) for start in self.starts] or [next((r.time for r in self.rows if r.time), time)]
        for index, began in enumerate(begins):
            until = self._last_of(index)
            if time <= began:
                break
            seconds += min(time, until if index + 1 < len(begins) else time) - began
        return max(0.0, seconds)

    def _last_of(self, attempt: int) -> float:
        lasts = self.lasts
        return lasts[attempt] if attempt < len(lasts) else math.inf

    # When the last line of each attempt was written.
    lasts: list[float] = field(default_factory=list)

    @property
    def state(self) -> str:
        """What became of it: "completed", "stopped early", "interrupted", "failed", "running", "cut off", "unknown"."""
        if self.end is not None:
            return str(self.end.get("reason") or "completed")
        if not self.starts:
            return "unknown"
        import time

        silent = time.time() - (self.last_time or 0.0)
        return "running" if silent < SILENT_SECONDS else "cut off"


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Read a run.

    Args:
        path: the folder of a run; a folder of ``version_N``, of which the newest counts (also one with a
            ``lightning_logs``); a folder above runs, of which the one written to last counts; a ``run.jsonl`` or a
            ``metrics.csv``.

    Returns:
        the run. What could not be read is in ``problems``.

    Raises:
        FileNotFoundError: there is no run there.

    Example::

        >>> import tempfile
        >>> from hasten.record.file import Record
        >>> folder = Path(tempfile.mkdtemp())
        >>> record = Record(folder / "run.jsonl")
        >>> for step in (9, 19):
        ...     record.add("row", step=step, epoch=0, values={"loss": 1 / (step + 1)})
        >>> record.flush()
        >>> read_run(folder).series("loss")
        ([9.0, 19.0], [0.1, 0.05])

    """
    file = find_run(path)
    folder = file.parent
    run = RecordedRun(_name(folder), folder)
    record = folder / FILE_NAME if file.name == METRICS else file
    if record.is_file():
        # None of the many objects is in a circle: looking for some would take longer than reading.
        collects = gc.isenabled()
        gc.disable()
        try:
            _read_record(run, record)
        finally:
            if collects:
                gc.enable()
    if not run.rows and (folder / METRICS).is_file():
        run.rows = _read_metrics(run, folder / METRICS)
    if not run.rows and not run.starts and not run.problems:
        run.problems.append(f"{file} has no lines yet. Values are written at the logging interval.")
    elif not run.rows:
        run.problems.append("Nothing was logged. Values come from self.log(...) at every log_every_n_steps-th step.")
    return run


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the file that ``path`` means: a ``run.jsonl``, or else a ``metrics.csv``."""
    given = Path(path)
    if given.is_file():
        return given
    if not given.exists():
        raise FileNotFoundError(f"{given} does not exist. Name the folder of a run, such as lightning_logs/version_0.")
    for folder in (given, given / "lightning_logs"):
        versions = [one for one in folder.glob("version_*") if _has_run(one)]
        # version_10 comes after version_9.
        versions.sort(key=lambda one: (len(one.name), one.name))
        for found in (*versions[::-1], folder):
            if _has_run(found):
                return found / (FILE_NAME if (found / FILE_NAME).is_file() else METRICS)
    if (newest := _newest_below(given)) is not None:
        return newest
    if any(given.glob("**/events.out.tfevents.*")):
        hint = " It has event files of TensorBoard alone, which hasten does not read: add a CSVLogger to the Trainer."
    else:
        hint = " A fit writes run.jsonl beside the files of its logger; Lightning's CSVLogger writes metrics.csv."
    raise FileNotFoundError(f"{given} has no {FILE_NAME} and no {METRICS}.{hint}")


def _newest_below(folder: Path) -> Path | None:
    """Return the file of the run that was written to last, of all within some levels; None without one."""
    found: list[tuple[float, int, Path]] = []
    for name, folders, files in os.walk(folder):
        here = Path(name)
        if len(here.relative_to(folder).parts) >= _LEVELS:
            folders.clear()
        # Environments and repositories have many files, and no runs.
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _NO_RUNS]
        for file in (FILE_NAME, METRICS):
            if file in files:
                found.append(((here / file).stat().st_mtime, len(name), here / file))
                break
    return max(found)[2] if found else None


def _has_run(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file() or (folder / METRICS).is_file()


def _name(folder: Path) -> str:
    parts = [part for part in folder.absolute().parts[-2:] if part != "lightning_logs"]
    return "/".join(parts)


# -- run.jsonl

_LISTS = {
    "speed": "speed",
    "step_time": "step_times",
    "validation": "validations",
    "checkpoint": "checkpoints",
    "warning": "warnings",
    "ranks": "ranks",
}


def _read_record(run: RecordedRun, path: Path) -> None:
    attempt = 0
    unreadable: list[int] = []
    cut = False
    for number, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None:
            cut = not text.endswith("\n")
            unreadable.append(number)
            continue
        is_start = line["kind"] == "start"
        if is_start or not attempt:
            attempt += 1
            run.lasts.append(0.0)
        if is_start:
            _drop_from(run, int(line.get("step") or 0))
            if not run.starts:
                _add_earlier_attempts(run, path, line)
            run.starts.append(line)
            run.ends.append(None)
            run.end = None
        else:
            _add_line(run, line)
        run.spent.add(line)
        run.last_time = run.lasts[-1] = float(line["time"])
    if cut:
        # Only the last line is without its end: it is being written, or was when the process was killed.
        unreadable.pop()
        run.problems.append(f"The last line of {path.name} is unfinished and was left out.")
    if unreadable:
        shown = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        lines = "line" if len(unreadable) == 1 else "lines"
        run.problems.append(f"{path.name}: {lines} {shown} cannot be read and were left out.")


def _add_line(run: RecordedRun, line: dict[str, Any]) -> None:
    kind = line["kind"]
    if kind == "row":
        _add_row(run.rows, line)
    elif kind in _LISTS:
        getattr(run, _LISTS[kind]).append(line)
    elif kind == "advice":
        run.advice = line
    elif kind == "end":
        run.end = line
        if run.ends:
            run.ends[-1] = line


def _add_earlier_attempts(run: RecordedRun, path: Path, start: dict[str, Any]) -> None:
    """Count the time of attempts in other folders: the first one here continues from a checkpoint of theirs."""
    files, starts = [path.resolve()], [start]
    while (found := _record_of_checkpoint(starts[-1])) is not None and found not in files:
        lines = (line for text in _lines(found) if (line := _parsed(text)) is not None and line["kind"] == "start")
        first = next(lines, None)
        if first is None:
            break
        files.append(found)
        starts.append(first)
    for place in range(len(files) - 1, 0, -1):
        for line in filter(None, map(_parsed, _lines(files[place]))):
            # What another fit wrote there since is not of this run.
            if line["time"] < starts[place - 1]["time"]:
                run.spent.add(line)


def _record_of_checkpoint(start: dict[str, Any]) -> Path | None:
    """Return the record of the run whose checkpoint an attempt continues from; None where it is not known."""
    checkpoint = start.get("resumed_from")
    if not isinstance(checkpoint, str):
        return None
    above = (Path(str(start.get("cwd") or "")) / checkpoint).parents
    # version_N/checkpoints/name.ckpt, and the same with a folder in place of the file.
    return next((file.resolve() for one in list(above)[:3] if (file := one / FILE_NAME).is_file()), None)


def _drop_from(run: RecordedRun, step: int) -> None:
    """Drop what an attempt makes again that begins after ``step`` steps; lines count steps from 0."""
    if step == 0 and run.rows:
        run.problems.append("Several fits wrote into this folder: the last one that began anew is shown.")
    run.rows = [row for row in run.rows if row.step < step]
    for name in ("speed", "step_times", "validations", "checkpoints", "ranks"):
        setattr(run, name, [line for line in getattr(run, name) if int(line.get("step") or 0) < step])


def _add_row(rows: list[RecordedRow], line: dict[str, Any]) -> None:
    values: dict[str, float] = line.get("values") or {}
    if type(values) is not dict or set(map(type, values.values())) != {float}:
        # Rarely: whole numbers, and words for what is not finite.
        values = {name: number for name, value in dict(values).items() if (number := _number(value)) is not None}
    step, epoch = int(line["step"]), line.get("epoch")
    last = rows[-1] if rows else None
    if last is not None and last.step == step and last.epoch == epoch and not last.values.keys() & values.keys():
        last.values.update(values)
    else:
        rows.append(RecordedRow(step, epoch, float(line["time"]), values))


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from file


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line["kind"], str) and math.isfinite(line["time"]):
            has_step = line["kind"] in ("row", *_LISTS) and line["kind"] != "warning"
            int(line["step"] if has_step else line.get("step") or 0), int(line.get("epoch") or 0)
            if all(isinstance(line.get(name) or {}, dict) for name in ("values", "lr")):
                return line
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    return None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# -- metrics.csv


def _read_metrics(run: RecordedRun, path: Path) -> list[RecordedRow]:
    rows: list[RecordedRow] = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, texts in enumerate(_complete(csv.DictReader(file))):
            values = {name: value for name, text in texts.items() if name and (value := _number(text)) is not None}
            step, epoch = values.pop("step", float(number)), values.pop("epoch", None)
            if values and math.isfinite(step):
                whole = None if epoch is None or not math.isfinite(epoch) else int(epoch)
                rows.append(RecordedRow(int(step), whole, None, values))
    if rows and not run.starts:
        run.problems.append(
            f"There is no {FILE_NAME}: only the logged values of {METRICS} are known, and neither times nor arguments."
        )
    return rows


def _complete(reader: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error:
        return


# -- speeds


def _figures(line: Mapping[str, Any], *, several_rates: bool) -> Iterator[tuple[str, float]]:
    """Yield name and value of each figure in a line about speed."""
    number = {name: _number(value) for name, value in line.items()}
    seconds = number.get("seconds")
    if seconds and seconds > 0:
        for name, key in zip(SPEEDS, ("samples", "tokens"), strict=True):
            if amount := number.get(key):
                yield name, amount / seconds
        if (waited := number.get("data_seconds")) is not None:
            yield "data wait", 100 * waited / seconds
        if (flops := number.get("flops")) and (peak := number.get("peak_flops")):
            yield "MFU", 100 * flops / seconds / peak
    if memory := number.get("memory_bytes"):
        yield "memory", memory / 2**30
    for name, rate in (line.get("lr") or {}).items():
        if (value := _number(rate)) is not None:
            yield f"lr-{name}" if several_rates else "lr", value
