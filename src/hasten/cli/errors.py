"""What is wrong with a command line or config: the key, the value, what was expected, the nearest key.

jsonargparse tells every alternative that it tried; here its text becomes the one line that the user needs.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from hasten._lib.names import nearest
from hasten.cli.order import subcommands_of

if TYPE_CHECKING:
    from hasten.cli.parser import LightningArgumentParser

_KEY = re.compile(r'Parser key "([^"]*)": *')
_CLASS = re.compile(r"^( *)(?:- )?Problem with given class_path '([^']*)':\n", re.MULTILINE)
_NOT_ACCEPTED = re.compile(
    r"(?:Group '(?P<group>[^']*)' does not accept option|Subcommand '[^']*' does not accept option|Option) "
    r"'(?P<option>[^']*)'"
)
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_SUBCLASS = re.compile(r"does not correspond to (a subclass of \w+)")
_VALUE = re.compile(r"(?:Got value:|Given value:) (.*)\Z", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '([^']*)'")


def explain(parser: LightningArgumentParser, message: str, error: Exception | None = None) -> str:
    """Return what is wrong in a line that names the key, the value and what could be there instead.

    Args:
        parser: the parser that refused.
        message: what jsonargparse says.
        error: the exception it raised; it knows the parser of the sub-command.

    """
    parser = getattr(error, "subcommand_parser", None) or parser
    names = subcommands_of(parser)
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        words = [word for word in found[1].split() if word.startswith("-")] or found[1].split()
        return "\n".join(_unknown(parser, word.partition("=")[0]) for word in words)
    if (found := _CHOICE.search(message)) and names:
        return f"{found[1]!r}: no such sub-command{_hint(found[1], names)} There are {', '.join(names)}."
    if message.startswith('expected "subcommand"'):
        return f"a sub-command is missing: one of {', '.join(names)}"
    told = _about(parser, message, "")
    return told if told is not None else _plain(message)


def _about(parser: ArgumentParser, message: str, prefix: str) -> str | None:
    """Explain a message about the arguments of a parser whose keys begin with ``prefix`` on the command line."""
    key = _key_of(message)
    action = parser._option_string_actions.get(f"--{key}") if key else None
    hint = getattr(action, "_typehint", None)
    if key is not None and (found := _CLASS.search(message)):
        told = _about_class(type(parser), found, message, f"{prefix}{key}", hint)
        if told is not None:
            return told
    if key is None:
        if found := _NOT_ACCEPTED.search(message):
            group, option = found["group"], found["option"]
            name = _without_subcommand(parser, f"{group}.{option}" if group else option)
            return _unknown(_parser_for(parser, option), f"--{prefix}{name}", prefix)
        if found := _REQUIRED.search(message):
            keys = [_without_subcommand(parser, name.strip()) for name in found[1].split(",")]
            return "\n".join(f"--{prefix}{name}: required, and not given" for name in keys)
        return None
    name = f"--{prefix}{key}"
    if found := _NO_CLASS.search(message):
        return f"{name}={found[1]}: no such class{_hint(found[1], _subclasses(hint))}{_known(hint)}"
    if not (found := _VALUE.search(message)):
        return f"{name}: {_plain(_KEY.sub('', message, count=1))}"
    given = found[1].strip()
    name = f"{name}={'null' if given == 'None' else given}"
    if kind := _NO_SUBCLASS.search(message):
        return f"{name}: expected {kind[1]}{_of_lightning(given) or '.'}{_known(hint)}"
    if hint is not None:
        return f"{name}: expected {spelled(hint)}"
    return f"{name}: {_plain(_KEY.sub('', message[: found.start()], count=1))}"


def _about_class(kind_of_parser: Any, found: re.Match[str], message: str, key: str, hint: Any) -> str | None:
    """Explain a message about the arguments of a class that a config names."""
    class_path = found[2]
    lines = []
    for line in message[found.end() :].splitlines():
        if line.strip() and len(line) - len(line.lstrip()) <= len(found[1]):
            break
        lines.append(line)
    inner = textwrap.dedent("\n".join(lines)).strip()
    kind = _imported(class_path)
    if kind is None:
        return f"--{key}={class_path}: {_plain(inner)}{_of_lightning(class_path)}"
    own = kind_of_parser(exit_on_error=False)
    own.add_class_arguments(kind, fail_untyped=False)
    told = _about(own, inner, f"{key}.")
    if told is None:
        return f"--{key}={class_path}: {_plain(inner)}"
    unknown = _NOT_ACCEPTED.search(inner) if _CLASS.search(inner) is None else None
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    if unknown and takes_any and "did you mean" not in told:
        return f"{told}. What {kind.__name__} takes as **kwargs goes under --{key}.dict_kwargs.{unknown['option']}=..."
    if unknown and kind in _classes(hint):
        # No class was named, so this is about the base class.
        return f"{told.partition(': ')[0]}: unknown to {kind.__name__}; name a class with --{key}=...{_known(hint)}"
    return told


def _of_lightning(class_path: str) -> str:
    for package in ("lightning.pytorch.", "pytorch_lightning."):
        if class_path.startswith(package):
            ours = class_path.replace(package, "hasten.", 1)
            return f". Write {ours}, or start the program with `hasten run`."
    return ""


def _key_of(message: str) -> str | None:
    """Return the key a message is about: in ``Parser key "config": Parser key "model.width"`` the inner one."""
    found = None
    position = 0
    while match := _KEY.match(message, position):
        found = match[1]
        position = match.end()
    return found


def _parser_for(parser: Any, option: str) -> Any:
    for name, one in subcommands_of(parser).items():
        if option.startswith(f"{name}."):
            return one
    return parser


def _without_subcommand(parser: Any, key: str) -> str:
    for name in subcommands_of(parser):
        if key.startswith(f"{name}."):
            return key.removeprefix(f"{name}.")
    return key


def _unknown(parser: ArgumentParser, option: str, prefix: str = "") -> str:
    options = [f"--{prefix}{name.removeprefix('--')}" for name in _options(parser)]
    options = [one for one in options if not one.endswith("help")]
    group, _, leaf = option.lstrip("-").rpartition(".")
    beside = {
        one.rpartition(".")[2]: one for one in options if group and one.rpartition(".")[0] == f"--{group}"
    }
    if beside:
        # What they have in common is no reason to take one for another.
        found = beside.get(nearest(leaf, beside) or "")
    else:
        found = nearest(option, options)
    # A name in the wrong group, or without one: --max_epochs for --trainer.max_epochs.
    found = found or next((one for one in options if one.rpartition(".")[2] == leaf), None)
    return f"{option}: unknown" + (f"; did you mean {found}?" if found else "")


def _options(parser: ArgumentParser) -> list[str]:
    found = [name for name in parser._option_string_actions if name.startswith("--")]
    for one in subcommands_of(parser).values():
        found += [name for name in _options(one) if name not in found]
    return found


def _hint(name: str, allowed: Iterable[str]) -> str:
    found = nearest(name, allowed)
    return f"; did you mean {found}?" if found else "."


def _known(hint: Any) -> str:
    names = sorted(set(_subclasses(hint)))
    few = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f" Known are {few}; others by their whole path, package.module.Class." if names else ""


def _subclasses(hint: Any) -> list[str]:
    waiting, found = list(_classes(hint)), []
    while waiting:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        local = "<locals>" in kind.__qualname__ or kind.__name__.startswith("_")
        if not local and not getattr(kind, "__abstractmethods__", None) and kind not in _classes(hint):
            found.append(kind.__name__)
    return found


def _classes(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, type) and not get_args(hint):
        return () if hint.__module__ == "builtins" else (hint,)
    return tuple(kind for one in get_args(hint) if not isinstance(one, list) for kind in _classes(one))


def spelled(hint: Any) -> str:
    """Return a type as a user reads it.

    Example::

        >>> spelled(int | list[str] | None)
        'int, list[str] or null'
        >>> spelled(Literal["min", "max"])
        'min or max'

    """
    names = list(dict.fromkeys(_spellings(hint)))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _spellings(hint: Any) -> list[str]:
    if hint is None or hint is type(None):
        return ["null"]
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, types.UnionType):
        return [name for one in get_args(hint) for name in _spellings(one)]
    if hint is bool:
        return ["true", "false"]
    if isinstance(hint, type) and not get_args(hint):
        members = getattr(hint, "__members__", None)
        return list(members) if members else [hint.__name__]
    return [re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(hint)).replace("NoneType", "null")]


def _plain(message: str) -> str:
    """Return the lines of a message without empty ones, keys as they are written on a command line."""
    text = _KEY.sub(lambda found: f"--{found[1]}: ", message)
    lines = [line.rstrip() for line in text.splitlines() if line.strip(" -")]
    return "\n".join(lines).replace("<class '", "").replace("'>", "").strip()


def _imported(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
