"""read_run: what a fit has written about itself, for plots and reports; also of a run that goes on or was cut off."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hasten._lib.names import did_you_mean
from hasten.machine.allocator import kept
from hasten.record.file import FILE_NAME
from hasten_tools.report.goodput import TimeOfRun
from hasten_tools.report.rows import LARGEST_STEP, LoggedRows, RecordedColumn
from hasten_tools.report.text import Block, Text, read_blocks

METRICS = "metrics.csv"
# A run whose file was not written to for so long, and has no end, was cut off.
SILENT_SECONDS = 600.0
# Runs are looked for so many folders down: save_dir/name/version_N, below where the program was started.
_LEVELS = 6
_NO_RUNS = frozenset({"node_modules", "site-packages", "__pycache__"})
# What every fit's speed gives, beside the names that were logged.
SPEEDS = ("samples_per_sec", "tokens_per_sec")


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
        continues: the folder of the run from whose checkpoint this one went on; None where it is not another one.

    """

    name: str
    folder: Path
    rows: LoggedRows = field(default_factory=LoggedRows)
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
    continues: Path | None = None

    def keys(self) -> list[str]:
        """Return what ``series`` can give: the names logged, then learning rates and speeds."""
        return list(dict.fromkeys([*self.rows.names(), *self._rates_and_speeds()]))

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
        column = self.rows.column(key) or self._rates_and_speeds().get(key)
        if column is None:
            raise KeyError(f"{self.name} has no value {key!r}.{did_you_mean(key, self.keys())}")
        places: list[float] = {"step": column.steps, "epoch": column.epochs, "time": column.times}[x].tolist()
        kept = [(place, value) for place, value in zip(places, column.values.tolist(), strict=True) if place == place]
        if not kept:
            raise ValueError(f"{self.name}: the {x} of {key!r} was not written; draw it by step.")
        if x == "time":
            return [self.elapsed(place) for place, _ in kept], [value for _, value in kept]
        return [float(place) for place, _ in kept], [value for _, value in kept]

    def figures(self) -> dict[str, RecordedColumn]:
        """Return what the lines about speed say, by name: speeds, waiting, memory, learning rates."""
        found: dict[str, list[tuple[float, float, float, float]]] = {}
        several = len({name for line in self.speed for name in line.get("lr") or {}}) > 1
        for line in self.speed:
            epoch = as_number(line.get("epoch"))
            place = int(line["step"]), math.nan if epoch is None else epoch, float(line["time"])
            for name, value in _figures(line, several_rates=several):
                found.setdefault(name, []).append((*place, value))
        columns = {}
        for name, rows in found.items():
            steps, epochs, times, values = np.array(rows, np.float64).T
            columns[name] = RecordedColumn(steps.astype(np.int64), epochs, times, values)
        return columns

    def _rates_and_speeds(self) -> dict[str, RecordedColumn]:
        """Return the figures that ``series`` gives: learning rates, then speeds."""
        figures = self.figures()
        rates = {name: column for name, column in figures.items() if name == "lr" or name.startswith("lr-")}
        return rates | {name: figures[name] for name in SPEEDS if name in figures}

    def elapsed(self, time: float) -> float:
        """Return the seconds of training until ``time``, without the pauses between attempts."""
        seconds = 0.0
        begins = [float(start["time"]) for start in self.starts] or [self.rows.began or time]
        for index, began in enumerate(begins):
            if time <= began:
                break
            is_over = index < min(len(begins) - 1, len(self.lasts))
            seconds += min(time, self.lasts[index] if is_over else time) - began
        return max(0.0, seconds)

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
        _read_record(run, record)
    if not run.rows and (folder / METRICS).is_file():
        _read_metrics(run, folder / METRICS)
    run.rows.share_times()
    if not run.rows and not run.starts and not run.problems:
        run.problems.append(f"{file} has no lines yet. Values are written at the logging interval.")
    elif not run.rows:
        run.problems.append("Nothing was logged. Values come from self.log(...) at every log_every_n_steps-th step.")
    return run


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the file that ``path`` means: a ``run.jsonl``, or else a ``metrics.csv``."""
    given = Path(path)
    if given.is_file() and given.suffix in (".jsonl", ".csv"):
        return given
    if not given.is_dir():
        what = "is not the record of a run" if given.exists() else "does not exist"
        raise FileNotFoundError(f"{given} {what}. Name the folder of a run, such as lightning_logs/version_0.")
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


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RecordedRun]:
    """Read several runs, in a process that does nothing else: the memory of one block is used again for the next."""
    with ExitStack() as memory:
        # Returning it to the system takes as long as reading. Only glibc can keep it.
        with suppress(ValueError):
            memory.enter_context(kept("keep"))
        return [read_run(path) for path in paths]


# -- run.jsonl

_LISTS = {
    "speed": "speed",
    "step_time": "step_times",
    "validation": "validations",
    "checkpoint": "checkpoints",
    "warning": "warnings",
    "ranks": "ranks",
}
_START = Text(b'{"kind": "start"')


def _read_record(run: RecordedRun, path: Path) -> None:
    unreadable: list[int] = []
    cut = False
    for block in read_blocks(path):
        starts = np.flatnonzero(block.has(_START, block.begins + _START.length))
        # What is before a start is dropped by it, and what is after it is not.
        edges = np.unique([0, *starts, *(starts + 1), len(block)]).tolist()
        for begin, end in pairwise(edges):
            cut = _read_lines(run, path, block, range(begin, end), unreadable)
    if cut:
        # Only the last line is without its end: it is being written, or was when the process was killed.
        unreadable.pop()
        run.problems.append(f"The last line of {path.name} is unfinished and was left out.")
    if unreadable:
        shown = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        lines = "line" if len(unreadable) == 1 else "lines"
        run.problems.append(f"{path.name}: {lines} {shown} cannot be read and were left out.")


def _read_lines(run: RecordedRun, path: Path, block: Block, lines: range, unreadable: list[int]) -> bool:
    """Add lines to a run; return whether the last one is unfinished."""
    others, last, latest = run.rows.add_lines(block, lines.start, lines.stop)
    if len(others) < len(lines):
        run.lasts = run.lasts or [0.0]
        run.spent.add({"kind": "row", "time": latest})
    for place in others:
        text = block.line(place)
        line = _parsed(text)
        if line is not None:
            _add_line(run, path, line, number=block.number + int(place))
            run.last_time = run.lasts[-1] = float(line["time"])
        elif text.strip():
            unreadable.append(block.number + int(place) + 1)
            if not text.endswith("\n"):
                return True
    if last is not None:
        run.last_time = run.lasts[-1] = last
    return False


def _add_line(run: RecordedRun, path: Path, line: dict[str, Any], *, number: int) -> None:
    kind = line["kind"]
    if kind == "start" or not run.lasts:
        run.lasts.append(0.0)
    if kind == "start":
        _drop_from(run, int(line.get("step") or 0))
        if not run.starts:
            _add_earlier_attempts(run, path, line)
        run.starts.append(line)
        run.ends.append(None)
        run.end = None
    elif kind == "row":
        epoch, given = as_number(line.get("epoch")), line.get("values") or {}
        values = {name: value for name, one in dict(given).items() if (value := as_number(one)) is not None}
        whole = None if epoch is None or not math.isfinite(epoch) else int(epoch)
        run.rows.add(number, step=int(line["step"]), epoch=whole, time=float(line["time"]), values=values)
    elif kind in _LISTS:
        getattr(run, _LISTS[kind]).append(line)
    elif kind == "advice":
        run.advice = line
    elif kind == "end":
        run.end = line
        if run.ends:
            run.ends[-1] = line
    run.spent.add(line)


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
        run.continues = files[1].parent
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
    run.rows.drop_from(step)
    for name in ("speed", "step_times", "validations", "checkpoints", "ranks"):
        setattr(run, name, [line for line in getattr(run, name) if int(line.get("step") or 0) < step])


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from file


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line["kind"], str) and math.isfinite(line["time"]):
            has_step = line["kind"] in ("row", *_LISTS) and line["kind"] != "warning"
            step = int(line["step"] if has_step else line.get("step") or 0)
            int(line.get("epoch") or 0)
            if abs(step) < LARGEST_STEP and all(isinstance(line.get(name) or {}, dict) for name in ("values", "lr")):
                return line
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    return None


def as_number(value: str | float | None) -> float | None:
    """Return a value of a record as a number; None if it is none."""
    try:
        return float(value) if isinstance(value, (str, int, float)) else None
    except (ValueError, OverflowError):
        return None


# -- metrics.csv


def _read_metrics(run: RecordedRun, path: Path) -> None:
    names: list[str] = []
    count = 0
    blocks = read_blocks(path)
    for block in blocks:
        if block.contains(b'"'):
            # A cell may have commas and newlines.
            lines = chain.from_iterable(each.lines() for each in chain([block], blocks))
            for number, texts in enumerate(_complete(csv.DictReader(lines, names or None)), start=count):
                _add_cells(run, texts, number)
            break
        begin = 0 if names else 1
        names = names or block.line(0).rstrip("\r\n").split(",")
        others, numbers = run.rows.add_cells(block, begin, names, count)
        for texts, number in zip(
            _complete(csv.DictReader(map(block.line, others), names)), numbers[others], strict=False
        ):
            _add_cells(run, texts, int(number))
        count = int(numbers[-1]) + 1
    if run.rows and not run.starts:
        run.problems.append(
            f"There is no {FILE_NAME}: only the logged values of {METRICS} are known, and neither times nor arguments."
        )


def _add_cells(run: RecordedRun, texts: Mapping[str, Any], number: int) -> None:
    values = {name: value for name, text in texts.items() if name and (value := as_number(text)) is not None}
    step, epoch = values.pop("step", float(number)), values.pop("epoch", None)
    if values and abs(step) < LARGEST_STEP:
        whole = None if epoch is None or not math.isfinite(epoch) else int(epoch)
        run.rows.add(number, step=int(step), epoch=whole, time=None, values=values)


def _complete(reader: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error:
        return


# -- speeds


def _figures(line: Mapping[str, Any], *, several_rates: bool) -> Iterator[tuple[str, float]]:
    """Yield name and value of each figure in a line about speed."""
    number = {name: as_number(value) for name, value in line.items()}
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
        if (value := as_number(rate)) is not None:
            yield f"lr-{name}" if several_rates else "lr", value
