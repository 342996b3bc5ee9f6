"""The computer that this process runs on: cores, memory, interactive sessions, locks of builds, and sizes as text."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from hasten.extend import frames

_CONTROL_GROUP = Path("/sys/fs/cgroup")
# How long to wait for a lock without a message.
_LOCK_SECONDS = 20.0
# The ranks of a run start within so many seconds of each other.
_TOGETHER_SECONDS = 60.0


def usable_cores() -> int:
    """Return the number of cores that this process may use: by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max" for no quota
        quota, period = (_CONTROL_GROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    return cores


def total_memory_bytes() -> int | None:
    """Return the size of the machine's memory; None if the system does not say."""
    with suppress(AttributeError, OSError, ValueError):  # no such function or name
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def available_memory_bytes() -> int | None:
    """Return how much memory a process may still take, on the machine and in its container; None if unknown."""
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    with suppress(OSError, ValueError):
        limit = (_CONTROL_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
        if limit != "max":
            left = max(0, int(limit) - used)
            return left if free is None else min(free, left)
    return free


def process_memory_bytes(*, peak: bool = False) -> int | None:
    """Return the memory that this process holds, or held at its peak; None if the system is not Linux."""
    return _kilobytes("/proc/self/status", "VmHWM" if peak else "VmRSS")


def resource_usage(name: str) -> int:
    """Return a number of ``resource.getrusage`` for this process, such as ``ru_minflt``; 0 on Windows."""
    with suppress(ImportError):
        import resource

        return int(getattr(resource.getrusage(resource.RUSAGE_SELF), name))
    return 0


def _kilobytes(file: str, name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in Path(file).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def cpu_name() -> str:
    """Return the name of the processor, such as ``Intel(R) Xeon(R) Platinum 8481C``."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    return "IPKernelApp" in getattr(_ipython_shell(), "config", {})


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt, where the program cannot be started again."""
    return hasattr(sys, "ps1") or _ipython_shell() is not None


def _ipython_shell() -> Any:
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


class LockWatch:
    """Reports the lock on which torch waits to build an extension; an interrupted build leaves the lock behind."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        thread = threading.Thread(target=_watch, args=(self._ended, self._watched), daemon=True, name="extension-locks")
        weakref.finalize(self, self._ended.set)
        thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()


def _watch(ended: threading.Event, watched: int) -> None:
    since = 0.0
    while not ended.wait(1.0):
        path = _lock_waited_for(watched)
        since = since + 1.0 if path is not None else 0.0
        if path is not None and since >= _LOCK_SECONDS:
            sys.stderr.write(f"{_why_locked(path, since)}\n")
            sys.stderr.flush()
            return


def _why_locked(path: str, since: float) -> str:
    waited = f"to build an extension, for {since:.0f} s now"
    with suppress(OSError, ValueError):
        # The ranks of a run start together, and one of them builds for all.
        if os.stat(path).st_mtime > time.time() - process_age_seconds() - _TOGETHER_SECONDS:
            return f"Waiting for another rank of this run {waited}. That takes a minute or two."
    return (
        f"Waiting for another process {waited}. If none is being built (an earlier start was cut off), remove the "
        f"lock: rm {path}"
    )


def process_age_seconds() -> float:
    """Return for how long this process has run.

    Raises:
        OSError: the system does not say.

    """
    # After the name of the program, which may hold anything: the ticks from the start of the machine to its own.
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    up_seconds = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return up_seconds - started / os.sysconf("SC_CLK_TCK")


def _lock_waited_for(thread: int) -> str | None:
    """Return the path of the lock on which a thread waits in torch's ``FileBaton``."""
    for frame in frames.outwards(sys._current_frames().get(thread)):
        if frames.name_of(frame) == "wait" and frames.file_of(frame).endswith("file_baton.py"):
            with suppress(Exception):
                return str(frame.f_locals["self"].lock_file_path)
    return None


def process_has_ended(number: int) -> bool:
    """Return whether a process of this machine is known to have ended; False if the system does not say."""
    try:
        with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in parentheses, may contain any character. Z: a zombie, whose exit code has not
            # been read.
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return os.path.isdir("/proc/self")


def bytes_text(count: float) -> str:
    """Return bytes as text, in powers of 1000 as vendors count memory.

    Example::

        >>> bytes_text(80_000_000_000), bytes_text(1_500), bytes_text(12)
        ('80 GB', '1.5 KB', '12 B')

    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
