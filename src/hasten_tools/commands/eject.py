"""``hasten eject``: write the plain PyTorch program that does what a program does with hasten."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hasten.commands.parser import Parser, new_file
from hasten.extend.frames import caller, first_outside
from hasten_lightning.commands import run
from hasten_tools.eject.source import PACKAGES, EjectError


def main(arguments: Sequence[str]) -> int:
    """Eject a program; return the exit code."""
    parser = make_parser()
    words = list(arguments)
    if len(words) >= 3 and words[-2] in ("-o", "--output"):
        # Where people write it: after the program and its arguments.
        words = [*words[-2:], *words[:-2]]
    given, rest = run.parse_program(parser, words)
    if given.module is not None:
        parser.error(f"-m {given.module}: name its file, of which the plain program is made.")
    run.check_program(parser, given)
    path, output = Path(given.program), given.output
    source = run.read_source(path, parser)
    if source is None:
        parser.error(f"{path} is not a Python file. Name the file that calls Trainer.fit.")
    if output is not None and output.resolve() == path.resolve():
        parser.error(f"-o {output} is the program itself. Name another file.")
    try:
        text = eject_program(path, source.decode("utf-8-sig"), rest)
        several = "DistributedDataParallel(" in text
        if output is None:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # As Python reads programs.
            print(text, end="")
        else:
            output.write_text(text, encoding="utf-8")
            start = "torchrun --nproc-per-node N" if several else "python"
            print(f"{output}: {len(text.splitlines())} lines. Run it with: {start} {output} {' '.join(rest)}".rstrip())
    except (EjectError, UnicodeDecodeError, OSError) as error:
        print(f"hasten eject: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten eject",
        description=(
            "Print a plain PyTorch program that trains what PROGRAM trains, to the same bits, without importing "
            "hasten. PROGRAM runs up to its first Trainer.fit, with the arguments behind its name; nothing is trained. "
            "-o stands before PROGRAM or after its arguments."
        ),
    )
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="write it there instead of printing it")
    run.add_program(parser)
    return parser


class _FitSeen(SystemExit):
    """Ends the program when its first fit is known."""


def eject_program(path: Path, text: str, arguments: Sequence[str] = ()) -> str:
    """Return the plain program for a file.

    Raises:
        EjectError: it cannot be ejected; the message says why, and where.

    """
    from hasten_tools.eject import check, ejected, with_one_branch

    check(text, path.name)
    facts = _first_fit(path, text, arguments)
    try:
        return ejected(text, path.name, facts, stem=path.stem)
    except EjectError:
        # The other branch may make a Trainer that one loop cannot serve as well.
        one_way = with_one_branch(text, path.name, facts.made_at)
        if one_way == text:
            raise
        with contextlib.suppress(EjectError):
            return ejected(one_way, path.name, facts, stem=path.stem)
        raise


def _first_fit(path: Path, text: str, arguments: Sequence[str]) -> Any:
    from hasten.trainer import Trainer
    from hasten_tools.eject import QUIETLY, gather

    found: list[Any] = []
    # Where each Trainer was made, and the verbs that come before the first fit.
    made_at: dict[int, int] = {}
    first: list[str] = []
    init, fit = Trainer.__init__, Trainer.fit
    verbs = {verb: getattr(Trainer, verb) for verb in ("validate", "test", "predict")}

    @functools.wraps(init)
    def make(trainer: Trainer, *args: Any, **named: Any) -> None:
        frame = first_outside(caller(), lambda file: os.path.abspath(file) != os.path.abspath(path))
        if frame is not None:
            made_at[id(trainer)] = frame.f_lineno
        init(trainer, *args, **named)

    def restore() -> None:
        for name, method in ({"__init__": init, "fit": fit} | verbs).items():
            setattr(Trainer, name, method)

    @functools.wraps(fit)
    def look(trainer: Trainer, *args: Any, **named: Any) -> NoReturn:
        restore()
        try:
            facts = gather(trainer, *args, **named)
            facts.made_at, facts.verbs_before = made_at.get(id(trainer), 0), first
            found.append(facts)
        except EjectError as error:
            found.append(EjectError(f"{path.name}: {error}"))
        raise _FitSeen(0)

    def evaluated(verb: str) -> Callable[..., Any]:
        def evaluate(trainer: Trainer, *args: Any, **named: Any) -> Any:
            first.append(verb)
            # The program may read what it returns; nothing is written.
            return verbs[verb](trainer.with_arguments(**QUIETLY), *args, **named)

        return evaluate

    for verb in verbs:
        setattr(Trainer, verb, evaluated(verb))
    setattr(Trainer, "fit", look)  # noqa: B010
    setattr(Trainer, "__init__", make)  # noqa: B010
    before = sys.argv[:], sys.path[:]
    try:
        # What the program prints is no part of the one that is written.
        with contextlib.redirect_stdout(sys.stderr):
            code: object = _run(path, text, arguments)
    except SystemExit as error:
        code = error.code
    finally:
        restore()
        sys.argv[:], sys.path[:] = before
    if not found:
        raise EjectError(f"{path.name} ended with code {code} before it called Trainer.fit: there is no loop to write.")
    if isinstance(found[0], EjectError):
        raise found[0]
    return found[0]


def _run(path: Path, text: str, arguments: Sequence[str]) -> object:
    imported = {word for line in text.splitlines() for word in line.replace(".", " ").split()[1:2]
                if line.lstrip().startswith(("import ", "from "))}  # fmt: skip
    if imported & (PACKAGES - {"hasten"}):
        return run.main([str(path), *arguments])
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, os.path.abspath(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0
