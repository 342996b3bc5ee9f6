"""The command line: ``hasten COMMAND``. Each command is a module, imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hasten.commands.parser import Parser

# Command, the module that has it, one line for --help.
COMMANDS = {
    "advise": ("hasten.commands.advise", "measure which one-line switches make a program faster"),
    "check": ("hasten.commands.check", "find what would go wrong in a program's fit, in seconds, before it starts"),
    "consolidate": ("hasten.commands.consolidate", "make one file of a sharded checkpoint, which is a folder"),
    "demo": ("hasten.demo.command", "train a model on real data and time each one-line switch"),
    "eject": ("hasten.commands.eject", "write the plain PyTorch program that does the same without hasten"),
    "env": ("hasten.commands.env", "print what a bug report needs: versions, processor, memory, GPUs"),
    "launch": ("hasten.commands.launch", "start a program in several processes, and restart them when one dies"),
    "migrate": ("hasten.commands.migrate", "rewrite the imports of Lightning in a folder of programs"),
    "plan": ("hasten.commands.plan", "print what a program needs on many devices, without using any"),
    "plot": ("hasten.commands.plot", "draw what runs have logged, one or several side by side"),
    "report": ("hasten.commands.report", "write one page about a run: curves, where the time goes, what was set"),
    "run": ("hasten.commands.run", "run a program written for Lightning, unchanged"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; default: those of this process.

    Returns:
        The exit code: 0 done, 1 it could not be done (the message says why), 2 wrong use, 130 interrupted.

    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    # The words after the command belong to the command, also --help.
    split = next((place for place, word in enumerate(given) if not word.startswith("-")), len(given))
    if given[split - 1 : split] == ["--print-completion"]:
        split += 1
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
    return _run(COMMANDS[own.command][0], given[split + 1 :])


def make_parser() -> Parser:
    """Return what reads the words before the command. Each command has a function of this name for its arguments."""
    parser = Parser(
        prog="hasten",
        description="PyTorch training as fast as the hardware allows, by changing one line.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items())
        + "\n\nhasten COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and stop")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        metavar="SHELL",
        help="print a script that completes commands, options and files in bash, zsh or tcsh, and stop",
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser


def _run(module: str, arguments: list[str]) -> int:
    import importlib

    try:
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


__all__ = ["main"]
