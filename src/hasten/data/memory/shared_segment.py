"""Memory that several processes of a machine see, and that is gone when the last of them is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hasten.machine.job import name_of_job

_ALIGNED = 64


@dataclass(frozen=True)
class Handle:
    """Where the memory is: a file without a name that a process holds open.

    Args:
        pid: the process.
        started: when it started, by the kernel's clock: another process may get its number.
        descriptor: the number of the open file there.
        size_bytes: of the memory.

    """

    pid: int
    started: int
    descriptor: int
    size_bytes: int


class SharedMemory:
    """Memory for tensors, shared between processes without a name that could be left behind.

    The kernel frees it when the last process that has it ends, however it ends.

    Args:
        size_bytes: how much; for new memory.
        handle: of another process's memory, to attach to it.

    Raises:
        RuntimeError: the operating system has no such memory.
        OSError: the process of the handle is gone.

    """

    def __init__(self, size_bytes: int = 0, *, handle: Handle | None = None) -> None:
        if handle is None:
            if not hasattr(os, "memfd_create"):
                raise RuntimeError(
                    "hasten.data.preload() needs memfd_create, which Linux has. Use Trainer(resident=True) here, which "
                    "holds the data in each process."
                )
            self._descriptor = os.memfd_create("hasten-preload", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            os.truncate(self._descriptor, max(1, size_bytes))
            self._map = mmap.mmap(self._descriptor, max(1, size_bytes))
            self.handle = Handle(os.getpid(), _started(os.getpid()), self._descriptor, size_bytes)
        else:
            if _started(handle.pid) != handle.started:
                raise FileNotFoundError(f"process {handle.pid}, which held the data, is gone")
            with open(f"/proc/{handle.pid}/fd/{handle.descriptor}", "r+b") as file:
                self._map = mmap.mmap(file.fileno(), max(1, handle.size_bytes))
            self.handle = handle

    def tensor(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that begins at byte ``place``."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place).view(shape)


def needed_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return what a tensor takes, rounded up such that the next one begins at a good place."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _started(pid: int) -> int:
    """Return when a process started, in the kernel's ticks.

    Raises:
        FileNotFoundError: there is no such process.

    """
    # The name, in parentheses, may hold anything.
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    return int(after_name.split()[19])


# -- how the processes of a job find one another


def in_one_process(key: str, make: Callable[[], tuple[Handle, Any]]) -> tuple[Handle, Any] | None:
    """Have one process of this job on this machine make something; return what it left for the others.

    Whoever comes first makes it while the others wait. When he dies in the middle the next one does.

    Args:
        key: names it within the job.
        make: returns the handle and a description, as plain data.

    Returns:
        what another process made; None in the process that made it.

    """
    with _locked(_folder() / f"{name_of_job()}-{key}.json") as file:
        file.seek(0)
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            found = json.load(file)
            handle = Handle(**found["handle"])
            if _started(handle.pid) == handle.started and handle.pid != os.getpid():
                return handle, found["about"]
        try:
            handle, about = make()
        except BaseException:
            os.unlink(file.name)
            raise
        file.seek(0)
        file.truncate()
        json.dump({"handle": vars(handle), "about": about}, file)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Open a file for this process alone; the kernel gives the lock back when the process dies."""
    while True:
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Somebody may have removed it while this process waited: a lock on that file keeps nobody away.
            try:
                here = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                continue
            if here:
                yield file
                return


def forget(key: str, pid: int) -> None:
    """Remove what ``in_one_process`` left for the others, in the process that made it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            (_folder() / f"{name_of_job()}-{key}.json").unlink()


def _folder() -> Path:
    """Return a folder of this user's alone, without what dead processes left there.

    Raises:
        RuntimeError: somebody else made it.

    """
    folder = Path(tempfile.gettempdir()) / f"hasten-preload-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else. Set TMPDIR to a folder of your own.")
    for path in folder.glob("*.json"):
        _remove_if_left_behind(path)
    return folder


def _remove_if_left_behind(path: Path) -> None:
    """Remove what a dead process wrote, unless somebody is just using the file."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without its lock nobody writes: a file that cannot be read is what a killed process left of it.
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            handle = json.load(file)["handle"]
            if _started(handle["pid"]) == handle["started"]:
                return
        path.unlink()
