"""Parts of tensors that are not one rectangle: elements in memory order (ZeRO), and several ranges of a dimension."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hasten._lib import torch_private

# (offsets, sizes) of a rectangular part
Box = tuple[list[int], list[int]]
# First index in the whole dimension, first index in this process's part of it, and how many are next to each other.
_Range = tuple[int, int, int]


class FlatPart(Tensor):
    """Elements of a tensor that are next to each other in its memory.

    A checkpoint folder stores them as rectangular parts of the whole tensor, which any number of processes can read.
    Make one with ``flat_part``.
    """

    whole_shape: tuple[int, ...]
    start: int

    def detach(self) -> FlatPart:
        """Return this part: it is a copy already."""
        return self

    def __create_write_items__(self, key: str, _: Any) -> list[Any]:
        """Return what ``torch.distributed.checkpoint`` writes."""
        return _write_items(key, self.dtype, self.whole_shape, self._boxes())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the elements of one of the parts that are written."""
        elements, first = self.as_subclass(Tensor), 0
        for offsets, sizes in self._boxes():
            number = _product(sizes)
            if list(index.offset) == offsets:
                return elements[first : first + number].view(sizes)
            first += number
        raise KeyError(index)

    def _boxes(self) -> Iterator[Box]:
        return boxes(self.whole_shape, self.start, self.start + self.numel())


def flat_part(elements: Tensor, shape: Sequence[int], start: int) -> FlatPart:
    """Return a part of a tensor of ``shape``, copied to the host: its elements from ``start`` on, in one dimension."""
    part = elements.detach().to("cpu", copy=True).contiguous().as_subclass(FlatPart)
    part.whole_shape, part.start = tuple(shape), start
    return part


class _Ranges(Tensor):
    """The part of a ``DTensor`` that this process has, if it is several rectangles of the whole tensor.

    ``torch.distributed.checkpoint`` asks it for what to write and to read; it would take the part for one rectangle.
    """

    whole_shape: tuple[int, ...]
    # For each dimension, from the first to the last.
    ranges: list[list[_Range]]

    def __create_write_items__(self, key: str, _: Any) -> list[Any]:
        """Return what ``torch.distributed.checkpoint`` writes."""
        return _write_items(key, self.dtype, self.whole_shape, self._boxes())

    def __create_chunk_list__(self) -> list[Any]:
        """Return what ``torch.distributed.checkpoint`` reads."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return one of the rectangles, sharing its memory."""
        part = self.as_subclass(Tensor)
        for dim, (offset, ranges) in enumerate(zip(index.offset, self.ranges, strict=True)):
            first, length = next((own, length) for start, own, length in ranges if start == offset)
            part = part.narrow(dim, first, length)
        return part

    def _boxes(self) -> Iterator[Box]:
        for each in itertools.product(*self.ranges):
            yield [start for start, _, _ in each], [length for _, _, length in each]


def in_rectangles(tensor: Tensor) -> Tensor:
    """Return a tensor as ``torch.distributed.checkpoint`` takes it, sharing its memory.

    A ``DTensor`` of which this process has several ranges of a dimension is stored and read range by range. Other
    tensors are returned unchanged.
    """
    shard: Any = tensor
    if not any(map(torch_private.is_strided, getattr(tensor, "placements", ()))):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = shard.device_mesh, shard.placements
    ranges: list[list[_Range]] = []
    for dim, size in enumerate(shard.shape):
        along = [torch_private.placement_along(placement, dim) for placement in placements]
        own = distribute_tensor(torch.arange(size), mesh, along, src_data_rank=None).to_local().tolist()
        ranges.append(list(_ranges(own)))
    if all(len(each) == 1 for each in ranges):
        return tensor
    part = shard.to_local().detach().as_subclass(_Ranges)
    divided: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
    held: Any = torch_private.local_part(divided)
    held.whole_shape, held.ranges = tuple(shard.shape), ranges
    return divided


def _ranges(indices: Sequence[int]) -> Iterator[_Range]:
    """Yield the ranges of indices that follow each other.

    Example::

        >>> list(_ranges([4, 5, 12, 13]))
        [(4, 0, 2), (12, 2, 2)]

    """
    first = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[place - 1] + 1:
            yield indices[first], first, place - first
            first = place


def _write_items(key: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterator[Box]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(
            index=MetadataIndex(key, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=properties,
                size=torch.Size(shape),
            ),
        )
        for offsets, sizes in parts
    ]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the rectangular parts that make up elements ``start`` to ``stop``, in order.

    Example::

        >>> list(boxes((3, 4), 2, 9))
        [([0, 2], [1, 2]), ([1, 0], [1, 4]), ([2, 0], [1, 1])]

    """
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    row = _product(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for offsets, sizes in boxes(shape[1:], start - first * row, stop - first * row):
            yield [first, *offsets], [1, *sizes]
        return
    if start % row:
        yield from boxes(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row
    if whole > first:
        yield [first, *(0 for _ in shape[1:])], [whole - first, *shape[1:]]
    if stop % row:
        yield from boxes(shape, whole * row, stop)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
