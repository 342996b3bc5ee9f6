"""``hasten plot``: loss and accuracy by epoch, from what a logger wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hasten.commands.parser import Parser


def main(arguments: Sequence[str]) -> int:
    """Draw; return the exit code."""
    options = make_parser().parse(arguments)

    import hasten

    try:
        files = hasten.plot_logs(options.log_dir, options.output)
    except (ValueError, OSError) as error:
        print(f"hasten plot: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path)
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(prog="hasten plot", description="Draw loss.pdf and acc.pdf (and png) by epoch from a metrics.csv.")
    parser.add_argument("log_dir", type=Path, metavar="LOGDIR", help="folder with the metrics.csv of a CSVLogger")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write (default: LOGDIR)")
    return parser
