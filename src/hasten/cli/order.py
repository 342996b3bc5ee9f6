"""The order of options does not matter: they are put into the one in which the parser understands them."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import ActionConfigFile

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_OPTION = re.compile(r"--?[A-Za-z_]")


@dataclass(frozen=True)
class Group:
    """One option with its values, or one argument that belongs to no option."""

    key: str  # "model.width"; empty for what is no option
    tokens: tuple[str, ...]
    is_config: bool = False


def in_order(parser: ArgumentParser, args: Sequence[str]) -> list[str]:
    """Return ``args`` in an order that says the same whatever the order in which it was given.

    Config files come first, so that an option given beside them has the last word; the option that names a class
    comes before the options of this class. What the same key is given twice, or lists that are added to, keep
    their order.

    Args:
        parser: the parser that will read them.
        args: the arguments, without the name of the program.

    """
    if "--" in args:
        return list(args)  # From there on all is as the user wrote it.
    before, after = split_at_subcommand(parser, args)
    mine: list[Group] = []
    late: list[Group] = []
    for group in groups_of(parser, before):
        # What only the sub-command knows was meant for it.
        (mine if not after or belongs_to(parser, group) else late).append(group)
    moved = [token for group in late for token in group.tokens]
    ordered = [token for group in _sorted(mine) for token in group.tokens]
    return [*ordered, *after[:1], *moved, *after[1:]]


def split_at_subcommand(parser: ArgumentParser, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the name of the sub-command, and those from it on."""
    names = subcommands_of(parser)
    position = 0
    while names and position < len(args):
        token = args[position]
        if _OPTION.match(token):
            position += 1 + ("=" not in token and takes_value(parser, token))
        elif token in names:
            return list(args[:position]), list(args[position:])
        else:
            position += 1
    return list(args), []


def subcommands_of(parser: ArgumentParser) -> dict[str, Any]:
    """Return the parsers of the sub-commands by name."""
    action = parser._subcommands_action
    return dict(action.choices) if action is not None else {}


def action_of(parser: ArgumentParser, token: str) -> Action | None:
    """Return the action of an option of the parser or of its sub-commands."""
    name = token.partition("=")[0]
    for one in (parser, *subcommands_of(parser).values()):
        if name in one._option_string_actions:
            action: Action = one._option_string_actions[name]
            return action
    return None


def takes_value(parser: ArgumentParser, token: str) -> bool:
    """Return whether the option is followed by a value of its own."""
    name = token.partition("=")[0]
    action = action_of(parser, token)
    if action is None:
        return not name.endswith(".help")
    return action.nargs != 0 and name != parser._print_config


def groups_of(parser: ArgumentParser, args: Sequence[str]) -> list[Group]:
    """Return each option with its values."""
    groups: list[Group] = []
    position = 0
    while position < len(args):
        token = args[position]
        end = position + 1
        if _OPTION.match(token):
            action = action_of(parser, token)
            several = action is not None and action.nargs in ("+", "*", "...", "A...")
            if several and "=" not in token:
                while end < len(args) and not _OPTION.match(args[end]):
                    end += 1
            elif "=" not in token and takes_value(parser, token):
                values = action.nargs if action is not None and isinstance(action.nargs, int) else 1
                while end < len(args) and values and not _OPTION.match(args[end]):
                    end, values = end + 1, values - 1
            groups.append(Group(_key(token), tuple(args[position:end]), isinstance(action, ActionConfigFile)))
        else:
            groups.append(Group("", (token,)))
        position = end
    return groups


def belongs_to(parser: ArgumentParser, group: Group) -> bool:
    """Return whether the parser itself knows the option, not only its sub-commands."""
    return not group.key or group.tokens[0].partition("=")[0] in parser._option_string_actions


def _key(token: str) -> str:
    name = token.partition("=")[0].lstrip("-").removesuffix("+")
    return ".".join(part for part in name.split(".") if part not in ("init_args", "dict_kwargs"))


def _sorted(groups: list[Group]) -> list[Group]:
    ordered = [group for group in groups if group.is_config]
    waiting = [group for group in groups if not group.is_config]
    given: set[str] = set()
    while waiting:
        keys = {group.key for group in waiting} - given
        # The first one that waits for no class to be named.
        group = next(group for group in waiting if not any(p in keys for p in _parents(group.key)))
        waiting.remove(group)
        ordered.append(group)
        given.add(group.key)
    return ordered


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
