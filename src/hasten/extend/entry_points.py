"""Entry points, by which packages add to hasten; ``pip`` records them when it installs a package.

hasten's own tools come this way too: the core asks for a name, and does not know which package has it. A checkout of
the source is often used without an installation (``PYTHONPATH=src``), or is newer than what was installed from it. So
each of hasten's packages also has its entry points in a file, in the format that ``pip`` writes.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from os import path
from typing import Any

from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.optional import install_line
from hasten.extend.origin import FOLDERS, ROOTS

# The groups of entry points, with the kind of object in each.
GROUPS = {
    "hasten.accelerators": "a subclass of Accelerator: Trainer(accelerator=NAME)",
    "hasten.commands": "a Command: `hasten NAME`",
    "hasten.generators": "the random generator of a device, a DeviceGenerator, by the name of the library it needs",
    "hasten.levers": "a Lever, which the advisor and Trainer(speed=...) measure",
    "hasten.profilers": "a Profiler, or a function without arguments that returns one: Trainer(profiler=NAME)",
    "hasten.strategies": "a Strategy, or a function without arguments that returns one: Trainer(strategy=NAME)",
    "hasten.trainer": "a function that the Trainer needs for a method or an argument",
}


@dataclass(frozen=True)
class Command:
    """A command of ``hasten``, for an entry point of the group ``hasten.commands``.

    Args:
        module: the module of the command, which is imported when the command is used. It has ``main(arguments)``, which
            returns the exit code, and ``make_parser()``, which returns its ``argparse.ArgumentParser``.
        summary: one line for ``hasten --help``.

    Example::

        >>> Command("mypackage.hello", "say hello").summary
        'say hello'

    """

    module: str
    summary: str


def found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; hasten's own come before others of the same name.

    Example::

        >>> "advise" in found("hasten.commands")
        True

    """
    every = sorted(entry_points(group=group), key=lambda entry: entry.value.partition(".")[0] in ROOTS)
    return {entry.name: entry for entry in (*every, *_in_files(group))}


@cache
def _in_files(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points in the files of hasten's own packages."""
    names = configparser.ConfigParser(delimiters="=")
    names.optionxform = str  # type: ignore[assignment,method-assign]
    names.read([path.join(folder, "entry_points.txt") for folder in FOLDERS], encoding="utf-8")
    found = names.items(group) if names.has_section(group) else ()
    return tuple(EntryPoint(name, value, group) for name, value in found)


def load(group: str, name: str, *, purpose: str) -> Any:
    """Return the object that an entry point names; ``purpose`` is the feature that needs it, for the message.

    Raises:
        ModuleNotFoundError: no package that is installed has it; the message has the line that installs hasten's own.

    Example::

        >>> load("hasten.trainer", "plan", purpose="Trainer.plan")
        Traceback (most recent call last):
            ...
        ModuleNotFoundError: Trainer.plan needs the entry point 'plan' of the group 'hasten.trainer'...

    """
    entries = found(group)
    if name not in entries:
        what = f"{purpose} needs the entry point {name!r} of the group {group!r}, which no installed package has."
        fix = f"{did_you_mean(name, entries)} hasten's own come with its installation. Run: {install_line('')}"
        raise make_error(ModuleNotFoundError, what, fix=fix)
    return entries[name].load()
