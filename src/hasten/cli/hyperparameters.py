"""Hyper-parameters of modules made by a command line: saved in checkpoints as configs, and instantiated again.

A module whose arguments are objects (a backbone, a loss) is saved with the config that made them, which is plain data.
Such a checkpoint names classes, so the names are restricted: an argument annotated with a class accepts its subclasses;
any other argument accepts none.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from hasten.checkpoint import files
from hasten.module.hparams import CLASS_PATH, INSTANTIATOR, made_from_config

if TYPE_CHECKING:
    from hasten.cli.parser import LightningArgumentParser

ModuleType = TypeVar("ModuleType")


class FromConfig:
    """Instantiates a module or datamodule, whose hyper-parameters become the config.

    Args:
        parser: the parser of the sub-command.
        config: the parsed config.
        key: "model" or "data".

    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, key: str) -> None:
        self._parser, self._config, self._key = parser, config, key
        self._plain: dict[str, Any] | None = None

    def __call__(
        self,
        class_type: type[ModuleType],
        *args: Any,
        applied_instantiation_links: Mapping[str, Any],
        **kwargs: Any,
    ) -> ModuleType:
        """Return ``class_type(*args, **kwargs)``."""
        config = self._plain_config()
        class_path = config.get("class_path")
        if class_path is not None and not _is_named(class_type, class_path):
            return class_type(*args, **kwargs)  # A part of the module, of the same base class.
        hparams: dict[str, Any] = config
        if class_path is not None:
            hparams = {CLASS_PATH: class_path, **config.get("init_args", {}), **config.get("dict_kwargs", {})}
        hparams = dict(hparams)
        for target, value in applied_instantiation_links.items():
            if target.startswith(f"{self._key}."):
                _put(hparams, target.removeprefix(f"{self._key}.").removeprefix("init_args."), value)
        with made_from_config(class_type, hparams):
            return class_type(*args, **kwargs)

    def _plain_config(self) -> dict[str, Any]:
        if self._plain is None:
            text = self._parser.dump(
                self._config, format="yaml", skip_link_targets=False, skip_unset=False, skip_validation=True
            )
            self._plain = yaml.safe_load(text) or {}
        part: dict[str, Any] = self._plain.get(self._key) or {}
        return part


def _is_named(kind: type, class_path: str) -> bool:
    module, _, name = class_path.rpartition(".")
    return getattr(sys.modules.get(module), name, None) is kind or kind.__qualname__ == name


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.setdefault(part, {})
    data[last] = value


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
    refuse_unsafe(class_type, {**given, **({CLASS_PATH: class_path} if class_path else {})}, "the checkpoint")
    parser = ArgumentParser(exit_on_error=False)
    if class_path is not None:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        asked: dict[str, Any] = {"class_path": class_path, "dict_kwargs": given}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
        asked = given
    try:
        parsed = parser.parse_object({"module": asked}, defaults=True)
    except Exception as error:  # jsonargparse raises its own kinds
        raise ValueError(
            f"{class_type.__name__}: the hyper-parameters in the checkpoint do not fit: {error}"
        ) from error
    kind = class_type if class_path is None else _imported(class_path)

    def make(one: type[Any], *args: Any, **kwargs: Any) -> Any:
        if one is not kind:
            return one(*args, **kwargs)
        with made_from_config(one, dict(config)):  # So that it can be saved again.
            return one(*args, **kwargs)

    made: ModuleType = parser.instantiate(parsed, instantiators=[(make, class_type, True)]).module
    return made


def from_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str | None]:
    """Return the module's hyper-parameters in a checkpoint, and the name of the argument that holds all of them."""
    checkpoint = files.load(path, map_location="cpu")
    hparams = dict(checkpoint.get("hyper_parameters") or {})
    hparams.pop(INSTANTIATOR, None)
    return hparams, checkpoint.get("hparams_name")


def refuse_unsafe(kind: type, hparams: Mapping[str, Any], source: str) -> type:
    """Return the class that the hyper-parameters of a file belong to.

    Raises:
        ValueError: they name a class for an argument that does not allow it.

    """
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
        data = not _classes_in(hint) and _takes_dict(hint)
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
    bases = tuple(_classes_in(hint))
    package = class_path.partition(".")[0]
    if bases and package not in sys.stdlib_module_names:
        kind = _imported(class_path)
        if isinstance(kind, type) and issubclass(kind, bases):
            return kind
        if callable(kind) and not isinstance(kind, type):
            kind = inspect.signature(kind).return_annotation
    wanted = " or ".join(base.__name__ for base in bases) or "no class: it is not annotated with one"
    raise ValueError(
        f"{source} names {class_path} for the argument {key!r}, which may hold {wanted}. Annotate the "
        "argument with the class it takes, or pass the object yourself."
    )


def _classes_in(hint: Any) -> list[type]:
    """Return the classes in a type hint, except builtins."""
    arguments = getattr(hint, "__args__", ()) or ()
    if isinstance(hint, type) and not arguments:
        return [] if hint.__module__.partition(".")[0] in ("builtins", "typing") else [hint]
    found: list[type] = []
    for argument in arguments:
        for one in argument if isinstance(argument, list) else [argument]:
            found += _classes_in(one)
    return found


def _takes_dict(hint: Any) -> bool:
    if (get_origin(hint) or hint) in (dict, Mapping, MutableMapping):
        return True
    return get_origin(hint) in (Union, types.UnionType) and any(_takes_dict(one) for one in get_args(hint))


def as_config(kind: type, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with the names of enum members in place of their values."""
    hints = _hints(kind)
    return {name: _enum_name(hints.get(name), value) for name, value in hparams.items()}


def _enum_name(hint: Any, value: Any) -> Any:
    for kind in _classes_in(hint):
        if issubclass(kind, Enum) and value not in kind.__members__:
            found = [member.name for member in kind if member.value == value]
            return found[0] if found else value
    return value


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


def _imported(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the class {class_path!r} cannot be imported: {error}") from error
