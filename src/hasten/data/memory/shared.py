"""``preload``: a dataset read once on each machine, into memory that all processes there share.

The memory belongs to files without a name (memfd). Another process maps them through ``/proc/PID/fd`` of the process
that made them; the kernel frees the memory when the last process that has mapped it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_info
from hasten.data.memory.dataset_parts import comparable
from hasten.data.memory.read import Columns, DatasetReader, Kind, bytes_of, kind_of, of_tensors, pickled
from hasten.extend.origin import full_name
from hasten.machine.cluster import name_of_job
from hasten.machine.host import bytes_text
from hasten.seed import isolate_rng

with contextlib.suppress(ImportError):  # Windows, where preload() is refused.
    import fcntl

_of_this_process: weakref.WeakValueDictionary[str, PreloadedDataset] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class SharedFile:
    """A tensor in a file without a name that a process has open."""

    pid: int
    # The start time by the kernel's clock: a later process may get the same number.
    started: int | None
    descriptor: int
    shape: list[int]
    dtype: str

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: torch.dtype) -> SharedFile:
        """Make a file, which is closed with the object returned."""
        descriptor = os.memfd_create("hasten-preload", os.MFD_CLOEXEC)
        os.truncate(descriptor, max(1, torch.Size(shape).numel() * dtype.itemsize))
        pid = os.getpid()
        file = cls(pid, _start_time(pid), descriptor, list(shape), str(dtype).removeprefix("torch."))
        weakref.finalize(file, os.close, descriptor)
        return file

    def tensor(self) -> Tensor:
        """Return the tensor, in the memory of the file."""
        if not self.is_there():
            raise FileNotFoundError(f"process {self.pid}, which held the data, is gone")
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        return torch.from_file(path, shared=True, size=count, dtype=dtype).view(self.shape)

    def is_there(self) -> bool:
        """Return whether the process that has the file open is alive."""
        return self.started is not None and _start_time(self.pid) == self.started


class PreloadedDataset(Dataset[Any]):
    """A dataset's samples in shared memory; made by :func:`preload`.

    Pickled, as when processes are spawned, it takes a few bytes: the other process maps the same memory. Without a
    ``kind``, the tensors are the bytes of the pickled samples and where each of them ends.
    """

    _hasten_preloaded = True

    # What the dataset looked like before it was read.
    _look = ""

    def __init__(self, dataset: object, kind: Kind | None, files: list[SharedFile]) -> None:
        self.dataset = dataset
        self._kind, self._files = kind, files
        self._tensors = [file.tensor() for file in files]
        self.columns = None if kind is None else Columns(kind, self._tensors)

    def __len__(self) -> int:
        return len(self._tensors[-1])

    def __getitem__(self, index: int) -> Any:
        number = index if index >= 0 else index + len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self.columns is not None:
            return self.columns.sample(number)
        data, ends = self._tensors
        return pickle.loads(bytes_of(data[int(ends[number - 1]) if number else 0 : int(ends[number])]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("dataset", "columns"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __reduce__(self) -> Any:
        return PreloadedDataset, (self.dataset, self._kind, self._files)


def preload(dataset: object, *, name: str | None = None) -> PreloadedDataset:
    """Return a dataset with the same samples, in memory that all processes of a machine share.

    The first process that comes here reads the data, the others wait and then see the same memory; nothing is copied,
    whether processes are forked, spawned, or started by ``torchrun``, SLURM or the Trainer. There is nothing to clean
    up: the memory has no name, and the kernel frees it when the last process ends, also when it is killed. Samples
    come out as copies.

    Call it in every process, with the same dataset. With ``Trainer(resident=True)`` batches are made by indexing the
    shared tensors.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; its samples must be the same every time they are read.
        name: distinguishes datasets of a program that differ only in their code, or inside large tensors and lists.

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
    if isinstance(dataset, PreloadedDataset):
        return dataset
    if not hasattr(os, "memfd_create"):
        raise make_error(
            RuntimeError,
            "hasten.data.preload() needs memfd_create, which Linux has.",
            fix="Use Trainer(resident=True) here, which holds the data in each process.",
        )
    data: Any = dataset
    shown = name or f"the dataset {type(dataset).__name__}"
    reader = DatasetReader(dataset, "preload", shown)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(data):
        reader.read()  # Raises if the dataset cannot be held for another reason.
        raise make_error(ValueError, f"preload: {shown} is empty.", argument="preload")
    look = _look(data, name)
    key = _digest(f"{look} {comparable(data)}".encode())
    held = _held(dataset, look, key)
    if held is not None:
        return held
    # The first process reads while the others wait for the lock. If it dies meanwhile, the next one reads.
    with _locked(_folder() / f"{name_of_job()}-{key}.json") as file:
        found = _content(file)
        if found is not None and found[0][0].pid != os.getpid():
            files, in_columns = found
            return PreloadedDataset(dataset, kind_of(data[0]) if in_columns else None, files)
        began = time.perf_counter()
        try:
            files, kind = _read(reader)
        except BaseException:
            os.unlink(file.name)
            raise
        file.seek(0)
        file.truncate()
        json.dump({"files": [asdict(each) for each in files], "in_columns": kind is not None}, file)
    made = _of_this_process[key] = PreloadedDataset(dataset, kind, files)
    made._look = look
    # Other processes cannot map its files once the dataset is gone.
    weakref.finalize(made, _forget, key, os.getpid())
    size = sum(tensor.nbytes for tensor in made._tensors)
    rank_zero_info(
        f"{shown}: {len(data)} samples are in shared memory, {bytes_text(size)} ({time.perf_counter() - began:.1f} s)."
    )
    return made


def _read(reader: DatasetReader) -> tuple[list[SharedFile], Kind | None]:
    """Read the dataset into new shared memory."""
    dataset = reader.dataset
    files: list[SharedFile] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        files.append(SharedFile.new(shape, dtype))
        return files[-1].tensor()

    def add(tensor: Tensor) -> None:
        empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    columns = of_tensors(dataset) if type(dataset) is TensorDataset else None
    if columns is not None:
        reader.check_size(columns.size_bytes)
        for leaf in columns.leaves:
            add(leaf)
        return files, columns.kind
    data = reader.read(allocate=empty)
    if isinstance(data, Columns) and all(isinstance(leaf, Tensor) for leaf in data.leaves):
        return files, data.kind
    parts = [pickled(sample) for sample in (data.samples() if isinstance(data, Columns) else data)]
    files.clear()
    add(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8))
    add(torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0))
    return files, None


def _held(dataset: object, look: str, key: str) -> PreloadedDataset | None:
    """Return what this process holds of a dataset: reading may have changed its key, such as by a cache."""
    same = (each for each in list(_of_this_process.values()) if each.dataset is dataset and each._look == look)
    return next(same, _of_this_process.get(key))


def _look(dataset: Any, name: str | None) -> str:
    """Return a hash of a dataset's type, length and first and last samples, the same in all processes."""
    # Parts of a split may have the same ends, and of long lists ``comparable`` reads some elements.
    chosen = list(dataset.indices) if isinstance(dataset, Subset) else None
    text = f"{full_name(type(dataset))} {len(dataset)} {name}"
    with isolate_rng(include_cuda=False):
        samples = pickled([chosen, dataset[0], dataset[len(dataset) - 1]], identical=True)
    return _digest(text.encode() + samples)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _start_time(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # After the program's name, which is in parentheses and may contain anything.
    return int(stat.rpartition(")")[2].split()[19])


# -- how the processes of a job find one another


def _content(file: TextIO) -> tuple[list[SharedFile], bool] | None:
    """Return what such a file says, the tensors and whether they are columns, if the process that wrote it is alive."""
    file.seek(0)
    # A killed process has left a file that cannot be read.
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        content = json.load(file)
        files = [SharedFile(**each) for each in content["files"]]
        if files[0].is_there():
            return files, content["in_columns"]
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Open a file for this process alone; the kernel releases the lock when the process dies."""
    while True:
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have removed it meanwhile: a lock on that file excludes no process.
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                continue
            if is_current:
                yield file
                return


def _forget(key: str, pid: int) -> None:
    """Remove the file for other processes, in the process that made it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            (_folder() / f"{name_of_job()}-{key}.json").unlink()


def _folder() -> Path:
    """Return a folder of this user alone, without what dead processes left there."""
    folder = Path(tempfile.gettempdir()) / f"hasten-preload-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise make_error(RuntimeError, f"{folder} belongs to another user.", fix="Set TMPDIR to your own folder.")
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            # A locked file is in use.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _content(file) is None:
                path.unlink()
    return folder
