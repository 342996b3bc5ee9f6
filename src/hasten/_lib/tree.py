"""Nested collections of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_ATOMS: frozenset[type] = frozenset({str, int, float, bool, bytes, complex, type(None)})


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to each tensor.

    Args:
        function: takes a tensor and returns its replacement.
        data: a tensor, or dicts, lists, tuples, named tuples and dataclasses that hold tensors. Types are kept,
            and other leaves are unchanged.

    Returns:
        a new collection, or ``data`` itself if nothing changed.

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
        device: the target.
        non_blocking: return before the copies have finished; for copies from pinned memory.

    Returns:
        a new collection, or ``data`` itself if everything is on ``device`` already.

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
        # Some objects move in place and return None.
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
    # A copy keeps the attributes of a subclass, such as a default factory or the encodings of a tokenizer.
    new = dict(data) if type(data) is dict else copy.copy(data)
    for key, value in changed.items():
        new[key] = value
    return new


def _with_fields(data: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(data)
    for name, value in changed.items():
        # The dataclass may be frozen.
        object.__setattr__(new, name, value)
    return new


def batch_size_of(batch: Any) -> tuple[int, bool]:
    """Return (number of samples, whether that is certain).

    It is certain if all tensors in the batch have the same first dimension, or the batch has ``num_graphs``. Otherwise
    it is the first dimension of the first tensor, or 1 without tensors.
    """
    if type(batch) is Tensor:
        return (batch.shape[0], True) if batch.dim() else (1, True)
    if type(batch) is tuple or type(batch) is list:
        # Fast path for (inputs, labels).
        size = -1
        for part in batch:
            if type(part) is not Tensor or not part.dim() or (size >= 0 and part.shape[0] != size):
                break
            size = part.shape[0]
        else:
            if size >= 0:
                return size, True
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs, True
    sizes = list(_sizes(batch))
    if not sizes:
        return 1, False
    return sizes[0], all(size == sizes[0] for size in sizes)


def _sizes(data: Any) -> Iterator[int]:
    if isinstance(data, Tensor):
        if data.dim():
            yield data.shape[0]
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _sizes(value)
    elif isinstance(data, (list, tuple)):
        if data and all(isinstance(item, (str, int, float)) for item in data):
            yield len(data)
        else:
            for item in data:
                yield from _sizes(item)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from _sizes(getattr(data, field.name))


_Item = TypeVar("_Item")


def by_kind(items: Iterable[_Item], tensor_of: Callable[[_Item], Any] | None = None) -> list[list[_Item]]:
    """Group items by device and type, in their order, for torch's ``_foreach`` operations.

    Args:
        items: tensors, or objects that ``tensor_of`` maps to tensors.
        tensor_of: returns the tensor of an item; by default the item itself.

    Example::

        >>> one, two, whole = torch.zeros(1), torch.zeros(2), torch.zeros(3, dtype=torch.int64)
        >>> [len(alike) for alike in by_kind([one, whole, two])]
        [2, 1]

    """
    kinds: dict[tuple[torch.device, torch.dtype], list[_Item]] = {}
    for item in items:
        tensor: Tensor = item if tensor_of is None else tensor_of(item)  # type: ignore[assignment]
        kinds.setdefault((tensor.device, tensor.dtype), []).append(item)
    return list(kinds.values())
