"""The types allowed in a checkpoint: those that can be read back without running code."""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.rank_zero import warn_once

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
)
_TENSORS = frozenset({Tensor, nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})
_NUMBERS = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


def check_plain(contents: Any, name: str = "checkpoint") -> None:
    """Raise unless ``torch.load(..., weights_only=True)`` can read ``contents`` back.

    Args:
        contents: nested dicts, lists, tuples and sets.
        name: the name of ``contents`` in the message.

    Raises:
        TypeError: something in it is another Python object; the message says where and what to do.

    Example::

        >>> check_plain({"step": 3, "weight": torch.ones(2)})
        >>> check_plain({"hparams": {"activation": len}})
        Traceback (most recent call last):
        ...
        TypeError: checkpoint['hparams']['activation'] is a builtin_function_or_method, which a checkpoint does \
not hold: reading it back would run code. Store numbers, strings, tensors and dicts or lists of them instead.

    Source: `torch.load <https://docs.pytorch.org/docs/stable/generated/torch.load.html>`_.

    """
    _check(contents, name, set())


_objects_allowed = False


def allow_objects(allow: bool) -> None:
    """Allow Python objects in checkpoints, with a warning, for packages written for Lightning."""
    global _objects_allowed
    _objects_allowed = allow


def objects_allowed() -> bool:
    """Return whether checkpoints may hold Python objects."""
    return _objects_allowed


def check_storable(contents: Any) -> None:
    """Raise unless ``contents`` may be written: it is plain, or objects are allowed; see ``check_plain``."""
    try:
        check_plain(contents)
    except TypeError as error:
        if not _objects_allowed:
            raise
        place = str(error).partition(", which")[0]
        warn_once(
            "objects in a checkpoint",
            f"{place}: the checkpoint can be read back with weights_only=False only, which runs code in it.",
        )


def is_plain(contents: Any) -> bool:
    """Return whether :func:`check_plain` accepts ``contents``."""
    try:
        check_plain(contents)
    except TypeError:
        return False
    return True


@contextmanager
def numpy_allowed() -> Iterator[None]:
    """Let ``torch.load(..., weights_only=True)`` read numpy's numbers and arrays of numbers, which are plain data."""
    if "numpy" not in sys.modules:
        yield
        return
    import numpy

    # The module has different names in numpy 1 and 2; a file may be from either.
    multiarray = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    known: list[Any] = [numpy.ndarray, numpy.dtype]
    known += [type(numpy.dtype(number)) for number in _NUMBERS]
    for function in ("scalar", "_reconstruct"):
        for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
            known.append((getattr(multiarray, function), f"{module}.{function}"))
    with torch.serialization.safe_globals(known):
        yield


def _check(value: Any, place: str, above: set[int]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind in _TENSORS:
        attributes = vars(value)
        if attributes:
            _check(attributes, f"the attributes of {place}", above)
    elif kind in _MAPPINGS or kind in _SEQUENCES:
        if id(value) in above:
            raise TypeError(f"{place} contains itself, which a checkpoint does not hold.")
        above.add(id(value))
        if kind in _MAPPINGS:
            for key, inner in value.items():
                _check(key, f"a key of {place}", above)
                _check(inner, f"{place}[{key!r}]", above)
        else:
            for index, inner in enumerate(value):
                _check(inner, f"{place}[{index}]", above)
        above.discard(id(value))
    elif not _can_be_loaded(value):
        advice = "Store numbers, strings, tensors and dicts or lists of them instead"
        if hasattr(value, "as_posix"):
            advice = "Store str(path) instead"
        elif hasattr(value, "value") and hasattr(value, "name"):
            advice = "Store its .value instead"
        article = "an" if kind.__name__[0] in "aeiouAEIOU" else "a"
        raise TypeError(
            f"{place} is {article} {kind.__name__}, which a checkpoint does not hold: reading it back would run "
            f"code. {advice}."
        )


def _can_be_loaded(value: Any) -> bool:
    """Return whether another object can be read back: a tensor subclass, a numpy array, a type the user allowed."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with numpy_allowed():
            torch.load(buffer, weights_only=True)
    except (
        pickle.PicklingError,
        pickle.UnpicklingError,
        AttributeError,
        TypeError,
        RuntimeError,
        ValueError,
    ):
        return False
    return True
