"""Nested collections of tensors."""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to each tensor; every other leaf and every type stays."""
    return _map(function, data, lambda leaf: leaf)


def move_to(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return ``data`` on ``device``; what has a ``to`` method of its own moves itself."""
    device = torch.device(device)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    def move_other(leaf: Any) -> Any:
        to = getattr(leaf, "to", None)
        if to is None or isinstance(leaf, type):
            return leaf
        moved = to(device)
        return leaf if moved is None else moved

    return _map(move, data, move_other)


def _map(function: Callable[[Tensor], Any], data: Any, other: Callable[[Any], Any]) -> Any:
    if isinstance(data, Tensor):
        return function(data)
    kind = type(data)
    if kind in (str, int, float, bool, bytes, type(None)):
        return data
    if not isinstance(data, (dict, list, tuple)) and hasattr(data, "to") and not isinstance(data, Mapping):
        return other(data)
    if isinstance(data, defaultdict):
        return defaultdict(data.default_factory, {k: _map(function, v, other) for k, v in data.items()})
    if isinstance(data, UserDict) and hasattr(data, "to"):
        moved = other(data)
        return moved if moved is not data or other is not None else data
    if isinstance(data, Mapping):
        items = {key: _map(function, value, other) for key, value in data.items()}
        return items if kind is dict else kind(items)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return kind(*(_map(function, item, other) for item in data))
    if isinstance(data, (list, tuple)):
        return kind(_map(function, item, other) for item in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        new = object.__new__(kind)
        for name, value in vars(data).items():
            object.__setattr__(new, name, _map(function, value, other))
        return new
    return other(data)
