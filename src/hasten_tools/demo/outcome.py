"""A measured ladder as a table, a bar chart, CSV and JSON, with the line to write."""

from __future__ import annotations

import csv
import json
import platform
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from hasten._lib import VERSION
from hasten.machine.host import usable_cores
from hasten.report.peaks import flop_counter, measured_peaks
from hasten.report.tables import aligned
from hasten_tools.demo.cumulative import Result
from hasten_tools.demo.task import ENGINEERS_LOOP, RowVariant, Task, code_of, plural
from hasten_tools.speed.advice import BLUE, GREY, Bar, draw_speeds
from hasten_tools.speed.inspect_run import device_name
from hasten_tools.speed.safety import Safety

# The same work took so many times as long in another turn: then the figures are not worth quoting.
UNSTEADY = 1.5
NARROWEST, WIDEST = 72, 100
# Titles of the columns of figures, and their widths.
FIGURES = {"seconds": 8, "speed": 8, "all in": 8, "pad": 6, "acc.": 7}


@dataclass(frozen=True)
class Arithmetic:
    """The numbers from which the model FLOPs utilization of a row is computed.

    Args:
        useful_flops: floating point operations of the whole training, forward and backward, of real tokens only.
        peaks: operations a second that a large matrix product reaches on this device, by the type of its numbers:
            float32, bfloat16 and, on a GPU, tf32.

    Source: Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311

    """

    useful_flops: float
    peaks: dict[str, float]

    def mfu(self, result: Result) -> float | None:
        """Return the share of the peak that a row reaches, 0 to 1; None where that cannot be said."""
        variant = result.variant
        # Fewer tokens are another amount of work.
        if result.refused is not None or variant.max_length is not None:
            return None
        numbers = "tf32" if variant.argument("matmul_precision") else "float32"
        peak = self.peaks.get("bfloat16" if variant.argument("precision") else numbers)
        return None if peak is None else self.useful_flops / result.seconds / peak


def count(task: Task) -> Arithmetic:
    """Count the operations of a task, and measure the peak of its device; takes a second or two."""
    peaks = {name: peak for name, peak in measured_peaks(task.device).items() if peak is not None}
    return Arithmetic(task.epochs * useful_flops(task), peaks)


def useful_flops(task: Task) -> float:
    """Return the operations of one epoch.

    A transformer needs ``a * tokens + b * tokens ** 2`` for a sample; the shortest and the longest give both.
    """
    lengths = task.lengths(RowVariant())
    short, long = min(lengths), max(lengths)
    per_token = {length: sample_flops(task, lengths.index(length)) / length for length in {short, long}}
    b = (per_token[long] - per_token[short]) / max(long - short, 1)
    a = per_token[short] - b * short
    return sum(a * length + b * length**2 for length in lengths)


def sample_flops(task: Task, sample: int) -> int:
    """Return the operations of the forward and backward pass of a sample."""
    model = task.model(RowVariant()).train()
    with torch.random.fork_rng(devices=[]), flop_counter() as counter:
        task.loss(model, task.single(sample)).backward()
    return int(counter.get_total_flops())


def hardware(device: torch.device) -> dict[str, Any]:
    """Return what the numbers were measured on: device, cores, threads and versions."""
    return {
        "device": device_name(device),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hasten": VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def describe(facts: dict[str, Any]) -> str:
    """Return the hardware in one line."""
    return (
        f"{facts['device']}, {plural(facts['cores'], 'core')}, {plural(facts['threads'], 'thread')}; "
        f"torch {facts['torch']}, hasten {facts['hasten']}, Python {facts['python']}"
    )


def lines_to_write(results: Sequence[Result]) -> list[str]:
    """Return the lines of code with which to train as fast as the fastest rows that train the same model.

    The first shows the fastest row that changes rounding and random draws at most; a second follows if lower precision
    or other batches are faster still.
    """
    lines: dict[str, str] = {}
    for within in (Safety.OTHER_DRAWS, Safety.LOWER_PRECISION):
        allowed = (each for each in results if each.safety <= within and not each.row.by_hand)
        best = min(allowed, key=lambda each: each.seconds)
        line = f"trainer = L.Trainer({code_of(best.variant.trainer or {})})"
        lines.setdefault(line, f"{line}  # {_speed(results[0].seconds / best.seconds)}; {best.safety}")
    return list(lines.values())


# -- text


def table(
    task: Task,
    results: Sequence[Result],
    facts: dict[str, Any],
    *,
    arithmetic: Arithmetic | None = None,
    width: int = WIDEST,
) -> str:
    """Return the ladder as text, at most ``width`` (72 to 100) columns wide, plain ASCII."""
    width = max(NARROWEST, min(WIDEST, width))
    name_width = width - 3 - sum(FIGURES.values())
    rule = "-" * width

    rows = [["", "row, and the changed line", *FIGURES]]
    for number, result in enumerate(results, start=1):
        name = textwrap.wrap(result.row.name + _mark(result), name_width)
        code = [f"  {part}" for part in textwrap.wrap(result.row.line, width - 5)]
        rows.append([str(number), "\n".join([*name, *code]), *_figures(result, results[0])])
    lines = [
        *textwrap.wrap(f"{task.name}: {task.title}", width),
        *textwrap.wrap(describe(facts), width),
        *aligned(rows, [3, name_width, *FIGURES.values()], right_from=2, rule=rule),
    ]
    for note in _notes(results, arithmetic):
        lines += textwrap.wrap(note, width, subsequent_indent="  ")
    return "\n".join(lines)


def _mark(result: Result) -> str:
    return " *" * (not result.row.same_maths) + " -" * result.is_left_out


def _figures(result: Result, first: Result) -> list[str]:
    if result.refused is not None:
        return ["refused"]
    return [
        "~" * (not result.in_full) + _seconds(result.seconds),
        _speed(first.seconds / result.seconds),
        _speed(first.all_in / result.all_in),
        f"{result.pad_share:.0%}",
        "" if result.accuracy is None else f"{result.accuracy:.1%}",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def _speed(speed: float) -> str:
    return f"{speed:.2f}x" if speed < 10 else f"{speed:.1f}x"


_Numbered = list[tuple[int, Result]]


def _notes(results: Sequence[Result], arithmetic: Arithmetic | None) -> list[str]:
    """Return what the figures mean, and what else there is to say about single rows."""
    numbered = list(enumerate(results, start=1))
    notes = [
        "seconds: training only, without evaluation; speed: how many times as fast as row 1; all in: the same with "
        "starting and compiling in the clock; pad: share of the computed tokens that is padding."
    ]
    graphs_above = False
    for number, result in numbered:
        if result.refused is not None:
            notes.append(f"Row {number} was refused: {result.refused}")
        else:
            notes += _notes_of_row(number, result, graphs_above=graphs_above)
            graphs_above |= result.kept and result.variant.records_graphs
    notes += _over_the_engineer(numbered)
    notes += _marks(numbered)
    notes += _unsteadiness([(number, result) for number, result in numbered if result.refused is None])
    if arithmetic is not None:
        notes += _use_of_peak(numbered, arithmetic)
    return notes


def _over_the_engineer(numbered: _Numbered) -> Iterator[str]:
    """Compare the fastest row with the best loop by hand: the plain loop pads far more than anybody has to."""
    ours = [(number, each) for number, each in numbered if not each.row.by_hand and each.row.same_maths]
    for other, result in numbered:
        if result.row.name == ENGINEERS_LOOP and ours:
            number, fastest = min(ours, key=lambda each: each[1].seconds)
            speed = _speed(result.seconds / fastest.seconds)
            yield f"Row {number} is {speed} as fast as row {other}, {ENGINEERS_LOOP}."


def _notes_of_row(number: int, result: Result, *, graphs_above: bool) -> Iterator[str]:
    row = result.row
    if "compile" in row.arguments:
        doing = "compiling and recording" if result.variant.records_graphs else "compiling"
        yield f"Row {number}: {_seconds(result.start_seconds)} s went by before its steps, {doing}."
    if graphs_above and "packed" in row.arguments:
        yield f"Row {number} is without CUDA graphs: packed batches are not recorded."
    if not result.in_full and result.full_seconds is not None:
        in_full = _seconds(result.full_seconds)
        yield f"Row {number} was then trained in full, for its accuracy: in {in_full} s."
    if len(found := result.accuracies) > 1:
        each = ", ".join(f"{accuracy:.1%}" for accuracy in found)
        yield (
            f"Row {number}: accuracy over {len(found)} seeds {mean(found):.1%} "
            f"+- {stdev(found) / len(found) ** 0.5:.1%} ({each})."
        )


def _marks(numbered: _Numbered) -> Iterator[str]:
    """Return the meaning of the marks that rows have."""
    run = [(number, result) for number, result in numbered if result.refused is None]
    if sampled := [(number, result.basis) for number, result in run if not result.in_full]:
        yield (
            "~ timed over a sample of steps, in turns with the row it builds on, and scaled to all "
            f"({_grouped(sampled)}); no accuracy where not trained in full."
        )
    if not all(result.row.same_maths for _, result in numbered):
        yield "* changes the maths: not the same training, check the accuracy. The rows below keep the change."
    classes = [
        (number, result.row.safety)
        for number, result in numbered
        if result.row.same_maths and not result.row.safety.is_automatic
    ]
    if classes:
        yield f"More than rounding: {_grouped(sorted(classes, key=lambda each: each[1]))}."
    if left_out := [(number, "") for number, result in run if result.is_left_out]:
        yield f"- not faster here, so the rows below do without it: {_grouped(left_out)}."


def _unsteadiness(numbered: _Numbered) -> Iterator[str]:
    """Describe how much the times of a row's turns differ: apart from the load of the machine they should be equal."""
    spreads = [(1.0, 0)]
    for number, result in numbered:
        if costs := [turn.cost("tokens") for turn in result.turns]:
            spreads.append((max(costs) / min(costs), number))
    spread, worst = max(spreads)
    if spread > UNSTEADY:
        yield (
            f"This machine was busy: the same work in row {worst} took up to {spread:.1f} times as long. Run again "
            "when it is idle."
        )


def _use_of_peak(numbered: _Numbered, arithmetic: Arithmetic) -> Iterator[str]:
    fastest = min(numbered, key=lambda each: each[1].seconds)
    shares = {number: arithmetic.mfu(result) for number, result in (numbered[0], fastest)}
    parts = [f"row {number} {share:.0%}" for number, share in shares.items() if share is not None]
    if parts:
        peaks = " and ".join(f"{peak / 1e9:,.0f} in {name}" for name, peak in arithmetic.peaks.items())
        yield (
            f"Useful arithmetic (padding does not count) as a share of this device's peak: {', '.join(parts)}. The "
            f"peak is that of a large matrix product: {peaks} GFLOP/s."
        )


def _grouped(described: Iterable[tuple[int, str]]) -> str:
    """Return rows with what each is described as: "rows 1, 2: 3 of 117 steps; row 4: 1 of 117 steps"."""
    found: dict[str, list[str]] = {}
    for number, text in described:
        found.setdefault(text, []).append(str(number))
    return "; ".join(
        f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)}" + f": {text}" * bool(text)
        for text, numbers in found.items()
    )


# -- files


def write(
    folder: Path,
    task: Task,
    results: Sequence[Result],
    facts: dict[str, Any],
    command: str,
    *,
    arithmetic: Arithmetic | None = None,
) -> list[Path]:
    """Write ``<task>.csv``, ``.json`` (with the command that made the numbers) and ``.png``; return the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    table_file, data_file, chart = (folder / f"{task.name}.{ending}" for ending in ("csv", "json", "png"))
    rows = [_as_row(result, results[0], arithmetic) for result in results]
    columns = list(rows[0])
    with table_file.open("w", newline="", encoding="utf-8") as file:
        # Lists and details are in the JSON file alone.
        writer = csv.DictWriter(file, columns[: columns.index("kept") + 1], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    whole: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "command": command,
        "hardware": facts,
        "rows": rows,
    }
    if arithmetic is not None:
        whole |= {"useful_flops": arithmetic.useful_flops, "peak_flops": arithmetic.peaks}
    data_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    draw(chart, task, results, facts)
    return [table_file, data_file, chart]


def _as_row(result: Result, first: Result, arithmetic: Arithmetic | None) -> dict[str, Any]:
    measured = result.refused is None
    return {
        "row": result.row.name,
        "line": result.row.line,
        "seconds": round(result.seconds, 3) if measured else None,
        "speed": round(first.seconds / result.seconds, 4),
        "all_in_seconds": round(result.all_in, 3) if measured else None,
        "all_in_speed": round(first.all_in / result.all_in, 4),
        "pad_share": round(result.pad_share, 4),
        "test_accuracy": result.accuracy,
        "validation_accuracy": result.validation_accuracy,
        "basis": result.basis if measured else "refused",
        "same_maths": result.row.same_maths,
        "by_hand": result.row.by_hand,
        "kept": result.kept,
        "test_accuracies": result.accuracies,
        "refused": result.refused,
        "sampled": not result.in_full,
        "safety": result.row.safety,
        "verdict": None if result.comparison is None else result.comparison.verdict,
        "steps": result.steps,
        "step_seconds": [round(seconds, 4) for turn in result.turns for seconds in turn.step_seconds],
        "full_seconds": None if result.full_seconds is None else round(result.full_seconds, 4),
        "start_seconds": round(result.start_seconds, 4),
        "variant": asdict(result.variant),
    } | ({} if arithmetic is None else {"mfu": arithmetic.mfu(result)})


def draw(path: Path, task: Task, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Draw the ladder: a bar for each row, whose length is its speed, with seconds and accuracy next to it."""
    bars = []
    for result in results:
        text, *more = _figures(result, results[0])
        if more:
            text = f"{more[0]}   {text} s" + f"   accuracy {more[-1]}" * bool(more[-1])
        color = GREY if result.variant.trainer is None else BLUE
        speed, hatch = results[0].seconds / result.seconds, None if result.in_full else "///"
        bars.append(Bar(result.row.name + _mark(result), speed, text, color, hatch=hatch))
    notes = [
        "hatched, ~: timed over a sample of steps" * any(not result.in_full for result in results),
        "*: changes the maths" * any(not result.row.same_maths for result in results),
        "-: not faster, left out of the rows below" * any(result.is_left_out for result in results),
    ]
    draw_speeds(
        path,
        bars,
        title=f"{task.name}: {task.title}",
        axis="times as fast as the plain PyTorch loop (training time, longer is better)",
        notes=[describe(facts), ";  ".join(filter(None, notes))],
        purpose="the bar chart of `hasten demo`",
    )
