"""Find out which fields of a loader's batches have a dimension for tokens, and which have one for samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hasten._lib.rank_zero import warn_once
from hasten.batching.pad import (
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
from hasten.batching.split import STACKED, Fields, compare
from hasten.data.loader_parts import is_iterable, overrides_iter, samples_at
from hasten.data.memory.dataset_parts import preserve
from hasten.data.memory.resident import HeldDataset
from hasten.seed import isolate_rng

if TYPE_CHECKING:
    from hasten.types import Batch

# Matrices of floats with these names are (batch, time).
FLOAT_KEYS = ("input_values", MASK_KEY)
# Number of samples in a batch that is examined.
BATCH_SIZE = 32
# Numbers of samples that are joined to see which fields run over samples; even, for functions that make pairs.
MANY, FEW = 4, 2


def fields_over_tokens(
    loader: DataLoader[Any], lengths: Tensor, collate_fn: Callable[[list[Any]], Any], mask_key: Hashable
) -> tuple[Any, ...]:
    """Return the fields that run over tokens in the batches that ``collate_fn`` makes.

    These are all fields that are as wide as the mask both in a batch of the longest samples and in one of the shortest,
    except matrices of floats ``(batch, n)``, which may be features or one value for each class.

    Example::

        >>> mask = torch.ones(4, 5).tril(1).long()
        >>> loader = DataLoader(torch.utils.data.TensorDataset(mask * 7, mask, torch.rand(4, 5)), 2)
        >>> fields_over_tokens(loader, mask.sum(1), default_collate, 1)
        (0, 1)

    """
    size, order = min(loader.batch_size or 1, BATCH_SIZE), lengths.argsort(stable=True)
    found: dict[Any, bool] = {}
    # The batches are made in the process where training makes them: workers may not share open files.
    batches = DataLoader(
        loader.dataset,
        batch_sampler=[order[-size:].tolist(), order[:size].tolist()],
        collate_fn=collate_fn,
        num_workers=min(1, loader.num_workers),
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
    )
    with isolate_rng(include_cuda=False), preserve(loader.dataset, collate_fn):
        for batch in batches:
            fields = fields_of(batch) or {}
            mask = mask_in(fields, mask_key)
            if mask is not None:
                runs = {key: bool(token_dims(key, value, mask)) for key, value in fields.items()}
                found |= {key: found.get(key, True) and each for key, each in runs.items()}
    return tuple(key for key, runs in found.items() if runs)


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


def token_dims(key: Hashable, value: object, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that run over tokens: those as wide as the mask.

    A matrix of floats ``(batch, n)`` has none, unless its name is known: it may be features.
    """
    may_be_features = isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
    is_named = isinstance(key, str) and any(name in key for name in FLOAT_KEYS)
    return () if may_be_features and not is_named else time_dims(value, mask)


def time_dims(value: object, mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a field that are as wide as the mask; masks of pairs of tokens have two."""
    rows, time = mask.shape
    if not isinstance(value, Tensor) or value.dim() < 2 or value.size(0) != rows:
        return ()
    square = value.dim() > 2 and value.size(-2) == value.size(-1) == time
    if square and (value.dim() > 3 or not value.is_floating_point()):
        return value.dim() - 2, value.dim() - 1
    return (1,) if value.size(1) == time else ()


def mask_in(fields: Mapping[Any, object], key: Hashable) -> Tensor | None:
    """Return the mask ``(batch, time)`` of a batch; None if it has none."""
    mask = fields.get(key)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    # A position was found in the samples, and a collate function may put something else there.
    return mask if isinstance(key, str) or is_mask(mask) else None


@dataclass(eq=False)
class FitWidth:
    """A collate function whose batches are cut or padded to the width they need.

    Columns that the mask leaves out for every sample, at the right end, are dropped from every field that runs over
    tokens, ``(batch, time, ...)``; if ``multiple_of`` asks for a wider batch, columns are added. Only padding is
    dropped: classes among labels, and values that differ where the mask has padding, are kept. Other fields, however
    wide, and batches without a mask do not change.

    ``mask_key`` is the mask's key, or its position if batches are tuples or lists. No batch becomes wider than
    ``limit`` tokens. ``over_tokens`` are the fields that run over tokens besides the mask; without any, no batch
    changes.
    """

    collate_fn: Callable[[list[Any]], Any]
    _: KW_ONLY
    mask_key: Hashable = MASK_KEY
    multiple_of: int | Sequence[int] | None = None
    limit: int | None = None
    over_tokens: Collection[Any] = ()

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the batch that ``collate_fn`` makes, fitted."""
        batch = self.collate_fn(samples)
        fields = fields_of(batch) or {}
        mask = mask_in(fields, self.mask_key)
        if mask is None or not self.over_tokens:
            return batch
        dims = {key: time_dims(fields[key], mask) for key in fields if key == self.mask_key or key in self.over_tokens}
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

    def _width(self, mask: Tensor, timed: dict[Any, Any]) -> int:
        """Return the number of columns to which a batch is cut or padded."""
        masked = used = int(extents(mask).max())
        for key, value in timed.items():
            if value.size(1) != mask.size(1) or key == self.mask_key or key in REBUILT_KEYS:
                continue
            beyond = value[:, masked:].unsqueeze(2).flatten(2)
            if not beyond.numel():
                continue
            # Padding has one value throughout, which in labels is not a class; anything else is kept.
            is_label = isinstance(key, str) and key.startswith("label") and not value.is_floating_point()
            counts = beyond >= 0 if is_label else beyond != beyond[0, -1]
            used = max(used, masked + int(extents(counts.any(2)).max()))
            if used == mask.size(1):
                warn_once(
                    f"fit-width-{key}",
                    f"batching: {key!r} has values where {self.mask_key!r} has padding, so nothing is cut off the "
                    "batches.",
                    fix="Pad with one value (labels with -100).",
                )
        width = rounded_up(max(1, used), self.multiple_of)
        return width if self.limit is None else max(used, min(width, self.limit))

    def _fill_of(self, key: Any, value: Tensor, dims: tuple[int, ...], mask: Tensor) -> Any:
        """Return the padding value of a field: its own, or a known one; None if there is none."""
        if len(dims) > 1:
            # A mask of pairs cannot be extended: a row in which no token is visible gives NaN.
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
    are ``changed_later``, four samples are joined, and two: what runs over samples has four rows and two. Random
    generators are restored afterwards.

    Example::

        >>> data = [torch.zeros(3)] * 8
        >>> def join(samples):
        ...     return {"x": torch.stack(samples), "weight_of_class": torch.ones(8)}
        >>> fields = sample_fields(DataLoader(data, batch_size=8, collate_fn=join))
        >>> fields.places
        {"['x']": (0,), "['weight_of_class']": ()}

    """
    if isinstance(loaders, (Mapping, list, tuple)):
        return _fields_of_several(dict(loaders if isinstance(loaders, Mapping) else enumerate(loaders)))
    loader = loaders
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or overrides_iter(loader):
        return None  # A loader with its own iteration may yield other batches than it joins.
    dataset: Any = loader.dataset
    collate: Any = loader.collate_fn
    if collate is default_collate and not isinstance(dataset, HeldDataset) and not changed_later:
        return STACKED
    if is_iterable(loader):
        return None
    try:
        with isolate_rng(), preserve(dataset, collate):
            chosen = getattr(getattr(loader.batch_sampler, "sampler", None), "indices", None)
            numbers = list(range(min(MANY, len(dataset))) if chosen is None else chosen[:MANY])
            few = min(FEW, len(numbers) // 2)
            if not few:
                return None
            many, fewer = (collate(samples_at(dataset, numbers[:count])) for count in (len(numbers), few))
    except Exception:
        # The function needs as many samples as a batch has, or the dataset must be read in its own order.
        return None
    return Fields(compare(many, fewer, len(numbers), few))


def _fields_of_several(loaders: Mapping[Any, object]) -> Fields | None:
    places: dict[str, tuple[int, ...] | str] = {}
    for key, loader in loaders.items():
        fields = sample_fields(loader, changed_later=True)
        if fields is None or fields.places is None:
            return None
        places |= {f"[{key!r}]{where}": found for where, found in fields.places.items()}
    return Fields(places)
