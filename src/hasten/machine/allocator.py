"""Keep freed memory in the process between steps.

The C library of Linux returns large blocks to the system when they are freed and requests them again in the next step.
The system then zeroes the pages, which on a CPU can take as long as the arithmetic. An option of the allocator, or
another allocator, avoids that.
"""

from __future__ import annotations

import ctypes
import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten._lib.errors import make_error

# Options of mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
# The defaults of glibc, with the thresholds to which it raises them after large blocks were freed.
_AFTER = {_TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65536}
# How much memory is requested from the system at a time.
_PAD_BYTES = 64 * 2**20

LIBRARIES = {"tcmalloc": "libtcmalloc*.so*", "jemalloc": "libjemalloc.so*"}
_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib", "/opt/homebrew/lib")


@contextmanager
def kept(name: str, *, owner: str = "Trainer") -> Iterator[None]:
    """Keep the freed memory of this process while the context is open.

    ``name`` is "keep" for the C library's allocator without giving back, "tcmalloc" or "jemalloc" if this process was
    started with it.

    Source: `mallopt <https://man7.org/linux/man-pages/man3/mallopt.3.html>`_

    """
    loaded = preloaded()
    if loaded == name or (loaded is not None and name == "keep"):  # These keep memory by default.
        yield
        return
    if name != "keep":
        if (found := file_of(name)) is None:
            what = f"{owner}(allocator={name!r}): there is no {LIBRARIES[name]} on this machine."
            fix = f"Use allocator='keep', which needs nothing, or install it (Debian: apt install {_PACKAGES[name]})."
            raise make_error(ValueError, what, fix=fix, argument="allocator")
        what = f"{owner}(allocator={name!r}): an allocator is chosen before the program starts."
        fix = f"Start it with LD_PRELOAD={found} python ..., or use allocator='keep'."
        raise make_error(ValueError, what, fix=fix, argument="allocator")
    library = _keep(owner)
    try:
        yield
    finally:
        _give_back(library)


def file_of(name: str) -> str | None:
    """Return the file of an allocator on this machine, or None."""
    found = (path for folder in _FOLDERS for path in sorted(glob.glob(f"{folder}/{LIBRARIES[name]}"), key=len))
    return next(found, None)


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
    # mallopt returns 1 on success; musl has the function and ignores it.
    if library is None or mallopt is None or not (mallopt(_TRIM_THRESHOLD, -1) and mallopt(_MMAP_MAX, 0)):
        what = (
            f"{owner}(allocator='keep'): the C library of this machine ({sys.platform}) cannot keep memory; glibc on "
            "Linux can."
        )
        raise make_error(ValueError, what, fix="Leave it out.", argument="allocator")
    mallopt(_TOP_PAD, _PAD_BYTES)
    return library


def _give_back(library: ctypes.CDLL) -> None:
    """Return free memory to the system, and restore the thresholds."""
    for option, value in _AFTER.items():
        library.mallopt(option, value)
    library.malloc_trim(0)
