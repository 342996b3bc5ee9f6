"""Local files, URLs and the cache folder. Other processes, and the next run after a crash, find files whole or not."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# The end of the name of a file that is still being written; a cleaner removes those whose writer has died.
TEMPORARY = ".hasten-tmp"


def write_atomically(
    path: str | os.PathLike[str], data: bytes | str | Callable[[IO[bytes]], object], *, durable: bool = True
) -> None:
    """Write a file; at any moment ``path`` is the old file or the new one, whole.

    Args:
        path: in a folder that exists. A symbolic link is replaced, not followed.
        data: the content (text as UTF-8), or a function that writes it to the open file.
        durable: wait until the file would survive a power cut.

    Example::

        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp(), "a.txt")
        >>> write_atomically(target, "hello")
        >>> target.read_text()
        'hello'

    """
    with replacing(path, durable=durable) as file:
        if isinstance(data, str):
            file.write(data.encode())
        elif isinstance(data, bytes):
            file.write(data)
        else:
            data(file)


@contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path`` that takes its place if the block succeeds, and is removed otherwise.

    The file is locked while its writer lives; see ``remove_abandoned``. Arguments as for ``write_atomically``.
    """
    target = Path(path)
    while True:
        temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
        file = open(temporary, "x+b")  # noqa: SIM115  (closed below; the name must be known to remove it)
        _lock(file)
        # A cleaner may have come between opening and locking.
        if temporary.exists():
            break
        file.close()
    try:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        if durable:
            sync_folder(target.parent)
    finally:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            temporary.unlink()


def remove_abandoned(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove the temporary files in ``folder`` whose writers have died, and return their paths."""
    removed = []
    for path in Path(folder).glob(f".*{TEMPORARY}"):
        with suppress(OSError), open(path, "rb+") as file:
            # The system releases the lock of a process that dies, however it dies; a process id may be reused.
            if _lock(file):
                path.unlink()
                removed.append(path)
    return removed


def _lock(file: IO[bytes]) -> bool:
    """Lock a file if no other process has locked it; return whether that worked."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make a rename or a new file in ``folder`` survive a power cut."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is for fsspec, such as "s3://..." or "memory://..."."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def local(path: str | os.PathLike[str]) -> str:
    """Return a local path without "file://"."""
    return os.fspath(path).removeprefix("file://")


def file_system(url: str, storage_options: dict[str, Any] | None = None) -> Any:
    """Return the fsspec file system of a URL."""
    from hasten._lib.optional import need

    return need("fsspec.core", purpose=f"the path {url}").url_to_fs(url, **(storage_options or {}))[0]


# -- the user's cache folder: what was measured, compiled or downloaded once


def cache_folder(name: str = "") -> Path:
    """Return the cache folder, or the folder ``name`` in it. It may not exist yet.

    The environment variable ``HASTEN_CACHE`` names it; without that it is ``hasten`` in ``XDG_CACHE_HOME``
    (``~/.cache``).

    Example::

        >>> os.environ["HASTEN_CACHE"] = "/data/cache"
        >>> cache_folder("compile").as_posix()
        '/data/cache/compile'
        >>> del os.environ["HASTEN_CACHE"]

    Source: `XDG base directories <https://specifications.freedesktop.org/basedir-spec/latest/>`_.

    """
    chosen = os.environ.get("HASTEN_CACHE")
    if chosen:
        return Path(chosen).expanduser() / name
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "hasten" / name


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is absent or damaged."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def remember_json(path: Path, content: Any) -> bool:
    """Write a JSON file and the folders it lies in; return whether that worked.

    A full or read-only disk is not an error: what is cached can be made again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content), durable=False)
    except OSError:
        return False
    return True
