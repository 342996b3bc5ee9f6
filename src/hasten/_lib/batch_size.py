"""How many samples a batch holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def batch_size_of(batch: Any) -> tuple[int, bool]:
    """Return (number of samples, whether that is certain).

    It is certain when every tensor in the batch has the same first dimension, or the batch says how many
    graphs it holds. Otherwise the first tensor's first dimension is returned, or 1 when there is none.
    """
    if type(batch) is Tensor:
        return (batch.shape[0], True) if batch.dim() else (1, True)
    if type(batch) is tuple or type(batch) is list:
        # The everyday (inputs, labels), without a call for each part.
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
