"""A measured ladder as a table, a bar chart, CSV and JSON."""

from __future__ import annotations

import csv
import json
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.optional import need
from hasten._lib.version import VERSION

if TYPE_CHECKING:
    from hasten.demo.ladder import Result
    from hasten.demo.task import Task

# Rows that differ by less are not called slower: no machine with anything else to do repeats itself better.
NOISE = 0.1
# The same work took so many times as long at another moment: then the figures are not worth quoting.
UNSTEADY = 1.5
WIDEST = 100
NARROWEST = 72
# Columns of fixed width: number, name, seconds, speed, accuracy; the changed line gets the rest.
NAME, SECONDS, SPEED, ACCURACY = 22, 8, 8, 11
# A narrower column would break code in the middle of words: then it gets lines of its own.
NARROWEST_CODE = 40
COLUMNS = ("row", "line", "seconds", "speed", "test_accuracy", "validation_accuracy", "basis", "same_maths")


def hardware(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on: device, cores, threads and versions."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hasten": VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    return facts


def describe(facts: dict[str, Any]) -> str:
    """The hardware in one line.

    Example::

        >>> describe({"device": "a CPU", "cores": 2, "threads": 2, "torch": "2.13.0", "hasten": "0.1.0",
        ...           "python": "3.11.7", "system": "Linux"})
        'a CPU, 2 cores, 2 threads; torch 2.13.0, hasten 0.1.0, Python 3.11.7'

    """
    cores, threads = facts["cores"], facts["threads"]
    return (
        f"{facts['device']}, {cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}; "
        f"torch {facts['torch']}, hasten {facts['hasten']}, Python {facts['python']}"
    )


def table(task: Task, results: Sequence[Result], facts: dict[str, Any], *, width: int = WIDEST) -> str:
    """The ladder as text, at most ``width`` (72 to 100) columns wide, plain ASCII."""
    width = max(NARROWEST, min(WIDEST, width))
    changed = width - (3 + NAME + 2 + 2 + SECONDS + SPEED + ACCURACY)
    beside = changed >= NARROWEST_CODE
    name_width = NAME if beside else NAME + 2 + changed
    rule = "-" * width
    heads = f"{'seconds':>{SECONDS}}{'speed':>{SPEED}}{'test acc.':>{ACCURACY}}"
    code_head = f"{'changed line':<{changed}}  " if beside else ""
    lines = [
        *textwrap.wrap(f"{task.name}: {task.title}", width),
        *textwrap.wrap(describe(facts), width),
        rule,
        f"{'':3}{'row':<{name_width}}  {code_head}{heads}",
        rule,
    ]
    for number, (result, speed) in enumerate(zip(results, speeds(results), strict=True), start=1):
        names = textwrap.wrap(result.row.name + ("" if result.row.same_maths else " *"), name_width)
        seconds = ("~" if result.sampled else "") + _seconds(result.seconds)
        accuracy = "" if result.accuracy is None else f"{result.accuracy:.1%}"
        figures = f"{seconds:>{SECONDS}}{_speed(speed):>{SPEED}}{accuracy:>{ACCURACY}}"
        code = textwrap.wrap(result.row.line, changed if beside else width - 5)
        if not beside:
            lines.append(f"{number!s:<3}{names[0]:<{name_width}}  {figures}".rstrip())
            lines += [f"     {part}" for part in code]
            continue
        for part, (name, line) in enumerate(zip_longest(names, code, fillvalue="")):
            first = part == 0
            lines.append(
                f"{number if first else '':<3}{name:<{NAME}}  {line:<{changed}}  {figures if first else ''}".rstrip()
            )
    lines += [rule, *_legend(results, width)]
    return "\n".join(lines)


def _legend(results: Sequence[Result], width: int) -> list[str]:
    notes = ["seconds: training only, without evaluation; speed: how many times as fast as row 1."]
    if any(result.sampled for result in results):
        by_basis: dict[str, list[str]] = {}
        for number, result in enumerate(results, start=1):
            if result.sampled:
                by_basis.setdefault(result.basis, []).append(str(number))
        places = "; ".join(
            f"row{'s' * (len(rows) > 1)} {', '.join(rows)}: {basis}" for basis, rows in by_basis.items()
        )
        notes.append(
            f"~ timed over a sample of steps and scaled to all ({places}); no accuracy where not trained "
            "in full."
        )
    notes += [
        f"Row {number} was then trained in full, for its accuracy: in {_seconds(result.afterwards_seconds)} s."
        for number, result in enumerate(results, start=1)
        if result.afterwards_seconds is not None
    ]
    if not all(result.row.same_maths for result in results):
        notes.append(
            "* changes the maths: not the same training, check the accuracy. The rows below it keep the "
            "change."
        )
    unsteady = [
        (max(result.repeats) / min(result.repeats), number)
        for number, result in enumerate(results, start=1)
        if result.repeats and max(result.repeats) > UNSTEADY * min(result.repeats)
    ]
    if unsteady:
        worst, number = max(unsteady)
        notes.append(
            f"This machine was busy: the same work in row {number} took up to {worst:.1f} times as long. "
            "Run again when it is idle."
        )
    slower = [
        str(number)
        for number, (above, below) in enumerate(pairwise(results), start=2)
        if below.seconds > (1 + NOISE) * above.seconds
    ]
    if slower:
        notes.append(f"Slower here than the row above: row{'s' * (len(slower) > 1)} {', '.join(slower)}.")
    return [line for note in notes for line in textwrap.wrap(note, width, subsequent_indent="  ")]


def speeds(results: Sequence[Result]) -> list[float]:
    """How many times as fast as the first row each row is."""
    return [results[0].seconds / result.seconds for result in results]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def _speed(speed: float) -> str:
    return f"{speed:.2f}x" if speed < 10 else f"{speed:.1f}x"


def write(
    folder: Path, task: Task, results: Sequence[Result], facts: dict[str, Any], command: str
) -> list[Path]:
    """Write ``<task>.csv``, ``.json`` and ``.png``; the folder is created.

    Args:
        folder: where to.
        task: what was trained.
        results: of each row.
        facts: from :func:`hardware`.
        command: the command that made these numbers; kept in the JSON.

    Returns:
        The three files.

    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_as_row(result, speed) for result, speed in zip(results, speeds(results), strict=True)]
    table_file, data_file, chart = (folder / f"{task.name}.{ending}" for ending in ("csv", "json", "png"))
    with table_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: row[name] for name in COLUMNS} for row in rows)
    whole = {"task": task.name, "title": task.title, "command": command, "hardware": facts, "rows": rows}
    data_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    draw(chart, task, results, facts)
    return [table_file, data_file, chart]


def _as_row(result: Result, speed: float) -> dict[str, Any]:
    return {
        "row": result.row.name,
        "line": result.row.line,
        "seconds": round(result.seconds, 3),
        "speed": round(speed, 4),
        "test_accuracy": result.accuracy,
        "validation_accuracy": result.validation_accuracy,
        "basis": result.basis,
        "sampled": result.sampled,
        "same_maths": result.row.same_maths,
        "steps": result.steps,
        "step_seconds": [round(seconds, 4) for seconds in result.step_seconds],
        "full_seconds": [round(seconds, 4) for seconds in result.full_seconds],
        "afterwards_seconds": result.afterwards_seconds,
        "switches": asdict(result.row.switches),
    }


def draw(path: Path, task: Task, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Draw the ladder: a bar for each row, as long as it is fast, with seconds and accuracy beside it."""
    purpose = "the bar chart of `hasten demo`"
    # The figure is made without pyplot: no window, no global state, whatever backend is set.
    figure_class = need("matplotlib.figure", purpose=purpose).Figure
    canvas_class = need("matplotlib.backends.backend_agg", purpose=purpose).FigureCanvasAgg
    figure = figure_class(figsize=(9.0, 1.5 + 0.52 * len(results)), layout="constrained")
    canvas_class(figure)
    axes = figure.add_subplot()
    ratios = speeds(results)
    places = list(range(len(results)))
    colours = ["#8a8f98" if not result.row.switches.hasten else "#2f6fb5" for result in results]
    bars = axes.barh(places, ratios, color=colours, height=0.68)
    for bar, result in zip(bars, results, strict=True):
        if result.sampled:
            bar.set_hatch("///")
            bar.set_edgecolor("white")
    axes.set_yticks(places, [result.row.name + ("" if result.row.same_maths else " *") for result in results])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlim(0, max(ratios) * 1.5)
    for place, result, ratio in zip(places, results, ratios, strict=True):
        about = "~" if result.sampled else ""
        text = f"{_speed(ratio)}   {about}{_seconds(result.seconds)} s"
        if result.accuracy is not None:
            text += f"   accuracy {result.accuracy:.1%}"
        axes.annotate(
            text,
            (ratio, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            backgroundcolor="white",
            fontsize=9,
        )
    axes.set_xlabel("times as fast as the plain PyTorch loop (training time, longer is better)")
    axes.set_title("\n".join(textwrap.wrap(f"{task.name}: {task.title}", 100)), fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    notes = [describe(facts)]
    if any(result.sampled for result in results):
        notes.append("hatched, ~: timed over a sample of steps")
    if not all(result.row.same_maths for result in results):
        notes.append("*: changes the maths")
    figure.supxlabel(
        "\n".join(textwrap.wrap(";  ".join(notes), 120)), fontsize=7.5, color="#555555", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=144)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
