"""Tensors that one operation takes together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Item = TypeVar("_Item")


def by_kind(items: Iterable[_Item], tensor_of: Callable[[_Item], Any] | None = None) -> list[list[_Item]]:
    """Return items in lists of one device and type, in their order: what torch's ``_foreach`` operations are given.

    Args:
        items: tensors, or what ``tensor_of`` finds one in.
        tensor_of: returns the tensor of an item; by default the item is one.

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
