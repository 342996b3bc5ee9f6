"""The command line: ``hasten COMMAND``. Commands are found by entry points and imported when they are used.

It must not import ``hasten_tools``, ``hasten.trainer`` or ``hasten.loops``.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hasten.commands.parser import Parser
from hasten.extend.entry_points import Command, found

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_SECONDS_TO_INTERRUPT_AGAIN = 0.05
# What other programs call a command.
_OTHERS = {
    "doctor": "env",
    "fabric": "launch train.py",
    "fit": "run train.py",
    "help": "--help",
    "train": "run train.py",
    "version": "--version",
}


def commands() -> dict[str, Command]:
    """Return the commands that are installed, by name.

    Example::

        >>> commands()["env"].module.endswith("commands.env")
        True

    """
    return {name: entry.load() for name, entry in sorted(found("hasten.commands").items())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, with the arguments of this process unless others are given, without the program's name.

    Return the exit code: 0 done, 1 it could not be done (the message says why), 2 wrong use, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    # The words after the command belong to the command, also --help.
    split = next((place for place, word in enumerate(given) if not word.startswith("-")), len(given))
    if given[split - 1 : split] == ["--print-completion"]:
        split += 1
    if given[split : split + 1] and given[split].endswith(".py"):
        parser.error(f"{given[split]!r} is a program, not a command. Write hasten run {given[split]}.")
    if (other := "".join(given[split : split + 1])) in _OTHERS:
        parser.error(f"COMMAND {other!r} is unknown. Write hasten {_OTHERS[other]}.")
    own = parser.parse(given[: split + 1])
    if own.version:
        from hasten._lib import VERSION

        print(f"hasten {VERSION}")
        return 0
    if own.print_completion is not None:
        return _run("hasten.commands.completion", [own.print_completion])
    if own.command is None:
        parser.print_help()
        return 2
    return _run(commands()[own.command].module, given[split + 1 :])


def make_parser() -> Parser:
    """Return what reads the words before the command. Each command has a function of this name for its arguments."""
    known = commands()
    parser = Parser(
        prog="hasten",
        description="PyTorch training as fast as the hardware allows, by changing one line.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12}{command.summary}" for name, command in known.items())
        + "\n\nhasten COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and stop")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        metavar="SHELL",
        help="print a script that completes commands, options and files in bash, zsh or tcsh, and stop",
    )
    parser.add_argument("command", nargs="?", choices=known, metavar="COMMAND", help="see below")
    return parser


def _run(module: str, arguments: list[str]) -> int:
    import importlib

    try:
        with _dropped_interrupts_are_repeated():
            return int(importlib.import_module(module).main(arguments))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (hasten demo | head): no message can reach it.
        sys.stderr.close()
        return 1
    except ModuleNotFoundError as error:
        # Only messages with an install command; any other is our fault and keeps its traceback.
        if "pip install" not in str(error):
            raise
        print(f"hasten: {error}", file=sys.stderr)
        return 1


@contextmanager
def _dropped_interrupts_are_repeated() -> Iterator[None]:
    """Interrupt the main thread again when a Ctrl-C has arrived in a function whose exceptions Python drops.

    ``__del__`` and callbacks of weak references are such functions; the import system calls one for each module, so
    about one Ctrl-C of sixty during imports would be lost. Source:
    https://docs.python.org/3/library/sys.html#sys.unraisablehook
    """
    before = sys.unraisablehook

    def hook(unraisable: UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Not at once: Python also drops what this hook raises.
        timer = threading.Timer(_SECONDS_TO_INTERRUPT_AGAIN, _interrupt_main_thread)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_main_thread() -> None:
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        # A signal also ends a call that blocks, such as time.sleep.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


__all__ = ["commands", "main"]
