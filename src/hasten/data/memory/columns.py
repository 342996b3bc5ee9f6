"""Samples in whole tensors, one for each field: a batch is one indexing of each."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# ("tensor", shape, dtype) | ("array", shape, dtype) | ("scalar", dtype) | ("plain", type) | ("text", type)
# | (dict or a sequence type, keys or None, kinds of the fields)
Kind = tuple[Any, ...]
# Returns memory for a column of a shape and a dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]

_NOTHING = torch.empty(0, dtype=torch.int64)


class NoColumnsError(ValueError):
    """The samples do not fit into whole tensors; the message says why."""


def kind_of(sample: Any) -> Kind:
    """Return the structure, shapes and types that all samples must have for one tensor to hold each field.

    Raises:
        NoColumnsError: it has something else in it.

    """
    kind = type(sample)
    if kind is Tensor:
        if sample.layout != torch.strided or sample.is_quantized or sample.requires_grad:
            raise NoColumnsError("a tensor is sparse, quantised or requires a gradient")
        return ("tensor", tuple(sample.shape), sample.dtype)
    if kind in (int, float, bool):
        return ("plain", kind)
    if kind in (str, bytes):
        return ("text", kind)
    if kind is dict:
        return (dict, tuple(sample), tuple(kind_of(value) for value in sample.values()))
    if kind is tuple or kind is list or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return (kind, None, tuple(kind_of(value) for value in sample))
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and sample.dtype.kind in "biufc":
        return ("array", sample.shape, sample.dtype.str)
    if numpy is not None and isinstance(sample, (numpy.number, numpy.bool_)):
        return ("scalar", sample.dtype.str)
    raise NoColumnsError(f"a field is a {kind.__qualname__}")


def leaves_of(batch: Any, kind: Kind) -> Iterator[Any]:
    """Yield the fields of a collated batch of samples of a kind, in order."""
    first = kind[0]
    if isinstance(first, str):
        yield batch
        return
    parts = [batch[key] for key in kind[1]] if first is dict else batch
    for part, inner in zip(parts, kind[2], strict=True):
        yield from leaves_of(part, inner)


class Columns:
    """Samples as one tensor (or list of texts) for each field."""

    def __init__(self, kind: Kind, leaves: Sequence[Any]) -> None:
        self.kind = kind
        self.leaves = list(leaves)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._has_texts = len(tensors) < len(self.leaves)
        self._build = _batch_builder(kind, iter(self.leaves))
        self._one = _sample_builder(kind, iter(self.leaves))

    def __len__(self) -> int:
        return len(self.leaves[0])

    def batch(self, indices: Any) -> Any:
        """Return what ``default_collate`` makes of these samples, bit for bit."""
        if isinstance(indices, Tensor):
            index, numbers = indices, indices.tolist() if self._has_texts else []
        else:
            numbers = indices if isinstance(indices, list) else list(indices)
            # torch.tensor reads number by number, which would take as long as all else.
            index = torch.frombuffer(array.array("q", numbers), dtype=torch.int64) if numbers else _NOTHING
        if self._device.type == "cuda":
            # From pinned memory: the host does not wait.
            index = index.pin_memory().to(self._device, non_blocking=True)
        elif self._device.type != "cpu":
            index = index.to(self._device)
        return self._build(index, numbers)

    def sample(self, index: int) -> Any:
        """Return a copy of one sample, as the dataset gives it."""
        return self._one(index)

    def samples(self) -> list[Any]:
        """Return copies of all samples."""
        return [self._one(index) for index in range(len(self))]

    @property
    def size_bytes(self) -> int:
        """Memory of the tensors and texts."""
        return sum(
            leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else sum(map(sys.getsizeof, leaf))
            for leaf in self.leaves
        )

    def to(self, device: torch.device) -> Columns:
        """Return the same samples with their tensors on ``device``."""
        return Columns(
            self.kind, [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        )


class ColumnsBuilder:
    """Makes columns chunk by chunk."""

    def __init__(self, length: int, allocate: Allocate | None = None) -> None:
        self._length = length
        self._allocate = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
        self.kind: Kind | None = None
        self.filled = 0
        self._leaves: list[Any] = []

    def fits(self, kind: Kind | None) -> bool:
        """Return whether samples of a kind can be added."""
        return kind is not None and (self.kind is None or self.kind == kind)

    def add(self, kind: Kind, batch: Any, count: int) -> None:
        """Add a collated batch of ``count`` samples."""
        leaves = list(leaves_of(batch, kind))
        if self.kind is None:
            self.kind = kind
            self._leaves = [
                self._allocate((self._length, *leaf.shape[1:]), leaf.dtype)
                if isinstance(leaf, Tensor)
                else []
                for leaf in leaves
            ]
        for column, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(column, Tensor):
                column[self.filled : self.filled + count].copy_(leaf)
            else:
                column.extend(leaf)
        self.filled += count

    def columns(self) -> Columns:
        """Return what is filled so far."""
        assert self.kind is not None
        return Columns(self.kind, [leaf[: self.filled] for leaf in self._leaves])


def _batch_builder(
    kind: Kind, leaves: Iterator[Any], texts_in: type[Any] = list
) -> Callable[[Tensor, list[int]], Any]:
    first = kind[0]
    if first == "text":
        texts = next(leaves)
        return lambda index, numbers: texts_in([texts[number] for number in numbers])
    if isinstance(first, str):
        select = next(leaves).index_select
        return lambda index, numbers: select(0, index)
    # Texts of a field of a tuple come as a tuple from default_collate, others as a list.
    inner = [_batch_builder(each, leaves, list if first is dict else tuple) for each in kind[2]]
    if first is dict:
        named = list(zip(kind[1], inner, strict=True))
        return lambda index, numbers: {key: build(index, numbers) for key, build in named}
    if first in (tuple, list):
        # default_collate gives a list for a tuple, too.
        return lambda index, numbers: [build(index, numbers) for build in inner]
    return lambda index, numbers: first(*[build(index, numbers) for build in inner])


def _sample_builder(kind: Kind, leaves: Iterator[Any]) -> Callable[[int], Any]:
    first = kind[0]
    if isinstance(first, str):
        column = next(leaves)
        if first == "text":
            return lambda index: column[index]
        if first == "tensor":
            return lambda index: column[index].clone()
        if first == "plain":
            return lambda index: column[index].item()
        if first == "array":
            return lambda index: column[index].to("cpu", copy=True).numpy().astype(kind[2], copy=False)
        return lambda index: column[index].cpu().numpy().astype(kind[1])[()]
    inner = [_sample_builder(each, leaves) for each in kind[2]]
    if first is dict:
        named = list(zip(kind[1], inner, strict=True))
        return lambda index: {key: build(index) for key, build in named}
    if first in (tuple, list):
        return lambda index: first([build(index) for build in inner])
    return lambda index: first(*[build(index) for build in inner])
