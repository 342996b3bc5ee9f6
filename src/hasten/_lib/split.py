"""A batch in parts of fewer samples, and what was computed of the parts in one."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_ADVICE = (
    "micro_batch splits a batch along the first dimension of each of its tensors. What is not one a sample belongs "
    "into the module (self.register_buffer); or leave micro_batch out and use a smaller batch_size with "
    "accumulate_grad_batches"
)


def measure(batch: Any) -> tuple[int, bool]:
    """Return (how many samples a batch has, whether they are listed one by one).

    Args:
        batch: a tensor, or dicts, lists, tuples, named tuples and dataclasses of tensors ``(samples, ...)``. A tensor
            of one number, one with a first dimension of 1, numbers, strings and None belong to all samples. Where
            samples differ in shape, lists of one element a sample, as for object detection.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> measure({"x": torch.zeros(6, 3), "y": torch.zeros(6), "temperature": 0.5})
        (6, False)
        >>> measure(([torch.zeros(3, 4, 4), torch.zeros(3, 9, 9)], [{"box": torch.zeros(4)}] * 2))
        (2, True)

    """
    lists = _lists(batch)
    if lists is not None and any(isinstance(item, Mapping) for one in lists for item in one):
        return len(lists[0]), True
    try:
        return _samples_in(batch), False
    except ValueError:
        if lists is None or not all(_alike(one) for one in lists):
            raise
        return len(lists[0]), True


def _samples_in(batch: Any) -> int:
    found, size = "", -1
    for where, leaf in _leaves(batch, ""):
        own = _first_dimension(leaf, where)
        if own is None or (own == 1 and size > 1):
            continue
        if size in (-1, 1):
            found, size = where, own
        elif own != size:
            raise ValueError(
                f"batch{where}: its first dimension is {own}, and that of batch{found} is {size}. {_ADVICE}."
            )
    if size == -1:
        raise ValueError(f"the batch, a {type(batch).__name__}, holds no tensor to split. {_ADVICE}.")
    return size


def split(batch: Any, size: int) -> list[tuple[Any, int]]:
    """Return ``batch`` in parts of ``size`` samples with the samples of each; the last may have fewer.

    Args:
        batch: see ``measure``. Its tensors are not copied.
        size: at least 1.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> [(part.tolist(), count) for part, count in split(torch.arange(5), 2)]
        [([0, 1], 2), ([2, 3], 2), ([4], 1)]

    """
    samples, listed = measure(batch)
    if size >= samples:
        return [(batch, samples)]
    starts = range(0, samples, size)
    return [
        (_part(batch, start, min(start + size, samples), samples, listed), min(size, samples - start))
        for start in starts
    ]


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what was computed of each part as if it had been computed of the whole batch.

    Tensors and lists of one element a sample are put one after the other, floating numbers averaged by the samples of
    the parts, whole ones added; of anything else the last is taken.

    Args:
        parts: of the same structure each.
        sizes: the samples of each part.

    Example::

        >>> join([{"accuracy": 0.5, "correct": 1}, {"accuracy": 1.0, "correct": 1}], [2, 1])["correct"]
        2

    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts, sizes)
    if isinstance(first, (bool, str)) or first is None:
        return parts[-1]
    if isinstance(first, float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    if isinstance(first, int):
        return sum(parts)
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in part for part in parts)]
        return {key: join([part[key] for part in parts], sizes) for key in keys}
    if isinstance(first, (list, tuple)):
        if all(len(part) == size for part, size in zip(parts, sizes, strict=True)) and not _holds_tensors(
            first
        ):
            return type(first)(item for part in parts for item in part)
        if all(len(part) == len(first) for part in parts):
            items = [join(column, sizes) for column in zip(*parts, strict=True)]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return parts[-1]


def _join_tensors(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    # The graph is of no use after backward, and would keep the tensors of all parts alive.
    tensors = [part.detach() for part in parts]
    first = tensors[0]
    if first.dim() and all(tensor.shape[0] == size for tensor, size in zip(tensors, sizes, strict=True)):
        return torch.cat(tensors) if all(t.shape[1:] == first.shape[1:] for t in tensors) else tensors[-1]
    if any(tensor.shape != first.shape for tensor in tensors):
        return tensors[-1]
    if first.dtype == torch.bool:
        return tensors[-1]
    if not first.is_floating_point():
        return torch.stack(tensors).sum(0)
    weights = torch.tensor(sizes, dtype=torch.float32, device=first.device) / sum(sizes)
    wide = torch.stack(tensors).to(torch.promote_types(first.dtype, torch.float32))
    return torch.tensordot(weights.to(wide), wide, dims=1).to(first.dtype)


def _holds_tensors(items: Any) -> bool:
    return any(isinstance(item, Tensor) for item in items)


# -- one element


def _leaves(data: Any, where: str) -> Iterator[tuple[str, Any]]:
    for step, child in _children(data):
        if _is_collection(child):
            yield from _leaves(child, where + step)
        else:
            yield where + step, child
    if not _is_collection(data):
        yield where, data


def _children(data: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(data, (Mapping, UserDict)):
        yield from ((f"[{key!r}]", value) for key, value in data.items())
    elif isinstance(data, (list, tuple)) and not isinstance(data, PackedSequence):
        fields = getattr(data, "_fields", None)
        yield from (
            (f".{fields[index]}" if fields else f"[{index}]", value) for index, value in enumerate(data)
        )
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        yield from ((f".{field.name}", getattr(data, field.name, None)) for field in dataclasses.fields(data))


def _is_collection(data: Any) -> bool:
    if isinstance(data, (Tensor, PackedSequence)):
        return False
    if isinstance(data, (list, tuple)):
        # Words and numbers of a list are its samples: it is split itself.
        return not (data and all(isinstance(item, (str, bytes, int, float)) for item in data))
    return isinstance(data, (Mapping, UserDict)) or (
        dataclasses.is_dataclass(data) and not isinstance(data, type)
    )


def _first_dimension(leaf: Any, where: str) -> int | None:
    """Return how many samples a leaf has; None for what belongs to all."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout != torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise ValueError(f"batch{where} is a {kind} tensor, which cannot be split. {_ADVICE}.")
        return leaf.shape[0] if leaf.dim() else None
    if _is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim else None
    if isinstance(leaf, (list, tuple)) and not isinstance(leaf, PackedSequence):
        return len(leaf)
    if isinstance(leaf, PackedSequence) or (hasattr(leaf, "to") and not isinstance(leaf, type)):
        raise ValueError(f"batch{where} is a {type(leaf).__name__}, which cannot be split. {_ADVICE}.")
    return None


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _lists(batch: Any) -> list[Any] | None:
    """Return the parts of a batch that is made of lists of the same length only; None for any other."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(values, (list, tuple)) or not values:
        return None
    if not all(isinstance(value, (list, tuple)) and value for value in values):
        return None
    return list(values) if len({len(value) for value in values}) == 1 else None


def _alike(items: Sequence[Any]) -> bool:
    """Say whether the elements of a list may be samples of one kind, and not inputs and labels."""
    kinds = {(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in items}
    return len(kinds) == 1


def _part(data: Any, start: int, stop: int, samples: int, listed: bool) -> Any:
    if listed:
        return _rebuilt(data, lambda value: value[start:stop])
    if isinstance(data, Tensor):
        # A first dimension of 1 is one for all.
        return data[start:stop] if data.dim() and data.shape[0] == samples else data
    if _is_collection(data):
        return _rebuilt(data, lambda value: _part(value, start, stop, samples, False))
    if (isinstance(data, (list, tuple)) and len(data) == samples) or (
        _is_array(data) and data.ndim and data.shape[0] == samples
    ):
        return data[start:stop]
    return data


def _rebuilt(data: Any, function: Callable[[Any], Any]) -> Any:
    if type(data) is dict:
        return {key: function(value) for key, value in data.items()}
    if isinstance(data, (dict, UserDict)):
        # A copy keeps what a subclass has beside its items: a default factory, the encodings of a tokenizer.
        new = copy.copy(data)
        for key, value in data.items():
            new[key] = function(value)
        return new
    if isinstance(data, Mapping):
        return type(data)({key: function(value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, (list, tuple)):
        items = [function(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    new = copy.copy(data)
    for field in dataclasses.fields(data):
        # Past a frozen dataclass, whose copy is ours.
        object.__setattr__(new, field.name, function(getattr(data, field.name, None)))
    return new
