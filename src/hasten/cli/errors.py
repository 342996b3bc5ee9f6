"""One line after a message of jsonargparse: the nearest key, class or sub-command to what was not found."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, get_args

from jsonargparse import ArgumentParser

from hasten._lib.names import nearest
from hasten.cli.known import forwarded_arguments

_KEY = re.compile(r'Parser key "([^"]*)"')
_CLASS_PATH = re.compile(r"class_path '([^']*)'")
_NOT_ACCEPTED = re.compile(
    r"(?:Group '(?P<group>[^']*)' does not accept o|does not accept o|O)ption '(?P<name>[^']*)'"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_SUBCOMMAND = re.compile(r"invalid choice: '([^']*)'")


def hints(parser: ArgumentParser, message: str) -> list[str]:
    """Return lines that name the nearest there is to what ``message`` says was not found.

    Args:
        parser: the parser, or that of the sub-command, that refused.
        message: the text of jsonargparse.

    """
    unknown = _unknown_options(message)
    if found := _NO_SUBCOMMAND.search(message):
        near = [nearest(found[1], subcommands_of(parser))]
    elif (found := _NO_CLASS.search(message)) and not unknown:
        key = _KEY.findall(message)[-1]
        action = parser._option_string_actions.get(f"--{key}")
        near = [nearest(found[1], _subclass_names(getattr(action, "_typehint", None)))]
    else:
        options = _options(parser, message)
        near = [_nearest_option(name, options) for name in unknown]
    lines = [f"Did you mean {name}?" for name in dict.fromkeys(near) if name is not None]
    for package in ("lightning.pytorch.", "pytorch_lightning."):
        if (found := _CLASS_PATH.search(message)) and found[1].startswith(package):
            name = found[1].replace(package, "hasten.", 1)
            lines.append(f"Write {name}, or start the program with `hasten run`.")
    return lines


def subcommands_of(parser: ArgumentParser) -> dict[str, Any]:
    """Return the parsers of the sub-commands by name."""
    action = parser._subcommands_action
    return dict(action.choices) if action is not None else {}


def _unknown_options(message: str) -> list[str]:
    """Return the options that ``message`` calls unknown, as they are written on a command line."""
    if message.startswith("unrecognized arguments:"):
        return [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    found = _NOT_ACCEPTED.search(message)
    if found is None:
        return []
    keys = [*dict.fromkeys(_KEY.findall(message[: found.start()])), found["group"], found["name"]]
    return ["--" + ".".join(key for key in keys if key)]


def _options(parser: ArgumentParser, message: str) -> list[str]:
    """Return the options of the parser and its sub-commands, and of the class that ``message`` is about."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    for one in subcommands_of(parser).values():
        options += [name for name in one._option_string_actions if name.startswith("--")]
    if found := _NOT_ACCEPTED.search(message):
        before = message[: found.start()]
        for class_path in _CLASS_PATH.findall(before)[-1:]:
            key = ".".join(dict.fromkeys(_KEY.findall(before)))
            options += [f"--{key}.{name}" for name in _argument_names(class_path)]
    return [name for name in options if not name.endswith("help")]


def _argument_names(class_path: str) -> set[str]:
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        names = {name for one in kind.__mro__ for name in inspect.signature(one.__init__).parameters}
        return names.union(forwarded_arguments(kind))
    except (ImportError, AttributeError, ValueError):
        return set()


def _nearest_option(option: str, options: Iterable[str]) -> str | None:
    group, _, leaf = option.rpartition(".")
    same_group = {name.rpartition(".")[2]: name for name in options if name.rpartition(".")[0] == group}
    # The common beginning of a group's options does not make two of them similar.
    near = (
        same_group.get(nearest(leaf, same_group) or "") if group and same_group else nearest(option, options)
    )
    # A name in the wrong group, or without one: --max_epochs for --trainer.max_epochs.
    return near or next((name for name in options if name.rpartition(".")[2] == leaf.lstrip("-")), None)


def _subclass_names(hint: Any) -> list[str]:
    names: list[str] = []
    waiting: list[type] = list(_classes(hint))
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        waiting += below
        names += [kind.__name__ for kind in below]
    return names


def _classes(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, type) and not get_args(hint):
        return () if hint.__module__ == "builtins" else (hint,)
    return tuple(kind for one in get_args(hint) if not isinstance(one, list) for kind in _classes(one))
