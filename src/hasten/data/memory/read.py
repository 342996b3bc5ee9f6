"""A whole dataset, read once: into one tensor for each field if its samples fit, else one by one."""

from __future__ import annotations

import array
import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hasten._lib import tree
from hasten._lib.device import copies_in_background, is_host
from hasten._lib.errors import make_error
from hasten._lib.optional import installed
from hasten.data.loader_parts import has_state, samples_at, unchanged
from hasten.data.memory.dataset_parts import own_generators, preserve
from hasten.machine.host import available_memory_bytes, bytes_text, total_memory_bytes
from hasten.seed import collect_rng_state, isolate_rng

if TYPE_CHECKING:
    from hasten.types import Batch

# ("tensor", shape, dtype) | ("array", shape, dtype) | ("scalar", dtype) | ("plain", type) | ("text", type)
# | (dict or a sequence type, keys or None, kinds of the fields)
Kind = tuple[Any, ...]
# A function that returns memory for a column of a shape and a dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]

_T = TypeVar("_T")

# Samples read at once: large enough that joining them costs little, small enough for a queue between processes.
CHUNK = 256
# The share of the free memory to use; the rest is for everything else.
SHARE = 0.8
# Samples read a second time: at least so many, and one of so many. With 500, a dataset in which one sample of a hundred
# is random is detected in 99 of 100 cases.
_READ_AGAIN, _ONE_OF = 512, 10


class NoColumnsError(ValueError):
    """The samples do not fit into whole tensors; the message says why."""


def kind_of(sample: object) -> Kind:
    """Return the structure, shapes and types that all samples must have for one tensor to hold each field."""
    kind, value = type(sample), cast(Any, sample)
    if kind is Tensor:
        if value.layout != torch.strided or value.is_quantized or value.requires_grad:
            raise NoColumnsError("a tensor is sparse, quantized or requires a gradient")
        return ("tensor", tuple(value.shape), value.dtype)
    if kind in (int, float, bool):
        if kind is int and value.bit_length() > 63:
            raise NoColumnsError("a whole number needs more than 64 bits")
        return ("plain", kind)
    if kind in (str, bytes):
        return ("text", kind)
    if kind in (dict, tuple, list) and not value:
        raise NoColumnsError(f"a {kind.__name__} has no fields")
    if kind is dict:
        return (dict, tuple(value), tuple(map(kind_of, value.values())))
    if kind in (tuple, list) or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return (kind, None, tuple(map(kind_of, value)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in "biufc":
        return ("array", value.shape, value.dtype.str)
    if numpy is not None and isinstance(sample, (numpy.number, numpy.bool_)):
        return ("scalar", value.dtype.str)
    raise NoColumnsError(f"a field is a {kind.__qualname__}")


def _leaves_of(batch: Any, kind: Kind) -> list[Any]:
    """Return the fields of a collated batch of samples of a kind, in order."""
    if isinstance(kind[0], str):
        return [batch]
    parts = [batch[key] for key in kind[1]] if kind[0] is dict else batch
    return [leaf for part, inner in zip(parts, kind[2], strict=True) for leaf in _leaves_of(part, inner)]


class Columns:
    """Samples as one tensor (or list of texts) for each field."""

    def __init__(self, kind: Kind, leaves: Sequence[Any]) -> None:
        self.kind = kind
        self.leaves = list(leaves)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._build = _builder(kind, iter(self.leaves), _batch_field, collated=True)
        # A copy of one sample, as the dataset gives it.
        self.sample: Callable[[int], Any] = _builder(kind, iter(self.leaves), _sample_field, collated=False)

    def __len__(self) -> int:
        return len(self.leaves[0])

    def batch(self, indices: Iterable[int]) -> Batch:
        """Return what ``default_collate`` makes of these samples, bit for bit."""
        numbers = list(indices)
        # torch.tensor reads number by number, which would take as long as everything else.
        index = torch.frombuffer(array.array("q", numbers or [0]), dtype=torch.int64)[: len(numbers)]
        if copies_in_background(self._device):
            # Copied from pinned memory, so that the host does not wait.
            index = index.pin_memory().to(self._device, non_blocking=True)
        elif not is_host(self._device):
            index = index.to(self._device)
        return self._build((index, numbers))

    def samples(self) -> list[Any]:
        """Return copies of all samples."""
        return [self.sample(index) for index in range(len(self))]

    @property
    def size_bytes(self) -> int:
        """Memory of the tensors and texts."""
        return sum(
            leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else sum(map(sys.getsizeof, leaf))
            for leaf in self.leaves
        )

    def to(self, device: torch.device) -> Columns:
        """Return the same samples with their tensors on ``device``."""
        return Columns(self.kind, [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])


def _builder(
    kind: Kind, leaves: Iterator[Any], field: Callable[..., Any], *, collated: bool, texts_in: type = list
) -> Callable[[Any], Any]:
    """Return a function that builds a sample, or a batch, from what ``field`` builds of each column."""
    first = kind[0]
    if isinstance(first, str):
        build: Callable[[Any], Any] = field(kind, next(leaves), texts_in)
        return build
    # Texts of a field of a tuple come as a tuple from default_collate, others as a list.
    inside = list if first is dict else tuple
    inner = [_builder(each, leaves, field, collated=collated, texts_in=inside) for each in kind[2]]
    if first is dict:
        named = list(zip(kind[1], inner, strict=True))
        return lambda at: {key: build(at) for key, build in named}
    if first is list or (first is tuple and collated):
        # default_collate gives a list for a tuple, too.
        return lambda at: [build(at) for build in inner]
    if first is tuple:
        return lambda at: tuple([build(at) for build in inner])
    return lambda at: first(*[build(at) for build in inner])


def _batch_field(kind: Kind, column: Any, texts_in: type) -> Callable[[tuple[Tensor, list[int]]], Any]:
    if kind[0] == "text":
        return lambda at: texts_in([column[number] for number in at[1]])
    select = column.index_select
    return lambda at: select(0, at[0])


def _sample_field(kind: Kind, column: Any, texts_in: type) -> Callable[[int], Any]:
    name = kind[0]
    if name == "text":
        return lambda index: column[index]
    if name == "tensor":
        return lambda index: column[index].clone()
    if name == "plain":
        return lambda index: column[index].item()
    if name == "array":
        return lambda index: column[index].to("cpu", copy=True).numpy().astype(kind[2], copy=False)
    return lambda index: column[index].cpu().numpy().astype(kind[1])[()]


class DatasetReader:
    """Reads all samples of a dataset."""

    def __init__(self, dataset: object, argument: str, name: str) -> None:
        self.dataset: Any = dataset
        self.argument, self.name, self.kind = argument, name, type(dataset).__name__

    def read(self, loader: DataLoader[Any] | None = None, allocate: Allocate | None = None) -> Columns | list[Any]:
        """Return all samples, as columns if they are alike, else as a list.

        Random states, the dataset's own too, do not change. Random samples are detected by generators that advance
        while samples are read, including generators of the dataset and its transforms, and by reading samples again:
        all of a small dataset, at least 512 and one in ten of a large one.

        The workers of ``loader`` read, if it has some, else this process. ``allocate`` gives the memory of the columns.

        Raises:
            TypeError: the dataset has no samples by number.
            ValueError: they are random, change between epochs, or are too large together.

        """
        self._check()
        dataset = self.dataset
        if type(dataset) is TensorDataset and allocate is None:
            columns = of_tensors(dataset)
            if columns is not None:
                return columns
        with isolate_rng(include_cuda=False), preserve(dataset):
            if loader is None or not loader.num_workers or loader.worker_init_fn is None:
                self._probe()
            # Otherwise only its workers may be able to read the dataset, and their first samples show the size.
            return self._read(loader if loader is not None and loader.num_workers else None, allocate)

    @property
    def _named(self) -> str:
        """The name of the argument, without its value."""
        return self.argument.partition("=")[0].rpartition("(")[2]

    def check_size(self, size_bytes: int) -> None:
        """Check that there is memory for so many bytes."""
        limit = int(SHARE * available_bytes())
        if size_bytes > limit:
            raise make_error(
                ValueError,
                f"{self.argument}: the {len(self.dataset)} samples of {self.name} ({self.kind}) need about "
                f"{bytes_text(size_bytes)}, and {bytes_text(limit)} may be used.",
                fix="Leave it out; num_workers='auto' reads ahead in other processes.",
                argument=self._named,
            )

    def _check(self) -> None:
        dataset, start = self.dataset, f"{self.argument}: {self.name} reads {self.kind}"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            what = f"{start}, an IterableDataset, whose samples have no numbers."
            fix = "Use a dataset with __getitem__ and __len__, or leave it out."
            raise make_error(TypeError, what, fix=fix, argument=self._named)
        if not hasattr(dataset, "__len__") or getattr(dataset, "ndim", None) == 0:
            what = f"{start}, which has no length."
            raise make_error(TypeError, what, fix="Give it a __len__, or leave it out.", argument=self._named)
        if type(dataset) is dict and any(index not in dataset for index in (0, len(dataset) - 1)):
            what = f"{start}, whose samples have no numbers from 0."
            raise make_error(TypeError, what, fix="Use a list of its values, or leave it out.", argument=self._named)
        if callable(getattr(dataset, "set_epoch", None)) or has_state(dataset):
            method = "set_epoch" if hasattr(dataset, "set_epoch") else "state_dict"
            raise make_error(
                ValueError,
                f"{start}, which has {method}(): its samples may change between epochs, and samples in memory do not.",
                fix="Leave it out.",
                argument=self._named,
            )

    def _probe(self) -> None:
        """Read some samples twice: are they random, and how large are all of them together?"""
        dataset, count = self.dataset, len(self.dataset)
        watch, sizes = _RandomWatch(dataset), []
        for index in sorted({0, count // 3, count // 2, count - 1} if count else ()):
            sample = dataset[index]
            try:
                kept = copy.deepcopy(sample)
            except TypeError as error:
                what = f"{self.argument}: {self.name} reads {self.kind}, and sample {index} cannot be copied: {error}."
                raise make_error(TypeError, what, fix="Leave it out.", argument=self._named) from error
            again = dataset[index]
            if watch.drawn() or not same(kept, again):
                raise self._random_samples(f"sample {index}")
            sizes.append(size_of(sample))
        self.check_size(count * sum(sizes) // max(1, len(sizes)))

    def _random_samples(self, which: str = "a sample") -> ValueError:
        return make_error(
            ValueError,
            f"{self.argument}: {self.name} reads {self.kind}, and {which} is made with random numbers: in memory it "
            "would be the same in every epoch.",
            fix="Draw them in on_after_batch_transfer, or use num_workers='auto'.",
            argument=self._named,
        )

    def _read(self, loader: DataLoader[Any] | None, allocate: Allocate | None) -> Columns | list[Any]:
        dataset, count = self.dataset, len(self.dataset)
        first = [range(start, min(count, start + CHUNK)) for start in range(0, count, CHUNK)]
        every = range(0, count, max(1, min(count // _READ_AGAIN, _ONE_OF)))
        again = [every[start : start + CHUNK] for start in range(0, len(every), CHUNK)]
        names = ("num_workers", "multiprocessing_context", "worker_init_fn")
        options = {} if loader is None else {name: getattr(loader, name) for name in names}
        # collate_fn: without one, torch would convert what is in the chunks.
        chunks: Any = iter(
            DataLoader(_Chunks(dataset, first + again), batch_size=None, collate_fn=unchanged, **options)
        )
        gathered = _Gathered(count, allocate)
        for indices, (kind, chunk, drawn) in zip(first, chunks, strict=False):
            if drawn:
                raise self._random_samples()
            if not indices.start and options.get("worker_init_fn") is not None:
                sizes = [size_of(sample) for sample in _samples(kind, chunk)]
                self.check_size(count * sum(sizes) // len(indices))
            gathered.add(indices, kind, chunk)
        read = gathered.samples()
        for indices, (kind, chunk, drawn) in zip(again, chunks, strict=False):
            for index, other in zip(indices, _samples(kind, chunk), strict=True):
                if drawn or not same(read.sample(index) if isinstance(read, Columns) else read[index], other):
                    raise self._random_samples(f"sample {index}")
        return read


class _Gathered:
    """The ``count`` samples of a dataset in order: in columns while they are of one kind, and then one by one."""

    def __init__(self, count: int, allocate: Allocate | None) -> None:
        self._count, self._allocate = count, allocate
        self._columns: Columns | None = None
        self._single: list[Any] | None = None

    def add(self, indices: range, kind: Kind | None, chunk: Any) -> None:
        """Add a chunk of samples; their kind is None if they are not of one kind."""
        if self._single is None and kind is not None and (self._columns is None or self._columns.kind == kind):
            self._add_to_columns(indices, kind, _leaves_of(chunk, kind))
            return
        if self._single is None:
            columns = self._columns
            self._single = [] if columns is None else [columns.sample(index) for index in range(indices.start)]
        self._single += _samples(kind, chunk)

    def _add_to_columns(self, indices: range, kind: Kind, leaves: Sequence[Any]) -> None:
        if self._columns is None:
            self._columns = Columns(kind, [_empty_column(leaf, self._count, self._allocate) for leaf in leaves])
        for column, leaf in zip(self._columns.leaves, leaves, strict=True):
            if isinstance(column, Tensor):
                column[indices.start : indices.stop].copy_(leaf)
            else:
                column.extend(leaf)

    def samples(self) -> Columns | list[Any]:
        if self._single is None and self._columns is not None:
            return self._columns
        return self._single or []


def _empty_column(leaf: Any, count: int, allocate: Allocate | None) -> Tensor | list[Any]:
    """Return room for a field of all samples, of which ``leaf`` is a part."""
    if not isinstance(leaf, Tensor):
        return []
    shape = (count, *leaf.shape[1:])
    return torch.empty(shape, dtype=leaf.dtype) if allocate is None else allocate(shape, leaf.dtype)


def of_tensors(dataset: TensorDataset) -> Columns | None:
    """Return the tensors themselves if each sample has a row of each."""
    tensors = dataset.tensors
    try:
        kind: Kind = (tuple, None, tuple(kind_of(tensor[0]) for tensor in tensors))
    except (NoColumnsError, IndexError):
        return None
    if not tensors or any(tensor.device != tensors[0].device for tensor in tensors):
        return None
    return Columns(kind, tensors)


def is_random(dataset: object, read: Callable[[], object]) -> bool:
    """Return whether samples of a dataset are random: generators move for them, or they differ the second time."""
    watch = _RandomWatch(dataset)
    kept = copy.deepcopy(read())
    return watch.drawn() or not same(kept, read())


class _RandomWatch:
    """Detects random numbers drawn from the program's or the dataset's generators."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._last = collect_rng_state(cuda=False)
        self._own = own_generators(dataset)

    def drawn(self) -> bool:
        """Return whether numbers were drawn since the last call."""
        before, self._last = self._last, collect_rng_state(cuda=False)
        # Searched each time: some datasets make their generator with the first sample.
        own, self._own = self._own, own_generators(self._dataset)
        return before != self._last or any(own.get(key) != state for key, state in self._own.items())


class DatasetProxy(Dataset[Any]):
    """Replaces the samples of a dataset; attributes are read from the original dataset, and set there."""

    _hasten_dataset: Any

    def __init__(self, dataset: object, **own: object) -> None:
        # Not self.x = ...: that is for the dataset. Nor names that a dataset may have.
        self.__dict__.update(_hasten_dataset=dataset, **own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_hasten_")):
            raise AttributeError(name)
        return getattr(self._hasten_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._hasten_dataset, name, value)


class _Chunks(DatasetProxy):
    """Chunks of a dataset: (kind or None, the samples joined or pickled, whether random numbers were drawn)."""

    def __init__(self, dataset: Any, chunks: Sequence[range]) -> None:
        super().__init__(dataset, _hasten_chunks=chunks, _hasten_watch=None)

    def __len__(self) -> int:
        return len(self._hasten_chunks)

    def __getitem__(self, number: int) -> tuple[Kind | None, Any, bool]:
        dataset = self._hasten_dataset
        indices = list(self._hasten_chunks[number])
        if self._hasten_watch is None:
            # Made by the process that reads: the generators are there, and worker_init_fn may have made some.
            self.__dict__["_hasten_watch"] = _RandomWatch(dataset)
        watch = self._hasten_watch
        watch.drawn()
        samples = samples_at(dataset, indices)
        drawn = watch.drawn()
        kinds: set[Kind] = set()
        with suppress(NoColumnsError):
            kinds.update(map(kind_of, samples))
            if len(kinds) == 1:
                return kinds.pop(), default_collate(samples), drawn
        return None, pickled(samples), drawn


def _samples(kind: Kind | None, chunk: Any) -> list[Any]:
    if kind is not None:
        return Columns(kind, _leaves_of(chunk, kind)).samples()
    return list(pickle.loads(chunk))


# -- samples as bytes: sent between processes, tensors would each take a file descriptor or 100 us


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is Tensor and obj.is_cpu and obj.layout == torch.strided
        if not is_plain or obj.is_quantized or obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        return _tensor, (bytes_of(obj), obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the memory of a tensor on the CPU."""
    if not tensor.numel():
        return b""
    words = tree.as_bytes(tensor)
    return words.numpy().tobytes() if installed("numpy") else bytes(words.tolist())


def pickled(samples: object, *, identical: bool = False) -> bytes:
    """Return samples as bytes that ``pickle.loads`` reads; tensors cost little more than their memory."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.fast = identical
    pickler.dump(samples)
    return buffer.getvalue()


def fresh(sample: _T) -> _T:
    """Return a copy of a sample: changing it in place does not change the one in memory."""
    return tree.map_tensors(Tensor.clone, sample) if _is_only_tensors(sample) else copy.deepcopy(sample)


def _is_only_tensors(sample: Any) -> bool:
    kind = type(sample)
    if kind in (Tensor, int, float, bool, str, bytes, type(None)):
        return True
    if kind is dict:
        # map_tensors would return a dict without tensors itself.
        values = sample.values()
        return any(isinstance(value, Tensor) for value in values) and all(map(_is_only_tensors, values))
    return kind is tuple and all(map(_is_only_tensors, sample))


def same(one: object, other: object) -> bool:
    """Return whether two samples are equal: types, shapes and every bit that counts; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and (bool(torch.equal(one, other)) or pickled(one) == pickled(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes") and hasattr(one, "shape"):
        array: Any = other
        return bool(one.shape == array.shape and one.tobytes() == array.tobytes())
    try:
        return bool(one == other) or pickled(one) == pickled(other)
    except Exception:
        return False


def size_of(sample: object) -> int:
    """Return about how many bytes a sample takes."""
    return sum(map(_size_of_leaf, tree.leaves(sample)))


def _size_of_leaf(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, int) or not hasattr(leaf, "tobytes"):
        return sys.getsizeof(leaf)
    size: int = getattr(leaf, "nbytes", 0) or len(leaf.tobytes())  # For instance of an array or an image.
    return size


def available_bytes() -> int:
    """Return how much memory this process may still take; half of the machine's if that is not known."""
    available = available_memory_bytes()
    return (total_memory_bytes() or sys.maxsize) // 2 if available is None else available
