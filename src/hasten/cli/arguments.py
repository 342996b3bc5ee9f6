"""Turn command-line arguments, or a config given as data, into the config of the run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from hasten._lib.rank_zero import rank_zero_warn
from hasten.checkpoint.files import CheckpointDamaged, CheckpointRefused
from hasten.cli.errors import subcommands_of
from hasten.cli.hyperparameters import as_config, from_checkpoint, refuse_unsafe
from hasten.module.hparams import CLASS_PATH

if TYPE_CHECKING:
    from hasten.cli.parser import ArgsType, LightningArgumentParser


def warn_if_both(args: ArgsType) -> None:
    """Warn if the program ignores its command line because it was given ``args``."""
    if args is not None and len(sys.argv) > 1:
        rank_zero_warn(
            "LightningCLI's args parameter is intended to run from within Python like if it were from the command "
            "line. To prevent mistakes it is not recommended to provide both args and command line arguments, got: "
            f"sys.argv[1:]={sys.argv[1:]}, args={args}."
        )


def needed_subcommands(parser: LightningArgumentParser, args: ArgsType, names: list[str]) -> list[str]:
    """Return the sub-commands whose options the parser needs; adding the options of all of them takes time.

    That is one if the words begin with it and no config can hold values for others, and none for ``--help``.
    """
    words = sys.argv[1:] if args is None else args
    if not isinstance(words, list) or parser.default_config_files or parser.default_env:
        return names
    if words[:1] in (["--help"], ["-h"]):
        return []
    first = next((position for position, word in enumerate(words) if word in names), None)
    if first is None or any(
        "=" not in word or word.startswith(("-c=", "--config=")) for word in words[:first]
    ):
        return names
    return [words[first]]


def parsed(parser: LightningArgumentParser, args: ArgsType) -> Namespace:
    """Return the config in ``args``; None reads the command line of this program."""
    if isinstance(args, (dict, Namespace)):
        return parser.parse_object(args)
    return parser.parse_args(args)


def with_checkpoint(
    parser: LightningArgumentParser,
    config: Namespace,
    args: ArgsType,
    subcommand: str,
    kind: type,
    subclass_mode: bool,
) -> Namespace:
    """Return the config with the module's hyper-parameters from ``--ckpt_path``, if that is a file.

    They override config files and defaults, which may not fit the weights. Options of the command line override them.
    """
    path = config[subcommand].get("ckpt_path")
    if not path or not Path(path).is_file():
        return config  # "best" and its like, or a URL: found when the run starts.
    try:
        hparams, wrapped_as = from_checkpoint(path)
    except (CheckpointDamaged, CheckpointRefused):
        return config  # The Trainer reads the whole file, and raises if it may not.
    own = subcommands_of(parser).get(subcommand, parser)
    given = _command_line_keys(args)
    class_path = hparams.pop(CLASS_PATH, None)
    if wrapped_as and wrapped_as != "kwargs" and f"--model.{wrapped_as}" in own._option_string_actions:
        hparams = {wrapped_as: hparams}
    linked = (
        {link.target[0] for link in own._links_group._group_actions}
        if hasattr(own, "_links_group")
        else set()
    )
    for name in list(hparams):
        names = {f"model.{name}", f"model.init_args.{name}"}
        if names & linked or any(key == f"model.{name}" or key.startswith(f"model.{name}.") for key in given):
            del hparams[name]
    if not hparams:
        return config
    model: dict[str, Any] = hparams
    chosen = config[subcommand].get("model")
    if subclass_mode:
        named = chosen.get("class_path") if chosen is not None and "model" in given else class_path
        named = named or (chosen.get("class_path") if chosen is not None else None)
        if named is None:
            return config
        chosen_kind = refuse_unsafe(kind, {**hparams, CLASS_PATH: named}, str(path))
        hparams = as_config(chosen_kind, hparams)
        model = {"class_path": named, "dict_kwargs": hparams}
    else:
        model = as_config(refuse_unsafe(kind, hparams, str(path)), hparams)
    try:
        return parser.parse_object({subcommand: {"model": model}}, config)
    except SystemExit:
        sys.stderr.write(
            f"Parsing of ckpt_path hyperparameters failed: those in {path} do not fit the model. Was it saved by "
            "another version of it?\n"
        )
        raise


def _command_line_keys(args: ArgsType) -> set[str]:
    """Return the keys that the command line gives, without those in configs."""
    words = sys.argv[1:] if args is None else args
    if isinstance(words, (dict, Namespace)):
        return set()
    keys = [word[2:].partition("=")[0].removesuffix("+") for word in words if word.startswith("--")]
    return {".".join(p for p in key.split(".") if p not in ("init_args", "dict_kwargs")) for key in keys}


@contextmanager
def trainer_errors(parser: LightningArgumentParser, *, as_errors: bool) -> Iterator[None]:
    """End the program with a message instead of a traceback if the Trainer refuses an argument of the command line."""
    try:
        yield
    except (ValueError, TypeError) as error:
        match = re.match(r"Trainer\((\w+)=(.*?)\)(?=:| got )", str(error), re.DOTALL)
        if not as_errors or match is None or f"--trainer.{match[1]}" not in parser._option_string_actions:
            raise
        value = "" if match[2] == "..." else f"={match[2]}"
        parser.error(f"--trainer.{match[1]}{value}{str(error)[match.end() :]}", error)
