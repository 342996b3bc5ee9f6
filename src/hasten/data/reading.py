"""A whole dataset, read once: into columns where its samples fit, else one by one."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hasten._lib import tree
from hasten.data.columns import Allocate, Columns, Filling, Kind, NoColumnsError, kind_of
from hasten.data.indices import has_state
from hasten.data.workers import RngWatch
from hasten.seed import isolate_rng

# Samples read at once: large enough that joining them costs little, small enough for a queue between processes.
CHUNK = 256
# What is left of the machine's memory for everything else.
SHARE = 0.8


def read(
    dataset: Any,
    *,
    asked: str,
    name: str,
    loader: DataLoader[Any] | None = None,
    allocate: Allocate | None = None,
) -> Columns | list[Any]:
    """Return all samples of a dataset, as columns if they are alike, else as a list.

    The random state and the loader stay as they are; a loader with workers has them read.

    Args:
        dataset: with ``__getitem__`` and ``__len__``.
        asked: what was asked for, for messages.
        name: what to call the loader in messages.
        loader: whose workers read; None to read in this process.
        allocate: gives the memory of the columns.

    Raises:
        TypeError: the dataset has no samples by number.
        ValueError: they are random, change between epochs, or are too large together.

    """
    _check(dataset, asked, name)
    if type(dataset) is TensorDataset and allocate is None:
        columns = of_tensors(dataset)
        if columns is not None:
            return columns
    with isolate_rng(include_cuda=False):
        samples = _probe(dataset, asked, name)
        count = len(dataset)
        check_size(count * sum(map(size_of, samples)) // max(1, len(samples)), count, asked, name, dataset)
        return _read(dataset, asked, name, loader, allocate)


def check_size(size_bytes: int, count: int, asked: str, name: str, dataset: Any) -> None:
    """Check that so many bytes can be held.

    Raises:
        ValueError: the machine has not so many left.

    """
    limit = int(SHARE * available_bytes())
    if size_bytes > limit:
        raise ValueError(
            f"{asked}: the {count} samples of {name} ({_kind(dataset)}) need about {gigabytes(size_bytes)}, and "
            f"{gigabytes(limit)} may be used. Leave it out; num_workers='auto' has them read ahead."
        )


def _check(dataset: Any, asked: str, name: str) -> None:
    kind = _kind(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{asked}: {name} reads {kind}, an IterableDataset, whose samples have no numbers by which they could be "
            "taken again. Use a dataset with __getitem__ and __len__, or leave it out."
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{asked}: {name} reads {kind}, which has no length. Give it a __len__, or leave it out."
        )
    if has_state(dataset) or callable(getattr(dataset, "set_epoch", None)):
        method = "set_epoch" if callable(getattr(dataset, "set_epoch", None)) else "state_dict"
        raise ValueError(
            f"{asked}: {name} reads {kind}, which has {method}(): its samples may change between epochs, and held ones "
            "do not. Leave it out."
        )


def of_tensors(dataset: TensorDataset) -> Columns | None:
    """Return the tensors themselves where each sample has a row of each."""
    tensors = dataset.tensors
    try:
        kind: Kind = (tuple, None, tuple(kind_of(tensor[0]) for tensor in tensors))
    except (NoColumnsError, IndexError):
        return None
    if not tensors or any(tensor.device != tensors[0].device for tensor in tensors):
        return None
    return Columns(kind, tensors)


def _probe(dataset: Any, asked: str, name: str) -> list[Any]:
    """Read some samples twice.

    Raises:
        ValueError: they differ, or random numbers were drawn for them.

    """
    count = len(dataset)
    watch, samples = RngWatch(), []
    for index in sorted({0, count // 3, count // 2, count - 1} if count else ()):
        before = watch.state()
        one = dataset[index]
        kept = copy.deepcopy(one)
        other = dataset[index]
        drawn = watch.state() != before
        if drawn or not same(kept, other):
            raise random_samples(dataset, asked, name, index)
        samples.append(one)
    return samples


def random_samples(dataset: Any, asked: str, name: str, index: int | None = None) -> ValueError:
    """Return the error for samples that are not the same each time."""
    which = "a sample" if index is None else f"sample {index}"
    return ValueError(
        f"{asked}: {name} reads {_kind(dataset)}, and {which} is made with random numbers: held in memory it would be "
        "the same in every epoch. Draw them in the model or once the batch is made (on_after_batch_transfer), or leave "
        "it out; num_workers='auto' has samples made in parallel."
    )


def _read(
    dataset: Any, asked: str, name: str, loader: DataLoader[Any] | None, allocate: Allocate | None
) -> Columns | list[Any]:
    workers = 0 if loader is None else loader.num_workers
    options: dict[str, Any] = {}
    if loader is not None and workers:
        options = {
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
        }
    chunks: Any = DataLoader(
        _Chunks(dataset),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        **options,
    )
    filling = Filling(len(dataset), allocate)
    samples: list[Any] | None = None
    for number, (kind, chunk, drawn) in enumerate(chunks):
        if drawn:
            raise random_samples(dataset, asked, name)
        count = min(CHUNK, len(dataset) - number * CHUNK)
        if samples is None and filling.fits(kind):
            filling.add(kind, chunk, count)
            continue
        if samples is None:
            done = filling.columns() if filling.filled else None
            samples = [] if done is None else [done.sample(index) for index in range(len(done))]
        samples += pickle.loads(chunk) if kind is None else _samples_of(kind, chunk, count)
    return filling.columns() if samples is None and filling.filled else samples or []


class _Chunks(Dataset[Any]):
    """Chunks of a dataset: (kind or None, the samples joined or pickled, whether random numbers were drawn)."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._watch = RngWatch()

    def __len__(self) -> int:
        return -(-len(self._dataset) // CHUNK)

    def __getitem__(self, number: int) -> tuple[Kind | None, Any, bool]:
        dataset = self._dataset
        indices = list(range(number * CHUNK, min(len(dataset), (number + 1) * CHUNK)))
        before = self._watch.state()
        if callable(getattr(dataset, "__getitems__", None)):
            samples = dataset.__getitems__(indices)
        else:
            samples = [dataset[index] for index in indices]
        drawn = self._watch.state() != before
        try:
            kinds = [kind_of(sample) for sample in samples]
        except NoColumnsError:
            return None, pickled(samples), drawn
        if any(kind != kinds[0] for kind in kinds):
            return None, pickled(samples), drawn
        return kinds[0], default_collate(samples), drawn


def _as_it_is(samples: Any) -> Any:
    return samples


def _samples_of(kind: Kind, batch: Any, count: int) -> list[Any]:
    filling = Filling(count)
    filling.add(kind, batch, count)
    columns = filling.columns()
    return [columns.sample(index) for index in range(count)]


# -- samples as bytes: tensors would each take a file descriptor, or 100 us


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        if obj.is_quantized or obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        # Not .numpy(), which is missing where numpy is.
        words = obj.contiguous().view(-1).view(torch.uint8) if obj.numel() else obj
        data = ctypes.string_at(words.data_ptr(), words.numel()) if obj.numel() else b""
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def pickled(samples: Any, *, identical: bool = False) -> bytes:
    """Return samples as bytes that ``pickle.loads`` reads; tensors cost little more than their memory.

    Args:
        samples: what to pickle.
        identical: equal samples give equal bytes in every process, also where parts of them are one object.

    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.fast = identical
    pickler.dump(samples)
    return buffer.getvalue()


def fresh(sample: Any) -> Any:
    """Return a sample in memory of its own: what is done to it in place stays out of what is held."""
    return tree.map_tensors(Tensor.clone, sample) if _is_only_tensors(sample) else copy.deepcopy(sample)


def _is_only_tensors(sample: Any) -> bool:
    kind = type(sample)
    if kind in (Tensor, int, float, bool, str, bytes, type(None)):
        return True
    if kind is dict:
        # A dict without tensors would come back as the same object.
        return any(isinstance(v, Tensor) for v in sample.values()) and all(
            map(_is_only_tensors, sample.values())
        )
    if kind is tuple:
        return all(map(_is_only_tensors, sample))
    return False


def same(one: Any, other: Any) -> bool:
    """Say whether two samples are equal: types, shapes and every bit that counts; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(torch.equal(one, other)) or pickled(one) == pickled(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes") and hasattr(one, "shape"):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    try:
        return bool(one == other) or pickled(one) == pickled(other)
    except Exception:
        return False


# -- sizes


def size_of(sample: Any) -> int:
    """Return about how many bytes a sample takes."""
    if isinstance(sample, Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, dict):
        return sum(map(size_of, sample.values()))
    if isinstance(sample, (list, tuple)):
        return sum(map(size_of, sample)) + 8 * len(sample)
    size: int = getattr(sample, "nbytes", 0)
    if isinstance(size, int) and size:
        return size
    if hasattr(sample, "tobytes") and not isinstance(sample, int):
        return len(sample.tobytes())
    return sys.getsizeof(sample)


def available_bytes() -> int:
    """Return how much memory this process may still take: what the machine, and the container, have left."""
    free = sys.maxsize
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        free = pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages > 0 else free
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


def gigabytes(size_bytes: int) -> str:
    """Return a size as people read it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} bytes"


def _kind(dataset: Any) -> str:
    return type(dataset).__name__
