"""How many tokens each sample of a dataset has, found as cheaply as the dataset allows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hasten._lib.rank_zero import rank_zero_info
from hasten.batching.pad import MASK_KEY, fields_of, is_mask, is_sequence, last_column, sequence_key
from hasten.data.memory.on_device import users_dataset
from hasten.seed import isolate_rng

# Reading them takes seconds for data that is decoded on the way, so each dataset is read once.
_KNOWN: WeakKeyDictionary[Any, dict[Any, SampleLengths]] = WeakKeyDictionary()


class LengthsNotFoundError(ValueError):
    """Nothing about the samples tells a length; the message says what was looked at."""


@dataclass(frozen=True)
class SampleLengths:
    """What was found.

    Args:
        lengths: tokens of every sample that are no padding, int64 ``(samples,)``.
        mask_key: the key or position of the mask in a sample; None where there is none.
        in_tokens: whether they are tokens and not, say, characters of a text that is yet to become tokens.
        mixed: fields that are a sequence in some samples and a single value in others, with the number of a sample
            of each kind; where all samples were read.

    """

    lengths: Tensor
    mask_key: Any = MASK_KEY
    in_tokens: bool = True
    mixed: Mapping[Any, tuple[int, int]] = field(default_factory=dict)


def sample_lengths(dataset: Any, key: Any = None, *, name: str = "the dataset") -> SampleLengths:
    """Return the length of every sample of a map-style dataset.

    Looked at in this order: what an earlier call found; an attribute ``lengths`` of the dataset; tensors of a
    ``TensorDataset``; columns of a Hugging Face dataset; else every sample is read once. The random state stays as
    it is. A sample's length is that of its ``attention_mask`` up to its last 1, of its ``input_ids`` or another
    sequence, or the characters of its text.

    Args:
        dataset: what a ``DataLoader`` reads, with a length; parts and joined ones are looked into.
        key: the field that tells the length: a key, or a position in a tuple; None to look for one.
        name: what to call the dataset in messages.

    Raises:
        LengthsNotFoundError: nothing about the samples tells a length.

    Example::

        >>> sample_lengths([[1, 2, 3], [4]]).lengths
        tensor([3, 1])

    """
    dataset = users_dataset(dataset)
    if isinstance(dataset, Subset):
        found = sample_lengths(dataset.dataset, key, name=name)
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return SampleLengths(found.lengths[chosen], found.mask_key, found.in_tokens)
    if isinstance(dataset, ConcatDataset):
        parts = [sample_lengths(each, key, name=name) for each in dataset.datasets]
        return SampleLengths(
            torch.cat([part.lengths for part in parts]),
            parts[0].mask_key,
            all(part.in_tokens for part in parts),
        )
    try:
        known = _KNOWN.setdefault(dataset, {})
    except TypeError:  # Not hashable, or nothing can refer to it weakly: a list, say.
        known = {}
    found_before = known.get(key)
    if found_before is None or len(found_before.lengths) != len(dataset):
        known[key] = found_before = _found(dataset, key, name)
    return found_before


def _found(dataset: Any, key: Any, name: str) -> SampleLengths:
    if key is None:
        given = _attribute(dataset)
        if given is not None:
            return SampleLengths(given)
    for look in (_in_tensors, _in_columns):
        found = look(dataset, key)
        if found is not None:
            return found
    return _in_samples(dataset, key, name)


def _attribute(dataset: Any) -> Tensor | None:
    """Return the attribute ``lengths`` where it has a number for each sample."""
    given = getattr(dataset, "lengths", None)
    if given is None or callable(given) or not hasattr(given, "__len__") or len(given) != len(dataset):
        return None
    try:
        lengths = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return None
    if lengths.dim() != 1 or lengths.is_floating_point():
        return None
    return lengths.to("cpu", torch.int64)


def _in_tensors(dataset: Any, key: Any) -> SampleLengths | None:
    """Look into the whole tensors of a ``TensorDataset``, whose samples are all as long: a mask tells."""
    if type(dataset) is not TensorDataset:
        return None
    places = range(len(dataset.tensors)) if key is None else [key]
    for place in places:
        mask = dataset.tensors[place]
        if mask.dim() == 2 and not mask.is_floating_point() and is_mask(mask):
            return SampleLengths(_extents(mask), mask_key=place)
    return None


def _in_columns(dataset: Any, key: Any) -> SampleLengths | None:
    """Look into the columns of a Hugging Face dataset, without making samples."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not hasattr(dataset, "with_format"):
        return None
    if getattr(dataset, "format", {}).get("type") == "custom":
        return None  # A transform makes other samples of the columns.
    wanted = [MASK_KEY, "length", "lengths", "input_ids"] if key is None else [key]
    for column in wanted:
        if column in columns:
            values = dataset.with_format("arrow").select_columns([column])[:][column].combine_chunks()
            if hasattr(values, "value_lengths"):
                sizes = _from_arrow(values.value_lengths())
                if column == MASK_KEY and len(sizes) and bool((sizes == sizes[0]).all()) and int(sizes[0]):
                    return SampleLengths(_extents(_from_arrow(values.flatten()).view(len(sizes), -1)))
                return SampleLengths(sizes)
            if column in ("length", "lengths"):
                return SampleLengths(_from_arrow(values))
    return None


def _from_arrow(values: Any) -> Tensor:
    return torch.tensor(values.to_numpy(zero_copy_only=False)).to(torch.int64)


def _in_samples(dataset: Any, key: Any, name: str) -> SampleLengths:
    start = time.perf_counter()
    lengths: list[int] = []
    in_tokens = True
    mask_places: set[Any] | None = None if key is None else {key}
    extents: dict[Any, list[int]] = {}
    kinds: dict[Any, dict[bool, int]] = {}
    with isolate_rng(include_cuda=False):
        for index in range(len(dataset)):
            sample = dataset[index]
            try:
                length, is_tokens = _length(sample, key)
            except (TypeError, KeyError) as error:
                raise LengthsNotFoundError(f"sample {index} tells no length: {error.args[0]}") from error
            lengths.append(length)
            in_tokens = in_tokens and is_tokens
            fields = fields_of(sample) or {}
            mask_places = _still_masks(fields, mask_places, extents)
            for place, value in fields.items():
                kinds.setdefault(place, {}).setdefault(is_sequence(value), index)
    seconds = time.perf_counter() - start
    if seconds > 1:
        rank_zero_info(
            f"reading the lengths of the {len(lengths):,} samples of {name} took {seconds:.1f} s. An attribute "
            "`lengths` of the dataset, with a number for each sample, spares it."
        )
    mixed = {place: (seen[True], seen[False]) for place, seen in kinds.items() if len(seen) > 1}
    place = _mask_among(mask_places or set(), lengths, extents, key)
    if place is not None:
        return SampleLengths(torch.tensor(extents[place], dtype=torch.int64), mask_key=place, mixed=mixed)
    return SampleLengths(torch.tensor(lengths, dtype=torch.int64), in_tokens=in_tokens, mixed=mixed)


def _mask_among(places: set[Any], lengths: list[int], extents: dict[Any, list[int]], key: Any) -> Any:
    """Return the field that tells what is padding, or None where samples are not padded or nothing tells."""
    if key is not None or MASK_KEY in places:
        return next((place for place in (key, MASK_KEY) if place in places), None)
    # A sample's own ones and zeros may be its content: only samples of one size need a mask.
    found = [place for place in places if isinstance(place, int) or "mask" in str(place)]
    return min(found, key=str) if found and len(set(lengths)) == 1 else None


def _length(sample: Any, key: Any) -> tuple[int, bool]:
    """Return the length of a sample, and whether it is one in tokens.

    Raises:
        TypeError, KeyError: nothing tells.

    """
    if isinstance(sample, str):
        return len(sample), False
    fields = fields_of(sample)
    if fields is None:
        if not is_sequence(sample):
            raise TypeError(f"it is a single {type(sample).__name__}")
        return len(sample), True
    if key is None:
        try:
            key = sequence_key(sample)
        except TypeError:
            text = next((value for value in fields.values() if isinstance(value, str)), None)
            if text is None:
                raise
            return len(text), False
    if key not in fields:
        raise KeyError(f"it has {list(fields)} and no {key!r}")
    value = fields[key]
    if isinstance(value, str):
        return len(value), False
    if is_sequence(value):
        return len(value), True
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int) and not isinstance(number, bool):
        return number, True  # A field that is the length itself.
    raise TypeError(f"its {key!r} is a single {type(value).__name__}")


def _still_masks(fields: dict[Any, Any], places: set[Any] | None, extents: dict[Any, list[int]]) -> set[Any]:
    """Return the fields that were masks in all samples so far, and note how far each goes."""
    still = set()
    for place in fields if places is None else places:
        value = fields.get(place)
        if not _is_flat(value):
            continue
        mask = torch.as_tensor(value)
        if not mask.is_floating_point() and (place == MASK_KEY or is_mask(mask[None])):
            extents.setdefault(place, []).append(last_column((mask != 0)[None]))
            still.add(place)
    return still


def _is_flat(value: Any) -> bool:
    if not is_sequence(value):
        return False
    return len(value.shape) == 1 if hasattr(value, "shape") else True


def _extents(masks: Tensor) -> Tensor:
    """Return for each row how many columns there are up to the last that is not 0."""
    places = torch.arange(1, masks.size(1) + 1)
    return torch.where(masks != 0, places, 0).amax(1)
