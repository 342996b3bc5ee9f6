"""Hyper-parameters of modules made by a command line: saved in checkpoints as configs, and instantiated again.

A module whose arguments are objects (a backbone, a loss) is saved with the config that made them, which is plain data.
Such a checkpoint names classes, so the names are restricted: an argument annotated with a class accepts its subclasses;
any other argument accepts none.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from hasten._lib.errors import make_error
from hasten.checkpoint import files
from hasten.extend.origin import package_of
from hasten.module.hparams import CLASS_PATH, INSTANTIATOR, made_from_config

if TYPE_CHECKING:
    from hasten.cli.parser import LightningArgumentParser

ModuleType = TypeVar("ModuleType")


# Older versions of jsonargparse know what Lightning's command line needs by other names, or not at all.
RENEWED = "instantiate" in dir(ArgumentParser)
WITH_NONE = {"skip_unset" if RENEWED else "skip_none": False}
NO_LINKS: Mapping[str, Any] = types.MappingProxyType({})


def from_config(parser: LightningArgumentParser, config: Namespace, key: str) -> Callable[..., Any]:
    """Return a function that makes the module (``key="model"``) or datamodule ("data") of a parsed config.

    The config becomes the hyper-parameters of the object.
    """

    @functools.cache
    def plain() -> dict[str, Any]:
        text = parser.dump(config, format="yaml", skip_link_targets=False, skip_validation=True, **WITH_NONE)
        return (yaml.safe_load(text) or {}).get(key) or {}

    def make(
        class_type: type[Any], *args: Any, applied_instantiation_links: Mapping[str, Any] = NO_LINKS, **kwargs: Any
    ) -> Any:
        hparams = dict(plain())
        class_path = hparams.get("class_path")
        if class_path is not None:
            module, _, name = class_path.rpartition(".")
            if getattr(sys.modules.get(module), name, None) is not class_type and class_type.__qualname__ != name:
                return class_type(*args, **kwargs)  # A part of the module, of the same base class.
            given = {**hparams.get("init_args", {}), **hparams.get("dict_kwargs", {})}
            hparams = {CLASS_PATH: class_path, **given}
        for target, value in applied_instantiation_links.items():
            if target.startswith(f"{key}."):
                *path, last = target.removeprefix(f"{key}.").removeprefix("init_args.").split(".")
                functools.reduce(lambda data, part: data.setdefault(part, {}), path, hparams)[last] = value
        with made_from_config(class_type, hparams):
            return class_type(*args, **kwargs)

    return make


def instantiate_module(class_type: type[ModuleType], config: Mapping[str, Any]) -> ModuleType:
    """Instantiate a module from the hyper-parameters that a command line saved.

    Args:
        class_type: the class, or a base class of it if ``config`` has a ``_class_path``.
        config: the hyper-parameters.

    Raises:
        ValueError: they do not fit the class, or name a class that is not allowed.

    Example::

        >>> import torch
        >>> instantiate_module(torch.nn.Linear, {"in_features": 3, "out_features": 2})
        Linear(in_features=3, out_features=2, bias=True)

    """
    given = {key: value for key, value in config.items() if key != INSTANTIATOR}
    class_path = given.pop(CLASS_PATH, None)
    _refuse_unsafe(class_type, {**given, **({CLASS_PATH: class_path} if class_path else {})}, "the checkpoint")
    parser = ArgumentParser(exit_on_error=False)
    if class_path is not None:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        wanted: dict[str, Any] = {"class_path": class_path, "dict_kwargs": given}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
        wanted = given
    try:
        parsed = parser.parse_object({"module": wanted}, defaults=True)
    except Exception as error:  # jsonargparse raises its own kinds
        raise ValueError(
            f"{class_type.__name__}: the hyper-parameters in the checkpoint do not fit: {error}"
        ) from error
    kind = class_type if class_path is None else imported(class_path)

    def make(one: type[Any], *args: Any, **kwargs: Any) -> Any:
        if one is not kind:
            return one(*args, **kwargs)
        with made_from_config(one, dict(config)):  # So that it can be saved again.
            return one(*args, **kwargs)

    made: ModuleType = instantiated(parser, parsed, [(make, class_type, True)]).module
    return made


def with_checkpoint(
    parser: LightningArgumentParser, config: Namespace, given: set[str], kind: type, subclass_mode: bool
) -> Namespace:
    """Return the config with the module's hyper-parameters from ``--ckpt_path``, if that is a path.

    They override config files and defaults, which may not fit the weights.
    """
    subcommand = config["subcommand"]
    path, chosen = config[subcommand].get("ckpt_path"), config[subcommand].get("model")
    if not path or not Path(path).exists():
        return config  # "best", "last" or a URL: found when the run starts.
    try:
        # A few values are read: the weights stay on the disk.
        with files.mapped_tensors():
            checkpoint = files.load(path, map_location="cpu")
    except (files.CheckpointDamaged, files.CheckpointRefused):
        return config  # The Trainer reads the whole file, and raises if it may not.
    hparams: dict[str, Any] = dict(checkpoint.get("hyper_parameters") or {})
    hparams.pop(INSTANTIATOR, None)
    class_path = hparams.pop(CLASS_PATH, None)
    hparams = _settable(parser._subcommands_action.choices[subcommand], hparams, checkpoint.get("hparams_name"), given)
    if not hparams:
        return config
    model: dict[str, Any] = hparams
    if subclass_mode:
        named = chosen.get("class_path") if chosen is not None else None
        if "model" not in given or named is None:
            named = class_path or named
        if named is None:
            return config
        model = {"class_path": named, "dict_kwargs": hparams}
        kind = _refuse_unsafe(kind, {**hparams, CLASS_PATH: named}, str(path))
    else:
        kind = _refuse_unsafe(kind, hparams, str(path))
    _name_enum_members(hparams, kind)
    try:
        return parser.parse_object({subcommand: {"model": model}}, config)
    except SystemExit:
        sys.stderr.write(
            f"Parsing of ckpt_path hyperparameters failed: those in {path} do not fit the model. Was it saved by "
            "another version of it?\n"
        )
        raise


def _settable(own: Any, hparams: dict[str, Any], holder: str | None, given: set[str]) -> dict[str, Any]:
    """Return the hyper-parameters that neither the command line nor another argument sets."""
    if holder and holder != "kwargs" and f"--model.{holder}" in own._option_string_actions:
        hparams = {holder: hparams}
    links = own._links_group._group_actions if hasattr(own, "_links_group") else ()
    linked = {link.target[0] for link in links}

    def is_set(name: str) -> bool:
        is_linked = not linked.isdisjoint((f"model.{name}", f"model.init_args.{name}"))
        return is_linked or any(f"{key}.".startswith(f"model.{name}.") for key in given)

    return {name: value for name, value in hparams.items() if not is_set(name)}


def _name_enum_members(hparams: dict[str, Any], kind: type) -> None:
    """Replace values of enums by their names, which jsonargparse reads; without a command line values are saved."""
    hints = _hints(kind)
    for name, value in hparams.items():
        hparams[name] = _named_members(value, hints.get(name))


def _named_members(value: Any, hint: Any) -> Any:
    """Return a value with members of enums, where its type hint has an enum, by their names."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member_name(value, hint)
    if origin in (Union, types.UnionType):
        named = (found for one in arguments if (found := _named_members(value, one)) != value)
        return next(named, value)
    if isinstance(value, dict) and len(arguments) == 2:
        return {key: _named_members(each, arguments[1]) for key, each in value.items()}
    if type(value) in (list, tuple) and arguments:
        is_fixed = origin is tuple and len(arguments) == len(value) and ... not in arguments
        each_hint = arguments if is_fixed else [arguments[0]] * len(value)
        return type(value)(map(_named_members, value, each_hint))
    return value


def _member_name(value: Any, enum: type[Enum]) -> Any:
    if not isinstance(value, Hashable) or value in enum.__members__:
        return value
    return next((member.name for member in enum if member.value == value), value)


def _refuse_unsafe(kind: type, hparams: Mapping[str, Any], source: str) -> type:
    """Return the class of the hyper-parameters; raise if they name a class for an argument that does not allow it."""
    values = dict(hparams)
    class_path = values.pop(CLASS_PATH, None)
    if class_path is not None:
        kind = _checked_class(class_path, kind, CLASS_PATH, source)
    _check_arguments(kind, values, "", source)
    return kind


def _check_arguments(kind: type, values: Mapping[str, Any], prefix: str, source: str) -> None:
    hints = _hints(kind)
    for name, value in values.items():
        _check_value(hints.get(name, Any), value, f"{prefix}{name}", source)


def _check_value(hint: Any, value: Any, key: str, source: str) -> None:
    if isinstance(value, Mapping):
        # For an argument annotated as a dict, a config stays a dict.
        data = not classes_in(hint) and _takes_dict(hint)
        if isinstance(value.get("class_path"), str) and not data:
            kind = _checked_class(value["class_path"], hint, key, source)
            for part in ("init_args", "dict_kwargs"):
                inner = value.get(part)
                if isinstance(inner, Mapping):
                    _check_arguments(kind, inner, f"{key}.", source)
            return
        for name, inner in value.items():
            _check_value(Any if data else hint, inner, f"{key}.{name}", source)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_value(hint, inner, f"{key}[{index}]", source)


def _checked_class(class_path: str, hint: Any, key: str, source: str) -> type:
    bases = tuple(classes_in(hint))
    package = class_path.partition(".")[0]
    if bases and package not in sys.stdlib_module_names:
        kind = imported(class_path)
        if isinstance(kind, type) and issubclass(kind, bases):
            return kind
    wanted = " or ".join(base.__name__ for base in bases) or "no class: it is not annotated with one"
    what = f"{source} names {class_path} for the argument {key!r}, which may hold {wanted}."
    fix = "Annotate the argument with the class it takes, or pass the object yourself."
    raise make_error(ValueError, what, fix=fix)


def classes_in(hint: object) -> list[type]:
    """Return the classes in a type hint, except builtins."""
    arguments = getattr(hint, "__args__", ()) or ()
    if isinstance(hint, type) and not arguments:
        return [] if package_of(hint) in ("builtins", "typing") else [hint]
    return [
        kind for one in arguments for part in (one if isinstance(one, list) else [one]) for kind in classes_in(part)
    ]


def _takes_dict(hint: Any) -> bool:
    if (get_origin(hint) or hint) in (dict, Mapping, MutableMapping):
        return True
    return get_origin(hint) in (Union, types.UnionType) and any(_takes_dict(one) for one in get_args(hint))


def _hints(kind: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        init = one.__dict__.get("__init__")
        if init is not None:
            try:
                hints.update(get_type_hints(init))
            except (NameError, TypeError, AttributeError):
                hints.update(getattr(init, "__annotations__", {}))
    return hints


def instantiated(
    parser: ArgumentParser, config: Namespace, instantiators: list[tuple[Any, type, bool]] | None
) -> Namespace:
    """Return a config that ``parser`` has parsed with its objects made.

    ``instantiators`` are (function that makes objects, their class, whether it makes subclasses, too).
    """
    if RENEWED:
        return parser.instantiate(config, instantiators=instantiators)
    for make, kind, subclasses in instantiators or ():
        parser.add_instantiator(make, kind, subclasses=subclasses, prepend=True)
    return parser.instantiate_classes(config)


def imported(class_path: str) -> object:
    """Return the object that a path such as ``"torch.nn.Linear"`` names, or raise ``ValueError``."""
    module, _, name = class_path.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the class {class_path!r} cannot be imported: {error}") from error
