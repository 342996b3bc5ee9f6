"""A part of a tensor: some of its elements in memory order, as ZeRO divides tensors over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# (offsets, sizes) of a rectangular part
Box = tuple[list[int], list[int]]


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
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=properties,
                    size=torch.Size(self.whole_shape),
                ),
            )
            for offsets, sizes in self._boxes()
        ]

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
    """Return a part of a tensor, copied to the host.

    Args:
        elements: shape (number,).
        shape: of the whole tensor.
        start: the index of the first element in the whole tensor, if it had one dimension.

    """
    part = elements.detach().to("cpu", copy=True).contiguous().as_subclass(FlatPart)
    part.whole_shape, part.start = tuple(shape), start
    return part


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
