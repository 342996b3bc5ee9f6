"""The parts of a dataset: its attributes, transforms, and the random generators among them."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import sys
import threading
import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten.checkpoint.snapshots import Snapshot
from hasten.extend.origin import ROOTS, comes_from, module_of
from hasten.seed import is_generator, state_of_generator

# Number of parts of a dataset that are compared, the nearest first; each epoch begins with a comparison.
_MOST_PARTS, _DEEPEST = 4000, 8
# Of a long container, so many elements are looked into, so many compared if they have a hash, and so many numbers of an
# array compared; all spread evenly.
_ELEMENTS, _MOST_HASHED, _MOST_NUMBERS = 32, 10_000, 4096

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_OPAQUE = (types.ModuleType, threading.Thread, io.IOBase, DataLoader, type(threading.Lock()))
# Values in shared memory are compared by their bytes; what is behind them belongs to all such values of the process.
_SHARED = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_LEAVES = (Tensor, type, os.PathLike, types.BuiltinFunctionType, *_SHARED, *_OPAQUE)
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "abc", "collections", "functools", "random", "enum")
_RUNS = (*ROOTS, "lightning", "pytorch_lightning")
_MISSING = object()


def own_generators(dataset: object) -> dict[int, bytes]:
    """Return the states of the random generators that a dataset holds, by the generator's id."""
    found = (part for _, part in parts(dataset) if is_generator(part))
    return {id(part): pickle.dumps(state_of_generator(part)) for part in found}


@contextmanager
def preserve(*things: object) -> Iterator[None]:
    """Restore the random generators of these datasets, functions or other objects afterwards."""
    found = [Snapshot.of(part) for thing in things for _, part in parts(thing) if is_generator(part)]
    try:
        yield
    finally:
        for before in found:
            before.restore()


def fingerprint(dataset: object) -> dict[str, Any]:
    """Return the attributes of a dataset by their places, as values to compare later.

    Tensors and arrays are not copied: a tensor counts its changes, and of a large array some numbers are compared.
    Random generators are left out, since a sampler may share them.
    """
    return {place: _value(part) for place, part in parts(dataset) if not is_generator(part)}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the places at which two fingerprints differ."""
    places = [place for place, value in after.items() if before.get(place, _MISSING) != value]
    return places + [place for place in before if place not in after]


def comparable(dataset: object) -> dict[str, int]:
    """Return a number for each part of a dataset by its place; other processes have the same one for an equal part."""
    return {
        place: zlib.crc32(repr(contents_of(part)).encode())
        for place, part in parts(dataset)
        # A cache of Hugging Face, with random keys.
        if "__hffs_cache" not in place
    }


def _value(part: Any) -> Any:
    """Return the value by which two parts at the same place are compared."""
    kind = type(part)
    if isinstance(part, Tensor):
        version = 0 if part.is_inference() else part._version
        pointer = part.data_ptr() if part.layout == torch.strided and not part.is_meta else id(part)
        return "tensor", pointer, version, tuple(part.shape), part.dtype
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(part, numpy.ndarray):
        return _array_value(part)
    if numpy is not None and isinstance(part, numpy.generic):
        return part.dtype.str, part.tobytes()
    if isinstance(part, (float, complex, os.PathLike)):
        return kind, str(part)  # As text, NaN equals NaN.
    if isinstance(part, _PLAIN):
        return kind, part
    if isinstance(part, _SHARED):
        return "shared", bytes(part)
    if isinstance(part, (dict, set, frozenset)):
        return kind, len(part)
    if isinstance(part, (list, tuple, deque)):
        size = len(part)
        with suppress(Exception):  # Elements without a hash.
            return kind, size, hash(tuple(part)[:: -(-size // _MOST_HASHED) or 1])
        return kind, size
    # Functions and objects are compared by identity; a bound method is a new object each time.
    return kind.__qualname__, id(getattr(part, "__func__", part))


def _array_value(part: Any) -> tuple[Any, ...]:
    numbers = b""
    if part.dtype.kind in "biufcSUmM" and part.size:
        step = -(-part.size // _MOST_NUMBERS)
        # Spread along the first dimension: flattening may copy all of it.
        rows = part[:: max(1, min(step, len(part)))] if part.ndim else part
        numbers = rows.reshape(-1)[:_MOST_NUMBERS].tobytes()
    return "array", part.__array_interface__["data"][0], part.shape, part.dtype.str, numbers


def contents_of(part: Any) -> Any:
    """Return what is the same for equal parts of any two processes."""
    kind = type(part).__qualname__
    if is_generator(part):
        return kind, pickle.dumps(state_of_generator(part))
    if isinstance(part, Tensor):
        readable = part.layout == torch.strided and part.is_cpu and not part.is_quantized
        step = -(-part.numel() // _MOST_NUMBERS) or 1
        numbers = part.detach().reshape(-1)[::step].tolist() if readable else None
        return kind, tuple(part.shape), part.dtype, numbers
    if isinstance(part, (*_PLAIN, os.PathLike)):
        return kind, str(part)
    if isinstance(part, (set, frozenset)):
        return kind, len(part), sorted(map(repr, part)) if all(isinstance(each, _PLAIN) for each in part) else None
    if isinstance(part, (list, tuple, deque)):
        few = list(part)[:: -(-len(part) // _MOST_HASHED) or 1]
        return kind, len(part), few if all(isinstance(each, _PLAIN) for each in few) else None
    if isinstance(part, dict):
        return kind, len(part)
    value = _value(part)
    if value[0] == "array":
        return kind, *value[2:]
    numpy = sys.modules.get("numpy")
    if isinstance(part, _SHARED) or (numpy is not None and isinstance(part, numpy.generic)):
        return value
    # Objects and functions are compared only by their contents.
    return kind, getattr(part, "__qualname__", None)


def parts(dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a dataset, each with its place, nearest first."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[int, str, Any]] = deque([(0, "", dataset)])
    while waiting and len(seen) < _MOST_PARTS:
        depth, place, part = waiting.popleft()
        if isinstance(part, _PLAIN):
            yield place, part
            continue
        method = isinstance(part, types.MethodType)
        key = hash((id(part.__func__), id(part.__self__))) if method else id(part)
        if key in seen:
            continue
        # Kept, so that no other object gets its id meanwhile.
        seen[key] = part
        yield place, part
        if depth < _DEEPEST:
            # Reading an attribute of a user's object may raise; then its parts are left out.
            with suppress(Exception):
                waiting.extend([(depth + 1, *each) for each in _inside(place, part)])


def _inside(place: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Yield place and value of what a part holds."""
    if isinstance(part, _LEAVES) or is_generator(part):
        return
    if isinstance(part, (list, tuple, deque)):
        for index in range(0, len(part), -(-len(part) // _ELEMENTS) or 1):
            yield f"{place}[{index}]", part[index]
    elif isinstance(part, Mapping):
        for index, (key, value) in enumerate(list(part.items())[: 8 * _ELEMENTS]):
            name = repr(key) if isinstance(key, (str, int, float, bool)) else f"#{index}"
            yield f"{place}[{name}]", value
    elif isinstance(part, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _join(place, name), getattr(part, name)
    elif isinstance(part, types.MethodType):
        yield _join(place, "__self__"), part.__self__
    elif isinstance(part, types.FunctionType):
        for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=False):
            with suppress(ValueError):  # Not yet bound.
                yield f"{place}: {name}", cell.cell_contents
        yield f"{place}: defaults", (part.__defaults__, part.__kwdefaults__)
    elif hasattr(type(part), "get_obj"):
        # multiprocessing.Value and Array.
        yield _join(place, "value"), part.get_obj()
    else:
        yield from _attributes(place, part)


def _attributes(place: str, part: Any) -> Iterator[tuple[str, Any]]:
    kinds = [kind for kind in type(part).__mro__ if not comes_from(kind, *_LIBRARIES)]
    users = [kind for kind in kinds if not comes_from(kind, *_RUNS)]
    if any(kind not in users and ".data." not in f"{module_of(kind)}." for kind in kinds):
        return  # A run and its modules change with every step.
    held = dict(getattr(part, "__dict__", {}))
    for kind in kinds:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(part, name):
                held.setdefault(name, getattr(part, name))
    for kind in users:
        for name, value in list(vars(kind).items()):
            if not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__")):
                held.setdefault(name, value)
    for name, value in held.items():
        yield _join(place, name), value


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
