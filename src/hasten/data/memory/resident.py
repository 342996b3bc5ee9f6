"""A loader whose data is in memory as whole tensors: one indexing operation for each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from hasten._lib import check, torch_private, tree
from hasten._lib.device import as_device, is_cuda, is_host
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.data.loader_parts import check_dataloader, required_in_training, unchanged
from hasten.data.memory.dataset_parts import changed, fingerprint, preserve
from hasten.data.memory.read import Columns, DatasetProxy, DatasetReader, fresh, same
from hasten.data.worker_count import WITHOUT_WORKERS
from hasten.machine.host import bytes_text
from hasten.seed import isolate_rng

_T = TypeVar("_T")

# The share of a device's free memory to use; the rest is for the model, its gradients and activations.
DEVICE_SHARE = 0.5


class ResidentLoader(DataLoader[Any]):
    """A ``DataLoader`` that reads its dataset once and then makes each batch by one indexing of whole tensors.

    Batches and their order are the same as with a ``DataLoader`` without workers, bit for bit, whatever sampler,
    shuffling, generator or ``drop_last`` it has. Samples that one tensor for each field cannot hold (of different
    sizes, or other objects), and those for which there is a ``collate_fn``, are held one by one and joined as usual.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; its samples must be the same every time they are read. If its
            attributes, or its first or last sample, change between epochs, all are read again; a change of attributes
            in the middle of an epoch raises an error at its end. The tensors of a ``TensorDataset`` are used without a
            copy.
        batch_size: samples of a batch.
        shuffle: another order each epoch.
        sampler: gives the order instead.
        batch_sampler: gives the batches' samples instead.
        collate_fn: joins samples instead of torch's ``default_collate``.
        drop_last: leave out the last batch if it is not full.
        generator: draws the order.
        pin_memory: put batches into pinned memory, if there is CUDA.
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
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        check.declared(ResidentLoader.__init__, locals())
        if isinstance(dataset, (str, bytes)):
            raise check.wrong("ResidentLoader", "dataset", dataset, "a dataset")
        place = as_device("ResidentLoader", device)
        if place is not None and is_cuda(place) and (place.index or 0) >= torch.cuda.device_count():
            raise check.wrong("ResidentLoader", "device", device, "'cpu', or a GPU that this machine has")
        check.whole("ResidentLoader", "batch_size", batch_size, at_least=1, unit="samples")
        super().__init__(
            cast("Dataset[Any]", dataset),
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=generator,
            pin_memory=pin_memory,
        )
        self.__dict__.update(_held(self, place, "ResidentLoader(dataset=...)", "its loader"))

    def _get_iterator(self) -> Any:
        index_batches = torch_private.indices_of(self)
        # torch's own iterator draws this seed for its workers: the order of samples depends on it.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return _batches(self, index_batches)


def resident(
    loader: _T, *, device: torch.device | str | None = None, stage: str = "train", name: str | None = None
) -> _T:
    """Return a loader with the same batches in the same order, from data that is read now and held in memory.

    ``Trainer(resident=True)`` does this with every loader; see :class:`ResidentLoader`. The loader itself does not
    change. If it has workers, they read the data.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        device: where the data is held; by default the host.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``. In training it is an error if the data cannot
            be held; otherwise the reason is logged, and the loader is returned unchanged.
        name: what to call the loader in messages.

    Raises:
        TypeError: it is not a ``DataLoader``, makes its batches itself, or its dataset has no samples by number.
        ValueError: its samples are random, or too large together for the memory there is.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> [batch[0].tolist() for batch in resident(loader)]
        [[0, 1], [2, 3], [4]]

    """
    name = name or f"the {stage} dataloader"
    argument = "resident=True" if device is None else "resident='device'"
    return required_in_training(lambda: _made_resident(loader, device, argument, name), loader, stage, name)


def is_resident(loader: Iterable[Any]) -> bool:
    """Return whether a loader reads from memory already."""
    return isinstance(loader, DataLoader) and type(loader)._get_iterator is ResidentLoader._get_iterator


def users_dataset(dataset: object) -> Any:
    """Return the user's dataset, whether its samples are held in memory or not."""
    return dataset._hasten_dataset if isinstance(dataset, HeldDataset) else dataset


class HeldDataset(DatasetProxy):
    """A dataset's samples in memory; a change that a callback makes here changes the user's dataset."""

    _hasten_data: Columns | list[Any]
    _hasten_changes: _Changes
    _hasten_reads_here: bool

    def __init__(
        self, dataset: object, read: Callable[[], Columns | list[Any]], name: str, *, reads_here: bool
    ) -> None:
        changes = _Changes(dataset, read, name)
        data = changes.read()
        super().__init__(dataset, _hasten_data=data, _hasten_changes=changes, _hasten_reads_here=reads_here)

    def __len__(self) -> int:
        return len(self._hasten_data)

    def __getitem__(self, index: int) -> Any:
        data = self._hasten_data
        number = index if index >= 0 else index + len(data)
        return data.sample(number) if isinstance(data, Columns) else fresh(data[number])

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch, joined already if there are columns; else its samples."""
        data = self._hasten_data
        return data.batch(indices) if isinstance(data, Columns) else [fresh(data[index]) for index in indices]

    def _hasten_begin_epoch(self) -> None:
        """Read the samples again if the dataset has changed since they were read."""
        data = self._hasten_changes.read_again(self._hasten_differs)
        if data is None:
            return
        if isinstance(self._hasten_data, list):
            data = data.samples() if isinstance(data, Columns) else data
        elif not isinstance(data, Columns):
            raise make_error(
                ValueError,
                f"{self._hasten_changes.name}: its samples had one shape and now differ in size, so they cannot be "
                "held as before.",
                fix="Leave resident=... out.",
            )
        self.__dict__["_hasten_data"] = data

    def _hasten_differs(self) -> bool:
        """Return whether the first or the last sample differs when it is read again."""
        dataset = self._hasten_dataset
        if not self._hasten_reads_here or not len(self):
            return False
        with isolate_rng(include_cuda=False), preserve(dataset):
            pairs = [tree.map_tensors(Tensor.cpu, (self[index], dataset[index])) for index in {0, len(self) - 1}]
        return not all(same(held, now) for held, now in pairs)


class _Changes:
    """Detects changes of a dataset since its samples were read."""

    def __init__(self, dataset: Any, read: Callable[[], Columns | list[Any]], name: str) -> None:
        self.name, self._dataset, self._read = name, dataset, read
        self._preloaded = hasattr(dataset, "_hasten_preloaded")
        self._before: dict[str, Any] | None = None
        # Places that reading itself changes (a cache, a counter): reading twice has shown that samples stay the same.
        self._by_reading: set[str] = set()
        self._times_read = 0

    def __getstate__(self) -> dict[str, Any]:
        # In another process the same attributes have other addresses.
        return {**self.__dict__, "_before": None}

    def read(self) -> Columns | list[Any]:
        """Return the present samples."""
        before = fingerprint(self._dataset)
        data = self._read()
        self._times_read += 1
        self._before = fingerprint(self._dataset)
        self._by_reading.update(changed(before, self._before))
        return data

    def read_again(self, differs: Callable[[], bool]) -> Columns | list[Any] | None:
        """Return the samples of a dataset that has changed, as its attributes or its samples show; None if not."""
        places = self._changed() or (["its samples"] if differs() else [])
        if not places:
            return None
        if self._preloaded:
            self._before = fingerprint(self._dataset)
            rank_zero_warn(
                f"{self.name}: the dataset {type(self._dataset.dataset).__name__} has changed ({places[0]}), and the "
                "preloaded samples are those from before.",
                fix="Leave preload() out for data that changes.",
            )
            return None
        if self._times_read == 2:
            rank_zero_warn(
                f"{self.name}: the dataset {type(self._dataset).__name__} changes between epochs ({places[0]}), so it "
                "is read again in each.",
                fix="Leave resident=... out, or make the change in on_after_batch_transfer.",
            )
        return self.read()

    def check(self) -> None:
        """Check that nothing has changed since the samples were read."""
        places = [] if self._preloaded else self._changed()
        if places:
            raise make_error(
                RuntimeError,
                f"{self.name}: the dataset {type(self._dataset).__name__} was changed in the middle of an epoch "
                f"({places[0]}), whose samples were in memory since its beginning.",
                fix="Change it between epochs (on_train_epoch_start), or leave resident=... out.",
            )

    def _changed(self) -> list[str]:
        now = fingerprint(self._dataset)
        if self._before is None:
            self._before = now
        places = changed(self._before, now)
        for each in self._by_reading:
            places = [place for place in places if place != each and not place.startswith((f"{each}.", f"{each}["))]
        return places


def _batches(loader: DataLoader[Any], index_batches: Iterator[Any]) -> Iterator[Any]:
    held: Any = loader.dataset
    # Not before the first batch: a DataLoader reads its dataset no earlier.
    held._hasten_begin_epoch()
    data, collate = held._hasten_data, loader.collate_fn
    take = data.batch if isinstance(data, Columns) else held.__getitems__
    pin: Callable[[Any], Any] | None = None
    if loader.pin_memory and torch.cuda.is_available():
        pin = torch_private.pinned
    for indices in index_batches:
        batch = collate(take(indices))
        yield batch if pin is None else pin(batch)
    held._hasten_changes.check()


def _made_resident(loader: Any, device: Any, argument: str, name: str) -> Any:
    if is_resident(loader):
        return loader
    check_dataloader(loader, argument, name)
    kind = type(loader)
    # A user's subclass of the loader stays that class.
    reads = {"_get_iterator": ResidentLoader._get_iterator}
    made: Any = ResidentLoader if kind is DataLoader else type(kind.__name__, (kind,), reads)
    new = made.__new__(made)
    new.__dict__.update(loader.__dict__, **_held(loader, device, argument, name))
    return new


def _held(loader: DataLoader[Any], device: Any, argument: str, name: str) -> dict[str, Any]:
    """Return the attributes with which a loader reads from memory."""
    began = time.perf_counter()
    dataset: Any = loader.dataset
    collate_fn: Any = loader.collate_fn
    on_device = device is not None and not is_host(torch.device(device))

    def read() -> Columns | list[Any]:
        data = getattr(dataset, "columns", None) if hasattr(dataset, "_hasten_preloaded") else None
        if data is None:
            data = DatasetReader(dataset, argument, name).read(loader if loader.num_workers else None)
        if isinstance(data, Columns) and collate_fn is not default_collate:
            # The collate function may need the samples together, so it gets them as always.
            data = data.samples()
        return _on_device(data, torch.device(device), argument, name) if on_device else data

    # Otherwise only its workers may be able to read the dataset.
    reads_here = not loader.num_workers or loader.worker_init_fn is None
    held = HeldDataset(dataset, read, name, reads_here=reads_here)
    data = held._hasten_data
    how = bytes_text(data.size_bytes) if isinstance(data, Columns) else "one by one"
    rank_zero_info(f"{name}: {len(held)} samples are held in memory, {how} ({time.perf_counter() - began:.1f} s).")
    return {
        **WITHOUT_WORKERS,
        "dataset": held,
        "collate_fn": unchanged if isinstance(data, Columns) else collate_fn,
        "worker_init_fn": None,
        "_iterator": None,
        # What is on the device already cannot be pinned.
        **({"pin_memory": False} if on_device else {}),
    }


def _on_device(data: Columns | list[Any], device: torch.device, argument: str, name: str) -> Columns:
    if not isinstance(data, Columns):
        raise make_error(
            ValueError,
            f"{argument}: the samples of {name} are joined one by one, because they differ in size or there is a "
            "collate_fn.",
            fix="Use resident=True, which holds them on the host.",
        )
    if is_cuda(device):
        free = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
        if data.size_bytes > free:
            raise make_error(
                ValueError,
                f"{argument}: the samples of {name} need {bytes_text(data.size_bytes)}, and {bytes_text(free)} of "
                f"{device} may be used.",
                fix="Use resident=True, which holds them on the host.",
            )
    return data.to(device)
