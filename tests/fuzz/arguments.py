"""Every argument of every public class, with values of every type."""

from __future__ import annotations

import builtins
import collections.abc
import functools
import importlib
import inspect
import math
import operator
import os
import re
import traceback
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from hasten._lib.errors import is_absent, parts_of
from tests.fuzz.running import Found
from tests.fuzz.values import anything

MODULES = tuple(
    f"hasten{part}" for part in ("", ".callbacks", ".data", ".loggers", ".plugins", ".profilers", ".strategies")
)
# Not made here: base classes whose arguments a program defines, what another package needs, and a part of an argument
# of the Trainer, which checks it.
_LEFT_OUT = frozenset(
    {"LightningModule", "LightningDataModule", "CometLogger", "TransformerEnginePrecision", "MicroBatch"}
)
# Arguments that a class needs, when another one is tried.
NEEDED: dict[str, dict[str, Any]] = {
    "BitsandbytesPrecision": {"mode": "nf4"},
    "CSVLogger": {"save_dir": "logs"},
    "CombinedLoader": {"iterables": [[1, 2]]},
    "DeepSpeedPrecision": {"precision": "32-true"},
    "EarlyStopping": {"monitor": "val_loss"},
    "FSDPPrecision": {"precision": "32-true"},
    "GradientAccumulationScheduler": {"scheduling": {1: 2}},
    "LengthBatchSampler": {"lengths": [3, 1, 2], "batch_size": 2},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "OnExceptionCheckpoint": {"dirpath": "kept"},
    "PackedBatchSampler": {"lengths": [3, 1, 2], "max_length": 4},
    "ResidentLoader": {"dataset": [1, 2, 3]},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "TensorBoardLogger": {"save_dir": "logs"},
    "ThroughputMonitor": {"batch_size_fn": len},
    "TokenBatchSampler": {"lengths": [3, 1, 2], "max_tokens": 4},
    "UploadedCheckpointIO": {"url": "memory://runs"},
}


def classes() -> dict[str, type]:
    """Return the public classes that take arguments, by name."""
    found: dict[str, type] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            kind = getattr(module, name)
            if not inspect.isclass(kind) or is_absent(kind) or inspect.isabstract(kind) or name in _LEFT_OUT:
                continue
            is_data = issubclass(kind, (BaseException, str, Enum))
            if kind.__module__.startswith("hasten") and not is_data and any(names_of(kind)):
                found[name] = kind
    return found


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def names_of(kind: type) -> list[str]:
    """Return the arguments of a class that have a name."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in parameters if one.kind in _NAMED and not one.name.startswith("_")]


CLASSES = classes()
NAMES = {name: names_of(kind) for name, kind in CLASSES.items()}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a class and some of its arguments; Trainer and Fabric, which have most, more often."""
    name = draw(st.sampled_from([*CLASSES, *["Trainer"] * 20, *["Fabric"] * 6, *["ModelCheckpoint"] * 6]))
    count = draw(st.sampled_from((1, 1, 1, 2, 3)))
    chosen = draw(st.lists(st.sampled_from(NAMES[name]), min_size=1, max_size=count, unique=True))
    return name, {argument: draw(anything) for argument in chosen}


# What is taken beside the annotations, because Lightning's classes take it.
_NONE_IS_DEFAULT = frozenset({"accelerator", "fast_dev_run", "max_steps", "strategy"})
_INF_IS_NO_LIMIT = frozenset({"max_epochs", "max_steps", "num_sanity_val_steps"})
_TYPES = {"num_nodes": str, "profiler": bool, "max_epochs": timedelta, "max_steps": timedelta}


def is_taken_as_by_lightning(name: str, argument: str, value: Any) -> bool:
    """Return whether a class takes a value that its annotation does not name."""
    if name in ("Trainer", "Fabric"):
        if isinstance(value, _TYPES.get(argument, ())):
            return True
        return argument in (_NONE_IS_DEFAULT if value is None else _INF_IS_NO_LIMIT if _equal(value, math.inf) else ())
    # A threshold may be a metric.
    return name == "EarlyStopping" and argument.endswith("_threshold") and getattr(value, "ndim", None) is not None


# The types of errors that say what is wrong with an argument. An OSError is about a folder that is there.
SENSIBLE = (TypeError, ValueError, OSError, NotImplementedError, ModuleNotFoundError)
# Lightning's class raises this for a table that it does not know.
_SENSIBLE_OF: dict[str, tuple[type[Exception], ...]] = {"PyTorchProfiler": (KeyError,)}


def check_call(call: tuple[str, dict[str, Any]]) -> None:
    """Raise ``Found`` unless an object is made of fitting values, or the error names a wrong one."""
    name, given = call
    shown = f"{name}({', '.join(f'{key}={shortened(value)}' for key, value in given.items())})"
    environment = dict(os.environ)
    try:
        CLASSES[name](**{**needed(name), **given})
    except (*SENSIBLE, *_SENSIBLE_OF.get(name, ())) as error:
        parts = parts_of(error)
        lines = str(error).splitlines()
        named = (
            isinstance(error, ModuleNotFoundError)
            or parts.argument in NAMES[name]
            or any(re.search(rf"\b{re.escape(one)}\b", str(error)) for one in given)
        )
        if not named:
            raise Found(f"{name}: no argument is named: {where(error)}", f"{shown}\n  {error!r}") from error
        if len(lines) > 2:
            raise Found(f"{name}({parts.argument}): {len(lines)} lines", f"{shown}\n  {error}") from error
    except Exception as error:
        raise Found(f"{name}: {where(error)}", f"{shown}\n  {error!r}") from error
    else:
        for argument, value in given.items():
            if is_taken_as_by_lightning(name, argument, value):
                continue
            if not fits(value, hints_of(CLASSES[name]).get(argument, Any)):
                raise Found(f"{name}({argument}=...) takes any value", shown)
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)


def needed(name: str) -> dict[str, Any]:
    """Return the arguments without which a class cannot be made."""
    if name in ("Trainer", "Fabric"):
        return {"accelerator": "cpu", "devices": 1}
    return NEEDED.get(name, {})


def where(error: BaseException) -> str:
    """Return the last line of hasten that an error has passed."""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file.name, line) for file, line in lines if "/src/hasten" in file.as_posix()]
    name, line = own[-1] if own else (type(error).__name__, 0)
    return f"{name}:{line}"


def shortened(value: Any) -> str:
    """Return a value for a message."""
    try:
        text = repr(value)
    except ValueError:
        text = f"<{type(value).__name__}>"
    return text if len(text) < 90 else f"{text[:80]}..."


# -- whether a value fits an annotation


class _Names(dict[str, Any]):
    """The names of a module; others, such as those that only type checkers import, are anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of the arguments of a class; ``Any`` for what cannot be evaluated."""
    found: dict[str, Any] = {}
    for one in inspect.signature(kind).parameters.values():
        hint: Any = one.annotation
        if isinstance(hint, str):
            names = _Names(vars(importlib.import_module(kind.__module__)))
            try:
                hint = eval(hint, {}, names)
            except (TypeError, AttributeError, NameError):
                hint = Any
        found[one.name] = Any if hint is inspect.Parameter.empty else hint
    return found


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be passed where an annotation stands; in doubt it may."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(value is one or (type(value) is not bool and _equal(value, one)) for one in get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    return _fits_type(value, origin or hint)


def _fits_type(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind is int:
        return _is_whole(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in _COLLECTIONS:
        return isinstance(value, collections.abc.Iterable) and not isinstance(value, (str, bytes))
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or kind is object:
        return True
    if issubclass(kind, Enum):
        return value in list(kind)
    try:
        return isinstance(value, kind)
    except TypeError:
        return True


_COLLECTIONS = frozenset(
    {list, tuple, set, frozenset}
    | {getattr(collections.abc, name) for name in ("Sequence", "Iterable", "Collection", "Set", "MutableSequence")}
)


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, float) and value.is_integer()
    return True


def _equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # arrays of several numbers
        return False
