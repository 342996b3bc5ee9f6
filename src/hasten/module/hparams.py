"""Hyper-parameters: collected from ``__init__``, stored as plain data, passed to ``__init__`` when loading."""

from __future__ import annotations

import ast
import copy
import csv
import functools
import importlib
import inspect
import os
import pickle
import reprlib
import sys
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch

from hasten._lib.errors import MisconfigurationRuntimeError, add_note, make_error, with_article
from hasten._lib.names import did_you_mean
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten._lib.tree import AttributeDict as AttributeDict
from hasten.checkpoint import files
from hasten.checkpoint.contents import check_entries, for_hooks, from_hooks, load_weights
from hasten.checkpoint.objects import NotRead, how_to_allow, not_read
from hasten.checkpoint.stored import StoredTensors, whole
from hasten.elsewhere import conventions
from hasten.extend import frames
from hasten.extend.origin import comes_from, package_of
from hasten.loggers.base import as_dict

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike

T = TypeVar("T")

# Keys of hyper-parameters that are the config of a command line: its class, and a mark that the rest is a config.
# The names and the value are the same as in Lightning's files.
CLASS_PATH, INSTANTIATOR = "_class_path", "_instantiator"
_CONFIG_READER = "lightning.pytorch.cli.instantiate_module"
# Functions that may read these configs. Programs add the path of a function of their own.
ALLOWED_INSTANTIATORS = {_CONFIG_READER, "pytorch_lightning.cli.instantiate_module"}

# The class that is being made from a config, and the config.
_CONFIGURED: ContextVar[tuple[type, dict[str, Any]] | None] = ContextVar("configured", default=None)


def made_from_config(kind: type, config: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which ``save_hyperparameters`` of a new ``kind`` keeps ``config``, not the objects."""
    return files.set_in_context(_CONFIGURED, (kind, {**config, INSTANTIATOR: _CONFIG_READER}))


if TYPE_CHECKING:
    OnClassOnly = classmethod
else:

    class OnClassOnly(classmethod):
        """A classmethod that cannot be called on an instance, which it would not change."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return super().__get__(instance, owner)
            name, kind = self.__func__.__name__, type(instance).__name__

            # When called, not when looked up: tools inspect the methods of instances.
            def refuse(*_: Any, **__: Any) -> Any:
                what = f"The classmethod `{kind}.{name}` cannot be called on an instance."
                fix = (
                    "Please call it on the class type and make sure the return value is used: "
                    f"model = {kind}.{name}(path)."
                )
                raise make_error(TypeError, what, fix=fix)

            return refuse


class _NoSuchArgument(ValueError, KeyError):
    """Both errors at once: programs for Lightning expect the second."""

    __str__ = Exception.__str__  # A KeyError would show its message in quotation marks.


class HyperparametersMixin:
    """``save_hyperparameters`` and ``hparams``, shared by modules and datamodules."""

    _log_hyperparams: bool = False

    def save_hyperparameters(
        self,
        *args: object,
        ignore: str | Iterable[str] | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` in ``self.hparams`` and in every checkpoint.

        Args:
            args: names of arguments to keep, or one dict / Namespace / dataclass holding them.
                Default: every argument of ``__init__``.
            ignore: names not to keep.
            frame: the frame whose arguments are read; the caller's by default.
            logger: also pass them to the loggers.

        Raises:
            ValueError: a name is not an argument of ``__init__``.

        Example::

            >>> import hasten as L
            >>> class Model(L.LightningModule):
            ...     def __init__(self, width=8):
            ...         super().__init__()
            ...         self.save_hyperparameters()
            >>> Model(width=4).hparams.width
            4

        """
        given = _init_arguments(self, frames.caller() if frame is None else frame)
        configured = _CONFIGURED.get()
        if configured is not None and configured[0] is type(self):
            given = {**given, **configured[1]} if args else configured[1]
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        ignored |= set(getattr(self, "_hparams_ignored", ()))
        found, name = _select(args, given, type(self).__name__)
        hparams = self.__dict__["_hparams"] = _merged(self.hparams, found, ignored)
        _warn_of_modules(hparams)
        for key in ignored & set(hparams):
            # Hyper-parameters that the __init__ of a base class has saved.
            hparams.pop(key)
        self.__dict__.update(_log_hyperparams=logger, _hparams_name=name, _hparams_initial=_frozen(hparams))

    def _set_hparams(self, hp: Mapping[str, Any] | Namespace) -> None:
        """Add hyper-parameters, for programs for Lightning that do not call ``save_hyperparameters``."""
        values = vars(hp) if isinstance(hp, Namespace) else hp
        if not isinstance(values, Mapping):
            raise ValueError(f"Primitives are not allowed: give a dict or a Namespace, not {type(hp).__name__}")
        self.hparams.update(values)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove the hyper-parameters in ``ignore_list``, and ignore them later."""
        self.__dict__.setdefault("_hparams_ignored", set()).update(ignore_list)
        for key in ignore_list:
            self.hparams.pop(key, None)

    @property
    def hparams(self) -> AttributeDict:
        """The hyper-parameters, by name and by attribute; changing them changes what is saved.

        After ``save_hyperparameters(config)`` with a config of OmegaConf they are that config.
        """
        hparams: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyper-parameters at the time when they were saved."""
        return _frozen(self.__dict__.get("_hparams_initial", AttributeDict()))


def _select(args: tuple[Any, ...], given: dict[str, Any], owner: str) -> tuple[Any, str | None]:
    """Return what ``save_hyperparameters(*args)`` saves, and the argument of ``__init__`` that holds it."""
    if not args:
        return given, "kwargs" if given else None
    if args == (None,):
        return {}, None
    if all(isinstance(arg, str) for arg in args):
        unknown = [arg for arg in args if arg not in given]
        if unknown:
            raise _NoSuchArgument(
                f"save_hyperparameters({', '.join(map(repr, args))}): {unknown} not among the arguments of "
                f"{owner}.__init__: {sorted(given)}."
            )
        # The last two make a config readable again.
        names = (*args, CLASS_PATH, INSTANTIATOR)
        return {name: given[name] for name in names if name in given}, "kwargs" if given else None
    if len(args) > 1:
        raise make_error(
            ValueError, "save_hyperparameters():", fix="give names of arguments, or one dict / Namespace / dataclass."
        )
    name = next((key for key, value in given.items() if _same(value, args[0])), None)
    return args[0] if _is_omegaconf(args[0]) else _as_dict(args[0], owner), name


def _merged(hparams: AttributeDict, found: Any, ignored: set[str]) -> Any:
    """Return hyper-parameters with those found in a call of ``save_hyperparameters``."""
    if _is_omegaconf(found) and not hparams:
        # Not converted: it keeps its interpolations and types.
        config = need("omegaconf", purpose="save_hyperparameters(DictConfig)").OmegaConf
        kept = [key for key in found if key not in ignored]
        return found if len(kept) == len(found) else config.masked_copy(found, kept)
    if found is hparams:
        return hparams
    merged = AttributeDict(hparams) if _is_omegaconf(hparams) else hparams
    merged.update({key: value for key, value in found.items() if key not in ignored})
    return merged


def _warn_of_modules(hparams: Mapping[str, Any]) -> None:
    if _is_omegaconf(hparams):
        return
    for key, value in hparams.items():
        if isinstance(value, torch.nn.Module):
            rank_zero_warn(
                f"save_hyperparameters(): {key!r} is {with_article(type(value))}, whose weights the checkpoint has "
                "already.",
                fix=f"Write save_hyperparameters(ignore=[{key!r}]).",
            )


def _init_arguments(owner: object, start: types.FrameType) -> dict[str, Any]:
    """Return the arguments of ``owner.__init__``, found in the call stack from ``start`` outwards."""
    found: dict[str, Any] = {}
    # By convention also the arguments of a module whose __init__ makes this one, if they have other names.
    of_makers: dict[str, Any] = {}
    is_made_by_module = conventions.current().hparams_of_makers
    for frame in frames.outwards(start):
        holder = frames.made_in(frame)
        if holder is owner:
            # The outer frame is the __init__ of the subclass, which takes precedence.
            found |= frames.arguments_of(frame)
        elif is_made_by_module and isinstance(holder, HyperparametersMixin):
            of_makers = {**frames.arguments_of(frame), **of_makers}
        elif found:
            is_made_by_module = False
    if not found and _is_dataclass(owner):
        # After its __init__, its fields have the arguments.
        found = {one.name: getattr(owner, one.name) for one in fields(cast("Any", owner)) if one.init}
    return {**found, **{name: value for name, value in of_makers.items() if name not in found}}


def _frozen(hparams: AttributeDict) -> AttributeDict:
    """Return a deep copy; what cannot be copied is shared."""
    if _is_omegaconf(hparams):
        return copy.deepcopy(hparams)
    frozen = AttributeDict()
    for key, value in hparams.items():
        try:
            # Modules are shared: they may be large, and are kept in memory only.
            frozen[key] = value if isinstance(value, torch.nn.Module) else copy.deepcopy(value)
        except Exception:
            frozen[key] = value
    return frozen


def _as_dict(hparams: Any, owner: str) -> dict[str, Any]:
    if isinstance(hparams, (Namespace, Mapping)) or _is_dataclass(hparams):
        return dict(as_dict(hparams))
    raise ValueError(
        f"save_hyperparameters(): cannot read hyper-parameters of {owner} from {with_article(type(hparams))}; "
        "give names, a dict, a Namespace or a dataclass."
    )


def _is_omegaconf(value: object) -> bool:
    return type(value).__name__ == "DictConfig" and comes_from(type(value), "omegaconf")


def _is_dataclass(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


class Dropped:
    """Stands for a value that cannot be stored as plain data."""


def storable(value: Any, left_out: list[str] | None = None, place: str = "", *, objects: bool = True) -> Any:
    """Return a hyper-parameter as data that a checkpoint can hold and that runs no code when it is read.

    Numbers, strings, tensors, dtypes, devices, dicts, lists, tuples and sets stay; enums become their values, paths
    strings, numpy scalars numbers, dataclasses, Namespaces and other mappings dicts. Objects whose classes were
    allowed with ``torch.serialization.add_safe_globals`` stay. Anything else becomes ``Dropped``, and is left out of
    dicts and lists.

    ``left_out`` receives the places of values that are left out, named from ``place`` on. Without ``objects``, those of
    allowed classes do not stay either.
    """
    if objects and _is_allowed(value):
        return value
    inside = functools.partial(storable, objects=objects)
    if isinstance(value, Enum):
        return inside(value.value, left_out, place)
    if (plain := _plain(value)) is not Dropped:
        return plain
    value = _as_mapping(value)
    if isinstance(value, Mapping):
        pairs = (
            (inside(key, left_out, f"a key of {place}"), inside(inner, left_out, f"{place}[{key!r}]"))
            for key, inner in value.items()
        )
        return {key: inner for key, inner in pairs if key is not Dropped and inner is not Dropped}
    if (kind := _sequence_kind(value)) is not None:
        items = [inside(item, left_out, f"{place}[{index}]") for index, item in enumerate(value)]
        return kind(item for item in items if item is not Dropped)
    numbers = _numbers(value)
    if numbers is Dropped and left_out is not None:
        left_out.append(place)
    return numbers


def _plain(value: Any) -> Any:
    """Return a number, string, path or object of torch as a checkpoint holds it; ``Dropped`` for anything else."""
    if type(value) in (NoneType, complex, torch.Size):
        return value
    if isinstance(value, (torch.Tensor, torch.dtype, torch.device)):
        return value
    for base in (bool, int, float, str, bytes):
        if isinstance(value, base):
            return value if type(value) is base else base(value)  # type: ignore[arg-type]
    return str(value) if isinstance(value, Path) else Dropped


def _as_mapping(value: Any) -> Any:
    """Return a config, a Namespace or a dataclass as a dict; return anything else unchanged."""
    if _is_omegaconf(value):
        return _config_as_dict(value)
    return as_dict(value) if isinstance(value, Namespace) or _is_dataclass(value) else value


def _sequence_kind(value: Any) -> type[list[Any]] | type[tuple[Any, ...]] | type[set[Any]] | None:
    """Return the type of sequence or set that a checkpoint holds for a value; None for anything else."""
    if isinstance(value, tuple):
        return tuple
    if isinstance(value, (set, frozenset)):
        return set
    return list if isinstance(value, list) or type(value).__name__ == "ListConfig" else None


def _numbers(value: Any) -> Any:
    """Return a scalar or an array of numpy as plain numbers; ``Dropped`` for anything else."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    if hasattr(value, "tolist") and package_of(type(value)) == "numpy":
        return value.tolist()
    return Dropped


def _is_allowed(value: Any) -> bool:
    """Return whether the user allowed files to hold this class or object, with torch's list of names."""
    allowed = torch.serialization.get_safe_globals()
    if not allowed:
        return False
    kind = value if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")) else type(value)
    listed = any(kind is (entry[0] if isinstance(entry, tuple) else entry) for entry in allowed)
    return listed and files.is_plain(value)


def _config_as_dict(config: Any) -> dict[str, Any]:
    omegaconf = need("omegaconf", purpose="hyper-parameters in a DictConfig")
    try:
        found = omegaconf.OmegaConf.to_container(config, resolve=True)
    except omegaconf.errors.OmegaConfBaseException:
        # An interpolation that cannot be resolved here stays as text.
        found = omegaconf.OmegaConf.to_container(config, resolve=False)
    return cast("dict[str, Any]", found)


@dataclass
class StoredHyperParameters:
    """The hyper-parameters of module and datamodule, as a part of a checkpoint; ``construct`` reads them."""

    owners: Iterable[Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the checkpoint as plain data; what cannot be stored as such is named in a warning."""
        entries: dict[str, Any] = {}
        for owner in self.owners:
            if owner is None or not owner.hparams:
                continue
            key, name, hparams = owner.CHECKPOINT_HYPER_PARAMS_KEY, type(owner).__name__, owner.hparams
            is_config = _is_omegaconf(hparams)
            values = _config_as_dict(hparams) if is_config else hparams
            left_out: list[str] = []
            stored = {str(each): storable(value, left_out, str(each)) for each, value in values.items()}
            stored = {each: value for each, value in stored.items() if value is not Dropped}
            if files.objects_allowed():
                entries |= _with_objects(owner, values)
            else:
                entries[key] = stored
                if is_config:
                    entries[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = "DictConfig"
            if not is_config and (dicts := _of_dicts(values)):
                entries[f"{key}_of_dicts"] = dicts
            if left_out and not files.objects_allowed():
                warn_once(
                    f"hparams dropped {name} {left_out}",
                    f"The hyper-parameters {left_out} of {name} are Python objects, which a checkpoint does not hold.",
                    fix=(
                        "Pass them to load_from_checkpoint(path, ...), allow their classes with "
                        "torch.serialization.add_safe_globals([...]), or leave them out with "
                        f"save_hyperparameters(ignore={left_out})."
                    ),
                )
            entries[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner.__dict__.get("_hparams_name", "kwargs")
        return entries


def _of_dicts(values: Mapping[str, Any]) -> list[str]:
    """Return the names of values that hold dicts, and nothing else whose entries have names."""
    return [str(name) for name, value in values.items() if {*map(type, _mappings(value))} == {dict}]


def _mappings(value: Any) -> Iterator[Any]:
    """Yield the dicts in a value, and whatever else has entries with names, itself among them."""
    if isinstance(value, Mapping) or _as_mapping(value) is not value:
        yield value
    for inner in value.values() if type(value) is dict else value if _sequence_kind(value) is not None else ():
        yield from _mappings(inner)


def _with_objects(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with the objects, as Lightning writes them, and plain data for those who read strictly."""
    key, plain = owner.CHECKPOINT_HYPER_PARAMS_KEY, {}
    is_config = _is_omegaconf(owner.hparams)
    for name, value in values.items():
        left_out: list[str] = []
        if is_config or not files.is_plain(value):
            stored = storable(value, left_out, objects=False)
            # A container with missing values differs from the argument that the module was made with.
            if not left_out:
                plain[str(name)] = stored
    if is_config:
        return {key: owner.hparams, f"{key}_plain": plain, owner.CHECKPOINT_HYPER_PARAMS_TYPE: type(owner.hparams)}
    kept = {str(name): value for name, value in values.items() if files.is_plain(value) or is_picklable(value)}
    return {key: kept, **({f"{key}_plain": plain} if plain else {})}


def is_picklable(obj: object) -> bool:
    """Return whether an object can be pickled."""
    try:
        pickle.dumps(obj)
    except Exception:  # pickling runs the object's own code, which may fail in any way
        return False
    return True


def remove_unpicklable(*owners: HyperparametersMixin | None) -> None:
    """Remove hyper-parameters that a checkpoint of Lightning could not hold, with a warning for each."""
    for owner in owners:
        if owner is not None and not _is_omegaconf(owner.hparams):
            clean_namespace(owner.hparams)


def clean_namespace(hparams: MutableMapping[Any, Any]) -> None:
    """Remove entries that cannot be pickled, with a warning for each."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        del hparams[name]
        rank_zero_warn(f"Attribute {name!r} removed from hparams because it cannot be pickled.")


def construct(
    cls: type[T],
    checkpoint_path: PathLike | IO[bytes],
    map_location: MapLocation,
    hparams_file: PathLike | None,
    weights_only: bool | None,
    given: Mapping[str, Any],
    strict: bool | None = None,
) -> T:
    """Read a checkpoint and return ``cls(**hyper_parameters)`` with its state.

    Raises:
        TypeError: ``cls.__init__`` needs arguments that are neither stored nor given.

    """
    _check_paths(cls.__name__, checkpoint_path, hparams_file)
    load: Any = files.load_open if hasattr(checkpoint_path, "read") else files.load
    path, owner = str(checkpoint_path), cast("Any", cls)
    with files.hyper_parameters_left_out():
        checkpoint = load(checkpoint_path, map_location=map_location or "cpu", weights_only=weights_only)
    is_module = issubclass(cls, torch.nn.Module)
    if isinstance(_mapping(checkpoint, path).get("state_dict"), StoredTensors):
        # A user's on_load_checkpoint may change it. Optimizer states are not read.
        checkpoint = {**checkpoint, "state_dict": whole(checkpoint["state_dict"]) if is_module else {}}
    if is_module:
        check_entries(checkpoint, path, training=False)
    key = owner.CHECKPOINT_HYPER_PARAMS_KEY
    stored = _stored(checkpoint, owner, is_module) if hparams_file is None else _read_hparams(hparams_file)
    if "hasten_version" in from_hooks(checkpoint):
        stored = _readable_by_attribute(stored, checkpoint.get(f"{key}_of_dicts"))
    if weights_only is False:
        # Files of earlier versions.
        for name, value in checkpoint.get(f"{key}_pickled", {}).items():
            stored.setdefault(name, pickle.loads(value))
    instantiator = stored.pop(INSTANTIATOR, None)
    if instantiator is not None:
        made = _instantiator(instantiator, stored, cls, path)(cls, {**stored, **given})
    else:
        wrapped_as = checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_NAME)
        kind = str(checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_TYPE))
        arguments = _arguments(cls, stored, given, wrapped_as, path, is_config="DictConfig" in kind)
        if names := not_read(arguments):
            raise files.CheckpointRefused(
                f"{cls.__name__}.load_from_checkpoint({path!r}): the hyper-parameters "
                f"{[name for name, value in arguments.items() if not_read(value)]} are objects of {', '.join(names)}; "
                "reading those could run code.",
                fix=(
                    "Pass them, as load_from_checkpoint(path, name=...), or pass weights_only=False if you trust the "
                    f"file as you would trust a program. {how_to_allow(names)}"
                ),
            )
        with _named_in_errors(cls, hparams_file, path, given):
            made = cls(**arguments)
    if is_module:
        _restore_module(made, checkpoint, path, strict, cls.__name__)
    elif (state := checkpoint.get(cls.__qualname__)) is not None:
        cast("Any", made).load_state_dict(state)
    return cast("T", made)


def _check_paths(owner: str, checkpoint_path: PathLike | IO[bytes], hparams_file: PathLike | None) -> None:
    for name, path in (("checkpoint_path", checkpoint_path), ("hparams_file", hparams_file or "")):
        if not isinstance(path, (str, os.PathLike)) and not hasattr(path, "read"):
            raise make_error(
                TypeError,
                f"{owner}.load_from_checkpoint({name}={reprlib.repr(path)}): it must be a path, not "
                f"{type(path).__name__}.",
                fix="Pass hyper-parameters by name." if name == "hparams_file" else "",
                argument=name,
            )


@contextmanager
def _named_in_errors(cls: type, hparams_file: PathLike | None, path: str, given: Iterable[str]) -> Iterator[None]:
    """Name the file whose hyper-parameters a class takes, if it raises: ``hparams_file`` or the checkpoint."""
    try:
        yield
    except Exception as error:
        for argument in given:
            if f"unexpected keyword argument '{argument}'" in str(error):
                fix = did_you_mean(argument, inspect.signature(cls).parameters).strip() or "Leave it out."
                add_note(error, f"{argument!r} is not an argument of {cls.__name__}.__init__.", fix=fix)
                raise
        what = f"{cls.__name__} was made with the hyper-parameters in {str(hparams_file or path)!r}."
        add_note(error, what, fix="Pass others by name, as load_from_checkpoint(path, name=...).")
        raise


def _restore_module(module: Any, checkpoint: dict[str, Any], path: str, strict: bool | None, name: str) -> None:
    """Load the weights of a checkpoint into a new module, with the hooks of a run; ``name`` is for messages."""
    # As in a run: on_load_checkpoint may need layers that configure_model makes.
    module.configure_model()
    shown = for_hooks(checkpoint) if conventions.current().checkpoints_have_loops else checkpoint
    module.on_load_checkpoint(shown)
    weights = from_hooks(shown)["state_dict"]
    # map_location may be a function or a dict: take the device of the loaded weights.
    first = next((value for value in weights.values() if isinstance(value, torch.Tensor)), None)
    if first is not None:
        module.to(first.device)
    exact = module.strict_loading if strict is None else strict
    if strict is not None and _strictness(module) not in (None, strict):
        what = (
            f"{name}.load_from_checkpoint(strict={strict}) is in conflict with "
            f"{name}.strict_loading={module.strict_loading}."
        )
        raise make_error(ValueError, what, fix="Use the same value, or leave one out.", argument="strict")
    if not weights:
        rank_zero_warn(f"The state dict in {path!r} contains no parameters: {name} keeps its own.")
    unfit = load_weights(module, weights, strict=exact, source=path)
    if not exact:
        _report_unfit(unfit, name)


def _report_unfit(unfit: Any, name: str) -> None:
    """Warn of the weights that only the file or only the model has."""
    for found, keys in (("that the file lacks", "missing_keys"), ("that the model lacks", "unexpected_keys")):
        if names := getattr(unfit, keys, None):
            rank_zero_warn(f"{name}.load_from_checkpoint(strict=False): weights {found}: {names}.")


def _strictness(module: Any) -> bool | None:
    """Return the ``strict_loading`` that a module sets itself; None where it has the default."""
    owners = (vars(module), *map(vars, type(module).__mro__))
    owner = next(owner for owner in owners if "strict_loading" in owner)
    default = owner.get("__module__") == "hasten.module.module"
    value: bool | None = None if default else owner["strict_loading"]
    return value


def _stored(checkpoint: Mapping[str, Any], owner: Any, is_module: bool) -> dict[str, Any]:
    """Return the hyper-parameters in a checkpoint; plain data in place of objects that were not read."""
    key = owner.CHECKPOINT_HYPER_PARAMS_KEY
    found: dict[str, Any] = {}
    # All versions since 0.8 use the last one.
    for entry in ("hparams", "module_arguments", key) if is_module else (key,):
        values = checkpoint.get(entry)
        plain = checkpoint.get(f"{entry}_plain") or {}
        values = plain if isinstance(values, NotRead) and plain else values
        if isinstance(values, Namespace):
            values = vars(values)
        if isinstance(values, Mapping):
            found |= {name: plain.get(name, value) if not_read(value) else value for name, value in values.items()}
    return found


def _instantiator(name: object, stored: Mapping[str, Any], cls: type, path: str) -> Any:
    """Return the function that makes an object from the config of a command line."""
    if not isinstance(name, str) or name not in ALLOWED_INSTANTIATORS:
        raise make_error(
            ValueError,
            f"{path}: its hyper-parameters are to be read by {name!r}, which is not in the allowlist of trusted "
            "instantiators.",
            fix="If you trust the file, add that name to hasten.module.hparams.ALLOWED_INSTANTIATORS first.",
        )
    wanted = stored.get(CLASS_PATH)
    if wanted is not None:
        # The class is checked where the object is made; nothing is imported here because a file says so.
        module = str(wanted).rpartition(".")[0]
        if module not in sys.modules:
            what = f"{path}: it asks for the class {wanted!r} in place of {cls.__name__}, which is not imported."
            raise make_error(ValueError, what, fix=f"If you trust the file, import the module {module!r} first.")
    module, _, function = name.rpartition(".")
    if module.partition(".")[0] in ("lightning", "pytorch_lightning") and module not in sys.modules:
        module = "hasten.cli"
    # Imported by name: the command line is a higher layer, and few programs need it.
    return getattr(importlib.import_module(module), function)


def _arguments(
    cls: type, stored: dict[str, Any], given: Mapping[str, Any], wrapped_as: str | None, path: str, *, is_config: bool
) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    several: tuple[Any, ...] = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameter = parameters.get(str(wrapped_as))
    if parameter is not None and parameter.kind not in several and not _holds_itself(stored, parameter.name):
        # After save_hyperparameters(config), __init__ takes the hyper-parameters as one argument.
        inner = {key: value for key, value in given.items() if key not in parameters}
        whole: Any = AttributeDict({**stored, **inner})
        if is_config and not not_read(whole):
            whole = need("omegaconf", purpose="hyper-parameters in a DictConfig").OmegaConf.create(dict(whole))
        arguments = {str(wrapped_as): whole}
        arguments |= {key: value for key, value in given.items() if key in parameters}
    else:
        arguments = {**stored, **given}
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            arguments = _taken_by_init(arguments, given, parameters, cls.__name__)
    missing = [
        name
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty and one.kind not in several and name not in arguments
    ]
    if missing:
        call = ", ".join(f"{name}=..." for name in missing)
        what = f"{cls.__name__}.load_from_checkpoint({path!r}): the checkpoint does not hold {missing} of __init__."
        fix = f"Write load_from_checkpoint(path, {call}), or self.save_hyperparameters() in __init__ before training."
        raise make_error(TypeError, what, fix=fix)
    return arguments


def _holds_itself(stored: Mapping[str, Any], name: str) -> bool:
    """Return whether an argument that holds hyper-parameters is among them, as ``save_hyperparameters()`` saves it."""
    inside = stored.get(name)
    holds_others = isinstance(inside, Mapping) and bool(inside) and inside.keys() <= stored.keys()
    return holds_others or (name == "kwargs" and name in stored)


def _taken_by_init(
    arguments: dict[str, Any], given: Mapping[str, Any], parameters: Mapping[str, Any], owner: str
) -> dict[str, Any]:
    """Return the arguments without those in the checkpoint that ``__init__`` does not take."""
    unknown = [key for key in given if key not in parameters]
    if unknown and conventions.current().mistakes_are_warnings:
        # As in Lightning, whose programs pass all their options.
        rank_zero_warn(f"{owner}.load_from_checkpoint(): __init__ does not take {unknown}, left out.")
        return {key: value for key, value in arguments.items() if key in parameters}
    return {key: value for key, value in arguments.items() if key in parameters or key in given}


def _mapping(checkpoint: Any, path: str) -> Mapping[str, Any]:
    """Return the contents of a file; refuse what is no dict."""
    if not isinstance(checkpoint, Mapping):
        check_entries(checkpoint, path, training=False)
    return cast("Mapping[str, Any]", checkpoint)


def _readable_by_attribute(stored: dict[str, Any], of_dicts: object) -> dict[str, Any]:
    """Return values with attributes where they may have had some: a dataclass, a Namespace or an OmegaConf config."""
    plain = of_dicts if isinstance(of_dicts, list) else []
    return {name: value if name in plain else _with_attributes(value) for name, value in stored.items()}


def _with_attributes(value: Any) -> Any:
    if type(value) in (dict, AttributeDict):
        return AttributeDict({key: _with_attributes(inner) for key, inner in value.items()})
    if type(value) is list:
        return [_with_attributes(inner) for inner in value]
    return value


_READING = "reading hparams_file"


def yaml_with_tuples(text: str | IO[str]) -> Any:
    """Return the plain data that a text in YAML holds, and tuples, for which Lightning writes a tag; no code is run."""
    yaml = need("yaml", purpose=_READING)

    def tuple_of(loader: Any, node: Any) -> tuple[Any, ...]:
        return tuple(loader.construct_sequence(node, deep=True))

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("tag:yaml.org,2002:python/tuple", tuple_of)
    return yaml.load(text, loader)


def _read_hparams(path: PathLike) -> dict[str, Any]:
    kind, why = Path(path).suffix.lower(), ""
    is_readable = kind in (".csv", ".yaml", ".yml")
    if is_readable and conventions.current().mistakes_are_warnings and not Path(path).is_file():
        rank_zero_warn(f"load_from_checkpoint(hparams_file={str(path)!r}): there is no such file.", RuntimeWarning)
        return {}
    content = Path(path).read_bytes() if is_readable else b""
    try:
        text = content.decode()
        if kind == ".csv":
            return {key: convert(value) for key, value in list(csv.reader(text.splitlines()))[1:]}
        data = yaml_with_tuples(text) or {}
        if is_readable and isinstance(data, dict) and all(isinstance(name, str) for name in data):
            return data
    except Exception as error:  # yaml has many, and raises others for a date that makes no sense
        why = f" it cannot be read ({files.first_line(error)})."
    what = f"load_from_checkpoint(hparams_file={str(path)!r}):{why}"
    fix = "use a .yaml, .yml or .csv file with names and values."
    raise make_error(ValueError, what, fix=fix, argument="hparams_file")


def convert(val: str) -> Any:
    """Return the Python value that a text writes, or the text."""
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def logged_hparams(*owners: HyperparametersMixin | None) -> dict[str, Any] | None:
    """Return the hyper-parameters of module and datamodule for the loggers; None if there are none.

    Under Lightning's names, the mark of a config is among them: its loggers write it to the files that
    ``load_from_checkpoint(hparams_file=...)`` reads.
    """
    found: dict[str, Any] = {}
    saved = False
    for owner in owners:
        if owner is None or not owner.__dict__.get("_log_hyperparams", True):
            continue
        saved = saved or "_log_hyperparams" in owner.__dict__
        for key, value in owner.hparams_initial.items():
            if key == CLASS_PATH:
                continue
            if key in found and not _same(found[key], value):
                raise MisconfigurationRuntimeError(
                    f"Error while merging hparams: the keys {[key]} are present in both the LightningModule's and "
                    f"LightningDataModule's hparams but have different values, {found[key]!r} and {value!r}.",
                    fix="Give them different names, or save_hyperparameters(logger=False) in one of them.",
                )
            found[key] = value
    return found if found or saved else None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        equal = one == other
        # Tensors and arrays compare element by element.
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (ValueError, RuntimeError, TypeError):
        return False
