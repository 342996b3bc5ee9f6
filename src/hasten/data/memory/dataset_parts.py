"""What a dataset is made of: its attributes, transforms, functions, and the random generators among them."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

# A dataset of more parts is looked at in part: each epoch begins with a look.
_MOST_PARTS = 4000
_DEEPEST = 8
# Of long containers so many elements are looked into, and so many compared where they can be hashed, spread evenly.
_ELEMENTS = 32
_MOST_HASHED = 10_000
# Numbers of an array that are compared, spread evenly.
_MOST_NUMBERS = 4096

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_OPAQUE = (types.ModuleType, threading.Thread, io.IOBase, DataLoader, type(threading.Lock()))
# What is defined in these packages reads nothing of the program's.
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "abc", "collections", "functools", "random", "enum")
_RUNS = ("hasten", "lightning", "pytorch_lightning")
_MARK = object()


def own_generators(dataset: Any) -> dict[int, Any]:
    """Return the states of the random generators that a dataset holds or its methods read, by the generator's id.

    Example::

        >>> class Flipping:
        ...     def __init__(self):
        ...         self.random = random.Random(0)
        >>> data = Flipping()
        >>> before = own_generators(data)
        >>> data.random.random() < 1 and own_generators(data) == before
        False

    """
    return {id(part): state for _, part in parts(dataset) if (state := _state(part)) is not _MARK}


@contextmanager
def own_generators_kept(dataset: Any) -> Iterator[None]:
    """Leave the random generators that a dataset holds or its methods read afterwards as they were before.

    Example::

        >>> generator = random.Random(0)
        >>> with own_generators_kept([generator]):
        ...     first = generator.random()
        >>> first == generator.random()
        True

    """
    put_back = [_restorer(part) for _, part in parts(dataset) if _state(part) is not _MARK]
    try:
        yield
    finally:
        for function in put_back:
            function()


def _restorer(generator: Any) -> Callable[[], None]:
    """Return what gives a generator the state back that it has now."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if hasattr(generator, "set_state"):
        # Of torch, and numpy's old one.
        return functools.partial(generator.set_state, generator.get_state())
    bits = getattr(generator, "bit_generator", generator)
    return functools.partial(setattr, bits, "state", bits.state)


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a dataset by their places, as values that can be compared later on.

    Tensors and arrays are not copied: a tensor counts its changes, of a large array some numbers are taken. Random
    generators are left out, since a sampler may share them.

    Example::

        >>> class Curriculum:
        ...     level = 0
        >>> data = Curriculum()
        >>> before = fingerprint(data)
        >>> data.level = 1
        >>> changed(before, fingerprint(data))
        ['level']

    """
    found: dict[str, Any] = {}
    for place, part in parts(dataset):
        if _state(part) is _MARK:
            found[place] = _value(part)
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the places at which two fingerprints differ."""
    places = [
        place for place, value in after.items() if place not in before or not _equal(before[place], value)
    ]
    return places + [place for place in before if place not in after]


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _state(part: Any) -> Any:
    """Return the state of a random generator; a mark of its own for anything else."""
    if isinstance(part, random.Random):
        try:
            return part.getstate()
        except NotImplementedError:
            return _MARK  # The system's has no state.
    if isinstance(part, torch.Generator):
        return part.get_state().numpy().tobytes() if "numpy" in sys.modules else part.get_state().tolist()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds = numpy.random
        if isinstance(part, kinds.Generator):
            return repr(part.bit_generator.state)
        if isinstance(part, kinds.RandomState):
            state = part.get_state(legacy=False)
            return repr(
                {
                    **state,
                    "state": {name: bytes(numpy.asarray(each)) for name, each in state["state"].items()},
                }
            )
        if isinstance(part, kinds.BitGenerator):
            return repr(part.state)
    return _MARK


def _value(part: Any) -> Any:
    if isinstance(part, Tensor):
        version = 0 if part.is_inference() else part._version
        pointer = part.data_ptr() if part.layout == torch.strided and part.device.type != "meta" else id(part)
        return "tensor", pointer, version, tuple(part.shape), part.dtype
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(part, numpy.ndarray):
        numbers = b""
        if part.dtype.kind in "biufcSUmM" and part.size:
            step = -(-part.size // _MOST_NUMBERS)
            # Evenly spread along the first dimension: flattening may copy all of it.
            rows = part[:: max(1, min(step, len(part)))] if part.ndim else part
            numbers = rows.reshape(-1)[:_MOST_NUMBERS].tobytes()
        return "array", part.__array_interface__["data"][0], part.shape, part.dtype.str, numbers
    if numpy is not None and isinstance(part, numpy.generic):
        return part.dtype.str, part.tobytes()
    if isinstance(part, (float, complex, os.PathLike)):
        # As text, NaN equals NaN.
        return type(part), str(part)
    if isinstance(part, _PLAIN):
        return type(part), part
    if isinstance(part, ctypes._SimpleCData):
        return "shared", part.value
    if isinstance(part, (ctypes.Array, ctypes.Structure)):
        return "shared", bytes(part)
    if isinstance(part, (list, tuple, set, frozenset, deque, dict)):
        size = len(part)
        if isinstance(part, dict):
            return "dict", size
        if isinstance(part, (set, frozenset)):
            return "set", size
        try:
            return type(part), size, hash(tuple(part)[:: -(-size // _MOST_HASHED) or 1])
        except Exception:  # Elements without a hash.
            return type(part), size
    # Functions and objects are known by what they are, not by where: bound methods are made each time.
    return type(part).__qualname__, id(part) if not isinstance(part, types.MethodType) else id(part.__func__)


def parts(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a dataset is made of, each with its place, nearest first."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[str, Any, int, frozenset[str]]] = deque([("", dataset, 0, frozenset())])
    while waiting and len(seen) < _MOST_PARTS:
        place, part, depth, names = waiting.popleft()
        plain = isinstance(part, _PLAIN)
        if not plain:
            # A bound method is made each time it is asked for.
            method = isinstance(part, types.MethodType)
            key = hash((id(part.__func__), id(part.__self__))) if method else id(part)
            if key in seen:
                continue
            # Kept, so that no other object gets its number meanwhile.
            seen[key] = part
        yield place, part
        if not plain and depth < _DEEPEST:
            try:
                inside = list(_inside(place, part, names))
            except Exception:
                # The user's objects may raise whatever is asked of them; then they are taken whole.
                continue
            waiting.extend((inner_place, inner, depth + 1, read) for inner_place, inner, read in inside)


_Inside = Iterator[tuple[str, Any, frozenset[str]]]


def _inside(place: str, part: Any, names: frozenset[str]) -> _Inside:
    """Yield place and value of what a part holds, and the names that the code which reads it uses.

    Args:
        place: of the part.
        part: the part.
        names: what the code that reads the part uses.

    """
    if (
        isinstance(part, (Tensor, type, os.PathLike, types.BuiltinFunctionType, *_OPAQUE))
        or _state(part) is not _MARK
    ):
        return
    if isinstance(part, (list, tuple, deque)):
        step = -(-len(part) // _ELEMENTS) or 1
        for index in range(0, len(part), step):
            yield f"{place}[{index}]", part[index], names
    elif isinstance(part, Mapping):
        for index, (key, value) in enumerate(list(part.items())[: 8 * _ELEMENTS]):
            name = repr(key) if isinstance(key, (str, int, float, bool)) else f"#{index}"
            yield f"{place}[{name}]", value, names
    elif isinstance(part, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _join(place, name), getattr(part, name), names
    elif isinstance(part, types.MethodType):
        yield f"{place}()", part.__func__, names
        yield _join(place, "__self__"), part.__self__, _names(part.__func__)
    elif isinstance(part, types.FunctionType):
        yield from _read_by(place, part)
    elif hasattr(type(part), "get_obj"):
        # multiprocessing.Value and Array.
        yield _join(place, "value"), part.get_obj(), names
    else:
        yield from _attributes(place, part, names)


def _attributes(place: str, part: Any, names: frozenset[str]) -> _Inside:
    kinds = [kind for kind in type(part).__mro__ if not _is_of(kind, _LIBRARIES)]
    if any(_is_of(kind, _RUNS) and ".data." not in f"{kind.__module__}." for kind in kinds):
        # A run and its modules change with every step: only what the dataset's code reads counts.
        for name in sorted(names):
            value = _quietly(part, name)
            if isinstance(value, (*_PLAIN, Tensor)) and value is not None:
                yield _join(place, name), value, names
        return
    mine = [kind for kind in kinds if not _is_of(kind, _RUNS)]
    # Those that are overridden too: super() may call them.
    functions = [(f"{kind.__name__}.{name}()", found) for kind in mine for name, found in _functions_of(kind)]
    read = names.union(*(_names(function) for _, function in functions))
    held = getattr(part, "__dict__", {})
    for name, value in list(held.items()):
        yield _join(place, name), value, read
    for kind in kinds:
        for name in (slots,) if isinstance(slots := getattr(kind, "__slots__", ()), str) else slots:
            if hasattr(part, name):
                yield _join(place, name), getattr(part, name), read
    of_the_class = {name: value for kind in reversed(mine) for name, value in list(vars(kind).items())}
    for name, value in of_the_class.items():
        is_code = name.startswith("__") or callable(value) or hasattr(type(value), "__get__")
        if name not in held and not is_code:
            yield _join(place, name), value, read
    for name, function in functions:
        yield _join(place, name), function, read


def _functions_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(vars(kind).items()):
        if isinstance(value, property):
            value = value.fget
        # Of a classmethod, a staticmethod, and what functools.cache makes.
        value = getattr(value, "__func__", getattr(value, "__wrapped__", value))
        if isinstance(value, types.FunctionType):
            yield name, value


def _read_by(place: str, function: types.FunctionType) -> _Inside:
    """Yield what a function reads besides its arguments: defaults, enclosing variables, globals that are data."""
    if (function.__module__ or "").partition(".")[0] in (*_LIBRARIES, *_RUNS):
        return
    names = _names(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # Not yet bound.
        if name != "__class__":
            yield f"{place}: {name}", value, names
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"{place}: {name}", value, names
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"{place}: default {index}", value, names
    for name in sorted(names):
        value = function.__globals__.get(name, _MARK)
        if value is not _MARK and not isinstance(value, (types.ModuleType, type)):
            yield f"global {name}", value, names


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _names(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else _names_in(code)


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    module = kind.__module__
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _quietly(part: Any, name: str) -> Any:
    try:
        return getattr(part, name, None)
    except Exception:  # A property of a module that is not in a run.
        return None
