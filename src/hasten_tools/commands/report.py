"""``hasten report``: write one page about a run, or about several runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hasten.commands.parser import Parser, new_file


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    options = make_parser().parse(arguments)

    from hasten_tools.report import page
    from hasten_tools.report.read import find_run

    try:
        output = options.output
        if output is None:
            folder = find_run(options.runs[0]).parent
            output = folder / "report.html" if len(options.runs) == 1 else Path("report.html")
        if output.is_dir():
            output /= "report.html"
        if output.suffix not in (".html", ".htm"):
            raise ValueError(f"-o {options.output}: use a name that ends in .html.")
        if options.follow:
            page.follow(options.runs, output, say=lambda text: print(text, flush=True))
            return 0
        runs = page.write(options.runs, output)
    except (ValueError, OSError) as error:
        print(f"hasten report: {error}", file=sys.stderr)
        return 1
    for run in runs:
        for problem in run.problems:
            print(f"{run.name}: {problem}", file=sys.stderr)
        before = run.continues
        if before is not None and all(before != other.folder.resolve() for other in runs):
            print(
                f"{run.name} continues the run in {before}, whose curves are not on this page. "
                f"hasten report {before} {run.folder} shows both.",
                file=sys.stderr,
            )
    print(output)
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten report",
        description="Write one HTML file about a run: curves, where the time goes, checkpoints, warnings, versions. "
        "Several runs are shown side by side, with what differs between them.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="folder of a run, such as lightning_logs/version_0, or above runs: the newest counts",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE",
        help="the page (default: report.html in the folder of the run; of several runs, here)",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="write it again while the run continues, until it ends")
    return parser
