"""Which fields of samples and batches run over tokens: decided once from the data, not batch by batch.

A batch by itself cannot tell: six features beside texts that happen to have six tokens look like a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from hasten.batching.pad import (
    IGNORED_LABEL,
    KNOWN_KEYS,
    MASK_KEY,
    REBUILT_KEYS,
    fields_of,
    is_mask,
    is_sequence,
    length_of,
)
from hasten.data.memory.on_device import gives_batches
from hasten.seed import isolate_rng

# What these names stand for has (batch, time, ...); "input_features" may have its time elsewhere.
SURE_KEYS = ("input_ids", "tokens", "token_ids", "ids", "input_values", "inputs_embeds")
# Samples that are looked at: enough for independent values never to follow a mask by chance.
LOOKED_AT = 256
# Samples of a batch that is made only to look at its fields.
LARGEST_LOOK = 32
# Rows of whole tensors that are compared at once, so that no copy of a large dataset is made.
ROWS = 4096


def spread(lengths: Tensor, count: int) -> list[int]:
    """Return the numbers of ``count`` samples from the shortest to the longest, both of them included."""
    order = lengths.argsort(stable=True)
    places = (
        torch.linspace(0, len(order) - 1, min(count, len(order)), dtype=torch.float64).round().long().unique()
    )
    return order[places].tolist()


def ragged_fields(samples: Sequence[Any]) -> frozenset[Any]:
    """Return the fields whose size is not the same in all samples: those that can only be joined padded."""
    rows = [fields_of(sample) for sample in samples]
    known = [row for row in rows if row is not None]
    return frozenset(
        key
        for key in (known[0] if known else ())
        if all(key in row and is_sequence(row[key]) for row in known)
        and len({length_of(row[key]) for row in known}) > 1
    )


def named_time_dims(key: Any, value: Any, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that run over the mask's columns as far as its name tells."""
    if not isinstance(key, str):
        return ()
    dims = time_dims(value, mask)
    if len(dims) > 1:
        return dims if MASK_KEY in key or "attn_mask" in key else ()
    is_sure = key in SURE_KEYS or key in REBUILT_KEYS or MASK_KEY in key
    # Labels of floats may be one for each class.
    return dims if is_sure or (key in KNOWN_KEYS and not value.is_floating_point()) else ()


def time_dims(value: Any, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that are as wide as the mask; masks of who sees whom have two."""
    rows, time = mask.shape
    if not isinstance(value, Tensor) or value.dim() < 2 or value.size(0) != rows:
        return ()
    square = value.dim() > 2 and value.size(-2) == value.size(-1) == time
    if square and (value.dim() > 3 or not value.is_floating_point()):
        return value.dim() - 2, value.dim() - 1
    return (1,) if value.size(1) == time else ()


@dataclass(frozen=True)
class TokenFields:
    """What was decided about the fields of a loader's batches.

    Args:
        over_tokens: the fields that run over tokens, the mask among them; padding may be cut off them.
        doubtful: fields as wide as the mask of which nothing tells whether they run over tokens. Cut off them, values
            of the user's could be lost; left beside narrower ids, they would not fit.

    """

    over_tokens: tuple[Any, ...] = ()
    doubtful: tuple[Any, ...] = ()


def token_fields(loader: DataLoader[Any], lengths: Tensor, collate_fn: Any, mask_key: Any) -> TokenFields:
    """Return which fields of the batches that ``collate_fn`` makes run over tokens.

    A field does so if its name says it; if it is as wide as the mask in batches of several widths; or if, like
    ids, its values end where each sample's mask ends (or as many tokens before) and are one and the same value behind.

    Args:
        loader: gives the samples, from a worker if it has some. The random state stays as it is.
        lengths: of all samples, int64 ``(samples,)``.
        collate_fn: joins them.
        mask_key: the mask's key in a batch, or its position.

    Example::

        >>> mask = torch.ones(4, 5).tril(1).long()
        >>> loader = DataLoader(TensorDataset(mask * 7, mask, torch.rand(4, 5)), 2)
        >>> token_fields(loader, mask.sum(1), default_collate, 1)
        TokenFields(over_tokens=(0, 1), doubtful=(2,))

    """
    seen, size = _Seen(mask_key), min(loader.batch_size or 1, LARGEST_LOOK)
    order = lengths.argsort(stable=True)
    # The longest and the shortest show which fields are as wide as the mask; mostly their names tell the rest.
    seen.add_all(_batches(loader, collate_fn, [order[-size:].tolist(), order[:size].tolist()]))
    if seen.looks:
        chosen = spread(lengths, LOOKED_AT)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        seen.add_all(_batches(loader, collate_fn, parts))
        seen.has_all = len(chosen) == len(lengths)
    if not seen.has_all and any(len(looks.values) == 1 for looks in seen.looks.values()):
        # One value in these samples; whether in all is looked at where that is cheap.
        everything = _everything(loader.dataset, collate_fn)
        seen.has_all = everything is not None
        seen.add_all(everything or ())
    decided = (*seen.named, *(key for key, looks in seen.looks.items() if seen.is_over_tokens(looks)))
    return TokenFields(
        tuple(key for key in seen.order if key in decided),
        tuple(key for key in seen.looks if key not in decided),
    )


def _batches(loader: DataLoader[Any], collate_fn: Any, parts: list[list[int]]) -> Iterator[Any]:
    """Yield the batches of these samples, made where training makes them: workers do not fork off open files."""
    with isolate_rng(include_cuda=False):
        yield from DataLoader(
            loader.dataset,
            batch_sampler=parts,
            collate_fn=collate_fn,
            num_workers=min(1, loader.num_workers),
            multiprocessing_context=loader.multiprocessing_context,
            worker_init_fn=loader.worker_init_fn,
        )


def _everything(dataset: Any, collate_fn: Any) -> Iterator[Any] | None:
    """Return all samples as joined rows where they are in memory as whole tensors; else None."""
    starts = range(0, len(dataset), ROWS)
    if type(dataset) is TensorDataset and collate_fn is default_collate:
        return ([tensor[start : start + ROWS] for tensor in dataset.tensors] for start in starts)
    if gives_batches(dataset):
        return (dataset.__getitems__(list(range(start, min(start + ROWS, len(dataset))))) for start in starts)
    return None


@dataclass
class _Looks:
    """What a field as wide as the mask was like so far."""

    ends: set[int] = field(default_factory=set)  # Columns between the end of its values and that of the mask.
    behind: set[float] = field(default_factory=set)  # Values behind the mask.
    mask_ends: set[int] = field(default_factory=set)
    values: set[float] = field(default_factory=set)  # Two at most: whether it is one value throughout.


class _Seen:
    """What batches have shown of their fields."""

    def __init__(self, mask_key: Any) -> None:
        self.mask_key = mask_key
        self.has_all = False
        self.widths: set[int] = set()
        self.named: set[Any] = set()
        self.order: list[Any] = []
        self.looks: dict[Any, _Looks] = {}
        self._ruled_out: set[Any] = set()

    def add_all(self, batches: Iterable[Any]) -> None:
        """Take note of several batches."""
        for batch in batches:
            self.add(batch)

    def add(self, batch: Any) -> None:
        """Take note of a batch; one without a mask shows nothing."""
        fields = fields_of_batch(batch)
        mask = mask_in(fields, self.mask_key)
        if mask is None:
            return
        self.widths.add(mask.size(1))
        self.order += [key for key in fields if key not in self.order]
        for key, value in fields.items():
            dims = time_dims(value, mask)
            if key == self.mask_key or named_time_dims(key, value, mask):
                self.named.add(key)
            elif not dims:
                self._ruled_out.add(key)
                self.looks.pop(key, None)
            elif key not in self._ruled_out:
                self._look(self.looks.setdefault(key, _Looks()), value.movedim(dims[-1], 1), mask)

    def is_over_tokens(self, looks: _Looks) -> bool:
        """Return whether a field runs over tokens beyond doubt."""
        if len(self.widths) > 1 or (self.has_all and len(looks.values) == 1):
            return True  # As wide as the mask at several widths; or one value in all samples, as token types are.
        if len(looks.behind) != 1:
            return False
        # Labels that no loss counts: what is no label has no such value.
        return looks.behind == {IGNORED_LABEL} or (len(looks.ends) == 1 and len(looks.mask_ends) > 1)

    def _look(self, looks: _Looks, value: Tensor, mask: Tensor) -> None:
        flat = value.detach().flatten(2) if value.dim() > 2 else value.detach()[..., None]
        if not flat.numel() or flat.is_complex():
            return
        if len(looks.values) < 2:
            looks.values |= set(torch.stack([flat.min(), flat.max()]).double().tolist())
        places = torch.arange(1, mask.size(1) + 1, device=mask.device)
        mask_ends = torch.where(mask != 0, places, 0).amax(1)
        short = mask_ends < mask.size(1)
        if not bool(short.any()):
            return
        flat, mask_ends = flat[short], mask_ends[short]
        behind = flat[places >= mask_ends[:, None] + 1]
        looks.behind |= set(torch.stack([behind.min(), behind.max()]).double().tolist())
        if len(looks.behind) > 1:
            return
        used = (flat != behind.flatten()[0]).any(2)
        ends = mask_ends - torch.where(used, places, 0).amax(1)
        looks.ends |= set(ends.unique().tolist())
        looks.mask_ends |= set(mask_ends.unique().tolist())


def fields_of_batch(batch: Any) -> dict[Any, Any]:
    """Return a batch's fields by key or position; none where it is something else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


def mask_in(fields: dict[Any, Any], key: Any) -> Tensor | None:
    """Return the mask ``(batch, time)`` of a batch; None where it has none."""
    mask = fields.get(key)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    # A position was found in the samples, and a collate function may put something else there.
    return mask if isinstance(key, str) or is_mask(mask) else None
