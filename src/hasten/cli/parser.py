"""The parser: arguments of hasten's classes, of optimizers and of schedulers; the nearest key in its messages."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jsonargparse
import torch
from jsonargparse import ArgumentParser, Namespace, class_from_function, register_unresolvable_import_paths
from jsonargparse.typing import register_type
from torch.optim import Optimizer

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean, did_you_mean_file, instead_of_removed, nearest
from hasten._lib.rank_zero import rank_zero_warn
from hasten.cli.hyperparameters import classes_in, imported
from hasten.cli.optimizers import LRSchedulerType, LRSchedulerTypeTuple
from hasten.extend.origin import is_builtin, module_of
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.trainer import Trainer

# Words of a command line, or the config as data.
ArgsType: TypeAlias = list[str] | dict[str, Any] | Namespace | None

# Functions implemented in C have no __module__; a config may name them anyway.
register_unresolvable_import_paths(torch)
if "set_parsing_settings" in dir(jsonargparse):
    jsonargparse.set_parsing_settings(config_read_mode_fsspec_enabled=True)
else:  # Before 4.39.
    jsonargparse.set_config_read_mode(fsspec_enabled=True)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype of torch, such as torch.float32.")
    return found


# In configs they are texts: "cuda:0", "torch.float32".
register_type(torch.device, deserializer_exceptions=(ValueError, TypeError, RuntimeError))
register_type(torch.dtype, deserializer=_dtype)

AUTOMATIC = "AUTOMATIC"

# How jsonargparse names what it does not find: an option, a key of a config, a sub-command or a class.
_UNKNOWN = re.compile(
    r"unrecognized arguments: -{0,2}(?P<option>[a-zA-Z_][\w.-]*)|invalid choice: '(?P<command>[^']+)'"
    r"|(?:Group '(?P<group>[^']+)' does not accept )?[oO]ption '(?P<key>[^']+)'(?! is not accepted before)"
    r"|Expected a dot import path string: (?P<class>\S+)"
    r"|module '(?P<module>[\w.]+)' has no attribute '(?P<attribute>\w+)'"
)
_MISSING_FILE = re.compile(r"File does not exist: '?([^'\n]+)'?")
_KEY = re.compile(r'Parser key "([^"]*)"')
_CLASS_PATH = re.compile(r"class_path '([^']*)'")
# An option of an optimizer or scheduler whose class is not chosen.
_NO_CLASS = re.compile(r"class_path 'torch\.optim\.(?:Optimizer|lr_scheduler\.LRScheduler)'")
_NO_ACTION = re.compile(r'No action for key "([^"]+)"')
# The text "None", which YAML reads from None.
_NONE_AS_TEXT = re.compile(r"got 'None'|value type: <class 'str'>\s+Given value: None\b")
# Arguments of a class beside its class_path.
_NO_INIT_ARGS = re.compile(
    r"'class_path': '[^']+', '(?!init_args|dict_kwargs)|, '(?!init_args)\w+': [^,{}]+, 'class_path'"
)
_LIGHTNING = re.compile(r"class_path '((?:lightning\.pytorch|pytorch_lightning)\.([\w.]+))'")

# Where a class passes its **kwargs: (module, name there, arguments that the class sets itself).
_FORWARDS_TO = {
    "CometLogger": ("comet_ml", "ExperimentConfig", ()),
    "DDPStrategy": ("torch.nn.parallel", "DistributedDataParallel", ("module",)),
    "TensorBoardLogger": ("torch.utils.tensorboard", "SummaryWriter", ("log_dir",)),
    "WandbLogger": ("wandb", "init", ()),
}


@functools.cache
def _import_named_classes() -> None:
    """Import hasten's own classes that a command line may name without their module."""
    for package in ("callbacks", "loggers", "profilers", "strategies", "plugins", "accelerators"):
        module = importlib.import_module(f"hasten.{package}")
        for name in module.__all__:
            with suppress(ModuleNotFoundError):  # Its package is not installed.
                getattr(module, name)


class LightningArgumentParser(ArgumentParser):
    """jsonargparse's ``ArgumentParser``, with arguments for modules, optimizers and schedulers.

    Args:
        args: for jsonargparse's parser.
        description: of the program, for ``--help``.
        env_prefix: prefix of the environment variables.
        default_env: read environment variables.
        kwargs: for jsonargparse's parser: default_config_files, parser_mode, exit_on_error, ...

    Example::

        >>> parser = LightningArgumentParser()
        >>> parser.add_optimizer_args(torch.optim.SGD)
        >>> parser.parse_args(["--optimizer.lr=0.5"]).optimizer.lr
        0.5

    Source: `jsonargparse <https://jsonargparse.readthedocs.io>`_.

    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        # With abbreviations, a typo could be taken for another key.
        kwargs.setdefault("allow_abbrev", False)
        # The config file that is read at the moment, or was read last.
        self._config_path: str | os.PathLike[str] | None = None
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        # Key -> (class or classes, the key it is linked to).
        self._optimizers: dict[str, tuple[type | tuple[type, ...], str]] = {}
        self._lr_schedulers: dict[str, tuple[type | tuple[type, ...], str]] = {}

    def add_lightning_class_args(
        self,
        lightning_class: Callable[..., Any] | type,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a Trainer, module, datamodule or callback.

        Args:
            lightning_class: the class, or a function annotated to return one of its objects.
            nested_key: where they go: "trainer" gives ``--trainer.max_epochs``.
            subclass_mode: take the class itself from the command line, any subclass of this one.
            required: in ``subclass_mode``, a class must be given.

        Returns:
            The keys added.

        Raises:
            MisconfigurationException: it is not one of these.

        """
        given: Any = lightning_class
        kinds = (Trainer, LightningModule, LightningDataModule, Callback)
        if isinstance(given, kinds):
            fix = f"give the class {type(given).__name__}, not an object of it."
            raise MisconfigurationException(f"{nested_key} of the command line:", fix=fix)
        if callable(given) and not isinstance(given, type):
            given = class_from_function(given)
        if not (isinstance(given, type) and issubclass(given, kinds)):
            raise MisconfigurationException(
                f"Cannot add arguments from: {lightning_class!r}.",
                fix=(
                    "Give a subclass of Trainer, LightningModule, LightningDataModule or Callback, or a function "
                    "annotated to return one. For another class there is parser.add_class_arguments()."
                ),
            )
        if issubclass(given, Trainer):
            _import_named_classes()
        if issubclass(given, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(given, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        # LightningCLI.instantiate_trainer makes the Trainer, with further arguments.
        added: list[str] = self.add_class_arguments(
            given, nested_key, fail_untyped=False, instantiate=not issubclass(given, Trainer), sub_configs=True
        )
        return added

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, **options: Any) -> list[str]:
        """Add the arguments of any class; see jsonargparse."""
        added: list[str] = super().add_class_arguments(theclass, nested_key, **options)
        if nested_key is None:
            for name in _forwarded_arguments(theclass):
                if f"--{name}" not in self._option_string_actions:
                    # Without a default: only what the user gives is passed on.
                    self.add_argument(f"--{name}", type=Any, default=SUPPRESS)
        return added

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: the class; or a tuple of classes, to choose one of their subclasses by name.
            nested_key: where they go.
            link_to: the key of the module's argument that gets its config; by default it becomes the module's
                ``configure_optimizers``.

        Raises:
            TypeError: not an optimizer class.

        """
        self._add_choice("add_optimizer_args", optimizer_class, (Optimizer,), nested_key, {"params"})
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: LRSchedulerType | tuple[LRSchedulerType, ...] = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning rate scheduler.

        Args:
            lr_scheduler_class: the class; or a tuple of classes, to choose one of their subclasses by name.
            nested_key: where they go.
            link_to: the key of the module's argument that gets its config; by default it is used with the optimizer.

        Raises:
            TypeError: not a scheduler class.

        """
        self._add_choice("add_lr_scheduler_args", lr_scheduler_class, LRSchedulerTypeTuple, nested_key, {"optimizer"})
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_choice(self, method: str, kind: Any, allowed: tuple[type, ...], nested_key: str, skip: set[str]) -> None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not kinds or not all(isinstance(one, type) and issubclass(one, allowed) for one in kinds):
            names = " or ".join(f"{module_of(one)}.{one.__name__}" for one in allowed)
            raise make_error(TypeError, f"{method}({kind!r}):", fix=f"give a subclass of {names}, or a tuple of them.")
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, nested_key, instantiate=False, fail_untyped=False, skip=skip)
        else:
            self.add_class_arguments(
                kind, nested_key, instantiate=False, fail_untyped=False, skip=skip, sub_configs=True
            )

    def set_defaults(self, *args: Any, **kwargs: Any) -> None:
        """Set defaults; see jsonargparse."""
        with self._naming_nearest("set_defaults"):
            super().set_defaults(*args, **kwargs)

    def link_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Link arguments; see jsonargparse."""
        with self._naming_nearest("link_arguments"):
            super().link_arguments(*args, **kwargs)

    @contextmanager
    def _naming_nearest(self, method: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, ValueError) as error:
            if (unknown := _NO_ACTION.search(str(error))) is None:
                raise
            keys = [name.removeprefix("--") for name in self._option_string_actions]
            fix = did_you_mean(unknown[1], keys).strip() or f"Use one of the options that {self.prog} --help lists."
            raise MisconfigurationException(f"{method}: there is no option {unknown[1]!r}.", fix=fix) from None

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Parse a config file; see jsonargparse."""
        # Not put back at the end: an error of another file comes after the next path.
        self._config_path = path
        with suppress(OSError, TypeError, ValueError):  # jsonargparse says what is wrong with the file.
            keys = re.findall(r"^([a-z]\w*):", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
            for key in (each for each in dict.fromkeys(keys) if keys.count(each) > 1):
                rank_zero_warn(f"{path} has {key}: twice, and the last one alone counts.", fix="Join the two.")
        return super().parse_path(path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message of jsonargparse and the nearest key; exit with code 2."""
        if self._config_path is not None:
            # YAML does not know which file it reads.
            message = message.replace('"<unicode string>"', str(self._config_path))
            message = message.replace("Unexpected config:", f"{self._config_path} has no keys, such as trainer:")
        parser = getattr(ex, "subcommand_parser", None) or self
        if not getattr(self, "_inner_parser", False):
            # The message of an inner parser, for a class named in a config, becomes part of the outer parser's message.
            message = "\n".join([message, *_hints(parser, message)])
        if callable(self._error_handler) or not self.exit_on_error:
            super().error(message, ex)
        self.exit(2, f"error: {message}\nAll options: {parser.prog.replace(' [options]', '')} --help\n")
        raise SystemExit(2)  # For a program that replaced exit().


def _forwarded_arguments(kind: type) -> list[str]:
    """Return the names of the arguments that ``kind`` accepts in its ``**kwargs``."""
    if kind.__name__ not in _FORWARDS_TO or not is_builtin(kind):
        return []
    module, name, own = _FORWARDS_TO[kind.__name__]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return []  # The class itself raises.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [one.name for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    return [one for one in found if one not in own]


# What options are called elsewhere.
_OTHER_NAMES = {"seed": "seed_everything", "epochs": "max_epochs", "num_epochs": "max_epochs", "steps": "max_steps"}


def _hints(parser: ArgumentParser, message: str) -> list[str]:
    """Return lines that say what to write instead of what ``message`` refuses: the nearest word, if anything is."""
    unknown = _UNKNOWN.search(message)
    lines = _hints_for(parser, message, unknown) if unknown else []
    if missing := _MISSING_FILE.search(message):
        path = Path(missing[1])
        files = (str(each) for each in path.parent.glob("*") if each.is_file()) if path.parent.is_dir() else ()
        lines.append(did_you_mean_file(str(path), files).strip() or f"Give the path of a file, seen from {Path.cwd()}.")
    if _NONE_AS_TEXT.search(message):
        lines.append("In YAML, None is written null.")
    if _NO_INIT_ARGS.search(message):
        lines.append("Arguments of a class stand below init_args, which stands beside class_path.")
    # Its class is hasten's under `hasten run`.
    if (named := _LIGHTNING.search(message)) and not is_builtin(sys.modules.get(named[1].rpartition(".")[0])):
        lines.append(f"Write hasten.{named[2]}, or start the program with `hasten run`.")
    return lines


def _hints_for(parser: ArgumentParser, message: str, unknown: re.Match[str]) -> list[str]:
    group, _, name = _name_in(unknown).rpartition(".")
    if group.endswith("trainer") and (instead := instead_of_removed(name)):
        return [f"{instead} In a config or on the command line, these are options of trainer."]
    near = _nearest(parser, message, unknown)
    if near != f"--{group}.{name}" or near not in message:
        lines = _options_of(parser, group.partition(".")[0], near)
        if unknown["key"] and (name == "init_args" or group.endswith(".init_args")):
            return ["Leave class_path and init_args out: the class is fixed, and its arguments stand below it.", *lines]
        if near or lines:
            return [*lines, f"Did you mean {near}?"] if near else lines
    if _NO_CLASS.search(message):
        return [f"Choose a class first, as in --{_KEY.findall(message)[-1]}=Name."]
    if unknown["command"] or near:
        return ["The subcommand comes before the options, as in: fit --trainer.max_epochs 3"]
    return []


def _options_of(parser: ArgumentParser, group: str, near: str | None) -> list[str]:
    """Return a line with the options of a group, unless the nearest option is one of them."""
    own = [option for option in parser._option_string_actions if group and option.startswith(f"--{group}.")]
    return [f"Options of {group}: {', '.join(own)}."] if near not in own and 0 < len(own) < 20 else []


def _name_in(unknown: re.Match[str]) -> str:
    return unknown["option"] or unknown["attribute"] or ".".join(filter(None, (unknown["group"], unknown["key"])))


def _nearest(parser: ArgumentParser, message: str, unknown: re.Match[str]) -> str | None:
    action = parser._subcommands_action
    subcommands = dict(action.choices) if action is not None else {}
    if unknown["command"]:
        of_others = {"train": "fit", "eval": "validate", "evaluate": "validate"}
        return nearest(unknown["command"], subcommands) or of_others.get(unknown["command"])
    if unknown["class"]:
        option = parser._option_string_actions.get(f"--{_KEY.findall(message)[-1]}")
        return nearest(unknown["class"], _subclass_names(classes_in(getattr(option, "_typehint", None))))
    if unknown["module"]:
        return nearest(unknown["attribute"], dir(sys.modules.get(unknown["module"])))
    group, _, leaf = _name_in(unknown).rpartition(".")
    # What arguments of fit call the data.
    group = "data" if group == "datamodule" else group
    named = _CLASS_PATH.findall(message)
    if named and not group:  # An argument of the class.
        return nearest(leaf, itertools.chain.from_iterable(map(_argument_names, named)))
    leaf = leaf.replace("-", "_")
    options = [name for one in (parser, *subcommands.values()) for name in one._option_string_actions]
    leaves = [name.removeprefix("--").rpartition(".")[2] for name in options]
    found = nearest(leaf if leaf in leaves else _OTHER_NAMES.get(leaf, leaf), leaves)
    same = [name for name in options if name.removeprefix("--").rpartition(".")[2] == found]
    return min(same, key=lambda name: not name.startswith(f"--{group}."), default=None)


def _argument_names(class_path: str) -> list[str]:
    try:
        kind: Any = imported(class_path)
        own = [name for one in kind.__mro__ for name in inspect.signature(one.__init__).parameters]
    except (AttributeError, ValueError):
        return []
    return [*own, *_forwarded_arguments(kind)]


def _subclass_names(kinds: list[type]) -> list[str]:
    below: list[type] = list(itertools.chain.from_iterable(type.__subclasses__(kind) for kind in kinds))
    return [kind.__name__ for kind in below] + (_subclass_names(below) if below else [])
