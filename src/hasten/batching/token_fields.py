"""Which fields of batches run over tokens, decided once from the data; and padding cut off them.

One batch cannot show it: six features beside texts that happen to have six tokens look like a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from hasten._lib.rank_zero import warn_once
from hasten.batching.pad import (
    IGNORED_LABEL,
    KNOWN_KEYS,
    MASK_KEY,
    REBUILT_KEYS,
    default_padding,
    extents,
    fields_of,
    is_mask,
    is_sequence,
    like,
    pad_to,
    rounded_up,
)
from hasten.data.memory.resident import gives_batches
from hasten.seed import isolate_rng

# Fields of these names are (batch, time, ...); "input_features" may have its time elsewhere.
SURE_KEYS = ("input_ids", "tokens", "token_ids", "ids", "input_values", "inputs_embeds")
# Samples that are looked at: enough for independent values never to follow a mask by chance.
SAMPLES = 256
# Samples of a batch that is made only to look at its fields.
BATCH_SIZE = 32
# Rows of whole tensors that are compared at once, so that no copy of a large dataset is made.
ROWS = 4096


class TokenFields(NamedTuple):
    """What was decided about the fields of a loader's batches.

    ``over_tokens`` run over tokens, the mask among them: padding may be cut off them. ``doubtful`` are as wide as the
    mask, and nothing shows whether they run over tokens: cutting could lose values, and not cutting could leave them
    wider than the ids.
    """

    over_tokens: tuple[Any, ...] = ()
    doubtful: tuple[Any, ...] = ()


def token_fields(loader: DataLoader[Any], lengths: Tensor, collate_fn: Any, mask_key: Any) -> TokenFields:
    """Return which fields of the batches that ``collate_fn`` makes run over tokens.

    A field does so if its name says so; if it is as wide as the mask in batches of several widths; or if, like
    ids, its values end where each sample's mask ends (or as many tokens before) and one value fills the rest.

    Example::

        >>> mask = torch.ones(4, 5).tril(1).long()
        >>> loader = DataLoader(TensorDataset(mask * 7, mask, torch.rand(4, 5)), 2)
        >>> token_fields(loader, mask.sum(1), default_collate, 1)
        TokenFields(over_tokens=(0, 1), doubtful=(2,))

    """
    seen, size = _Seen(mask_key), min(loader.batch_size or 1, BATCH_SIZE)
    order = lengths.argsort(stable=True)
    # The longest and the shortest show which fields are as wide as the mask; mostly their names decide the rest.
    seen.add(_batches(loader, collate_fn, [order[-size:].tolist(), order[:size].tolist()]))
    if seen.candidates:
        chosen = spread(lengths, SAMPLES)
        seen.add(_batches(loader, collate_fn, [chosen[at : at + size] for at in range(0, len(chosen), size)]))
        seen.has_all = len(chosen) == len(lengths)
    if not seen.has_all and any(len(each.values) == 1 for each in seen.candidates.values()):
        # One value in these samples; whether in all is checked where that is cheap.
        everything = _everything(loader.dataset, collate_fn)
        seen.has_all = everything is not None
        seen.add(everything or ())
    over_tokens = {key for key, each in seen.candidates.items() if seen.runs_over_tokens(each)} | seen.named
    return TokenFields(
        tuple(key for key in seen.order if key in over_tokens),
        tuple(key for key in seen.candidates if key not in over_tokens),
    )


def spread(lengths: Tensor, count: int) -> list[int]:
    """Return the numbers of ``count`` samples from the shortest to the longest, both of them included."""
    order = lengths.argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(count, len(order)), dtype=torch.float64)
    return order[places.round().long().unique()].tolist()


def ragged_fields(samples: Sequence[Any]) -> frozenset[Any]:
    """Return the fields whose size is not the same in all samples: those that can only be joined padded."""
    rows = [fields for fields in map(fields_of, samples) if fields is not None]
    return frozenset(
        key
        for key in (rows[0] if rows else ())
        if all(key in row and is_sequence(row[key]) for row in rows)
        and len({len(row[key]) for row in rows}) > 1
    )


def named_time_dims(key: Any, value: Any, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that run over the mask's columns according to its name."""
    if not isinstance(key, str):
        return ()
    dims = time_dims(value, mask)
    if len(dims) > 1:
        return dims if MASK_KEY in key or "attn_mask" in key else ()
    is_sure = key in SURE_KEYS or key in REBUILT_KEYS or MASK_KEY in key
    # Labels of floats may be one for each class.
    return dims if is_sure or (key in KNOWN_KEYS and not value.is_floating_point()) else ()


def time_dims(value: Any, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that are as wide as the mask; masks of pairs of tokens have two."""
    rows, time = mask.shape
    if not isinstance(value, Tensor) or value.dim() < 2 or value.size(0) != rows:
        return ()
    square = value.dim() > 2 and value.size(-2) == value.size(-1) == time
    if square and (value.dim() > 3 or not value.is_floating_point()):
        return value.dim() - 2, value.dim() - 1
    return (1,) if value.size(1) == time else ()


def _batches(loader: DataLoader[Any], collate_fn: Any, parts: list[list[int]]) -> Iterator[Any]:
    """Yield the batches of these samples, made where training makes them: workers may not share open files."""
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
    """Return all samples as joined rows if they are in memory as whole tensors, else None."""
    starts = range(0, len(dataset), ROWS)
    if type(dataset) is TensorDataset and collate_fn is default_collate:
        return ([tensor[start : start + ROWS] for tensor in dataset.tensors] for start in starts)
    if gives_batches(dataset):
        return (dataset.__getitems__(list(range(start, min(start + ROWS, len(dataset))))) for start in starts)
    return None


@dataclass
class _Candidate:
    """What batches have shown of a field that is as wide as the mask."""

    ends: set[int] = field(default_factory=set)  # Columns between the end of its values and that of the mask.
    mask_ends: set[int] = field(default_factory=set)
    behind: set[float] = field(default_factory=set)  # Values behind the mask.
    values: set[float] = field(default_factory=set)  # Two at most: whether it is one value throughout.

    def add(self, value: Tensor, mask: Tensor) -> None:
        flat = value.detach().flatten(2) if value.dim() > 2 else value.detach()[..., None]
        if not flat.numel() or flat.is_complex():
            return
        if len(self.values) < 2:
            self.values |= _range(flat)
        ends = extents(mask)
        short = ends < mask.size(1)
        if not bool(short.any()):
            return
        flat, ends = flat[short], ends[short]
        behind = flat[torch.arange(mask.size(1), device=mask.device) >= ends[:, None]]
        self.behind |= _range(behind)
        if len(self.behind) == 1:
            used = (flat != behind.flatten()[0]).any(2)
            self.ends |= set((ends - extents(used)).tolist())
            self.mask_ends |= set(ends.tolist())


def _range(values: Tensor) -> set[float]:
    return set(torch.stack([values.min(), values.max()]).double().tolist())


class _Seen:
    """What batches have shown of all their fields."""

    def __init__(self, mask_key: Any) -> None:
        self.mask_key = mask_key
        self.has_all = False
        self.widths: set[int] = set()
        self.named: set[Any] = set()
        self.order: dict[Any, None] = {}
        self.candidates: dict[Any, _Candidate] = {}
        self._ruled_out: set[Any] = set()

    def add(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            fields = fields_of_batch(batch)
            mask = mask_in(fields, self.mask_key)
            if mask is None:
                continue
            self.widths.add(mask.size(1))
            self.order |= dict.fromkeys(fields)
            for key, value in fields.items():
                dims = time_dims(value, mask)
                if key == self.mask_key or named_time_dims(key, value, mask):
                    self.named.add(key)
                elif not dims:
                    self._ruled_out.add(key)
                    self.candidates.pop(key, None)
                elif key not in self._ruled_out:
                    self.candidates.setdefault(key, _Candidate()).add(value.movedim(dims[-1], 1), mask)

    def runs_over_tokens(self, candidate: _Candidate) -> bool:
        """Return whether a field runs over tokens beyond doubt."""
        if len(self.widths) > 1 or (self.has_all and len(candidate.values) == 1):
            return True  # As wide as the mask at several widths; or one value in all samples, as token types are.
        if len(candidate.behind) != 1:
            return False
        # Labels that no loss counts: other fields have no such value.
        return candidate.behind == {IGNORED_LABEL} or (
            len(candidate.ends) == 1 and len(candidate.mask_ends) > 1
        )


def fields_of_batch(batch: Any) -> dict[Any, Any]:
    """Return a batch's fields by key or position; none if it is something else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


def mask_in(fields: dict[Any, Any], key: Any) -> Tensor | None:
    """Return the mask ``(batch, time)`` of a batch; None if it has none."""
    mask = fields.get(key)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    # A position was found in the samples, and a collate function may put something else there.
    return mask if isinstance(key, str) or is_mask(mask) else None


class FitWidth:
    """A collate function, and its batches cut or filled up to the width they need.

    Columns that the mask leaves out for every sample, at the right end, are dropped from every field that runs over
    tokens, ``(batch, time, ...)``; if ``multiple_of`` asks for a wider batch, columns are added. Only padding is
    dropped: classes among labels, and values that differ where the mask has padding, are kept. Other
    fields, however wide, and batches without such a mask do not change.

    Args:
        collate_fn: makes the batch.
        mask_key: the mask's key, or its position if batches are tuples or lists.
        multiple_of: see :class:`PadCollator`.
        limit: the widest batch, in tokens: none becomes wider.
        over_tokens: the fields that run over tokens, by key or position, besides the mask; None decides it by their
            names (``input_ids``, ``labels`` and others), and an empty collection changes no batch.

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
        if width == mask.size(1):
            return batch
        changed: dict[Any, Tensor] = {}
        for key, value in timed.items():
            if width < mask.size(1):
                for dim in dims[key]:
                    value = value.narrow(dim, 0, width)
                changed[key] = value.contiguous()
                continue
            fill = self._fill_of(key, value, dims[key], mask)
            if fill is None:
                return batch
            changed[key] = pad_to(value, width, fill, dim=1)
        if not isinstance(batch, Mapping):
            return like(batch, {**fields, **changed})
        new: Any = copy.copy(batch)
        for key, value in changed.items():
            new[key] = value
        return new

    def _dims(self, key: Any, value: Any, mask: Tensor) -> tuple[int, ...]:
        """Return the dimensions of a field that run over tokens."""
        if key == self.mask_key:
            return (1,)
        if self.over_tokens is None:
            return named_time_dims(key, value, mask)
        return time_dims(value, mask) if key in self.over_tokens else ()

    def _width(self, mask: Tensor, timed: dict[Any, Any]) -> int:
        """Return to how many columns a batch is cut or filled up."""
        masked = used = int(extents(mask).max())
        for key, value in timed.items():
            if value.size(1) != mask.size(1) or key == self.mask_key or key in REBUILT_KEYS:
                continue
            beyond = value[:, masked:].flatten(2) if value.dim() > 2 else value[:, masked:, None]
            if not beyond.numel():
                continue
            # Padding is one value throughout, and in labels not a class; anything else is kept.
            is_label = isinstance(key, str) and key.startswith("label") and not value.is_floating_point()
            counts = beyond >= 0 if is_label else beyond != beyond[0, -1]
            used = max(used, masked + int(extents(counts.any(2)).max()))
            if used == mask.size(1):
                warn_once(
                    f"fit-width-{key}",
                    f"batching: {key!r} has values where {self.mask_key!r} has padding, so nothing is cut off the "
                    "batches. Pad with one value (labels with -100).",
                )
        width = rounded_up(max(1, used), self.multiple_of)
        return width if self.limit is None else max(used, min(width, self.limit))

    def _fill_of(self, key: Any, value: Tensor, dims: tuple[int, ...], mask: Tensor) -> Any:
        """Return what a field is filled up with: its padding, or a known value; None if there is none."""
        if len(dims) > 1:
            return (
                None  # Which tokens see each other cannot be made up: a row in which none is seen gives NaN.
            )
        if key == self.mask_key or key in REBUILT_KEYS:
            return 0
        padded = value[mask == 0]
        if padded.numel() and bool((padded == padded.flatten()[0]).all()):
            return padded.flatten()[0].item()
        return default_padding(key) if key in KNOWN_KEYS else None
