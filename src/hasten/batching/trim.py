"""Batches that are padded already become as wide as they must be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hasten._lib.rank_zero import warn_once
from hasten.batching.pad import (
    KNOWN_KEYS,
    MASK_KEY,
    REBUILT_KEYS,
    default_padding,
    last_column,
    like,
    pad_to,
)
from hasten.batching.pad_widths import rounded_up
from hasten.batching.token_fields import fields_of_batch, mask_in, named_time_dims, time_dims


class FitWidth:
    """A collate function and, behind it, padding cut down to what a batch needs.

    Columns that the mask leaves out for every sample, at the right end, are dropped from every field that runs over
    tokens, ``(batch, time, ...)``; where ``multiple_of`` asks for a wider batch, columns are added. What is no padding
    is never dropped: classes among labels, and values that differ where the mask says that all is padding. Other
    fields, however wide, and batches without such a mask stay as they are.

    Args:
        collate_fn: makes the batch.
        mask_key: the mask's key, or its position where batches are tuples or lists.
        multiple_of: see :class:`PadCollator`.
        limit: the widest batch, in tokens: none becomes wider.
        over_tokens: the fields that run over tokens, by key or position, besides the mask; None leaves it to their
            names (``input_ids``, ``labels`` and others), and where there are none, every batch stays as it is.

    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        mask_key: Any = MASK_KEY,
        multiple_of: int | Sequence[int] | None = None,
        limit: int | None = None,
        over_tokens: Collection[Any] | None = None,
    ) -> None:
        self.collate_fn = collate_fn
        self.mask_key = mask_key
        self.multiple_of = multiple_of
        self.limit = limit
        self.over_tokens = None if over_tokens is None else frozenset(over_tokens)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch that ``collate_fn`` makes, fitted."""
        batch = self.collate_fn(samples)
        fields = fields_of_batch(batch)
        mask = mask_in(fields, self.mask_key)
        if mask is None or (self.over_tokens is not None and not self.over_tokens):
            return batch
        dims = {key: self._dims(key, value, mask) for key, value in fields.items()}
        timed = {key: fields[key] for key, found in dims.items() if found}
        width = self._width(mask, timed)
        if width > mask.size(1):
            fill = {key: self._fill_of(key, value, dims[key], mask) for key, value in timed.items()}
            if None in fill.values():
                return batch
            changed = {key: pad_to(value, width, fill[key], dim=1) for key, value in timed.items()}
        elif width < mask.size(1):
            changed = {key: _cut(value, width, dims[key]) for key, value in timed.items()}
        else:
            return batch
        return _with_fields(batch, changed)

    def _dims(self, key: Any, value: Any, mask: Tensor) -> tuple[int, ...]:
        """Return the dimensions of a field that run over tokens."""
        if key == self.mask_key:
            return (1,)
        if self.over_tokens is None:
            return named_time_dims(key, value, mask)
        return time_dims(value, mask) if key in self.over_tokens else ()

    def _width(self, mask: Tensor, timed: dict[Any, Any]) -> int:
        """Return to how many columns a batch is cut or filled up."""
        masked = used = last_column(mask != 0)
        for key, value in timed.items():
            if value.size(1) != mask.size(1) or key == self.mask_key or key in REBUILT_KEYS:
                continue
            beyond = value[:, masked:].flatten(2) if value.dim() > 2 else value[:, masked:, None]
            if not beyond.numel():
                continue
            # Padding is one value again and again, and no class of a label; all else is something that counts.
            counts = beyond >= 0 if _is_label(key, value) else beyond != beyond[0, -1]
            used = max(used, masked + last_column(counts.any(2)))
            if used == mask.size(1):
                warn_once(
                    f"fit-width-{key}",
                    f"batching: batches have values in {key!r} where {self.mask_key!r} says that all is padding, so "
                    "none of it is cut. Pad with one value (labels with -100).",
                )
        width = rounded_up(max(1, used), self.multiple_of)
        return width if self.limit is None else max(used, min(width, self.limit))

    def _fill_of(self, key: Any, value: Tensor, dims: tuple[int, ...], mask: Tensor) -> Any:
        """Return what a field is filled up with: what pads it already, or is known to; None where nothing is."""
        if len(dims) > 1:
            return None  # Who sees whom cannot be made up: a row in which nothing is seen gives NaN.
        if key == self.mask_key or key in REBUILT_KEYS:
            return 0
        padded = value[mask == 0]
        if padded.numel() and bool((padded == padded.flatten()[0]).all()):
            return padded.flatten()[0].item()
        return default_padding(key) if key in KNOWN_KEYS else None


def _cut(value: Tensor, width: int, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        value = value.narrow(dim, 0, width)
    return value.contiguous()


def _is_label(key: Any, value: Tensor) -> bool:
    return isinstance(key, str) and key.startswith("label") and not value.is_floating_point()


def _with_fields(batch: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a batch with some of its fields replaced; its type stays."""
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)
        for key, value in changed.items():
            new[key] = value
        return new
    return like(batch, {place: changed.get(place, value) for place, value in enumerate(batch)})
