"""``hasten check``: run a program up to its first fit, and check model, data and arguments there."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hasten.commands.parser import Parser, new_file
from hasten_lightning.commands import run

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten_tools.preflight.report import CheckReport


def main(arguments: Sequence[str]) -> int:
    """Check a program; return the exit code."""
    parser = make_parser()
    given, rest = run.parse_program(parser, arguments)
    words = run.program_words(parser, given, rest)
    try:
        report = check_program(lambda: run.main(words, as_python_does=True), shown=words[-1 - len(rest)])
        report.show()
        if given.json is not None:
            given.json.write_text(to_json(report), encoding="utf-8")
            print(given.json)
    except OSError as error:
        print(f"hasten check: {error}", file=sys.stderr)
        return 1
    return 0 if report.ok else 1


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten check",
        description=(
            "Run a program up to its first Trainer.fit, train on three batches there and evaluate one of each other "
            "loader, and print what would go wrong and the line to write. Everything after PROGRAM belongs to the "
            "program. The fit itself does not take place, and nothing is written. The exit code is 1 if there is an "
            "error."
        ),
    )
    parser.add_options([("--json", "FILE", new_file, "also write the rows")])
    run.add_program(parser)
    return parser


def to_json(report: CheckReport) -> str:
    """Return a report as JSON."""
    import json
    from dataclasses import asdict

    content = {"title": report.title, "ok": report.ok, "rows": [asdict(row) for row in report.rows]}
    return json.dumps(content, indent=1) + "\n"


class _EndOfCheck(SystemExit):
    """Ends the program when its fit is checked."""


def check_program(run_it: Callable[[], int], *, shown: str) -> CheckReport:
    """Return the check of the first ``Trainer.fit`` that a program calls.

    ``run_it`` runs it in this process, which it changes for good, and returns its exit code; ``shown`` is its name.
    """
    from hasten import Fabric, LightningDataModule, Trainer
    from hasten.loops.evaluate import evaluate, predict
    from hasten_tools.preflight.check import alone
    from hasten_tools.preflight.report import CheckReport, CheckRow, Rows
    from hasten_tools.preflight.said import innermost, row_of_error

    found: list[CheckReport] = []

    def take(row: CheckRow) -> None:
        found.append(CheckReport([row], f"Check of {shown}"))

    def look(trainer: Trainer, model: Any, *args: Any, **given: Any) -> NoReturn:
        names = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only")
        given = {**dict(zip(names, args, strict=False)), **given}
        data = (given.get("train_dataloaders"), given.get("val_dataloaders"), given.get("datamodule"))
        # Not the method of a subclass.
        found.append(Trainer.check(trainer, model, *data))
        path = given.get("ckpt_path")
        if path not in (None, "last", "best", "hpc") and "://" not in str(path) and not os.path.exists(str(path)):
            seen = f"fit(ckpt_path={str(path)!r}): there is no such file."
            found[0].rows.append(CheckRow("checkpoint", "error", seen, 'ckpt_path="last"'))
        raise _EndOfCheck(0)

    evaluated: list[str] = []

    def first_batch_of(name: str) -> Callable[..., Any]:
        """Return the function that replaces evaluations before training: one batch of each loader."""

        def call(trainer: Trainer, model: Any = None, data: Any = None, *_: Any, **given: Any) -> Any:
            data = given.get("dataloaders", data)
            datamodule = given.get("datamodule")
            if isinstance(data, LightningDataModule):
                data, datamodule = None, data
            evaluated.append(name)

            def body(run: Run) -> Any:
                with run.data.of(name)[0].limited_to(1):
                    if name == "predict":
                        return predict(run, return_predictions=True)
                    return evaluate(run, run.data.of(name)[0])

            stage: Any = name
            return alone(trainer, Rows()).prepared_run(stage, model, {name: data}, datamodule, body)

        return call

    def keeps_own_loop(*_: Any, **__: Any) -> NoReturn:
        why = "the program keeps its own loop (Fabric), and a check follows Trainer.fit"
        take(CheckRow("program", "not checked", why))
        raise _EndOfCheck(0)

    setattr(Trainer, "fit", functools.wraps(Trainer.fit)(look))  # noqa: B010
    for name in ("validate", "test", "predict"):
        original = getattr(Trainer, name)
        setattr(Trainer, name, functools.wraps(original)(first_batch_of(name)))
    # From launch on the program runs in several processes.
    for name in ("launch", "setup", "setup_module"):
        setattr(Fabric, name, keeps_own_loop)
    errors: list[BaseException] = []
    # ``hasten run`` shows errors through it.
    sys.excepthook = lambda kind, error, trace: errors.append(error)
    code: int | None = None
    try:
        code = run_it()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            errors.append(error)
    finally:
        sys.excepthook = sys.__excepthook__
    if not found and errors:
        if isinstance(errors[0], KeyboardInterrupt):
            raise KeyboardInterrupt
        row = row_of_error(errors[0], "program")
        place = row.place or innermost(errors[0])
        seen = f"The program ends before Trainer.fit: {row.seen}"
        take(dataclasses.replace(row, name="program", seen=seen, place=place))
    elif not found and evaluated:
        why = f"the program calls Trainer.{evaluated[0]} and never Trainer.fit, which a check looks at"
        take(CheckRow("program", "not checked", why))
    if not found:
        seen = f"The program ended with code {code} and did not call Trainer.fit."
        take(CheckRow("program", "error", seen))
    return found[0]
