"""Which fields of a loader's batches run over samples, decided once from the data by joining fewer samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate

from hasten._lib.split import STACKED, Fields, compare, joined
from hasten.data.loader_parts import is_iterable, overrides_iter
from hasten.data.memory.dataset_parts import preserve
from hasten.data.memory.resident import HeldDataset
from hasten.seed import isolate_rng


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


# Samples that are joined to see what their batch is like; even numbers, for functions that make pairs.
_MANY, _FEW = 4, 2


def fields_of(loaders: Any, *, changed_later: bool) -> Fields | None:
    """Return which fields run over samples in the batches of one loader, or of several that are read as one."""
    if isinstance(loaders, Mapping):
        inside = [(f"[{key!r}]", loader) for key, loader in loaders.items()]
    elif isinstance(loaders, (list, tuple)):
        inside = [(f"[{index}]", loader) for index, loader in enumerate(loaders)]
    else:
        return sample_fields(loaders, by_place=changed_later)
    found = []
    for place, loader in inside:
        fields = fields_of(loader, changed_later=True)
        if fields is None:
            return None
        found.append(fields.inside(place))
    return joined(found)


def sample_fields(loader: Any, *, by_place: bool = False) -> Fields | None:
    """Return which fields run over samples in the batches of ``loader``; None if nothing shows it.

    torch's ``default_collate`` stacks samples, so all of its tensors do. With another ``collate_fn`` four samples are
    joined, and two: what runs over samples has four rows and two. The dataset, the function and the random generators
    are restored afterwards.

    Example::

        >>> import torch
        >>> data = [torch.zeros(3)] * 8
        >>> def join(samples):
        ...     return {"x": torch.stack(samples), "weight_of_class": torch.ones(8)}
        >>> fields = sample_fields(DataLoader(data, batch_size=8, collate_fn=join))
        >>> sorted(fields.over), sorted(fields.shared)
        (["['x']"], ["['weight_of_class']"])

    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if overrides_iter(loader):
        return None  # What it yields need not be what it joins.
    dataset, collate = loader.dataset, loader.collate_fn
    if collate is default_collate and not isinstance(dataset, HeldDataset) and not by_place:
        return STACKED
    if is_iterable(loader):
        return None
    try:
        with isolate_rng(), preserve(dataset, collate, containers=True):
            numbers = _numbers(loader)
            if len(numbers) < 2:
                return None
            few = min(_FEW, len(numbers) // 2)
            many, fewer = (collate(_samples(dataset, numbers[:count])) for count in (len(numbers), few))
    except Exception:
        # A function that needs as many samples as a batch has, or a dataset that is read in its own order.
        return None
    return compare(many, fewer, len(numbers), few)


def _numbers(loader: DataLoader[Any]) -> list[Any]:
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    own = getattr(sampler, "indices", None)
    if own is not None:
        return list(own[:_MANY])
    return list(range(min(_MANY, len(loader.dataset))))  # type: ignore[arg-type]


def _samples(dataset: Any, numbers: list[Any]) -> Any:
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(numbers)
    return [dataset[number] for number in numbers]
