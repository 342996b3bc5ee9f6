"""One line after a message of jsonargparse: the nearest key, class or sub-command to what was not found."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re

from jsonargparse import ArgumentParser

from hasten._lib.names import nearest
from hasten.cli.hyperparameters import classes_in

_KEY = re.compile(r'Parser key "([^"]*)"')
_CLASS_PATH = re.compile(r"class_path '([^']*)'")
_NOT_ACCEPTED = re.compile(
    r"(?:Group '(?P<group>[^']*)' does not accept o|does not accept o|O)ption '(?P<name>[^']*)'"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_SUBCOMMAND = re.compile(r"invalid choice: '([^']*)'")

# Where a class passes its **kwargs: (module, name there, arguments that the class sets itself).
_FORWARDS_TO = {
    "CometLogger": ("comet_ml", "ExperimentConfig", ()),
    "DDPStrategy": ("torch.nn.parallel", "DistributedDataParallel", ("module",)),
    "TensorBoardLogger": ("torch.utils.tensorboard", "SummaryWriter", ("log_dir",)),
    "WandbLogger": ("wandb", "init", ()),
}


def forwarded_arguments(kind: type) -> list[str]:
    """Return the names of the arguments that ``kind`` accepts in its ``**kwargs``."""
    if kind.__name__ not in _FORWARDS_TO or not kind.__module__.startswith("hasten."):
        return []
    module, name, own = _FORWARDS_TO[kind.__name__]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return []  # The class itself raises.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [one.name for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    return [one for one in found if one not in own]


def hints(parser: ArgumentParser, message: str) -> list[str]:
    """Return lines that name the nearest there is to what ``message`` of jsonargparse says was not found.

    ``parser`` is that of the sub-command that refused, or of the program.
    """
    action = parser._subcommands_action
    subcommands = dict(action.choices) if action is not None else {}
    parsers = [parser, *subcommands.values()]
    options = [
        name
        for one in parsers
        for name in one._option_string_actions
        if name.startswith("--") and not name.endswith("help")
    ]
    near: list[str | None] = []
    if message.startswith("unrecognized arguments:"):
        words = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        near = [_nearest_option(word, options) for word in words]
    elif found := _NO_SUBCOMMAND.search(message):
        near = [nearest(found[1], subcommands)]
    elif found := _NOT_ACCEPTED.search(message):
        before = message[: found.start()]
        keys = list(dict.fromkeys(_KEY.findall(before)))
        for class_path in _CLASS_PATH.findall(before)[-1:]:
            options += ["--" + ".".join([*keys, name]) for name in _argument_names(class_path)]
        near = [
            _nearest_option("--" + ".".join(filter(None, (*keys, found["group"], found["name"]))), options)
        ]
    elif found := _NO_CLASS.search(message):
        option = parser._option_string_actions.get(f"--{_KEY.findall(message)[-1]}")
        near = [nearest(found[1], _subclass_names(classes_in(getattr(option, "_typehint", None))))]
    lines = [f"Did you mean {name}?" for name in dict.fromkeys(near) if name is not None]
    for package in ("lightning.pytorch.", "pytorch_lightning."):
        if (found := _CLASS_PATH.search(message)) and found[1].startswith(package):
            name = found[1].replace(package, "hasten.", 1)
            lines.append(f"Write {name}, or start the program with `hasten run`.")
    return lines


def _argument_names(class_path: str) -> set[str]:
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        names = {name for one in kind.__mro__ for name in inspect.signature(one.__init__).parameters}
        return names.union(forwarded_arguments(kind))
    except (ImportError, AttributeError, ValueError):
        return set()


def _nearest_option(option: str, options: list[str]) -> str | None:
    group, _, leaf = option.rpartition(".")
    same_group = {name.rpartition(".")[2]: name for name in options if name.rpartition(".")[0] == group}
    # The common beginning of a group's options does not make two of them similar.
    near = (
        same_group.get(nearest(leaf, same_group) or "") if group and same_group else nearest(option, options)
    )
    # A name in the wrong group, or without one: --max_epochs for --trainer.max_epochs.
    return near or next((name for name in options if name.rpartition(".")[2] == leaf.lstrip("-")), None)


def _subclass_names(kinds: list[type]) -> list[str]:
    below: list[type] = list(itertools.chain.from_iterable(map(type.__subclasses__, kinds)))
    return [kind.__name__ for kind in below] + (_subclass_names(below) if below else [])
