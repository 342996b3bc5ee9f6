"""The computer that this process runs on: its cores and memory, and whether someone works in a prompt or notebook."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_CONTROL_GROUP = Path("/sys/fs/cgroup")


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
    """Return how much memory a process may still take: what machine and container have left; None if unknown."""
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    with suppress(OSError, ValueError):
        limit = (_CONTROL_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
        if limit != "max":
            left = max(0, int(limit) - used)
            return left if free is None else min(free, left)
    return free


def process_memory_bytes(*, peak: bool = False) -> int | None:
    """Return the memory that this process holds, or held at its peak; None where the system is not Linux."""
    return _kilobytes("/proc/self/status", "VmHWM" if peak else "VmRSS")


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
