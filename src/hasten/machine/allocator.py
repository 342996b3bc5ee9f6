"""Memory that is kept between steps, where the system would zero fresh pages for each of them.

The C library of Linux returns large blocks to the system as soon as they are free, and asks for them again in the
next step; the system hands out pages of zeros, which on a CPU can take as long as the arithmetic. The allocator can
be told to keep them, or another one takes its place.
"""

from __future__ import annotations

import ctypes
import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of malloc.h: what mallopt changes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
# glibc's defaults, the thresholds where it moves them itself once large blocks were freed.
_AFTER = {_TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65536}
# Asked of the system at a time when memory runs short.
_PAD_BYTES = 64 * 2**20

LIBRARIES = {"tcmalloc": "libtcmalloc*.so*", "jemalloc": "libjemalloc.so*"}
_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib", "/opt/homebrew/lib")


@contextmanager
def kept(name: str, *, owner: str = "Trainer") -> Iterator[None]:
    """Have this process keep its memory for a while.

    Args:
        name: "keep" for the C library's allocator without giving back, "tcmalloc" or "jemalloc" if this process was
            started with it.
        owner: "Trainer" or "Fabric", for the messages.

    Raises:
        ValueError: it cannot be had in this process; the message has the line that starts one with it.

    Source: `mallopt <https://man7.org/linux/man-pages/man3/mallopt.3.html>`_

    """
    loaded = preloaded()
    if name == "keep":
        # The other two keep memory by themselves.
        if loaded is not None:
            yield
            return
        library = _keep(owner)
        try:
            yield
        finally:
            _give_back(library)
        return
    if loaded == name:
        yield
        return
    found = file_of(name)
    if found is None:
        raise ValueError(
            f"{owner}(allocator={name!r}): there is no {LIBRARIES[name]} on this machine. Use allocator='keep', which "
            f"needs nothing, or install it (Debian: apt install {_PACKAGES[name]})."
        )
    raise ValueError(
        f"{owner}(allocator={name!r}): an allocator is chosen before the program starts. Start it with "
        f"LD_PRELOAD={found} python ..., or use allocator='keep'."
    )


_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}


def file_of(name: str) -> str | None:
    """Return the file of an allocator on this machine, or None."""
    for folder in _FOLDERS:
        found = sorted(glob.glob(f"{folder}/{LIBRARIES[name]}"), key=len)
        if found:
            return found[0]
    return None


def preloaded() -> str | None:
    """Return the allocator this process was started with, "tcmalloc" or "jemalloc"; None for the C library's."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((name for name in LIBRARIES if f"/lib{name}" in maps), None)


def _keep(owner: str) -> ctypes.CDLL:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(library, "mallopt", None)
    # Each call returns 1 where it was obeyed; musl has the function and ignores it.
    if library is None or mallopt is None or not (mallopt(_TRIM_THRESHOLD, -1) and mallopt(_MMAP_MAX, 0)):
        raise ValueError(
            f"{owner}(allocator='keep'): the C library of this machine ({sys.platform}) cannot be told to keep memory; "
            "glibc on Linux can. Leave it out."
        )
    mallopt(_TOP_PAD, _PAD_BYTES)
    return library


def _give_back(library: ctypes.CDLL) -> None:
    """Return what is free, and let the library decide again as it does in a process that has used much memory."""
    for option, value in _AFTER.items():
        library.mallopt(option, value)
    library.malloc_trim(0)
