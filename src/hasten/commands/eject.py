"""``hasten eject``: write the plain PyTorch program that does what a program does with hasten."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hasten.commands import run
from hasten.commands.parser import Parser
from hasten.eject.source import PACKAGES, EjectError


def main(arguments: Sequence[str]) -> int:
    """Eject a program; return the exit code."""
    parser = make_parser()
    words, output = list(arguments), None
    if len(words) >= 3 and words[-2] in ("-o", "--output"):
        # Where people write it: after the program and its arguments.
        words, output = words[:-2], Path(words[-1])
    given, rest = run.parse_program(parser, words)
    output = given.output or output
    if given.module is not None:
        parser.error(f"-m {given.module}: name its file, of which the plain program is made.")
    run.check_program(parser, given)
    path = Path(given.program)
    source = run.read_source(path, parser)
    if source is None:
        parser.error(f"{path} is not a Python file. Name the file that calls Trainer.fit.")
    if output is not None and output.resolve() == path.resolve():
        parser.error(f"-o {output} is the program itself. Name another file.")
    try:
        text = eject_program(path, source.decode("utf-8"), rest)
        several = "DistributedDataParallel(" in text
        if output is None:
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
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    run.add_program(parser)
    return parser


class _FitSeen(SystemExit):
    """Ends the program when its first fit is known."""


def eject_program(path: Path, text: str, arguments: Sequence[str] = ()) -> str:
    """Return the plain program for a file.

    Args:
        path: of the program; it runs in this process up to its first ``Trainer.fit``.
        text: its text.
        arguments: of the program.

    Raises:
        EjectError: it cannot be ejected; the message says why, and where.

    """
    from hasten.eject import check, ejected

    check(text, path.name)
    facts = _first_fit(path, text, arguments)
    return ejected(text, path.name, facts, stem=path.stem)


def _first_fit(path: Path, text: str, arguments: Sequence[str]) -> Any:
    from hasten.eject import gather
    from hasten.trainer import Trainer

    found: list[Any] = []
    fit, refused = Trainer.fit, {}

    @functools.wraps(fit)
    def look(trainer: Trainer, *args: Any, **named: Any) -> NoReturn:
        Trainer.fit = fit  # type: ignore[method-assign]
        try:
            found.append(gather(trainer, *args, **named))
        except EjectError as error:
            found.append(EjectError(f"{path.name}: {error}"))
        raise _FitSeen(0)

    def refuse(verb: str) -> Callable[..., NoReturn]:
        def refused_verb(*_: Any, **__: Any) -> NoReturn:
            found.append(EjectError(f"{path.name}: it calls Trainer.{verb} before Trainer.fit. Train first."))
            raise _FitSeen(1)

        return refused_verb

    for verb in ("validate", "test", "predict"):
        refused[verb] = getattr(Trainer, verb)
        setattr(Trainer, verb, refuse(verb))
    setattr(Trainer, "fit", look)  # noqa: B010
    before = sys.argv[:], sys.path[:]
    try:
        code: object = _run(path, text, arguments)
    except SystemExit as error:
        code = error.code
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]
        for verb, method in refused.items():
            setattr(Trainer, verb, method)
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
