"""Find the number of tokens of each sample of a dataset, as cheaply as the dataset allows."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hasten._lib.rank_zero import rank_zero_info
from hasten.batching.pad import MASK_KEY, extents, fields_of, is_mask, is_sequence, sequence_key
from hasten.data.loader_parts import sample_at
from hasten.data.memory.dataset_parts import preserve
from hasten.data.memory.resident import users_dataset
from hasten.seed import isolate_rng

# Reading samples takes seconds if they are decoded, so each dataset is read once.
_KNOWN: WeakKeyDictionary[Any, dict[Any, SampleLengths]] = WeakKeyDictionary()


class LengthsNotFoundError(ValueError):
    """Raised if no length of the samples can be found; the message says where hasten looked for it."""


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of a dataset's samples."""

    # Tokens of every sample without padding, int64 (samples,).
    lengths: Tensor
    # The key or position of the mask in a sample.
    mask_key: Hashable = MASK_KEY
    # False for characters of a text, say, that has not been tokenized.
    in_tokens: bool = True


def sample_lengths(dataset: object, key: Hashable = None, *, name: str = "the dataset") -> SampleLengths:
    """Return the length of every sample of a map-style dataset.

    Looked for in this order: the result of an earlier call; an attribute ``lengths`` of the dataset; tensors of a
    ``TensorDataset``; columns of a Hugging Face dataset; else every sample is read once. Random states, the dataset's
    own too, do not change. A sample's length is the length of its ``attention_mask`` up to its last 1, of its
    ``input_ids`` or another sequence, or the number of characters of its text.

    Raises:
        LengthsNotFoundError: nothing about the samples shows a length.

    Example::

        >>> sample_lengths([[1, 2, 3], [4]]).lengths
        tensor([3, 1])

    """
    data: Any = users_dataset(dataset)
    if isinstance(data, Subset):
        found = sample_lengths(data.dataset, key, name=name)
        chosen = torch.as_tensor(data.indices, dtype=torch.int64)
        return SampleLengths(found.lengths[chosen], found.mask_key, found.in_tokens)
    if isinstance(data, ConcatDataset):
        parts = [sample_lengths(each, key, name=name) for each in data.datasets]
        lengths = torch.cat([part.lengths for part in parts])
        return SampleLengths(lengths, parts[0].mask_key, all(part.in_tokens for part in parts))
    try:
        known = _KNOWN.setdefault(data, {})
    except TypeError:  # The dataset has no hash or allows no weak references, for instance a list.
        known = {}
    if key not in known or len(known[key].lengths) != len(data):
        known[key] = (
            (_in_attribute(data) if key is None else None)
            or _in_tensors(data, key)
            or _in_columns(data, key)
            or _in_samples(data, key, name)
        )
    return known[key]


def _in_attribute(dataset: Any) -> SampleLengths | None:
    """Look for an attribute ``lengths`` with a number for each sample."""
    values: Any = getattr(dataset, "lengths", None)
    if callable(values) or not hasattr(values, "__len__") or len(values) != len(dataset):
        return None
    try:
        lengths = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    if lengths.dim() != 1 or lengths.is_floating_point():
        return None
    return SampleLengths(lengths.to("cpu", torch.int64))


def _in_tensors(dataset: Any, key: Any) -> SampleLengths | None:
    """Look for a mask among the whole tensors of a ``TensorDataset``, whose samples all have the same size."""
    if type(dataset) is not TensorDataset:
        return None
    for place in range(len(dataset.tensors)) if key is None else [key]:
        mask = dataset.tensors[place]
        if mask.dim() == 2 and not mask.is_floating_point() and is_mask(mask):
            return SampleLengths(extents(mask), mask_key=place)
    return None


def _in_columns(dataset: Any, key: Any) -> SampleLengths | None:
    """Look into the columns of a Hugging Face dataset, without making samples."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not hasattr(dataset, "with_format"):
        return None
    if getattr(dataset, "format", {}).get("type") == "custom":
        return None  # A transform makes other samples of the columns.
    for column in (MASK_KEY, "length", "lengths", "input_ids") if key is None else (key,):
        if column in columns:
            values = dataset.with_format("arrow").select_columns([column])[:][column].combine_chunks()
            if hasattr(values, "value_lengths"):
                sizes = _from_arrow(values.value_lengths())
                if column == MASK_KEY and len(sizes) and bool((sizes == sizes[0]).all()) and int(sizes[0]):
                    return SampleLengths(extents(_from_arrow(values.flatten()).view(len(sizes), -1)))
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
    # Fields that were masks in all samples so far, and the length of each mask.
    masks: dict[Any, list[int]] = {}
    with isolate_rng(include_cuda=False), preserve(dataset):
        for index in range(len(dataset)):
            sample = sample_at(dataset, index)
            try:
                length, is_tokens = _length(sample, key)
            except (TypeError, KeyError) as error:
                raise LengthsNotFoundError(f"sample {index} has no length: {error.args[0]}") from error
            lengths.append(length)
            in_tokens = in_tokens and is_tokens
            fields = fields_of(sample) or {}
            if not index:
                masks = {place: [] for place in (fields if key is None else [key])}
            for place in list(masks):
                extent = _mask_extent(place, fields.get(place))
                if extent is None:
                    del masks[place]
                else:
                    masks[place].append(extent)
    seconds = time.perf_counter() - start
    if seconds > 1:
        rank_zero_info(
            f"reading the lengths of the {len(lengths):,} samples of {name} took {seconds:.1f} s. An attribute "
            "`lengths` of the dataset, with a number for each sample, avoids it."
        )
    place = _place_of_mask(masks, key, lengths)
    if place is not None:
        return SampleLengths(torch.tensor(masks[place]), mask_key=place)
    return SampleLengths(torch.tensor(lengths, dtype=torch.int64), in_tokens=in_tokens)


def _place_of_mask(masks: Mapping[Any, list[int]], key: Any, lengths: list[int]) -> Any:
    """Return the field that shows how long samples are without padding; None if there is none."""
    found = [place for place in (key, MASK_KEY) if place in masks]
    if not found and key is None and len(set(lengths)) == 1:
        # A sample's own ones and zeros may be its content: only samples of one size need a mask.
        found = sorted((each for each in masks if isinstance(each, int) or "mask" in str(each)), key=str)
    return found[0] if found else None


def _length(sample: Any, key: Any) -> tuple[int, bool]:
    """Return the length of a sample, and whether it is in tokens."""
    fields = fields_of(sample)
    if fields is None:
        value = sample
    else:
        if key is None:
            text = next((each for each in fields.values() if isinstance(each, str)), None)
            try:
                key = sequence_key(sample)
            except TypeError:
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
    if fields is not None and isinstance(number, int) and not isinstance(number, bool):
        return number, True  # The field holds the length itself.
    raise TypeError(f"{'it' if fields is None else f'its {key!r}'} is a single {type(value).__name__}")


def _mask_extent(place: Any, value: Any) -> int | None:
    """Return the position up to which a field of a sample is used, if the field may be a mask; else None."""
    if not is_sequence(value) or (hasattr(value, "shape") and len(value.shape) != 1):
        return None
    mask = torch.as_tensor(value)
    if mask.is_floating_point() or not (place == MASK_KEY or is_mask(mask[None])):
        return None
    return int(extents(mask[None])[0]) if len(mask) else 0
