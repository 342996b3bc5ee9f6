"""``hasten --print-completion SHELL``: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten._lib.optional import need

# Placeholders of argument values in --help, by what a shell offers for them.
_FOLDERS = frozenset({"FOLDER", "DIR"})
_FILES = frozenset({"FILE", "PATH", "RUN"})
_PROGRAM = "PROGRAM"


def main(arguments: Sequence[str]) -> int:
    """Print the script for the shell that is named; return the exit code."""
    print(script(*arguments))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell: ``"bash"``, ``"zsh"`` or ``"tcsh"``.

    Raises:
        ModuleNotFoundError: shtab is not installed.

    """
    shtab = need("shtab", purpose="hasten --print-completion")
    return str(shtab.complete(_all_commands(shtab), shell=shell))


def _all_commands(shtab: Any) -> argparse.ArgumentParser:
    """Return one parser that has every command with its options."""
    from hasten.commands import commands, make_parser

    parser = argparse.ArgumentParser(prog="hasten")
    for action in make_parser()._actions:
        if action.option_strings and action.dest != "help":
            parser._add_action(action)
    every = parser.add_subparsers(metavar="COMMAND")
    for name, command in commands().items():
        own = importlib.import_module(command.module).make_parser()
        for action in own._actions:
            _offer_files(action, shtab)
        # A parent gives its --help away, too.
        every.add_parser(name, help=command.summary, parents=[own], add_help=False)
    return parser


def _offer_files(action: argparse.Action, shtab: Any) -> None:
    """Let the shell offer files or folders where an argument is one."""
    complete: Any = None
    if action.metavar == _PROGRAM:
        complete = shtab.glob("*.py")
    elif action.metavar in _FOLDERS:
        complete = shtab.DIRECTORY
    elif action.metavar in _FILES or action.type is Path:
        complete = shtab.FILE
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]
