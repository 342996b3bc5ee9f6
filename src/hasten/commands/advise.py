"""``hasten advise``: which switches make a program faster, measured on the program itself."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hasten.commands import run
from hasten.commands.parser import Parser, positive, whole


def main(arguments: Sequence[str]) -> int:
    """Measure a program; return the exit code."""
    options, program, rest = _split(arguments)
    parser = _parser()
    given = parser.parse([*options, *(["--", program] if program is not None else [])])
    if given.list:
        return _list()
    if given.module is None and given.program is None:
        parser.error(
            "name a program: hasten advise train.py [its arguments], or hasten advise -m package.train."
        )
    if given.module is not None:
        origin = Path(run.find_module(given.module, parser))
        source = origin.read_bytes() if origin.suffix == ".py" else None
        words = ["-m", given.module, *rest]
    else:
        source = run.read_source(Path(given.program), parser)
        words = [given.program, *rest]

    from hasten.speed.advice import remember
    from hasten.speed.advisor import AdviceError, Program, measure
    from hasten.speed.races import Plan

    folders = [path.parent for path in (given.json, given.png) if path is not None]
    try:
        # Found out before the measuring, not after it.
        for folder in [*folders, *([given.out] if given.out is not None else [])]:
            folder.mkdir(parents=True, exist_ok=True)
        if given.png is not None or given.out is not None:
            from hasten._lib.optional import need

            need("matplotlib.figure", purpose="the bar chart of `hasten advise`")
        plan = Plan(
            rounds=given.rounds,
            steps=given.steps,
            warm_up=given.warm_up,
            seeds=given.seeds,
            combine=not given.alone,
            budget_seconds=given.budget,
            timeout_seconds=given.timeout,
        )
        measured = Program(
            shlex.join(words), "hasten.commands.trial:run_program", (words,), preload=_imports(source)
        )
        found = measure(
            measured,
            levers=given.levers,
            plan=plan,
            say=lambda line: print(f"advise: {line}", file=sys.stderr, flush=True),
        )
    except (AdviceError, ValueError, OSError) as error:
        print(f"hasten advise: {error}", file=sys.stderr)
        return 1
    if given.levers is None and found.is_complete:
        # A verdict on some levers says nothing about the others.
        remember(found.facts.get("key"), found)
    print(found.table())
    if given.json is not None:
        given.json.write_text(found.to_json(), encoding="utf-8")
        print(given.json)
    if given.png is not None:
        print(found.draw(given.png))
    if given.out is not None:
        for path in found.write(given.out):
            print(path)
    return 0


# Options that take the next word: it is not the program.
_VALUED = (
    *("--levers", "--rounds", "--steps", "--warm-up", "--seeds", "--budget", "--timeout"),
    *("--json", "--png", "--out"),
)


def _split(arguments: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return our options, the program, and what belongs to it. ``-m MODULE`` ends our options as a program does."""
    words = list(arguments)
    place = 0
    while place < len(words):
        word = words[place]
        if word in _VALUED:
            place += 2
        elif word.startswith("--") and word != "--":
            place += 1
        else:
            # From here on it is as for `hasten run`.
            options, program, rest = run.split_program(words[place:])
            return words[:place] + options, program, rest
    return words, None, []


def _imports(source: bytes | None) -> list[str]:
    """Return the modules that a program imports, in order."""
    try:
        nodes = list(ast.walk(ast.parse(source or b"")))
    except (SyntaxError, ValueError):
        # Running it gives the error.
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def _parser() -> Parser:
    parser = Parser(
        prog="hasten advise",
        description=(
            "Measure which one-line switches make a program faster: each trains it in a process of its own, in turns "
            "with the fastest line so far, until it is certain what it gains, and its losses must stay those of that "
            "line. Everything after PROGRAM belongs to the program. Nothing is left behind but what is asked for "
            "here; a verdict on all levers is remembered for Trainer(speed='auto')."
        ),
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="measure a module, as python -m runs it")
    parser.add_argument(
        "--levers",
        type=_names,
        metavar="A,B",
        help="names of the levers to measure; default: all (see --list)",
    )
    parser.add_argument("--list", action="store_true", help="list the levers and stop")
    parser.add_argument(
        "--rounds",
        type=whole(1),
        default=3,
        metavar="N",
        help="a comparison ends after 16 N turns of each at the latest; default: 3",
    )
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="steps of a turn; default: half a second's worth, 1 to 50"
    )
    parser.add_argument(
        "--warm-up",
        type=whole(1),
        default=3,
        metavar="N",
        help="steps of each before the clock, one where they take long; default: 3",
    )
    parser.add_argument(
        "--seeds",
        type=whole(1),
        default=1,
        metavar="N",
        help="runs with other seeds, where losses can only be compared by how much they differ by chance; default: 1",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="compare each lever with the unchanged program, not with the fastest line so far",
    )
    parser.add_argument(
        "--budget",
        type=positive,
        metavar="S",
        help="how many seconds all of it may take: then it stops, the most promising levers first. Default: no limit",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=900.0,
        metavar="S",
        help="seconds the program may take to start training, a lever to prepare, or a turn to last; default: 900",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a bar chart")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write table, JSON and chart")
    parser.add_argument(
        "program", nargs="?", metavar="PROGRAM", help="a Python file, or a folder with __main__.py"
    )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _list() -> int:
    from hasten.speed.levers import known_levers
    from hasten.speed.safety import Safety

    for lever in known_levers():
        print(f"{lever.name:<22}{lever.safety:<31}{lever.line}")
    print()
    for safety in Safety:
        print(f"{safety.words}: {safety.means}")
    return 0
