"""Which fields of a loader's batches run over tokens and which over samples, decided once from the data.

One batch cannot show it: six features beside texts that happen to have six tokens look like a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hasten._lib.rank_zero import warn_once
from hasten._lib.split import STACKED, Fields, compare
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
from hasten.data.loader_parts import is_iterable, overrides_iter, samples_at
from hasten.data.memory.dataset_parts import preserve
from hasten.data.memory.resident import HeldDataset
from hasten.seed import isolate_rng

# Fields of these names are (batch, time, ...); "input_features" may have its time elsewhere.
SURE_KEYS = ("input_ids", "tokens", "token_ids", "ids", "input_values", "inputs_embeds")
# Samples that are looked at, enough for independent values never to follow a mask by chance; and those of one batch.
SAMPLES, BATCH_SIZE = 256, 32
# Samples that are joined to see which fields run over samples; even numbers, for functions that make pairs.
MANY, FEW = 4, 2


class TokenFields(NamedTuple):
    """What was decided about the fields of a loader's batches.

    ``over_tokens`` run over tokens, the mask among them: padding may be cut off them. ``doubtful`` are as wide as the
    mask, and nothing shows whether they run over tokens: cutting could lose values, and not cutting could leave them
    wider than the ids.
    """

    over_tokens: tuple[Any, ...] = ()
    doubtful: tuple[Any, ...] = ()


def token_fields(
    loader: DataLoader[Any], lengths: Tensor, collate_fn: Callable[[list[Any]], Any], mask_key: Hashable
) -> TokenFields:
    """Return which fields of the batches that ``collate_fn`` makes run over tokens.

    A field does so if its name says so; if it is as wide as the mask in batches of several widths; or if, like
    ids, its values end where each sample's mask ends (or as many tokens before) and one value fills the rest.

    Example::

        >>> mask = torch.ones(4, 5).tril(1).long()
        >>> loader = DataLoader(torch.utils.data.TensorDataset(mask * 7, mask, torch.rand(4, 5)), 2)
        >>> token_fields(loader, mask.sum(1), default_collate, 1)
        TokenFields(over_tokens=(0, 1), doubtful=(2,))

    """
    found: dict[Any, _Evidence] = {}
    widths: set[int] = set()

    def look_at(batches: Iterable[Any]) -> None:
        for batch in batches:
            fields = fields_of(batch) or {}
            mask = mask_in(fields, mask_key)
            if mask is not None:
                widths.add(mask.size(1))
                for key, value in fields.items():
                    found.setdefault(key, _Evidence()).add(key, value, mask, is_mask=key == mask_key)

    size, order = min(loader.batch_size or 1, BATCH_SIZE), lengths.argsort(stable=True)
    # The longest and the shortest show which fields are as wide as the mask; mostly their names decide the rest.
    look_at(_batches(loader, collate_fn, [order[-size:].tolist(), order[:size].tolist()]))
    if any(each.is_open for each in found.values()):
        chosen = spread(lengths, SAMPLES)
        look_at(_batches(loader, collate_fn, [chosen[at : at + size] for at in range(0, len(chosen), size)]))
    over_tokens, doubtful = [], []
    for key, each in found.items():
        if each.is_named or (each.is_open and (len(widths) > 1 or each.ends_with_the_mask())):
            over_tokens.append(key)
        elif each.is_open:
            doubtful.append(key)
    return TokenFields(tuple(over_tokens), tuple(doubtful))


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
        if all(key in row and is_sequence(row[key]) for row in rows) and len({len(row[key]) for row in rows}) > 1
    )


def named_time_dims(key: Hashable, value: Tensor, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that run over the mask's columns according to its name."""
    if not isinstance(key, str):
        return ()
    dims = time_dims(value, mask)
    if len(dims) > 1:
        return dims if MASK_KEY in key or "attn_mask" in key else ()
    is_sure = key in SURE_KEYS or key in REBUILT_KEYS or MASK_KEY in key
    # Labels of floats may be one for each class.
    return dims if is_sure or (key in KNOWN_KEYS and not value.is_floating_point()) else ()


def time_dims(value: object, mask: Tensor) -> tuple[int, ...]:
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


@dataclass
class _Evidence:
    """What batches have shown of one field."""

    is_named: bool = False  # Its name says that it runs over tokens.
    is_other: bool = False  # It is not as wide as the mask in some batch.
    mask_ends: set[int] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)  # Columns between the end of its values and that of the mask.
    behind: set[float] = field(default_factory=set)  # Values behind the mask.

    @property
    def is_open(self) -> bool:
        return not (self.is_named or self.is_other)

    def add(self, key: Hashable, value: Any, mask: Tensor, *, is_mask: bool) -> None:
        dims = time_dims(value, mask)
        self.is_named |= is_mask or bool(named_time_dims(key, value, mask))
        self.is_other |= not dims
        ends = extents(mask)
        short = ends < mask.size(1)
        if not self.is_open or value.is_complex() or not value.numel() or not bool(short.any()):
            return
        ends, values = ends[short], value.detach().movedim(dims[-1], 1)[short].unsqueeze(2).flatten(2)
        behind = values[torch.arange(mask.size(1), device=mask.device) >= ends[:, None]]
        self.behind |= set(torch.stack([behind.min(), behind.max()]).double().tolist())
        if len(self.behind) == 1:
            used = (values != behind.flatten()[0]).any(2)
            self.gaps |= set((ends - extents(used)).tolist())
            self.mask_ends |= set(ends.tolist())

    def ends_with_the_mask(self) -> bool:
        # Labels that no loss counts end where they like: other fields have no such value.
        is_aligned = len(self.gaps) == 1 and len(self.mask_ends) > 1
        return len(self.behind) == 1 and (self.behind == {IGNORED_LABEL} or is_aligned)


def mask_in(fields: Mapping[Any, object], key: Hashable) -> Tensor | None:
    """Return the mask ``(batch, time)`` of a batch; None if it has none."""
    mask = fields.get(key)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    # A position was found in the samples, and a collate function may put something else there.
    return mask if isinstance(key, str) or is_mask(mask) else None


@dataclass(eq=False)
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

    collate_fn: Callable[[list[Any]], Any]
    _: KW_ONLY
    mask_key: Hashable = MASK_KEY
    multiple_of: int | Sequence[int] | None = None
    limit: int | None = None
    over_tokens: Collection[Any] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch that ``collate_fn`` makes, fitted."""
        batch = self.collate_fn(samples)
        fields = fields_of(batch) or {}
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
        new.update(changed)
        return new

    def _dims(self, key: Any, value: Any, mask: Tensor) -> tuple[int, ...]:
        """Return the dimensions of a field that run over tokens."""
        if key != self.mask_key and self.over_tokens is None:
            return named_time_dims(key, value, mask)
        return time_dims(value, mask) if key == self.mask_key or key in (self.over_tokens or ()) else ()

    def _width(self, mask: Tensor, timed: dict[Any, Any]) -> int:
        """Return to how many columns a batch is cut or filled up."""
        masked = used = int(extents(mask).max())
        for key, value in timed.items():
            if value.size(1) != mask.size(1) or key == self.mask_key or key in REBUILT_KEYS:
                continue
            beyond = value[:, masked:].unsqueeze(2).flatten(2)
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
            # Which tokens see each other cannot be made up: a row in which none is seen gives NaN.
            return None
        if key == self.mask_key or key in REBUILT_KEYS:
            return 0
        padded = value[mask == 0]
        if padded.numel() and bool((padded == padded.flatten()[0]).all()):
            return padded.flatten()[0].item()
        return default_padding(key) if key in KNOWN_KEYS else None


# -- fields that run over samples


@dataclass(frozen=True)
class MicroBatch:
    """How a batch is split into parts, for ``Trainer(micro_batch=...)`` if the data does not show it.

    Args:
        samples: samples computed at once: a number, or "auto".
        shared: the fields of a batch that belong to all samples and go to each part as a whole: keys, names of
            attributes, or positions. All others run over samples if their first dimension is that long.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(micro_batch=MicroBatch("auto", shared=("class_weights",)))

    """

    samples: int | Literal["auto"]
    shared: Collection[Any] = ()


def sample_fields(loaders: object, *, changed_later: bool = False) -> Fields | None:
    """Return which fields run over samples in the batches of a loader, or of several read as one; None if unknown.

    torch's ``default_collate`` stacks samples, so all of its tensors do. With another ``collate_fn``, or if batches
    are ``changed_later``, four samples are joined, and two: what runs over samples has four rows and two. The dataset,
    the function and the random generators are restored afterwards.

    Example::

        >>> data = [torch.zeros(3)] * 8
        >>> def join(samples):
        ...     return {"x": torch.stack(samples), "weight_of_class": torch.ones(8)}
        >>> fields = sample_fields(DataLoader(data, batch_size=8, collate_fn=join))
        >>> fields.places
        {"['x']": (0,), "['weight_of_class']": ()}

    """
    if isinstance(loaders, (Mapping, list, tuple)):
        places: dict[str, tuple[int, ...] | str] = {}
        for key, loader in loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders):
            fields = sample_fields(loader, changed_later=True)
            if fields is None or fields.places is None:
                return None
            places |= {f"[{key!r}]{where}": found for where, found in fields.places.items()}
        return Fields(places)
    loader = loaders
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or overrides_iter(loader):
        return None  # What a loader with its own iteration yields need not be what it joins.
    dataset: Any = loader.dataset
    collate: Any = loader.collate_fn
    if collate is default_collate and not isinstance(dataset, HeldDataset) and not changed_later:
        return STACKED
    if is_iterable(loader):
        return None
    try:
        with isolate_rng(), preserve(dataset, collate, containers=True):
            chosen = getattr(getattr(loader.batch_sampler, "sampler", None), "indices", None)
            numbers = list(range(min(MANY, len(dataset))) if chosen is None else chosen[:MANY])
            few = min(FEW, len(numbers) // 2)
            if not few:
                return None
            many, fewer = (collate(samples_at(dataset, numbers[:count])) for count in (len(numbers), few))
    except Exception:
        # A function that needs as many samples as a batch has, or a dataset that is read in its own order.
        return None
    return Fields(compare(many, fewer, len(numbers), few))
