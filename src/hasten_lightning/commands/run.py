"""``hasten run``: run a program written for Lightning, unchanged, on hasten."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from hasten._lib.names import did_you_mean_file
from hasten.commands.parser import Parser
from hasten.extend.frames import file_of

# hasten's own arguments of Trainer and Fabric: name, its values, whether it may stand without one, and what it does.
OWN_ARGUMENTS = (
    ("speed", "exact|auto|CLASS", False, "use what is faster of what follows, and changes no more than that"),
    ("compile", "regional|JSON", True, "compile the model"),
    ("batching", "length|tokens:N", False, "put samples of similar length in one batch"),
    ("packed", "first_token", True, "skip padding in transformer blocks"),
    ("num_workers", "N|auto", False, "worker processes of each loader"),
    ("resident", "auto|device", True, "hold the data in memory"),
    ("matmul_precision", "high|medium", False, "the precision of float32 matrix products"),
    ("fused_optimizer", "0", True, "update all parameters in one kernel"),
    ("batch_size", "N|auto", False, "samples of a batch"),
    ("micro_batch", "N|auto", False, "samples of a batch computed at once"),
    ("memory", "auto|selective|full|offload", False, "recompute activations, or keep them on the host"),
    ("dropout", "fast", False, "masks from random bytes"),
    ("allocator", "keep|tcmalloc|jemalloc", False, "how memory of the host is allocated"),
    ("uneven", "stop|error", False, "when processes have different numbers of batches"),
    ("on_bad_loss", "warn|stop|skip|rewind", False, "when the loss is not finite"),
)


def main(arguments: Sequence[str], *, as_python_does: bool = False) -> int:
    """Run a program; return its exit code.

    ``as_python_does``: a program that imports hasten alone, and no name of Lightning, keeps hasten's conventions.
    """
    parser = make_parser()
    given, rest = parse_program(parser, arguments)
    check_program(parser, given)

    import hasten_lightning
    from hasten.elsewhere.conventions import HASTEN, use
    from hasten.machine import launch
    from hasten_lightning import environment

    def install() -> None:
        hasten_lightning.install()
        if as_python_does:
            use(HASTEN)

    for name, *_ in OWN_ARGUMENTS:
        if (value := getattr(given, name)) is not None:
            try:
                environment.parse(name, value)
            except ValueError as error:
                parser.error(f"{_option(name)}: {str(error).partition(': ')[2]} Got {value!r}.")
            # In the environment, for the processes that the program starts.
            os.environ[environment.variable(name)] = value
    # Other processes of a distributed run start the way this one did.
    launch.PREFIX[:] = ["-m", "hasten", "run"]
    if given.module is not None:
        origin = find_module(given.module, parser)
        install()
        sys.argv[:] = [given.module, *rest]
        return _shown(lambda: runpy.run_module(given.module, run_name="__main__", alter_sys=True), origin)
    path = Path(given.program)
    source = read_source(path, parser)
    install()
    sys.argv[:] = [given.program, *rest]
    # A program can import modules from its own folder.
    if not sys.flags.safe_path:
        sys.path[0] = os.path.abspath(path if source is None else path.parent)
    if source is None:
        return _shown(lambda: runpy.run_path(given.program, run_name="__main__"), os.path.abspath(path / "__main__.py"))
    file = os.path.abspath(path)
    return _shown(lambda: _execute(source, file), file)


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten run",
        description=(
            "Run a program with the names of Lightning (lightning, pytorch_lightning, lightning_fabric) leading to "
            "hasten, in this process and those it starts. Everything after PROGRAM belongs to the program."
        ),
    )
    of_trainer = parser.add_argument_group(
        "arguments of each Trainer and Fabric that the program makes",
        "Environment variables do the same: HASTEN_PACKED=1 is --packed.",
    )
    for name, values, alone, text in OWN_ARGUMENTS:
        options = {"nargs": "?", "const": "1"} if alone else {}
        of_trainer.add_argument(_option(name), metavar=values, help=text, **options)  # type: ignore[arg-type]
    add_program(parser)
    return parser


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_program(parser: Parser) -> None:
    """Add PROGRAM and ``-m MODULE`` to a parser."""
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module, as python -m runs it")
    parser.add_argument("program", nargs="?", metavar="PROGRAM", help="a Python file, or a folder with __main__.py")


def parse_program(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a parser that ``add_program`` was called with, and the arguments of the program."""
    options, program, rest = _split(list(arguments), parser.options_with_value())
    parsed = parser.parse([*options, *(["--", program] if program is not None else [])])
    if program is not None:
        _note_late_option(parser, program, rest)
    return parsed, rest


def _note_late_option(parser: Parser, program: str, rest: Sequence[str]) -> None:
    """Say that the program gets an option of ours that stands after it, unless its file mentions such an option."""
    late = next((word.partition("=")[0] for word in rest if word.partition("=")[0] in parser.long_options()), None)
    if late is None or not os.path.isfile(program):
        return
    if late.strip("-").replace("-", "_") not in Path(program).read_text("utf-8", "replace").replace("-", "_"):
        print(
            f"{parser.prog}: {late} comes after {program}, so the program gets it. Write it before {program} to give "
            f"it to {parser.prog}.",
            file=sys.stderr,
        )


def check_program(parser: Parser, given: argparse.Namespace) -> None:
    """End this process with an error if neither a program nor a module is named."""
    if given.module is None and given.program is None:
        name = parser.prog
        parser.error(f"name a program: {name} train.py [its arguments], or {name} -m package.train.")


def program_words(parser: Parser, given: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return the words that run a program: its file or ``-m`` and its module, and its arguments.

    Ends this process with an error if none is named, or if it does not exist.
    """
    check_program(parser, given)
    if given.module is not None:
        find_module(given.module, parser)
        return ["-m", given.module, *rest]
    read_source(Path(given.program), parser)
    return [given.program, *rest]


def _split(words: list[str], valued: set[str]) -> tuple[list[str], str | None, list[str]]:
    """Return our options, the program, and its arguments. ``-m MODULE`` ends our options as a program does."""
    place = 0
    while place < len(words):
        word = words[place]
        if word == "-m":
            return words[: place + 2], None, words[place + 2 :]
        if word.startswith("-m"):
            return [*words[:place], "-m", word[2:]], None, words[place + 1 :]
        if word == "--" and place + 1 < len(words):
            return words[:place], words[place + 1], words[place + 2 :]
        if not word.startswith("-"):
            return words[:place], word, words[place + 1 :]
        place += 2 if word in valued else 1
    return words, None, []


def find_module(name: str, parser: Parser) -> str:
    """Return the file of a module, as `python -m` finds it: the working directory comes first."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        parser.error(f"-m {name}: not found in {os.getcwd()} or among the installed packages.")
    return found.origin or name


def read_source(path: Path, parser: Parser) -> bytes | None:
    """Return the program's text; None for a folder or an archive, which Python itself reads."""
    if path.is_dir():
        if not (path / "__main__.py").exists():
            parser.error(f"{path} is a folder without a __main__.py. Name the file to run.")
        return None
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except FileNotFoundError:
        hint = did_you_mean_file(str(path), [str(other) for other in path.parent.glob("*.py")])
        parser.error(f"no file {str(path)!r} in {os.getcwd()}.{hint} For a module: {parser.prog} -m MODULE.")
    except OSError as error:
        parser.error(f"{path} cannot be read: {error.strerror}.")
    return None if source[:2] == b"PK" else source


def _execute(source: bytes, file: str) -> None:
    code = compile(source, file, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    # Stays there: what the program leaves running looks for its classes in it, also after its last line.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _shown(run: Callable[[], object], file: str) -> int:
    """Run a program; an error is shown as Python shows it, without the frames of this command."""
    try:
        run()
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        _explain(error)
        traceback = _of_the_program(error.__traceback__, file)
        error.__traceback__ = traceback
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error, traceback)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _explain(error: BaseException) -> None:
    """Add the usual fix to an error of torch, if the program has imported torch."""
    if "torch" in sys.modules:
        from hasten._lib.explain import explain

        explain(error)


def _of_the_program(traceback: TracebackType | None, file: str) -> TracebackType | None:
    """Return the traceback from the program's first line on; None if it did not come so far."""
    while traceback is not None and os.path.abspath(file_of(traceback.tb_frame)) != file:
        traceback = traceback.tb_next
    return traceback
