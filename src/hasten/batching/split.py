"""Split a batch into micro-batches and join their outputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hasten._lib.errors import make_error
from hasten._lib.tree import children, is_array, rebuilt

# "['x'][0].y": the steps of a place.
_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)")

_ADVICE = (
    "micro_batch splits a batch along the first dimension of each of its tensors. What is not one a sample belongs "
    "into the module (self.register_buffer), or is named in hasten.data.MicroBatch(shared=[...]); or leave micro_batch "
    "out and use a smaller batch_size with accumulate_grad_batches"
)


@dataclasses.dataclass(frozen=True)
class Fields:
    """Known facts about the elements of a loader's batches.

    Args:
        places: by place (``"['x'][0]"``), the dimensions of an element that have one entry a sample: ``()`` for one
            that belongs to all samples; or the reason why it cannot be split. None: all tensors run over samples.
        shared_names: without ``places``, the keys, attributes or positions of those that do not.

    """

    places: Mapping[str, tuple[int, ...] | str] | None = None
    shared_names: frozenset[Any] = frozenset()


# Values that belong to all samples. Objects of other classes may hold tensors of samples.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Enum)

# What torch's default_collate makes.
STACKED = Fields()


def compare(many: Any, fewer: Any, count: int, fewer_count: int, where: str = "") -> dict[str, tuple[int, ...] | str]:
    """Return the ``places`` of ``Fields``, from two batches of ``count`` and ``fewer_count`` samples.

    Example::

        >>> compare((torch.zeros(4, 2), torch.zeros(2)), (torch.zeros(2, 2), torch.zeros(2)), 4, 2)
        {'[0]': (0,), '[1]': ()}

    """
    if type(many) is not type(fewer):
        return {where: "is of another type for other samples"}
    if isinstance(many, Tensor) and _kind_refused(many):
        return {where: (0,)}  # Refused when it is split.
    if isinstance(many, Tensor) or is_array(many):
        return {where: _compare_shapes(many.shape, fewer.shape, (count, fewer_count))}
    if isinstance(many, (list, tuple)) and not isinstance(many, PackedSequence):
        if (len(many), len(fewer)) == (count, fewer_count) and not hasattr(many, "_fields"):
            return {where: (0,)}
        if len(many) != len(fewer):
            return {where: "has neither one element a sample nor as many for any samples"}
    if not _is_collection(many):
        return {where: () if isinstance(many, _PLAIN) else (0,)}
    others = dict(children(fewer))
    found: dict[str, tuple[int, ...] | str] = {}
    for step, child in children(many):
        if step in others:
            found |= compare(child, others[step], count, fewer_count, where + step)
    return found


def _compare_shapes(one: Sequence[int], other: Sequence[int], counts: tuple[int, int]) -> tuple[int, ...] | str:
    if len(one) != len(other):
        return "has another number of dimensions for other samples"
    dims = tuple(dim for dim, sizes in enumerate(zip(one, other, strict=True)) if sizes == counts)
    if dims and dims[0] > 0:
        return f"has its samples along dimension {dims[0]}, not along the first"
    if not dims and one[:1] != other[:1]:
        return "has neither one row a sample nor as many for any samples"
    return dims


def measure(batch: Any, fields: Fields | None = STACKED) -> int:
    """Return how many samples a batch has.

    Args:
        batch: a tensor, or dicts, lists, tuples, named tuples and dataclasses of tensors ``(samples, ...)``. A tensor
            of one number, one with a first dimension of 1, numbers, strings and None belong to all samples. Where
            samples differ in shape, lists of one element a sample, as for object detection.
        fields: which elements run over samples: by default all. None if it is not known: then a batch of one tensor can
            be split, and a pair of inputs and labels.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> measure({"x": torch.zeros(6, 3), "y": torch.zeros(6), "temperature": 0.5})
        6
        >>> measure(([torch.zeros(3, 4, 4), torch.zeros(3, 9, 9)], [{"box": torch.zeros(4)}] * 2))
        2

    """
    return _over_samples(batch, fields)[0]


def split(batch: Any, size: int, fields: Fields | None = STACKED) -> list[tuple[Any, int]]:
    """Return ``batch`` in parts of ``size`` samples with the samples of each; the last may have fewer; see ``measure``.

    Tensors are not copied.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> [(part.tolist(), count) for part, count in split(torch.arange(5), 2)]
        [([0, 1], 2), ([2, 3], 2), ([4], 1)]

    """
    samples, places = _over_samples(batch, fields)
    if size >= samples:
        return [(batch, samples)]

    def part(data: Any, rows: slice, where: str = "") -> Any:
        if where in places:
            return data[rows]
        if not _is_collection(data):
            return data
        return rebuilt(data, [part(value, rows, where + step) for step, value in children(data)])

    return [(part(batch, slice(start, start + size)), min(size, samples - start)) for start in range(0, samples, size)]


def _over_samples(batch: Any, fields: Fields | None) -> tuple[int, Collection[str]]:
    """Return the number of samples, and the places of the elements that run over them."""
    known = STACKED if fields is None else fields
    lists = _lists(batch) if known.places is None else {}
    listed = bool(lists) and any(isinstance(item, Mapping) for one in lists.values() for item in one)
    try:
        found = {} if listed else _rows(batch, known)
    except ValueError:
        listed = bool(lists) and all(map(_alike, lists.values()))
        if not listed:
            raise
    if listed:
        return len(next(iter(lists.values()))), lists
    samples = len(next(iter(found.values())))
    if fields is None:
        _refuse_doubtful(batch, found, samples)
    return samples, found


def _rows(batch: Any, fields: Fields) -> dict[str, Any]:
    """Return the elements that run over samples, by their places; all have the same length."""
    known = fields.places is not None
    places = fields.places or {}
    elements: dict[str, Any] = {}
    doubtful: list[str] = []
    for where, element in _elements(batch, places):
        dims = places.get(where)
        if not _has_rows(element, where, dims, fields.shared_names):
            continue
        if known and not dims:
            doubtful.append(where)
        else:
            elements[where] = element
    if not known:  # A first dimension of 1 means one value for all samples.
        elements = {where: element for where, element in elements.items() if len(element) != 1} or elements
    lengths = {where: len(element) for where, element in elements.items()}
    first = next(iter(lengths), "")
    for where, rows in lengths.items():
        if rows != lengths[first]:
            what = f"batch{where}: its first dimension is {rows}, and that of batch{first} is {lengths[first]}."
            raise make_error(ValueError, what, fix=f"{_ADVICE}.")
    if doubtful and lengths.get(first) != 1:
        raise _doubt(doubtful)
    if not elements:
        raise make_error(
            ValueError, f"the batch, a {type(batch).__name__}, holds no tensor to split.", fix=f"{_ADVICE}."
        )
    return elements


def _has_rows(element: Any, where: str, dims: Any, shared_names: frozenset[Any]) -> bool:
    """Return whether an element may run over samples; raise if it cannot be split as other batches were.

    ``dims`` are the dimensions that run over samples, as other batches showed, or why it cannot be split.
    """
    if isinstance(dims, str):
        raise make_error(ValueError, f"batch{where} {dims}.", fix=f"{_ADVICE}.")
    if dims == () or _is_named(where, shared_names):
        return False
    rows = _length(element, where)
    if rows is None and dims:
        raise make_error(
            ValueError, f"batch{where} has no rows, and the samples of other batches had.", fix=f"{_ADVICE}."
        )
    if rows is not None and any(element.shape[dim] == rows > 1 for dim in (dims or ())[1:]):
        what = f"batch{where} has a value for each pair of samples, which parts do not have."
        raise make_error(ValueError, what, fix=f"{_ADVICE}.")
    return rows is not None


def _elements(data: Any, places: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is split or not as a whole: a list of samples is one element."""
    if places.get(where) or not _is_collection(data):
        yield where, data
        return
    for step, child in children(data):
        yield from _elements(child, places, where + step)


def _refuse_doubtful(batch: Any, found: Mapping[str, Any], samples: int) -> None:
    """Refuse several tensors with as many rows as samples: it is not known which of them run over samples."""
    # A pair is inputs and labels, unless the second one has a value for each pair of samples.
    is_square = any(getattr(one, "ndim", 0) > 1 and one.shape[1] == samples for one in [*found.values()][1:])
    plain = len(found) == 1 or (type(batch) in (list, tuple) and len(batch) == len(found) == 2)
    if samples > 1 and (is_square or not plain):
        raise _doubt(list(found))


def _doubt(places: Sequence[str]) -> ValueError:
    named = " and ".join(f"batch{where}" for where in places[:3]) + (" and others" if len(places) > 3 else "")
    return make_error(
        ValueError,
        f"micro_batch: nothing shows whether {named} {'has' if len(places) == 1 else 'have'} one row a sample.\n"
        "Write micro_batch=hasten.data.MicroBatch(size, shared=[...]) with the names of those that belong to all "
        "samples, or shared=[].",
        argument="micro_batch",
    )


def _is_named(where: str, names: frozenset[Any]) -> bool:
    return any(
        (quoted or attribute) in names or (index and place == 0 and int(index) in names)
        for place, (quoted, index, attribute) in enumerate(_STEP.findall(where) if names else ())
    )


def _lists(batch: Any) -> dict[str, Any]:
    """Return the parts of a batch that is made of lists of the same length only, by place; {} for any other."""
    parts = dict(children(batch)) if isinstance(batch, (Mapping, list, tuple)) else {}
    is_lists = all(isinstance(part, (list, tuple)) and part for part in parts.values())
    return parts if is_lists and len(set(map(len, parts.values()))) == 1 else {}


def _alike(items: Sequence[Any]) -> bool:
    """Return whether the elements of a list may be samples of one kind, and not inputs and labels."""
    kinds = {(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in items}
    return len(kinds) == 1


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of the parts, of one structure, as if they had been computed from the whole batch.

    Tensors and lists of one element a sample are put one after the other, floating numbers averaged by the samples of
    the parts, whole ones added; for anything else the last part's value is used.

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
    return _join_sequences(parts, sizes) if isinstance(first, (list, tuple)) else parts[-1]


def _join_sequences(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    holds_tensors = any(isinstance(item, Tensor) for item in first)
    if not holds_tensors and [len(part) for part in parts] == list(sizes):
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
    if first.dtype == torch.bool or any(tensor.shape != first.shape for tensor in tensors):
        return tensors[-1]
    if not first.is_floating_point():
        return torch.stack(tensors).sum(0)
    weights = torch.tensor(sizes, dtype=torch.float32, device=first.device) / sum(sizes)
    wide = torch.stack(tensors).to(torch.promote_types(first.dtype, torch.float32))
    return torch.tensordot(weights.to(wide), wide, dims=1).to(first.dtype)


# -- one element


def _is_collection(data: Any) -> bool:
    if isinstance(data, (Tensor, PackedSequence, type)):
        return False
    if isinstance(data, (list, tuple)):
        # Words and numbers of a list are its samples: it is split itself.
        return not (data and all(isinstance(item, (str, bytes, int, float)) for item in data))
    return isinstance(data, Mapping) or dataclasses.is_dataclass(data)


def _kind_refused(tensor: Tensor) -> str:
    """Return the kind of a tensor that has no rows, such as "sparse_coo"; "" for the usual ones."""
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return "" if kind == "strided" else f"{kind} tensor"


def _length(leaf: Any, where: str) -> int | None:
    """Return how many samples a leaf has; None for a leaf that belongs to all samples."""
    if isinstance(leaf, _PLAIN):
        return None
    refused = _kind_refused(leaf) if isinstance(leaf, Tensor) else ""
    if not refused and (isinstance(leaf, Tensor) or is_array(leaf)):
        return int(leaf.shape[0]) if leaf.ndim else None
    if isinstance(leaf, (list, tuple)) and not isinstance(leaf, PackedSequence):
        return len(leaf)
    raise make_error(
        ValueError, f"batch{where} is a {refused or type(leaf).__name__}, which cannot be split.", fix=f"{_ADVICE}."
    )
