"""A whole dataset, read once: into columns where its samples fit, else one by one."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hasten._lib import tree
from hasten.data.memory.columns import Allocate, Columns, Filling, Kind, NoColumnsError, kind_of
from hasten.data.memory.dataset_parts import own_generators, own_generators_kept
from hasten.data.resume.indices import has_state
from hasten.data.resume.workers import RngWatch
from hasten.seed import isolate_rng

# Samples read at once: large enough that joining them costs little, small enough for a queue between processes.
CHUNK = 256
# What is left of the machine's memory for everything else.
SHARE = 0.8
# Samples read a second time at least: with 500, of samples of which one in a hundred is another each time, one is found
# in 99 of 100 datasets. As long as it takes a tenth of the first reading, or half a second, all others are, too.
_READ_AGAIN = 512
_SHARE_READ_AGAIN = 0.1
_SECONDS_READ_AGAIN = 0.5
_CHUNK_READ_AGAIN = 64
_MOST_READ_AGAIN = 1 << 16


def read(
    dataset: Any,
    *,
    asked: str,
    name: str,
    loader: DataLoader[Any] | None = None,
    allocate: Allocate | None = None,
) -> Columns | list[Any]:
    """Return all samples of a dataset, as columns if they are alike, else as a list.

    Random states, the dataset's own too, and the loader stay as they are; a loader with workers has them read. Random
    samples are found by the generators that move while they are read, those of the dataset, its transforms and its code
    among them, and by reading samples again: all of a small dataset, 512 and more of a large one.

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
    with isolate_rng(include_cuda=False), own_generators_kept(dataset):
        if loader is None or not loader.num_workers or loader.worker_init_fn is None:
            samples = _probe(dataset, asked, name)
            count = len(dataset)
            size_bytes = count * sum(map(size_of, samples)) // max(1, len(samples))
            check_size(size_bytes, count, asked, name, dataset)
        # Else only its workers may be able to read it, and their first samples tell the size.
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
    watch, samples = _Watch(dataset), []
    for index in sorted({0, count // 3, count // 2, count - 1} if count else ()):
        one = dataset[index]
        kept = copy.deepcopy(one)
        other = dataset[index]
        if watch.drawn() or not same(kept, other):
            raise random_samples(dataset, asked, name, index)
        samples.append(one)
    return samples


class _Watch:
    """Says whether random numbers were drawn since the last look: from the program's generators or the dataset's."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._rng = dataset, RngWatch()
        self._last = self._rng.state()
        self._own = own_generators(dataset)

    def drawn(self) -> bool:
        """Return whether numbers were drawn since this was asked last."""
        before, self._last = self._last, self._rng.state()
        # Found each time: some datasets make their generator with the first sample.
        own, self._own = self._own, own_generators(self._dataset)
        return before != self._last or any(own.get(key) != state for key, state in self._own.items())


def is_random(dataset: Any, read: Callable[[], Any]) -> bool:
    """Return whether what is read from a dataset is random: generators move for it, or it is another the second time.

    Args:
        dataset: with ``__getitem__``; its own generators and those of the program are watched.
        read: reads from it.

    """
    watch = _Watch(dataset)
    kept = copy.deepcopy(read())
    return watch.drawn() or not same(kept, read())


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
    count = len(dataset)
    first = [range(start, min(count, start + CHUNK)) for start in range(0, count, CHUNK)]
    again = _read_again(count)
    chunks: Any = iter(
        DataLoader(
            _Chunks(dataset, first + again),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            **options,
        )
    )
    began = time.perf_counter()
    filling = Filling(count, allocate)
    samples: list[Any] | None = None
    for number, (indices, (kind, chunk, drawn)) in enumerate(zip(first, chunks, strict=False)):
        if drawn:
            raise random_samples(dataset, asked, name)
        if not number and options.get("worker_init_fn") is not None:
            read_now = _samples(kind, chunk, len(indices))
            check_size(count * sum(map(size_of, read_now)) // len(indices), count, asked, name, dataset)
        if samples is None and filling.fits(kind):
            filling.add(kind, chunk, len(indices))
            continue
        if samples is None:
            done = filling.columns() if filling.filled else None
            samples = [] if done is None else [done.sample(index) for index in range(len(done))]
        samples += _samples(kind, chunk, len(indices))
    read = filling.columns() if samples is None and filling.filled else samples or []
    now = time.perf_counter()
    until = now + max(_SECONDS_READ_AGAIN, _SHARE_READ_AGAIN * (now - began))
    compared = 0
    for indices, (kind, chunk, drawn) in zip(again, chunks, strict=False):
        for index, other in zip(indices, _samples(kind, chunk, len(indices)), strict=True):
            if drawn or not same(read.sample(index) if isinstance(read, Columns) else read[index], other):
                raise random_samples(dataset, asked, name, index)
        compared += len(indices)
        if compared >= _READ_AGAIN and time.perf_counter() > until:
            break
    return read


def _read_again(count: int) -> list[range]:
    """Return the samples to read a second time, in chunks: the first 512 spread evenly, the others after them."""
    step = max(1, count // _READ_AGAIN)
    found: list[range] = []
    for start in range(min(step, _MOST_READ_AGAIN // _READ_AGAIN)):
        every = range(start, count, step)
        found += [
            every[place : place + _CHUNK_READ_AGAIN] for place in range(0, len(every), _CHUNK_READ_AGAIN)
        ]
    return found


class _Chunks(Dataset[Any]):
    """Chunks of a dataset: (kind or None, the samples joined or pickled, whether random numbers were drawn).

    All else is that of the dataset, so that a ``worker_init_fn`` finds it as it expects it.

    Args:
        dataset: the user's.
        chunks: the numbers of the samples of each.

    """

    def __init__(self, dataset: Any, chunks: Sequence[range]) -> None:
        # Not self.x = ...: that is for the dataset.
        self.__dict__.update(_dataset=dataset, _chunks=chunks, _watch=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "_chunks", "_watch"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> tuple[Kind | None, Any, bool]:
        dataset = self._dataset
        indices = list(self._chunks[number])
        if self._watch is None:
            # In the process that reads: there the generators are, some of which worker_init_fn may have made.
            self.__dict__["_watch"] = _Watch(dataset)
        watch = self._watch
        watch.drawn()
        if callable(getattr(dataset, "__getitems__", None)):
            samples = dataset.__getitems__(indices)
        else:
            samples = [dataset[index] for index in indices]
        drawn = watch.drawn()
        try:
            kinds = [kind_of(sample) for sample in samples]
        except NoColumnsError:
            return None, pickled(samples), drawn
        if any(kind != kinds[0] for kind in kinds):
            return None, pickled(samples), drawn
        return kinds[0], default_collate(samples), drawn


def _as_it_is(samples: Any) -> Any:
    return samples


def _samples(kind: Kind | None, batch: Any, count: int) -> list[Any]:
    if kind is None:
        found: list[Any] = pickle.loads(batch)
        return found
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
    """Return whether two samples are equal: types, shapes and every bit that counts; NaN equals NaN."""
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
