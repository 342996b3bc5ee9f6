"""A measured ladder as a table, a bar chart, CSV and JSON."""

from __future__ import annotations

import csv
import json
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.optional import need
from hasten._lib.version import VERSION
from hasten.speed.safety import Safety

if TYPE_CHECKING:
    from hasten.demo.arithmetic import Arithmetic
    from hasten.demo.ladder import Result
    from hasten.demo.task import Task

# The same work took so many times as long at another moment: then the figures are not worth quoting.
UNSTEADY = 1.5
WIDEST = 100
NARROWEST = 72
# Columns of fixed width: number, name, seconds, speed, speed all in, padding, accuracy; the changed line gets the rest.
NAME, SECONDS, SPEED, ALL_IN, PAD, ACCURACY = 22, 8, 8, 8, 6, 7
FIGURES = SECONDS + SPEED + ALL_IN + PAD + ACCURACY
# A narrower column would break code in the middle of words: then it gets lines of its own.
NARROWEST_CODE = 33
COLUMNS = (
    "row",
    "line",
    "seconds",
    "speed",
    "all_in_seconds",
    "all_in_speed",
    "pad_share",
    "test_accuracy",
    "validation_accuracy",
    "basis",
    "same_maths",
    "kept",
)


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


def table(
    task: Task,
    results: Sequence[Result],
    facts: dict[str, Any],
    *,
    arithmetic: Arithmetic | None = None,
    width: int = WIDEST,
) -> str:
    """The ladder as text, at most ``width`` (72 to 100) columns wide, plain ASCII."""
    width = max(NARROWEST, min(WIDEST, width))
    changed = width - (3 + NAME + 2 + 2 + FIGURES)
    beside = changed >= NARROWEST_CODE
    name_width = NAME if beside else NAME + 2 + changed
    rule = "-" * width
    heads = f"{'seconds':>{SECONDS}}{'speed':>{SPEED}}{'all in':>{ALL_IN}}{'pad':>{PAD}}{'acc.':>{ACCURACY}}"
    code_head = f"{'changed line':<{changed}}  " if beside else ""
    lines = [
        *textwrap.wrap(f"{task.name}: {task.title}", width),
        *textwrap.wrap(describe(facts), width),
        rule,
        f"{'':3}{'row':<{name_width}}  {code_head}{heads}",
        rule,
    ]
    for number, result in enumerate(results, start=1):
        names = textwrap.wrap(result.row.name + _mark(result), name_width)
        figures = _figures(result, results[0])
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
    notes = [*_legend(results), *_utilisation(results, arithmetic)]
    lines += [rule, *(line for note in notes for line in textwrap.wrap(note, width, subsequent_indent="  "))]
    return "\n".join(lines)


def _mark(result: Result) -> str:
    return ("" if result.row.same_maths else " *") + ("" if result.kept else " -")


def _classes(results: Sequence[Result]) -> list[str]:
    """Return a sentence on rows that change more than rounding and less than the maths."""
    found: dict[Safety, list[str]] = {}
    for number, result in enumerate(results, start=1):
        if result.row.same_maths and not result.row.safety.is_automatic:
            found.setdefault(result.row.safety, []).append(str(number))
    each = [
        f"{safety} in row{'s' * (len(rows) > 1)} {', '.join(rows)}" for safety, rows in sorted(found.items())
    ]
    return [f"More than rounding: {'; '.join(each)}."] if each else []


def _figures(result: Result, first: Result) -> str:
    if result.refused is not None:
        return f"{'refused':>{SECONDS}}"
    seconds = ("~" if result.sampled else "") + _seconds(result.seconds)
    speed, all_in = _speed(first.seconds / result.seconds), _speed(first.all_in / result.all_in)
    accuracy = "" if result.accuracy is None else f"{result.accuracy:.1%}"
    pad = f"{result.pad_share:.0%}"
    return f"{seconds:>{SECONDS}}{speed:>{SPEED}}{all_in:>{ALL_IN}}{pad:>{PAD}}{accuracy:>{ACCURACY}}"


def _legend(results: Sequence[Result]) -> list[str]:
    notes = [
        "seconds: training only, without evaluation; speed: how many times as fast as row 1; all in: the same with "
        "starting and compiling in the clock; pad: share of the computed tokens that is padding."
    ]
    for number, result in enumerate(results, start=1):
        what = {name for name in ("compiled", "graphs") if result.row.changes.get(name)}
        if what and result.start_seconds:
            doing = "compiling" if "compiled" in what else "compiling and recording"
            notes.append(
                f"Row {number}: {_seconds(max(result.start_seconds))} s went by before its first step, {doing}."
            )
        packs = "packed" in result.row.changes or "first_token" in result.row.changes
        if packs and any(above.kept and above.switches.graphs for above in results[: number - 1]):
            notes.append(f"Row {number} is without CUDA graphs: packed batches are not recorded.")
    if any(result.sampled for result in results):
        by_basis: dict[str, list[str]] = {}
        for number, result in enumerate(results, start=1):
            if result.sampled and result.refused is None:
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
    notes += _classes(results)
    left_out = [
        str(number)
        for number, result in enumerate(results, start=1)
        if not result.kept and result.refused is None
    ]
    if left_out:
        notes.append(
            f"- loses here, so the rows below do without it: row{'s' * (len(left_out) > 1)} {', '.join(left_out)}."
        )
    notes += [
        f"Row {number} was refused: {result.refused}"
        for number, result in enumerate(results, start=1)
        if result.refused is not None
    ]
    notes += _spread(results)
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
    return notes


def _utilisation(results: Sequence[Result], arithmetic: Arithmetic | None) -> list[str]:
    """What share of the machine's peak the first row and the fastest reach with useful work."""
    if arithmetic is None:
        return []
    fastest = min(range(len(results)), key=lambda place: results[place].seconds)
    parts = []
    for place in sorted({0, fastest}):
        result = results[place]
        share = arithmetic.mfu(result.switches, result.seconds)
        # Fewer tokens are another amount of work.
        if share is not None and result.switches.max_length is None:
            parts.append(f"row {place + 1} {share:.0%}")
    peaks = " and ".join(f"{peak / 1e9:,.0f} in {name}" for name, peak in arithmetic.peaks.items())
    if not parts:
        return []
    return [
        f"Useful arithmetic (padding does not count) as a share of this device's peak: {', '.join(parts)}. The peak "
        f"is that of a large matrix product: {peaks} GFLOP/s."
    ]


def _spread(results: Sequence[Result]) -> list[str]:
    """Accuracies of several seeds: their mean and its standard error."""
    notes = []
    for number, result in enumerate(results, start=1):
        if len(result.accuracies) > 1:
            error = stdev(result.accuracies) / len(result.accuracies) ** 0.5
            each = ", ".join(f"{accuracy:.1%}" for accuracy in result.accuracies)
            notes.append(
                f"Row {number}: accuracy over {len(result.accuracies)} seeds {mean(result.accuracies):.1%} "
                f"+- {error:.1%} ({each})."
            )
    return notes


def speeds(results: Sequence[Result]) -> list[float]:
    """How many times as fast as the first row each row is."""
    return [results[0].seconds / result.seconds for result in results]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def _speed(speed: float) -> str:
    return f"{speed:.2f}x" if speed < 10 else f"{speed:.1f}x"


def write(
    folder: Path,
    task: Task,
    results: Sequence[Result],
    facts: dict[str, Any],
    command: str,
    *,
    arithmetic: Arithmetic | None = None,
) -> list[Path]:
    """Write ``<task>.csv``, ``.json`` and ``.png``; the folder is created.

    Args:
        folder: where to.
        task: what was trained.
        results: of each row.
        facts: from :func:`hardware`.
        command: the command that made these numbers; kept in the JSON.
        arithmetic: of the task, for the share of the peak.

    Returns:
        The three files.

    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        _as_row(result, speed, results[0].all_in / result.all_in)
        for result, speed in zip(results, speeds(results), strict=True)
    ]
    table_file, data_file, chart = (folder / f"{task.name}.{ending}" for ending in ("csv", "json", "png"))
    with table_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: row[name] for name in COLUMNS} for row in rows)
    whole: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "command": command,
        "hardware": facts,
        "rows": rows,
    }
    if arithmetic is not None:
        whole |= {"useful_flops": arithmetic.useful_flops, "peak_flops": arithmetic.peaks}
        for row, result in zip(rows, results, strict=True):
            shorter = result.switches.max_length is not None
            row["mfu"] = (
                None if shorter or result.refused else arithmetic.mfu(result.switches, result.seconds)
            )
    data_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    draw(chart, task, results, facts)
    return [table_file, data_file, chart]


def _as_row(result: Result, speed: float, all_in: float) -> dict[str, Any]:
    measured = result.refused is None
    return {
        "row": result.row.name,
        "line": result.row.line,
        "seconds": round(result.seconds, 3) if measured else None,
        "speed": round(speed, 4),
        "all_in_seconds": round(result.all_in, 3) if measured else None,
        "all_in_speed": round(all_in, 4),
        "pad_share": round(result.pad_share, 4),
        "test_accuracy": result.accuracy,
        "test_accuracies": result.accuracies,
        "validation_accuracy": result.validation_accuracy,
        "basis": result.basis if measured else "refused",
        "refused": result.refused,
        "sampled": result.sampled,
        "same_maths": result.row.same_maths,
        "safety": result.row.safety,
        "kept": result.kept,
        "steps": result.steps,
        "step_seconds": [round(seconds, 4) for seconds in result.step_seconds],
        "full_seconds": [round(seconds, 4) for seconds in result.full_seconds],
        "afterwards_seconds": result.afterwards_seconds,
        "start_seconds": [round(seconds, 4) for seconds in result.start_seconds],
        "switches": asdict(result.switches),
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
    colours = ["#8a8f98" if not result.switches.hasten else "#2f6fb5" for result in results]
    bars = axes.barh(places, ratios, color=colours, height=0.68)
    for bar, result in zip(bars, results, strict=True):
        if result.sampled:
            bar.set_hatch("///")
            bar.set_edgecolor("white")
    axes.set_yticks(places, [result.row.name + _mark(result) for result in results])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlim(0, max(ratios) * 1.5)
    for place, result, ratio in zip(places, results, ratios, strict=True):
        about = "~" if result.sampled else ""
        measured = result.refused is None
        text = f"{_speed(ratio)}   {about}{_seconds(result.seconds)} s" if measured else "refused"
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
    if not all(result.kept for result in results):
        notes.append("-: loses, left out of the rows below")
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
