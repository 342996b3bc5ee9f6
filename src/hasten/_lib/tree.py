"""Nested collections of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_ATOMS: frozenset[type] = frozenset({str, int, float, bool, bytes, complex, type(None)})


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to each tensor.

    Args:
        function: gets each tensor and returns what takes its place.
        data: a tensor, or dicts, lists, tuples, named tuples and dataclasses that hold tensors. Types are kept,
            and other leaves stay.

    Returns:
        a new collection, or ``data`` itself where nothing in it changed.

    Example::

        >>> map_tensors(lambda tensor: tensor + 1, {"x": torch.zeros(2), "name": "a"})
        {'x': tensor([1., 1.]), 'name': 'a'}

    """
    if isinstance(data, Tensor):
        return function(data)
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to everything in it that is not a collection, see ``map_tensors``.

    Example::

        >>> map_leaves(str, {"x": [1, None], "name": "a"})
        {'x': ['1', 'None'], 'name': 'a'}

    """
    return _map(function, data, frozenset())


def leaves(data: Any) -> list[Any]:
    """Return everything in ``data`` that is not a collection, in order; see ``map_tensors``.

    Example::

        >>> leaves({"x": [1, None], "name": "a"})
        [1, None, 'a']

    """
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map(note, data, frozenset())
    return found


def move_to(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return ``data`` on ``device``.

    Args:
        data: a tensor or a collection, see ``map_tensors``; other objects that have a method ``to`` move themselves.
        device: where to.
        non_blocking: go on before the copies have arrived; for copies from pinned memory.

    Returns:
        a new collection, or ``data`` itself where all is there already.

    """
    if type(data) is Tensor:
        return data.to(device, non_blocking=non_blocking)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        if to is None or isinstance(leaf, type):
            return leaf
        moved = to(device)
        # Objects that move in place may return nothing.
        return leaf if moved is None else moved

    return _map(move, data)


def _map(function: Callable[[Any], Any], data: Any, unchanged: frozenset[type] = _ATOMS) -> Any:
    kind = type(data)
    if kind in unchanged:
        return data
    if kind is tuple or kind is list:
        items = [_map(function, item, unchanged) for item in data]
        same = all(new is old for new, old in zip(items, data, strict=True))
        return data if same else kind(items)
    if isinstance(data, (dict, UserDict)):
        changed = {}
        for key, value in data.items():
            if (new := _map(function, value, unchanged)) is not value:
                changed[key] = new
        return _with_items(data, changed) if changed else data
    if isinstance(data, Tensor) or hasattr(data, "to"):
        return function(data)
    if isinstance(data, Mapping):
        items_by_key = {key: _map(function, value, unchanged) for key, value in data.items()}
        same = all(items_by_key[key] is value for key, value in data.items())
        return data if same else kind(items_by_key)
    if isinstance(data, (list, tuple)):
        items = [_map(function, item, unchanged) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return kind(*items) if hasattr(data, "_fields") else kind(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changed = {}
        for field in dataclasses.fields(data):
            value = getattr(data, field.name, None)
            if (new := _map(function, value, unchanged)) is not value:
                changed[field.name] = new
        return _with_fields(data, changed) if changed else data
    return function(data)


def _with_items(data: Any, changed: dict[Any, Any]) -> Any:
    # A copy keeps what a subclass has beside its items: a default factory, the encodings of a tokenizer.
    new = dict(data) if type(data) is dict else copy.copy(data)
    for key, value in changed.items():
        new[key] = value
    return new


def _with_fields(data: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(data)
    for name, value in changed.items():
        # Past a frozen dataclass, whose copy is ours.
        object.__setattr__(new, name, value)
    return new
