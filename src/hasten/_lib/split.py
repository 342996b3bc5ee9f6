"""A batch in parts of fewer samples, and what was computed of the parts in one."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hasten._lib.tree import children, rebuilt

# "['x'][0].y": the steps of a place.
_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)")

_ADVICE = (
    "micro_batch splits a batch along the first dimension of each of its tensors. What is not one a sample belongs "
    "into the module (self.register_buffer), or is named in hasten.data.MicroBatch(shared=[...]); or leave micro_batch "
    "out and use a smaller batch_size with accumulate_grad_batches"
)


@dataclasses.dataclass(frozen=True)
class Fields:
    """What is known about the elements of a loader's batches, by their places (``"['x'][0]"``).

    Args:
        over: tensors, arrays and lists with one element a sample.
        shared: those that belong to all samples.
        refused: those that cannot be split, with the reason.
        pairs: dimensions of ``over`` that had one element a sample, too.
        all_over: every tensor runs over samples, whatever its place.
        shared_names: then, the keys, attributes or positions of those that do not.

    """

    over: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pairs: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    all_over: bool = False
    shared_names: frozenset[Any] = frozenset()

    def inside(self, prefix: str) -> Fields:
        """Return the same of a batch that lies within a larger one, at ``prefix``."""
        return Fields(
            frozenset(prefix + where for where in self.over),
            frozenset(prefix + where for where in self.shared),
            {prefix + where: why for where, why in self.refused.items()},
            {prefix + where: dims for where, dims in self.pairs.items()},
        )


def joined(all_fields: Sequence[Fields]) -> Fields:
    """Return what is known about a batch from what is known about its parts."""
    return Fields(
        frozenset().union(*(fields.over for fields in all_fields)),
        frozenset().union(*(fields.shared for fields in all_fields)),
        {where: why for fields in all_fields for where, why in fields.refused.items()},
        {where: dims for fields in all_fields for where, dims in fields.pairs.items()},
    )


# What torch's default_collate makes.
STACKED = Fields(all_over=True)


def compare(many: Any, fewer: Any, count: int, fewer_count: int) -> Fields:
    """Return which elements of a batch run over samples, from two batches of ``count`` and ``fewer_count`` samples.

    Example::

        >>> found = compare((torch.zeros(4, 2), torch.zeros(2)), (torch.zeros(2, 2), torch.zeros(2)), 4, 2)
        >>> found.over, found.shared
        (frozenset({'[0]'}), frozenset({'[1]'}))

    """
    over: set[str] = set()
    shared: set[str] = set()
    refused: dict[str, str] = {}
    pairs: dict[str, tuple[int, ...]] = {}

    def sizes(one: Any, other: Any, where: str) -> None:
        one, other = tuple(one.shape), tuple(other.shape)
        if len(one) != len(other):
            refused[where] = "has another number of dimensions for other samples"
            return
        follow = [i for i, pair in enumerate(zip(one, other, strict=True)) if pair == (count, fewer_count)]
        if 0 in follow:
            over.add(where)
            pairs.update({where: tuple(follow[1:])} if len(follow) > 1 else {})
        elif follow:
            refused[where] = f"has its samples along dimension {follow[0]}, not along the first"
        elif one[:1] == other[:1]:
            shared.add(where)
        else:
            refused[where] = "has neither one row a sample nor as many for any samples"

    def visit(one: Any, other: Any, where: str) -> None:
        if type(one) is not type(other):
            refused[where] = "is of another type for other samples"
        elif isinstance(one, Tensor) and (one.is_nested or one.layout != torch.strided):
            over.add(where)  # Refused by its kind.
        elif isinstance(one, Tensor) or _is_array(one):
            sizes(one, other, where)
        elif isinstance(one, (list, tuple)) and not isinstance(one, PackedSequence):
            if (len(one), len(other)) == (count, fewer_count) and not hasattr(one, "_fields"):
                over.add(where)
            elif len(one) == len(other) and _is_collection(one):
                inside(one, other, where)
            elif len(one) == len(other):
                shared.add(where)
            else:
                refused[where] = "has neither one element a sample nor as many for any samples"
        elif _is_collection(one):
            inside(one, other, where)
        elif _holds_tensors_inside(one):
            over.add(where)  # Refused by its kind.
        else:
            shared.add(where)

    def inside(one: Any, other: Any, where: str) -> None:
        others = dict(children(other))
        for step, child in children(one):
            if step in others:
                visit(child, others[step], where + step)

    visit(many, fewer, "")
    return Fields(frozenset(over), frozenset(shared), refused, pairs)


def measure(batch: Any, fields: Fields | None = STACKED) -> tuple[int, bool]:
    """Return (how many samples a batch has, whether they are listed one by one).

    Args:
        batch: a tensor, or dicts, lists, tuples, named tuples and dataclasses of tensors ``(samples, ...)``. A tensor
            of one number, one with a first dimension of 1, numbers, strings and None belong to all samples. Where
            samples differ in shape, lists of one element a sample, as for object detection.
        fields: which elements run over samples: by default all. None where nothing tells: then a batch of one tensor
            can be split, and a pair of inputs and labels.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> measure({"x": torch.zeros(6, 3), "y": torch.zeros(6), "temperature": 0.5})
        (6, False)
        >>> measure(([torch.zeros(3, 4, 4), torch.zeros(3, 9, 9)], [{"box": torch.zeros(4)}] * 2))
        (2, True)

    """
    if fields is not None and not fields.all_over:
        return _samples_by(fields, batch), False
    lists = _lists(batch)
    if lists is not None and any(isinstance(item, Mapping) for one in lists for item in one):
        return len(lists[0]), True
    try:
        samples = _samples_in(batch, frozenset() if fields is None else fields.shared_names)
    except ValueError:
        if lists is None or not all(_alike(one) for one in lists):
            raise
        return len(lists[0]), True
    if fields is None:
        _refuse_doubtful(batch, samples)
    return samples, False


def _samples_by(fields: Fields, batch: Any) -> int:
    """Return how many samples there are where it is known which elements run over them."""
    found, size = "", -1
    doubtful = []
    for where, element in _elements(batch, fields):
        if where in fields.refused:
            raise ValueError(f"batch{where} {fields.refused[where]}. {_ADVICE}.")
        if where in fields.shared:
            continue
        own = _first_dimension(element, where)
        if where not in fields.over:
            if own is not None:
                doubtful.append(where)
            continue
        if own is None:
            raise ValueError(f"batch{where} has no rows, and the samples of other batches had. {_ADVICE}.")
        if size not in (-1, own):
            raise _unequal(where, own, found, size)
        if any(element.shape[dim] == own > 1 for dim in fields.pairs.get(where, ())):
            raise ValueError(
                f"batch{where} has a value for each pair of samples, which parts do not have. {_ADVICE}."
            )
        found, size = where, own
    if doubtful and size != 1:
        raise _doubt(doubtful)
    return _at_least_one(size, batch)


def _unequal(where: str, own: int, other: str, size: int) -> ValueError:
    return ValueError(
        f"batch{where}: its first dimension is {own}, and that of batch{other} is {size}. {_ADVICE}."
    )


def _at_least_one(size: int, batch: Any) -> int:
    if size == -1:
        raise ValueError(f"the batch, a {type(batch).__name__}, holds no tensor to split. {_ADVICE}.")
    return size


def _elements(data: Any, fields: Fields = Fields(), where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is split or not as a whole: a list of samples is one element."""
    if where in fields.over or where in fields.refused or not _is_collection(data):
        yield where, data
        return
    for step, child in children(data):
        yield from _elements(child, fields, where + step)


def _refuse_doubtful(batch: Any, samples: int) -> None:
    """Refuse several tensors of as many rows as there are samples: nothing tells which of them run over samples."""
    rows = [(where, leaf) for where, leaf in _elements(batch) if _first_dimension(leaf, where) == samples]
    # A pair is inputs and labels, unless the second one has a value for each pair of samples.
    is_square = any(
        getattr(leaf, "ndim", 0) > 1 and leaf.shape[1] == samples and samples > 1 for _, leaf in rows[1:]
    )
    plain = len(rows) == 1 or (type(batch) in (list, tuple) and len(batch) == len(rows) == 2)
    if samples > 1 and (is_square or not plain):
        raise _doubt([where for where, _ in rows])


def _doubt(places: Sequence[str]) -> ValueError:
    named = " and ".join(f"batch{where}" for where in places[:3]) + (" and others" if len(places) > 3 else "")
    one = len(places) == 1
    return ValueError(
        f"micro_batch: nothing shows whether {named} {'has' if one else 'have'} one row a sample.\n"
        "Write micro_batch=hasten.data.MicroBatch(size, shared=[...]) with the names of those that belong to all "
        "samples, or shared=[]."
    )


def _samples_in(batch: Any, names: frozenset[Any]) -> int:
    found, size = "", -1
    for where, leaf in _elements(batch):
        if names and _is_named(where, names):
            continue
        own = _first_dimension(leaf, where)
        if own is None or (own == 1 and size > 1):
            continue
        if size in (-1, 1):
            found, size = where, own
        elif own != size:
            raise _unequal(where, own, found, size)
    return _at_least_one(size, batch)


def _is_named(where: str, names: frozenset[Any]) -> bool:
    return any(
        (quoted or attribute) in names or (index and place == 0 and int(index) in names)
        for place, (quoted, index, attribute) in enumerate(_STEP.findall(where))
    )


def split(batch: Any, size: int, fields: Fields | None = STACKED) -> list[tuple[Any, int]]:
    """Return ``batch`` in parts of ``size`` samples with the samples of each; the last may have fewer.

    Args:
        batch: see ``measure``. Its tensors are not copied.
        size: at least 1.
        fields: see ``measure``.

    Raises:
        ValueError: it cannot be split; the message names the element.

    Example::

        >>> [(part.tolist(), count) for part, count in split(torch.arange(5), 2)]
        [([0, 1], 2), ([2, 3], 2), ([4], 1)]

    """
    samples, listed = measure(batch, fields)
    if size >= samples:
        return [(batch, samples)]
    starts = range(0, samples, size)
    fields = STACKED if fields is None else fields
    return [
        (_part(batch, start, min(start + size, samples), samples, listed, fields), min(size, samples - start))
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
    if (hasattr(leaf, "to") and not isinstance(leaf, type)) or _holds_tensors_inside(leaf):
        raise ValueError(f"batch{where} is a {type(leaf).__name__}, which cannot be split. {_ADVICE}.")
    return None


def _holds_tensors_inside(leaf: Any, depth: int = 2) -> bool:
    """Return whether an object of another class holds tensors, which would go to each part as a whole."""
    if isinstance(leaf, (bool, int, float, str, bytes, type(None), type)):
        return False
    if isinstance(leaf, Tensor) or _is_array(leaf):
        return True
    held: list[Any] = list(getattr(leaf, "__dict__", {}).values())
    slots = [vars(kind).get("__slots__", ()) for kind in type(leaf).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    held += [getattr(leaf, name, None) for name in names]
    if isinstance(leaf, (set, frozenset, list, tuple, deque)):
        held += leaf
    elif isinstance(leaf, Mapping):
        held += leaf.values()
    return depth > 0 and any(_holds_tensors_inside(each, depth - 1) for each in held[:100])


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
    """Return whether the elements of a list may be samples of one kind, and not inputs and labels."""
    return (
        len({(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in items}) == 1
    )


def _part(
    data: Any, start: int, stop: int, samples: int, listed: bool, fields: Fields, where: str = ""
) -> Any:
    if listed:
        return rebuilt(data, [value[start:stop] for _, value in children(data)])
    if where in fields.over:
        return data[start:stop]
    if fields.shared_names and _is_named(where, fields.shared_names):
        return data
    if _is_collection(data):
        return rebuilt(
            data,
            [
                _part(value, start, stop, samples, False, fields, where + step)
                for step, value in children(data)
            ],
        )
    # A first dimension of 1 is one for all.
    is_split = fields.all_over and _first_dimension(data, where) == samples
    return data[start:stop] if is_split else data
