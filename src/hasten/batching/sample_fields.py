"""Which fields of a loader's batches run over samples: decided once from the data, by joining fewer samples."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hasten._lib.split import STACKED, Fields, compare, joined
from hasten.data.memory.dataset_parts import parts
from hasten.data.memory.on_device import Held
from hasten.seed import isolate_rng


@dataclass(frozen=True)
class MicroBatch:
    """How a batch is split into parts, for ``Trainer(micro_batch=...)`` where the data does not tell.

    Args:
        samples: samples computed at once: a number, or "auto".
        shared: the fields of a batch that belong to all samples and go to each part as a whole: keys, names of
            attributes, or positions. All others run over samples where their first dimension is that long.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(micro_batch=MicroBatch("auto", shared=("class_weights",)))

    """

    samples: int | str
    shared: Collection[Any] = ()


# Samples that are joined to see what their batch is like; even numbers, for functions that make pairs.
_MANY, _FEW = 4, 2


def fields_of(loaders: Any, *, changed_later: bool) -> Fields | None:
    """Return which fields run over samples in the batches of one loader, or of several that are read as one.

    Args:
        loaders: a loader, or lists, tuples and dicts of them.
        changed_later: whether hooks may add to a batch: then each field is looked at by its place.

    """
    if isinstance(loaders, Mapping):
        inside = [(f"[{key!r}]", loader) for key, loader in loaders.items()]
    elif isinstance(loaders, (list, tuple)):
        inside = [(f"[{index}]", loader) for index, loader in enumerate(loaders)]
    else:
        return sample_fields(loaders, looks=changed_later)
    found = []
    for place, loader in inside:
        fields = fields_of(loader, changed_later=True)
        if fields is None:
            return None
        found.append(fields.inside(place))
    return joined(found)


def sample_fields(loader: Any, *, looks: bool = False) -> Fields | None:
    """Return which fields run over samples in the batches of ``loader``; None where nothing tells.

    Torch's own ``default_collate`` stacks samples, so all of its tensors do. With another ``collate_fn`` four samples
    are joined, and two: what runs over samples has four rows and two. The dataset, the function and the random
    generators are afterwards as they were.

    Args:
        loader: what gives the batches.
        looks: join samples also where torch stacks them, to know the places.

    Example::

        >>> data = [torch.zeros(3)] * 8
        >>> def join(samples):
        ...     return {"x": torch.stack(samples), "weight_of_class": torch.ones(8)}
        >>> fields = sample_fields(DataLoader(data, batch_size=8, collate_fn=join))
        >>> sorted(fields.over), sorted(fields.shared)
        (["['x']"], ["['weight_of_class']"])

    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return None  # What it yields need not be what it joins.
    dataset, collate = loader.dataset, loader.collate_fn
    if collate is default_collate and not isinstance(dataset, Held) and not looks:
        return STACKED
    if isinstance(dataset, IterableDataset):
        return None
    try:
        with isolate_rng(), _as_before(dataset, collate):
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


@contextmanager
def _as_before(*things: Any) -> Iterator[None]:
    """Leave attributes, containers and random generators of these objects afterwards as they were."""
    undo: list[Any] = []
    for thing in things:
        for _, part in parts(thing):
            if isinstance(part, torch.Generator):
                undo.append((part.set_state, part.get_state()))
            elif isinstance(part, random.Random):
                undo.append((part.setstate, part.getstate()))
            elif type(part).__module__.startswith("numpy.random"):
                undo.append(_of_numpy(part))
            elif isinstance(part, (list, dict, set, deque)):
                undo.append((_filler(part), part.copy()))
            elif isinstance(getattr(part, "__dict__", None), dict) and not isinstance(
                part, (type, types.ModuleType)
            ):
                undo.append((_filler(part.__dict__), dict(part.__dict__)))
    try:
        yield
    finally:
        for put_back, state in undo:
            put_back(state)


def _of_numpy(generator: Any) -> tuple[Any, Any]:
    if hasattr(generator, "set_state"):
        return generator.set_state, generator.get_state()
    bits = getattr(generator, "bit_generator", generator)
    return lambda state: setattr(bits, "state", state), bits.state


def _filler(container: Any) -> Any:
    def fill(before: Any) -> None:
        if isinstance(container, dict):
            if len(container) == len(before) and all(container.get(key) is before[key] for key in before):
                return
        elif len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True)):
            return
        container.clear()
        (container.extend if hasattr(container, "extend") else container.update)(before)

    return fill
