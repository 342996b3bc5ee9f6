"""``hasten advise``: measure which speed-ups make a program faster, on the program itself."""

from __future__ import annotations

import argparse
import ast
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.commands.parser import Option, Parser, new_file, positive, whole
from hasten_lightning.commands import run

if TYPE_CHECKING:
    from hasten_tools.speed.advice import Advice


def main(arguments: Sequence[str]) -> int:
    """Measure a program; return the exit code."""
    began = time.monotonic()
    parser = make_parser()
    given, rest = run.parse_program(parser, arguments)
    if given.list:
        return _list()
    run.check_program(parser, given)
    if given.module is not None:
        origin = Path(run.find_module(given.module, parser))
        source = origin.read_bytes() if origin.suffix == ".py" else None
        words = ["-m", given.module, *rest]
    else:
        source = run.read_source(Path(given.program), parser)
        words = [given.program, *rest]

    _say(f"at most {given.budget:.0f} s: importing torch, then {given.program or given.module}")
    from hasten._lib.optional import need
    from hasten_tools.speed.advice import CHART, remember
    from hasten_tools.speed.advisor import AdviceError, Program, measure
    from hasten_tools.speed.races import Plan

    try:
        if given.out is not None:
            # Errors come before the measuring, not after it.
            given.out.mkdir(parents=True, exist_ok=True)
        if given.png is not None or given.out is not None:
            need("matplotlib.figure", purpose=CHART)
        alone, seconds = given.alone, (given.budget, given.timeout)
        plan = Plan(given.rounds, given.steps, given.warm_up, given.seeds, not alone, *seconds)
        target, preload = "hasten_tools.commands.trial:run_program", _imports(source)
        measured = Program(shlex.join(words), target, (words,), preload=preload)
        found = measure(measured, levers=given.levers, plan=plan, say=_say, began=began)
    except (AdviceError, ValueError, OSError) as error:
        print(f"hasten advise: {error}", file=sys.stderr)
        return 1
    if given.levers is None and found.is_worth_keeping:
        # A result for some speed-ups says nothing about the others.
        remember(found.facts.get("key"), found)
    width = shutil.get_terminal_size((100, 24)).columns
    print(found.table(width) if given.verbose else found.summary(min(width, 100)))
    _write(found, given)
    return 130 if found.interrupted else 0


def _write(found: Advice, given: argparse.Namespace) -> None:
    """Write the files that were asked for, and print their names."""
    if given.json is not None:
        given.json.write_text(found.to_json(), encoding="utf-8")
        print(given.json)
    if given.png is not None:
        print(found.draw(given.png))
    if given.out is not None:
        for path in found.write(given.out):
            print(path)


def _imports(source: bytes | None) -> list[str]:
    """Return the modules that a program imports, in order."""
    try:
        nodes = list(ast.walk(ast.parse(source or b"")))
    except (SyntaxError, ValueError):
        # Running it gives the error.
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_OPTIONS: list[Option] = [
    ("--levers", "A,B", _names, "names of the speed-ups to measure; default: all (see --list)"),
    ("--list", "", None, "list the speed-ups and stop"),
    ("--rounds", "N", whole(1), "a comparison ends after 16 N turns of each at the latest; default: 3"),
    ("--steps", "N", whole(1), "steps of a turn; default: half a second's worth, 1 to 50"),
    ("--warm-up", "N", whole(1), "steps of each before the clock, one if they take long; default: 3"),
    ("--seeds", "N", whole(1), "runs with other seeds, where losses only agree up to chance; default: 1"),
    ("--alone", "", None, "compare each speed-up with the unchanged program, not with the fastest combination"),
    ("--budget", "S", positive, "seconds for everything, imports included; the best speed-ups come first; default: 90"),
    ("--verbose", "", None, "print every speed-up with all figures and reasons, also those that do not apply"),
    ("--timeout", "S", positive, "seconds for the program to start, a speed-up to prepare, or a turn; default: 900"),
    ("--json", "FILE", new_file, "write everything measured"),
    ("--png", "FILE", new_file, "draw a bar chart"),
    ("--out", "FOLDER", Path, "write table, JSON and chart"),
]


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten advise",
        description=(
            "Measure which one-line speed-ups make a program faster: each trains it in its own process, in turns with "
            "the fastest combination so far, until its gain is certain; the losses of both must agree. "
            "The result comes within the budget, and after Ctrl-C what was measured by then. "
            "Everything after PROGRAM belongs to the program. Only the files that you ask for here are left behind; a "
            "result for all speed-ups is kept for Trainer(speed='auto')."
        ),
    )
    parser.add_options(_OPTIONS)
    parser.set_defaults(budget=90.0, rounds=3, warm_up=3, seeds=1, timeout=900.0)
    run.add_program(parser)
    return parser


def _say(line: str) -> None:
    print(f"advise: {line}", file=sys.stderr, flush=True)


def _list() -> int:
    from hasten_tools.speed.levers import known_levers
    from hasten_tools.speed.safety import Safety

    for lever in known_levers():
        print(f"{lever.name:<22}{lever.safety:<31}{lever.line}")
    print()
    for safety in Safety:
        print(f"{safety.words}: {safety.means}")
    return 0
