"""``hasten plot``: draw the curves of one run, or compare several runs, as a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.commands.parser import Parser

if TYPE_CHECKING:
    from hasten_tools.report.curves import Axis
    from hasten_tools.report.read import RecordedRun

_PICTURES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str]) -> int:
    """Draw; return the exit code."""
    parser = make_parser()
    options = parser.parse(arguments)
    if not options.runs:
        parser.error("name a run: hasten plot lightning_logs/version_0 [more runs] [--key NAME ...].")

    try:
        for path in _by_epoch(options) or [_compared(options)]:
            print(path)
    except (ValueError, OSError) as error:
        print(f"hasten plot: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten plot",
        description=(
            "Draw what runs have logged, training and validation of each quantity together. For one run and without "
            "options: loss and accuracy by epoch, as loss.pdf, acc.pdf and png in its folder. For several runs, or "
            "with one of the options: one picture that compares them."
        ),
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN",
        help="the folder of a run or above runs (the newest), a run.jsonl or metrics.csv",
    )  # fmt: skip
    parser.add_argument(
        "--key", nargs="+", action="extend", default=[], metavar="NAME",
        help='what to draw: logged names, "val_*", lr, samples_per_sec, tokens_per_sec; default: losses and accuracies',
    )  # fmt: skip
    parser.add_argument("-x", choices=("step", "epoch", "time"), help="the horizontal axis; default: step")
    parser.add_argument(
        "--smooth", type=_smooth, metavar="S",
        help="a weight below 1, such as 0.9, for an exponential mean, or a number of values for a moving mean; curves "
        "of few values stay as they are",
    )  # fmt: skip
    parser.add_argument("--log", action="store_true", help="a logarithmic vertical axis")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH",
        help="a .png, .pdf or .svg file (default: hasten-plot.png, for one run plot.png in its folder), or for loss "
        "and accuracy by epoch a folder",
    )  # fmt: skip
    return parser


def _smooth(text: str) -> float:
    from hasten_tools.report.curves import check_smooth

    try:
        value = float(text)
        check_smooth(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: use a weight below 1, such as 0.9, or a number of values, such as 20."
        ) from None
    return value


def _by_epoch(options: argparse.Namespace) -> list[Path]:
    """Draw loss and accuracy by epoch, unless something else is asked for."""
    chosen = options.key or options.x or options.smooth is not None or options.log
    picture = options.output is not None and options.output.suffix.lower() in _PICTURES
    if len(options.runs) > 1 or chosen or picture:
        return []

    import hasten
    from hasten_tools.report.read import read_run

    (run,) = options.runs
    # Some fits log neither loss nor accuracy.
    recorded = read_run(run)
    try:
        return hasten.plot_logs(run, options.output)
    except (FileNotFoundError, ValueError):
        if options.output is not None or not recorded.keys():
            raise
        return []


def _compared(options: argparse.Namespace) -> Path:
    from hasten_tools.report.compare import curves_of_runs
    from hasten_tools.report.curves import can_smooth, check_format, draw, save
    from hasten_tools.report.read import read_runs

    if options.output is not None:
        # Before the reading, which may take long.
        check_format(options.output)
    runs: list[RecordedRun] = []
    for run in read_runs(options.runs):
        if run.folder not in [other.folder for other in runs]:
            runs.append(run)
    for run in runs:
        for problem in run.problems:
            _say(f"{run.folder}: {problem}")
    x: Axis = options.x or "step"
    curves = curves_of_runs(runs, keys=options.key, x=x, say=_say)
    if options.smooth and not any(can_smooth(curve.y, options.smooth) for curve in curves):
        _say(f"--smooth {options.smooth:g}: no curve has values enough, all are drawn as they are.")
    figure = draw(curves, x=x, smooth=options.smooth, log=options.log)
    if options.output is not None:
        return save(figure, options.output)
    return save(figure, Path("hasten-plot.png") if len(runs) > 1 else Path(os.path.abspath(runs[0].folder), "plot.png"))


def _say(line: str) -> None:
    print(f"hasten plot: {line}", file=sys.stderr)
