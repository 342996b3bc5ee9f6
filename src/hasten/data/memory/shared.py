"""``preload``: a dataset read once on each machine, into memory that all processes there share."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import time
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from hasten._lib.rank_zero import rank_zero_info
from hasten.data.memory.columns import Allocate, Columns, Kind, NoColumnsError, kind_of, leaves_of
from hasten.data.memory.read import check_size, gigabytes, of_tensors, pickled, read
from hasten.data.memory.shared_segment import Handle, SharedMemory, forget, in_one_process, needed_bytes
from hasten.seed import isolate_rng

_of_this_process: weakref.WeakValueDictionary[str, Preloaded] = weakref.WeakValueDictionary()


class Preloaded(Dataset[Any]):
    """A dataset's samples in shared memory; made by :func:`preload`.

    Pickled, as when processes are spawned, it takes a few bytes: the other process attaches to the same memory.

    Args:
        dataset: the user's; its attributes are found here, too.
        memory: where the samples are.
        layout: how.

    """

    _hasten_preloaded = True

    def __init__(self, dataset: Any, memory: SharedMemory, layout: _Layout) -> None:
        self.dataset = dataset
        self._memory, self._layout = memory, layout
        self._leaves = layout.tensors(memory)
        self.columns = None if layout.kind is None else Columns(layout.kind, self._leaves)

    def __len__(self) -> int:
        return self._layout.length

    def __getitem__(self, index: int) -> Any:
        number = index if index >= 0 else index + self._layout.length
        if not 0 <= number < self._layout.length:
            raise IndexError(f"sample {index} of {self._layout.length}")
        if self.columns is not None:
            return self.columns.sample(number)
        data, ends = self._leaves
        begin = int(ends[number - 1]) if number else 0
        piece = data[begin : int(ends[number])]
        return pickle.loads(ctypes.string_at(piece.data_ptr(), piece.numel()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("dataset", "columns"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "handle": self._memory.handle, "layout": self._layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = SharedMemory(handle=state["handle"])
        self.__init__(state["dataset"], memory, state["layout"])  # type: ignore[misc]


class _Layout:
    """What is where in the shared memory.

    Args:
        length: samples.
        kind: of all samples; None where each is pickled.
        leaves: shape and name of the dtype of each tensor.

    """

    def __init__(self, length: int, kind: Kind | None, leaves: list[tuple[tuple[int, ...], str]]) -> None:
        self.length, self.kind, self.leaves = length, kind, leaves

    def tensors(self, memory: SharedMemory) -> list[Tensor]:
        found, place = [], 0
        for shape, dtype_name in self.leaves:
            dtype: torch.dtype = getattr(torch, dtype_name)
            found.append(memory.tensor(place, shape, dtype))
            place += needed_bytes(shape, dtype)
        return found

    @property
    def size_bytes(self) -> int:
        return sum(needed_bytes(shape, getattr(torch, dtype)) for shape, dtype in self.leaves)


def preload(dataset: Any, *, name: str | None = None) -> Preloaded:
    """Return a dataset with the same samples, in memory that all processes of a machine share.

    The first process that comes here reads the data, the others wait and then see the same memory; nothing is copied,
    whether processes are forked, spawned, or started by ``torchrun``, SLURM or the Trainer. There is nothing to clean
    up: the memory has no name, and the kernel frees it when the last process ends, also when it is killed. Samples
    come out as copies of their own.

    Call it in every process, with the same dataset. With ``Trainer(resident=True)`` batches are made by indexing the
    shared tensors.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; its samples must be the same every time they are read.
        name: tells datasets apart within a program whose length, type and first and last samples are the same.

    Raises:
        TypeError: the dataset has no samples by number.
        ValueError: its samples are random, or too large together for the memory there is.
        RuntimeError: the operating system is not Linux.

    Example::

        >>> from torch.utils.data import TensorDataset
        >>> data = preload(TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3)))
        >>> data[1]
        (tensor([2., 3.]), tensor(1))

    Source: `memfd_create(2) <https://man7.org/linux/man-pages/man2/memfd_create.2.html>`_.

    """
    if isinstance(dataset, Preloaded):
        return dataset
    made: list[Preloaded] = []
    shown = name or f"the dataset {type(dataset).__name__}"

    def make() -> tuple[Handle, Any]:
        began = time.perf_counter()
        memory, layout = _filled(dataset, shown)
        made.append(Preloaded(dataset, memory, layout))
        rank_zero_info(
            f"{shown}: {len(dataset)} samples are in shared memory, {gigabytes(layout.size_bytes)} "
            f"({time.perf_counter() - began:.1f} s)."
        )
        about = {"leaves": layout.leaves, "alike": layout.kind is not None}
        return memory.handle, about

    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        read(dataset, asked="preload", name=shown)  # Says what is wrong.
        raise ValueError(f"preload: {shown} is empty.")
    key = _key(dataset, name)
    if key in _of_this_process:
        return _of_this_process[key]
    found = in_one_process(key, make)
    if found is None:
        _of_this_process[key] = made[0]
        # Nobody else can come for it once it is gone.
        weakref.finalize(made[0]._memory, forget, key, made[0]._memory.handle.pid)
        return made[0]
    handle, about = found
    kind = kind_of(dataset[0]) if about["alike"] else None
    leaves = [(tuple(shape), dtype) for shape, dtype in about["leaves"]]
    return Preloaded(dataset, SharedMemory(handle=handle), _Layout(len(dataset), kind, leaves))


def _filled(dataset: Any, name: str) -> tuple[SharedMemory, _Layout]:
    """Read the dataset into new shared memory."""
    columns = of_tensors(dataset) if type(dataset) is TensorDataset else None
    if columns is not None:
        check_size(columns.size_bytes, len(dataset), "preload", name, dataset)
        layout = _Layout(len(columns), columns.kind, [_described(leaf) for leaf in columns.leaves])
        memory = SharedMemory(layout.size_bytes)
        for target, leaf in zip(layout.tensors(memory), columns.leaves, strict=True):
            target.copy_(leaf)
        return memory, layout
    memory, allocate = _memory_for_samples_like_the_first(dataset)
    data = read(dataset, asked="preload", name=name, allocate=allocate)
    if isinstance(data, Columns) and all(isinstance(leaf, Tensor) for leaf in data.leaves):
        return memory, _Layout(len(data), data.kind, [_described(leaf) for leaf in data.leaves])
    samples = [data.sample(index) for index in range(len(data))] if isinstance(data, Columns) else data
    return _filled_with_pickles(samples)


def _memory_for_samples_like_the_first(dataset: Any) -> tuple[SharedMemory, Allocate]:
    """Return memory for one tensor for each field, and the function that gives it out; unused it takes none."""
    count, size = len(dataset), 0
    with isolate_rng(include_cuda=False), suppress(NoColumnsError):
        sample = dataset[0]
        for leaf in leaves_of(default_collate([sample]), kind_of(sample)):
            size += needed_bytes((count, *leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else 0
    memory, used = SharedMemory(size), 0

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal used
        place, used = used, used + needed_bytes(shape, dtype)
        return memory.tensor(place, shape, dtype) if used <= size else torch.empty(shape, dtype=dtype)

    return memory, allocate


def _filled_with_pickles(samples: list[Any]) -> tuple[SharedMemory, _Layout]:
    parts = [pickled(sample) for sample in samples]
    ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)
    layout = _Layout(len(parts), None, [((int(ends[-1]),), "uint8"), ((len(parts),), "int64")])
    memory = SharedMemory(layout.size_bytes)
    data, places = layout.tensors(memory)
    places.copy_(ends)
    data.copy_(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8))
    return memory, layout


def _described(leaf: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")


def _key(dataset: Any, name: str | None) -> str:
    """Return what tells this dataset from others of the program, the same in all processes."""
    with isolate_rng(include_cuda=False):
        ends = pickled([dataset[0], dataset[len(dataset) - 1]], identical=True)
    kind = type(dataset)
    text = f"{kind.__module__}.{kind.__qualname__} {len(dataset)} {name}"
    return hashlib.sha256(text.encode() + ends).hexdigest()[:24]
