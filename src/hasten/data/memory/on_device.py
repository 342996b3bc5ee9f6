"""A loader whose data is in memory as whole tensors: a batch is one indexing, not one call a sample."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.data.memory.columns import Columns
from hasten.data.memory.dataset_parts import changed, fingerprint
from hasten.data.memory.read import fresh, gigabytes, read

# Of a device's free memory: the rest is for the model, its gradients and activations.
DEVICE_SHARE = 0.5


class Held(Dataset[Any]):
    """A dataset's samples in memory; all else is that of the dataset.

    Args:
        dataset: the user's.
        data: its samples, as columns or one by one.
        changes: notices where the dataset is changed, and reads it again.

    """

    def __init__(self, dataset: Any, data: Columns | list[Any], changes: _Changes) -> None:
        # Not self.x = ...: that is for the dataset. Nor names that a dataset may have: a program that reads or sets
        # the data of one, or the dataset of a Subset, means those.
        self.__dict__.update(
            _hasten_dataset=dataset,
            _hasten_data=data,
            _hasten_joins=isinstance(data, Columns),
            _hasten_changes=changes,
        )

    def __len__(self) -> int:
        return len(self._hasten_data)

    def __getitem__(self, index: int) -> Any:
        data = self._hasten_data
        number = index if index >= 0 else index + len(data)
        return data.sample(number) if isinstance(data, Columns) else fresh(data[number])

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch, joined already where there are columns; else its samples."""
        data = self._hasten_data
        return data.batch(indices) if isinstance(data, Columns) else [fresh(data[index]) for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_hasten_")):
            raise AttributeError(name)
        return getattr(self._hasten_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What a callback sets on the loader's dataset is for the user's, from which samples are then read again.
        setattr(self._hasten_dataset, name, value)


def users_dataset(dataset: Any) -> Any:
    """Return the user's dataset, where its samples are held in memory and where they are not."""
    return dataset._hasten_dataset if isinstance(dataset, Held) else dataset


def gives_batches(dataset: Any) -> bool:
    """Return whether a dataset's samples are held as columns, which are joined to batches already."""
    return isinstance(dataset, Held) and bool(dataset._hasten_joins)


def _begin_epoch(held: Held) -> None:
    """Read the samples again if attributes of the dataset have changed since they were read."""
    data = held._hasten_changes.read_again()
    if data is not None:
        if held._hasten_joins and not isinstance(data, Columns):
            raise ValueError(
                f"{held._hasten_changes.name}: its samples had one shape and now differ in size, so they cannot be "
                "held as before. Leave resident=... out."
            )
        held.__dict__["_hasten_data"] = data if held._hasten_joins else _one_by_one(data)


class _Changes:
    """Notices that a dataset is another than when its samples were read.

    Args:
        dataset: the user's.
        read: reads its samples.
        name: what to call the loader in messages.

    """

    def __init__(self, dataset: Any, read: Callable[[], Any], name: str) -> None:
        self.name = name
        self._dataset, self._read = dataset, read
        self._before: dict[str, Any] | None = None
        # What reading itself changes (a cache, a counter) changes no sample: that is what reading twice is for.
        self._by_reading: tuple[str, ...] = ()
        self._times_read = 0

    def __getstate__(self) -> dict[str, Any]:
        # Elsewhere the same attributes lie at other places in memory.
        return {**self.__dict__, "_before": None}

    def read(self) -> Any:
        """Return the samples as they are now."""
        before = fingerprint(self._dataset)
        data = self._read()
        self._times_read += 1
        self._before = fingerprint(self._dataset)
        places = [place for place in changed(before, self._before) if place not in self._by_reading]
        self._by_reading += tuple(places)
        return data

    def read_again(self) -> Any:
        """Return the samples of a dataset that has changed; None where it has not."""
        places = self._changed()
        if not places:
            return None
        if hasattr(self._dataset, "_hasten_preloaded"):
            self._before = fingerprint(self._dataset)
            rank_zero_warn(
                f"{self.name}: the dataset {type(self._dataset.dataset).__name__} has changed ({places[0]}), and the "
                "preloaded samples are those from before. Leave preload() out for data that changes."
            )
            return None
        if self._times_read == 2:
            rank_zero_warn(
                f"{self.name}: the dataset {type(self._dataset).__name__} changes between epochs ({places[0]}), so it "
                "is read again in each. Leave resident=... out, or make the change where the batch is there "
                "(on_after_batch_transfer)."
            )
        return self.read()

    def check(self) -> None:
        """Check that nothing has changed since the samples were read.

        Raises:
            RuntimeError: something has.

        """
        places = [] if hasattr(self._dataset, "_hasten_preloaded") else self._changed()
        if places:
            raise RuntimeError(
                f"{self.name}: the dataset {type(self._dataset).__name__} was changed in the middle of an epoch "
                f"({places[0]}), and this epoch's samples were held in memory since its beginning. Change it between "
                "epochs (on_train_epoch_start), or leave resident=... out."
            )

    def _changed(self) -> list[str]:
        now = fingerprint(self._dataset)
        if self._before is None:
            self._before = now
        return [place for place in changed(self._before, now) if not self._is_by_reading(place)]

    def _is_by_reading(self, place: str) -> bool:
        return any(place == each or place.startswith((f"{each}.", f"{each}[")) for each in self._by_reading)


class _WholeBatches(DataLoader[Any]):
    """What a ``DataLoader`` iterates with when its dataset joins the batches."""

    def _get_iterator(self) -> Any:
        return _Batches(self)


class _Batches:
    """Iterates over the batches of a resident loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._index_batches = _index_batches(loader)
        # The loader's own iterator draws this seed for its workers: the order of samples depends on it.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._held: Held = loader.dataset
        self._take: Any = None
        self._collate = loader.collate_fn
        self._pins = loader.pin_memory and torch.cuda.is_available()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._take is None:
            # Not before the first batch is asked for: only then a DataLoader reads its dataset.
            _begin_epoch(self._held)
            data = self._held._hasten_data
            self._take = data.batch if isinstance(data, Columns) else self._held.__getitems__
        try:
            indices = next(self._index_batches)
        except StopIteration:
            # An error if the dataset is another than at the beginning of the epoch.
            self._held._hasten_changes.check()
            raise
        samples = self._take(indices)
        try:
            batch = self._collate(samples)
        except RuntimeError as error:
            raise_if_unlike(samples, self._collate, error)
            raise
        if self._pins:
            from torch.utils.data._utils.pin_memory import pin_memory

            batch = pin_memory(batch)
        return batch


def _index_batches(loader: Any) -> Iterator[Any]:
    """Yield the index batches of a loader; as tensors where its order is one, with the same draws at the same time."""
    batches = loader._index_sampler
    if type(batches) is not BatchSampler or not isinstance(loader.dataset._hasten_data, Columns):
        return iter(batches)
    sampler, size = batches.sampler, batches.batch_size
    if type(sampler) is SequentialSampler:
        return iter(_cut(torch.arange(len(sampler)), size, batches.drop_last))
    if (
        type(sampler) is not RandomSampler
        or sampler.replacement
        or sampler.num_samples != len(sampler.data_source)
        or not _knows_random_sampler()
    ):
        return iter(batches)
    return _shuffled(sampler, size, batches.drop_last)


def _shuffled(sampler: RandomSampler, size: int, drop_last: bool) -> Iterator[Tensor]:
    """Yield the batches of a shuffled epoch, drawing what ``RandomSampler`` draws, when it does."""
    count, generator = sampler.num_samples, sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    parts = _cut(torch.randperm(count, generator=generator), size, False)
    short = parts.pop() if count % size else None
    yield from parts
    # What it draws before it finds that all has been given.
    torch.randperm(count, generator=generator)
    if short is not None and not drop_last:
        yield short


def _cut(order: Tensor, size: int, drop_last: bool) -> list[Tensor]:
    parts = list(order.split(size)) if len(order) else []
    return parts[:-1] if drop_last and len(order) % size else parts


@functools.cache
def _knows_random_sampler() -> bool:
    """Return whether this torch's ``RandomSampler`` draws as expected."""
    generator, mine = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    theirs = list(BatchSampler(RandomSampler(range(7), generator=generator), 3, False))
    own = [part.tolist() for part in _shuffled(RandomSampler(range(7), generator=mine), 3, False)]
    return theirs == own and torch.equal(generator.get_state(), mine.get_state())


class ResidentLoader(_WholeBatches):
    """A ``DataLoader`` that reads its dataset once and then makes each batch by one indexing of whole tensors.

    Batches and their order are those of a ``DataLoader`` without workers, bit for bit, whatever sampler, shuffling,
    generator or ``drop_last`` it has. Samples that one tensor for each field cannot hold (of different sizes, or other
    objects), and those for which there is a ``collate_fn``, are held one by one and joined as they would be.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; its samples must be the same every time they are read. Where its
            attributes were changed between epochs they are read again; a change in the middle of an epoch raises an
            error at its end. The tensors of a ``TensorDataset`` are used as they are, without a copy.
        batch_size: samples of a batch.
        shuffle: another order each epoch.
        sampler: gives the order instead.
        batch_sampler: gives the batches' samples instead.
        collate_fn: joins samples instead of torch's ``default_collate``.
        drop_last: leave out the last batch where it is not full.
        generator: draws the order.
        pin_memory: put batches into pinned memory, where there is CUDA.
        device: where the data is held; by default the host.

    Raises:
        TypeError: the dataset has no samples by number.
        ValueError: its samples are random, or too large together for the memory there is.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
        >>> [labels.tolist() for _, labels in ResidentLoader(data, batch_size=2)]
        [[0, 1], [2]]

    Source: `torch.utils.data.DataLoader <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader>`_.

    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        *,
        collate_fn: Any = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=generator,
            pin_memory=pin_memory,
        )
        self.__dict__.update(_held(self, device, "ResidentLoader", "its loader"))


def resident(
    loader: Any, *, device: torch.device | str | None = None, stage: str = "train", name: str | None = None
) -> Any:
    """Return a loader with the same batches in the same order, from data that is read now and held in memory.

    What ``Trainer(resident=True)`` does with every loader; see :class:`ResidentLoader`. The loader given stays as it
    is. If it has workers, they read the data. Only for training it is an error when the data cannot be held; elsewhere
    a line says why, and the loader stays.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        device: where the data is held; by default the host.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        name: what to call the loader in messages.

    Raises:
        TypeError: it is no ``DataLoader``, makes its batches itself, or its dataset has no samples by number.
        ValueError: its samples are random, or too large together for the memory there is.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> [batch[0].tolist() for batch in resident(loader)]
        [[0, 1], [2, 3], [4]]

    """
    name = name or f"the {stage} dataloader"
    try:
        return _made_resident(
            loader, device, "resident=True" if device is None else "resident='device'", name
        )
    except (TypeError, ValueError) as error:
        if stage == "train":
            raise
        rank_zero_info(f"{name} is read as before. {error}")
        return loader


def is_resident(loader: Any) -> bool:
    """Return whether a loader reads from memory already."""
    return isinstance(loader, _WholeBatches)


def _made_resident(loader: Any, device: Any, asked: str, name: str) -> Any:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{asked}: {name} is a {type(loader).__name__}, whose batches are made elsewhere. Give a DataLoader, or "
            "leave it out."
        )
    if is_resident(loader):
        return loader
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise TypeError(
            f"{asked}: {name} is a {kind.__name__}, which iterates in its own way. Give a plain DataLoader, or leave "
            "it out."
        )
    if loader.batch_sampler is None:
        raise TypeError(
            f"{asked}: {name} has batch_size=None, so it makes no batches. Give it a batch_size, or leave it out."
        )
    # A subclass of the user's stays one.
    made: Any = ResidentLoader if kind is DataLoader else type(kind.__name__, (_WholeBatches, kind), {})
    new = made.__new__(made)
    new.__dict__.update(loader.__dict__, **_held(loader, device, asked, name))
    return new


def _held(loader: DataLoader[Any], device: Any, asked: str, name: str) -> dict[str, Any]:
    """Return the attributes with which a loader reads from memory."""
    began = time.perf_counter()
    dataset: Any = loader.dataset
    collate_fn = loader.collate_fn
    reader = loader if loader.num_workers else None
    changes = _Changes(
        dataset, functools.partial(_read, dataset, collate_fn, reader, device, asked, name), name
    )
    held = Held(dataset, data := changes.read(), changes)
    if isinstance(data, Columns):
        joins: Any = joined
        rank_zero_info(
            f"{name}: {len(data)} samples are held in memory, {gigabytes(data.size_bytes)} "
            f"({time.perf_counter() - began:.1f} s)."
        )
    else:
        joins = collate_fn
        why = (
            "they are not alike"
            if collate_fn is default_collate
            else f"{_called(collate_fn)} joins them as before"
        )
        rank_zero_info(
            f"{name}: {len(data)} samples are held in memory one by one, as {why} "
            f"({time.perf_counter() - began:.1f} s)."
        )
    return {
        "dataset": held,
        "collate_fn": joins,
        "num_workers": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
        "_DataLoader__multiprocessing_context": None,
        "worker_init_fn": None,
        "timeout": 0,
        "_iterator": None,
        # What is on the device already cannot be pinned.
        **({} if device is None or torch.device(device).type == "cpu" else {"pin_memory": False}),
    }


def _read(dataset: Any, collate_fn: Any, loader: Any, device: Any, asked: str, name: str) -> Any:
    """Return the samples of a dataset as they are held for a loader.

    Args:
        dataset: the user's.
        collate_fn: joins samples.
        loader: whose workers read; None to read in this process.
        device: where to hold them; None for the host.
        asked: what was asked for, for messages.
        name: what to call the loader in messages.

    """
    preloaded = getattr(dataset, "columns", None) if hasattr(dataset, "_hasten_preloaded") else None
    data = read(dataset, asked=asked, name=name, loader=loader) if preloaded is None else preloaded
    if isinstance(data, Columns) and collate_fn is not default_collate:
        # It may look at the samples together: it gets them as it always does.
        data = _one_by_one(data)
    if device is not None and torch.device(device).type != "cpu":
        data = _on_device(data, torch.device(device), asked, name, type(dataset).__name__)
    return data


def _one_by_one(data: Columns | list[Any]) -> list[Any]:
    return [data.sample(index) for index in range(len(data))] if isinstance(data, Columns) else data


def joined(batch: Any) -> Any:
    """Return a batch that is joined already: the collate function of a resident loader."""
    return batch


def raise_if_unlike(samples: Any, collate_fn: Any, error: RuntimeError) -> None:
    """Say which field keeps torch's ``default_collate`` from joining samples, if it was asked to and sizes differ.

    Args:
        samples: of a batch.
        collate_fn: what failed.
        error: how it failed.

    Raises:
        ValueError: a field has different shapes in the samples.

    """
    found = _unlike(samples) if collate_fn is default_collate and isinstance(samples, list) else None
    if found is None:
        return
    place, (one, other) = found
    raise ValueError(
        f"in batch{place}: samples of the shapes {one} and {other} meet in a batch, and torch joins tensors of one "
        "shape only. Give the loader a collate_fn such as hasten.data.pad_collate, or use Trainer(batching='length'), "
        "which pads."
    ) from error


def _unlike(values: list[Any]) -> tuple[str, tuple[Any, Any]] | None:
    """Return where in samples a field has two shapes, and these; None where it is nowhere so."""
    first = values[0]
    if hasattr(first, "shape"):
        shapes = [tuple(getattr(value, "shape", ())) for value in values]
        other = next((shape for shape in shapes if shape != shapes[0]), None)
        return None if other is None else ("", (shapes[0], other))
    if isinstance(first, Mapping):
        keys: Iterable[Any] = first
    elif isinstance(first, (list, tuple)):
        sizes = [(len(value),) for value in values if isinstance(value, (list, tuple))]
        size = next((each for each in sizes if each != sizes[0]), None)
        if size is not None:
            return "", (sizes[0], size)
        keys = range(len(first))
    else:
        return None
    for key in keys:
        try:
            found = _unlike([value[key] for value in values])
        except (KeyError, IndexError, TypeError):
            continue  # Samples of other kinds: torch says it well.
        if found is not None:
            return f"[{key!r}]{found[0]}", found[1]
    return None


def _on_device(data: Any, device: torch.device, asked: str, name: str, kind: str) -> Columns:
    if not isinstance(data, Columns):
        raise ValueError(
            f"{asked}: the samples of {name} ({kind}) are joined one by one, because they differ in size or there is a "
            "collate_fn. Use resident=True, which holds them on the host."
        )
    if device.type == "cuda":
        free = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
        if data.size_bytes > free:
            raise ValueError(
                f"{asked}: the samples of {name} ({kind}) need {gigabytes(data.size_bytes)}, and "
                f"{gigabytes(free)} of {device} may be used. Use resident=True, which holds them on the host."
            )
    return data.to(device)


def _called(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
