"""LightningCLI: a program with sub-commands, options and configs, made from classes."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import docstring_parser
from jsonargparse import ActionConfigFile, Namespace, class_from_function
from torch.optim import Optimizer

from hasten._lib import VERSION
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import without_unknown
from hasten._lib.rank_zero import rank_zero_warn
from hasten.cli.hyperparameters import from_config, instantiated, with_checkpoint
from hasten.cli.optimizers import (
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    ReduceLROnPlateau,
    class_config,
    instantiate_class,
    plain_config,
)
from hasten.cli.parser import AUTOMATIC, ArgsType, LightningArgumentParser
from hasten.cli.save_config import SaveConfigCallback
from hasten.elsewhere import conventions
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.optim.fused import fused_where_possible
from hasten.seed import seed_everything
from hasten.trainer import Trainer
from hasten.types import OptimizerLRScheduler


class LightningCLI:
    """A command line for a Trainer, a module and a datamodule: parse it, make the objects and run a sub-command.

    The sub-commands are fit, validate, test and predict. Each takes ``--config file.yaml``, the arguments of the
    Trainer as ``--trainer.*``, of the module as ``--model.*``, of the datamodule as ``--data.*``, an optimizer and a
    scheduler; ``--help`` lists them. The config of a run is saved with it.

    Args:
        model_class: the module, or a function annotated to return one; None for ``--model=NameOfTheClass``.
        datamodule_class: the datamodule likewise; None for ``--data=NameOfTheClass``, which may be left out.
        save_config_callback: saves the config; None to save none.
        save_config_kwargs: its arguments: overwrite, multifile, config_filename, save_to_log_dir.
        trainer_class: the Trainer, a subclass, or a function annotated to return one.
        trainer_defaults: other defaults of its arguments; its ``callbacks`` are always added.
        seed_everything_default: the seed; True: the seed in the environment (PL_GLOBAL_SEED), or 0; False for none.
        parser_kwargs: arguments of the parser, or of each sub-command's parser by its name.
        parser_class: the parser.
        subclass_mode_model: take any subclass of ``model_class`` from the command line.
        subclass_mode_data: take any subclass of ``datamodule_class`` from the command line.
        args: words or a config to read instead of the command line of the program.
        run: False: no sub-commands; make the objects and run nothing.
        auto_configure_optimizers: offer ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: save the config as hyper-parameters, so that ``load_from_checkpoint`` makes
            modules whose arguments are objects.

    Raises:
        SystemExit: with code 2: the command line is wrong; the message names the nearest key.
        MisconfigurationException: two optimizers or schedulers, and none is linked to the module.

    Example::

        >>> from hasten.demos.boring_classes import BoringDataModule, BoringModel
        >>> cli = LightningCLI(BoringModel, BoringDataModule, run=False, args=["--trainer.max_epochs=3"])
        >>> cli.trainer.max_epochs
        3

    Source: `jsonargparse <https://jsonargparse.readthedocs.io>`_.

    """

    @without_unknown
    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | dict[str, dict[str, Any]] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self._model_class: Any = model_class or LightningModule
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self._datamodule_class: Any = datamodule_class or LightningDataModule
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self._load_from_checkpoint_support = load_from_checkpoint_support
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self._given_args = args
        self.config: Namespace

        for_all = dict(self.parser_kwargs)
        per_subcommand = {name: for_all.pop(name) for name in self.subcommands() if name in for_all}
        self.setup_parser(run, for_all, per_subcommand)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._parse_ckpt_path()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a new parser that takes ``--config``."""
        kwargs.setdefault("dump_header", [f"hasten=={VERSION}"])
        parser = self.parser_class(**kwargs)
        text = "Path to a configuration file in json or yaml format."
        parser.add_argument("-c", "--config", action=ActionConfigFile, help=text)
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make ``self.parser``, with sub-commands or with all arguments in itself."""
        self.parser = self.init_parser(**main_kwargs)
        if add_subcommands:
            self._add_subcommands(self.parser, **subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the methods of the Trainer that are sub-commands, with the arguments that are not options."""
        evaluated = {"model", "dataloaders", "datamodule"}
        fitted = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fitted, "validate": set(evaluated), "test": set(evaluated), "predict": set(evaluated)}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments that belong to no class: ``--seed_everything``."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="Seed of all random numbers; true: PL_GLOBAL_SEED or 0; false: none.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer, the module and the datamodule."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults(
            {f"trainer.{key}": value for key, value in self.trainer_defaults.items() if key != "callbacks"}
        )
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        # The data may come from the module.
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add and link further arguments; override this method."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link the configs of optimizers and schedulers to the arguments of the module."""
        for key, (kind, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to != AUTOMATIC:
                config_of = plain_config if isinstance(kind, tuple) else functools.partial(class_config, kind)
                parser.link_arguments(key, link_to, compute_fn=config_of)

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            # Unless add_arguments_to_parser added them.
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        given: Any = self.trainer_class
        trainer = given if isinstance(given, type) else class_from_function(given)
        commands, names = parser.add_subcommands(), list(self.subcommands())
        needed = self._needed_subcommands(parser, names)
        for name in names:
            text = docstring_parser.parse(getattr(trainer, name).__doc__ or "").short_description
            options = {"description": text, **kwargs.get(name, {})}
            # Of the others, only the name and the description are needed.
            prepare = functools.partial(self._prepare_subcommand_parser, trainer, name)
            one = (prepare if name in needed else self.init_parser)(**options)
            commands.add_subcommand(name, one, help=text)

    def _prepare_subcommand_parser(self, trainer: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = self._subcommand_parsers[subcommand] = self.init_parser(**kwargs)
        self._add_arguments(parser)
        self._subcommand_method_arguments[subcommand] = parser.add_method_arguments(
            trainer, subcommand, skip=set(self.subcommands()[subcommand])
        )
        return parser

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    # -- the config

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the command line, or ``args``, into ``self.config``."""
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(
                "LightningCLI(args=...): it is not recommended to provide both args and command line arguments, which "
                f"are ignored: sys.argv[1:]={sys.argv[1:]}, args={args}."
            )
        is_data = isinstance(args, (dict, Namespace))
        self.config = parser.parse_object(args) if is_data else parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Take arguments of the module from the checkpoint; command lines written for Lightning override it."""
        if self.subcommand is not None:
            kind = _class_of(self._model_class)
            given = set() if conventions.current().checkpoint_beats_options else self._command_line_keys()
            self.config = with_checkpoint(self.parser, self.config, given, kind, self.subclass_mode_model)

    def _words(self) -> list[str] | None:
        """Return the command line; None where the arguments are data."""
        args = self._given_args
        if isinstance(args, (dict, Namespace)):
            return None
        return sys.argv[1:] if args is None else list(args)

    def _needed_subcommands(self, parser: LightningArgumentParser, names: list[str]) -> list[str]:
        """Return the sub-commands whose options the parser needs; adding the options of all of them takes time.

        That is one if the words begin with it and no config can hold values for others, and none for ``--help``.
        """
        words = self._words()
        if words is None or parser.default_config_files or parser.default_env:
            return names
        if words[:1] in (["--help"], ["-h"]):
            return []
        before = list(itertools.takewhile(lambda word: word not in names, words))
        if before == words or any("=" not in word or word.startswith(("-c=", "--config=")) for word in before):
            return names
        return [words[len(before)]]

    def _command_line_keys(self) -> set[str]:
        """Return the keys that the command line gives, without those in configs."""
        words = [word for word in self._words() or () if word.startswith("--")]
        keys = [word[2:].partition("=")[0].removesuffix("+") for word in words]
        return {".".join(p for p in key.split(".") if p not in ("init_args", "dict_kwargs")) for key in keys}

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """Return a value of the config of the sub-command."""
        return self._part(config).get(key, default)

    def _part(self, config: Namespace) -> Namespace:
        part: Namespace = config.get(str(self.subcommand), config)
        return part

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        if seed is True:
            # The environment has the seed of a parent process.
            seed = None if "PL_GLOBAL_SEED" in os.environ else 0
        chosen = seed_everything(seed, workers=True)
        # Save it, so that the same config gives the same results.
        self._part(self.config)["seed_everything"] = chosen

    # -- the objects

    def before_instantiate_classes(self) -> None:
        """Called before the objects are made; override this method."""

    def instantiate_classes(self) -> None:
        """Make ``self.datamodule``, ``self.model`` and ``self.trainer``."""
        instantiators = self._instantiators() if self._load_from_checkpoint_support else None
        self.config_init = instantiated(self.parser, self.config, instantiators)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Called when the objects are made; override this method."""

    def _instantiators(self) -> list[tuple[Any, type, bool]]:
        parser, config = self._parser(self.subcommand), self._part(self.config)
        return [
            (from_config(parser, config, key), _class_of(kind), subclasses)
            for key, kind, subclasses in (
                ("model", self._model_class, self.subclass_mode_model),
                ("data", self._datamodule_class, self.subclass_mode_data),
            )
        ]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a Trainer with the arguments in the config.

        Args:
            kwargs: arguments that override the config.

        """
        callbacks = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        return self._instantiate_trainer({**self._get(self.config_init, "trainer", {}), **kwargs}, callbacks)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if "callbacks" in config:
            config["callbacks"] = [
                *_as_list(config["callbacks"]),
                *callbacks,
                *map(_made, _as_list(self.trainer_defaults.get("callbacks"))),
            ]
            if self.save_config_callback and not config.get("fast_dev_run", False):
                parser, read = self._parser(self.subcommand), self._part(self.config)
                config["callbacks"].append(self.save_config_callback(parser, read, **self.save_config_kwargs))
        else:
            name = getattr(self.trainer_class, "__qualname__", repr(self.trainer_class))
            rank_zero_warn(
                f"The `{name}` class does not expose the `callbacks` argument so they will not be included:",
                fix="give it an argument `callbacks` and pass it to the Trainer.",
            )
        try:
            return self.trainer_class(**config)
        except (ValueError, TypeError) as error:
            # An argument of the command line that the Trainer refuses: a message instead of a traceback.
            match = re.match(r"Trainer\((\w+)=(.*?)\)(?=:| got )", str(error), re.DOTALL)
            parser = self._parser(self.subcommand)
            known = match is not None and f"--trainer.{match[1]}" in parser._option_string_actions
            if match is None or not known or self._words() is None:
                raise
            value = "" if match[2] == "..." else f"={match[2]}"
            parser.error(f"--trainer.{match[1]}{value}{str(error)[match.end() :]}", error)

    # -- optimizers

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> OptimizerLRScheduler:
        """Return what the module's ``configure_optimizers`` returns; override to change it.

        Args:
            lightning_module: the module.
            optimizer: the optimizer of the command line.
            lr_scheduler: the scheduler of the command line, if there is one.

        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor},
            }
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        parser = self._parser(subcommand)
        optimizers = [key for key, (_, link_to) in parser._optimizers.items() if link_to == AUTOMATIC]
        schedulers = [key for key, (_, link_to) in parser._lr_schedulers.items() if link_to == AUTOMATIC]
        if not self.auto_configure_optimizers or not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise MisconfigurationException(
                f"{type(self).__name__} expects at most one optimizer and one lr_scheduler that are 'AUTOMATIC', but "
                f"found {optimizers + schedulers}.",
                fix=(
                    "Link each to an argument of the module (add_optimizer_args(..., "
                    f"link_to='model.init_{optimizers[0]}')) and write its configure_optimizers."
                ),
            )
        optimizer = self._class_config(parser._optimizers, optimizers[0])
        if not optimizer:
            # The command line does not use it. A scheduler of a fixed class is there without being asked for.
            if schedulers and isinstance(parser._lr_schedulers[schedulers[0]][0], tuple):
                self._refuse_scheduler_alone(parser, schedulers[0], optimizers[0])
            return
        scheduler = self._class_config(parser._lr_schedulers, schedulers[0]) if schedulers else None
        if overrides(self.model, LightningModule, "configure_optimizers"):
            rank_zero_warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`: the command line has --{optimizers[0]}."
            )

        # Called by the Trainer when the module is complete and on its device. Not a closure: it must be picklable.
        self.model.configure_optimizers = functools.partial(
            _configured, self.model, self.configure_optimizers, optimizer, scheduler
        )

    def _refuse_scheduler_alone(self, parser: LightningArgumentParser, scheduler: str, optimizer: str) -> None:
        """Refuse a scheduler without an optimizer, which Lightning leaves out."""
        if not (config := self._get(self.config_init, scheduler)):
            return
        what = f"--{scheduler}={config['class_path'].rpartition('.')[2]} without --{optimizer}: it is left out."
        fix = f"Choose an optimizer, too, as in --{optimizer}=AdamW; or make both in configure_optimizers."
        if not conventions.current().mistakes_are_warnings:
            parser.error(f"{what}\n{fix}")
        rank_zero_warn(what, fix=fix)

    def _class_config(self, kinds: dict[str, tuple[Any, str]], key: str) -> Any:
        config, kind = self._get(self.config_init, key), kinds[key][0]
        return plain_config(config) if isinstance(kind, tuple) else class_config(kind, config)

    # -- the run

    def _run_subcommand(self, subcommand: str) -> None:
        getattr(self, f"before_{subcommand}", lambda: None)()
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        getattr(self, f"after_{subcommand}", lambda: None)()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        wanted = self._subcommand_method_arguments[subcommand]
        config = self.config_init[subcommand]
        kwargs = {key: value for key, value in config.items() if key in wanted}
        kwargs["model"] = self.model
        if self.datamodule is not None:
            kwargs["datamodule"] = self.datamodule
        return kwargs


def _configured(module: LightningModule, configure: Any, optimizer: Any, scheduler: Any) -> Any:
    # The optimizer is made here, so it is fused where possible, unless the options have fused=False.
    made = fused_where_possible(instantiate_class((module.parameters(),), optimizer), module)
    lr_scheduler = instantiate_class(made, scheduler) if scheduler else None
    return configure(module, optimizer=made, lr_scheduler=lr_scheduler)


def _made(callback: Any) -> Any:
    """Return the callback that a dict with ``class_path`` names; return any other value unchanged."""
    is_config = isinstance(callback, dict) and "class_path" in callback
    return instantiate_class((), callback) if is_config else callback


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _class_of(kind: Any) -> type:
    found: type = kind if isinstance(kind, type) else inspect.signature(kind, eval_str=True).return_annotation
    return found
