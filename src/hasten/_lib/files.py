"""Local files, URLs and the cache folder. Other processes, and the next run after a crash, see whole files or none."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hasten._lib.errors import add_note, make_error

# The end of the name of a file that is still being written; a cleaner removes those whose writer has died.
TEMPORARY = ".hasten-tmp"
# The end of the name of a file or folder that is set aside until its replacement has its name.
SET_ASIDE = ".hasten-old"


def require_folder(owner: str, argument: str, path: str) -> None:
    """Check that a local path is a folder, or can become one.

    Example::

        >>> require_folder("Trainer", "default_root_dir", __file__ + "/logs")
        Traceback (most recent call last):
            ...
        NotADirectoryError: ...

    """
    there = os.path.abspath(path)
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        what = f"{owner}({argument}={path!r}): {there} is a file."
        raise make_error(NotADirectoryError, what, fix="Give a folder, or a name that is free.", argument=argument)


def write_atomically(
    path: str | os.PathLike[str], data: bytes | str | Callable[[IO[bytes]], object], *, durable: bool = True
) -> None:
    """Write a file in a folder that exists; at any moment ``path`` is the old file or the new one, whole.

    ``data`` is the content, text as UTF-8, or a function that writes it to the open file. A symbolic link is replaced,
    not followed. ``durable`` waits until the file would survive a power cut.

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
def replacing(path: str | os.PathLike[str], *, durable: bool = True, over_folder: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file next to ``path`` that takes its place if the block succeeds, and is removed otherwise.

    The file is locked while its writer lives; see ``remove_abandoned``. Arguments as for ``write_atomically``; with
    ``over_folder``, it replaces a folder too.
    """
    target = Path(path)
    while True:
        temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
        file = open(temporary, "x+b")  # noqa: SIM115  (closed below; the name must be known to remove it)
        _lock(file.fileno())
        # A cleaner may have come between opening and locking.
        if temporary.exists():
            break
        file.close()
    try:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        if os.name == "nt":  # Open files cannot be renamed there.
            file.close()
        if over_folder:
            put_in_place(temporary, target)
        else:
            os.replace(temporary, target)
        if durable:
            sync_folder(target.parent)
    finally:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a temporary folder next to ``path``; it is removed at the end, unless ``put_in_place`` has renamed it.

    It is locked while its writer lives; see ``remove_abandoned``.
    """
    target = Path(path)
    while True:
        temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
        temporary.mkdir()
        # Folders cannot be opened on Windows, which has no such locks either.
        descriptor = os.open(temporary, os.O_RDONLY) if os.name != "nt" else None
        if descriptor is not None:
            _lock(descriptor)
        # A cleaner may have come between making and locking.
        if temporary.exists():
            break
        if descriptor is not None:
            os.close(descriptor)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def put_in_place(temporary: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Rename a file or folder to ``path``, whatever is there, and sync the folder around it.

    A folder with something in it cannot be replaced in one step: it is set aside first, where ``recover`` finds it if
    this process dies before the new one has its name.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{SET_ASIDE}")
    try:
        for attempt in range(100):
            try:
                os.replace(temporary, target)
                break
            except OSError as error:
                # After the first attempt fails: a reader has recovered the folder that was set aside.
                if error.errno not in _IN_THE_WAY or not os.path.lexists(target) or attempt == 99:
                    raise
            with suppress(FileNotFoundError):
                os.rename(target, aside)
    finally:
        if not os.path.lexists(target):
            with suppress(OSError):
                os.rename(aside, target)
    sync_folder(target.parent)
    remove_all(aside)


# Errors of rename for a folder that is not empty, and for a file and a folder. Windows denies access.
_IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES}


def recover(path: str | os.PathLike[str]) -> bool:
    """Return whether there is something at ``path``; give what was set aside its name back first, see ``put_in_place``.

    Example::

        >>> recover("no/such/folder/last.ckpt")
        False

    """
    target = Path(path)
    if not os.path.lexists(target) and target.parent.is_dir():
        for aside in target.parent.glob(f".*{SET_ASIDE}"):
            if _name_before(aside) == target.name:
                # It fails if something else has the name by now.
                with suppress(OSError):
                    os.rename(aside, target)
    return os.path.exists(target)


def set_aside(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths in ``folder`` whose content was set aside and not replaced, see ``put_in_place``."""
    names = map(_name_before, Path(folder).glob(f".*{SET_ASIDE}"))
    return [Path(folder, name) for name in names if name and not os.path.lexists(Path(folder, name))]


def _name_before(aside: Path) -> str:
    match = re.fullmatch(rf"\.(.+)\.[0-9a-f]{{8}}{re.escape(SET_ASIDE)}", aside.name)
    return match[1] if match else ""


def remove_all(path: str | os.PathLike[str]) -> None:
    """Remove a file, a link, or a folder with all that is in it; no part of it is left under its name."""
    target = Path(path)
    if target.is_symlink() or not target.is_dir():
        target.unlink(missing_ok=True)
        return
    # Under its own name, a folder of which a part is removed would look like a damaged one if this process dies.
    hidden = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    with suppress(FileNotFoundError):
        os.rename(target, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_abandoned(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove the temporary files and folders in ``folder`` whose writers have died, and return their paths.

    Files that were set aside get their names back, unless another file has the name by now.
    """
    removed = []
    for path in set_aside(folder):
        recover(path)
    hidden = list(Path(folder).glob(".*"))
    for path in [path for path in hidden if path.name.endswith(SET_ASIDE)]:
        with suppress(OSError):
            remove_all(path)
            removed.append(path)
    for path in [path for path in hidden if path.name.endswith(TEMPORARY)]:
        with suppress(OSError):
            is_folder = path.is_dir() and not path.is_symlink()
            descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
            try:
                # The system releases the lock of a process that dies, however it dies; a process id may be reused.
                if _lock(descriptor):
                    shutil.rmtree(path) if is_folder else path.unlink()
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _lock(descriptor: int) -> bool:
    """Lock a file or folder if no other process has locked it; return whether that worked."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def why_not_written(error: OSError, folder: str | os.PathLike[str]) -> str:
    """Return why a file in ``folder`` could not be written; for a full disk, with the free space."""
    if error.errno in (errno.ENOSPC, errno.EFBIG):
        with suppress(OSError):  # The folder may be gone, too.
            return f"{os.strerror(error.errno)} ({shutil.disk_usage(folder).free} bytes free in {folder})"
    return os.strerror(error.errno) if error.errno else str(error)


def in_the_way(error: OSError, folder: str | os.PathLike[str]) -> OSError:
    """Return the error to raise for a folder whose name a file has, or that of a folder above it."""
    path = Path(folder)
    there = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    named = type(error)(error.errno, f"{path} cannot be a folder: a file is in the way", str(there))
    add_note(named, "", fix=f"Move {there} away, or save to another folder.")
    return named


def is_named(error: OSError) -> bool:
    """Return whether an error says more than the system does."""
    return error.errno is None or error.strerror != os.strerror(error.errno)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is for fsspec, such as "s3://..." or "memory://..."."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def local(path: str | os.PathLike[str]) -> str:
    """Return a local path without "file://"."""
    return os.fspath(path).removeprefix("file://")


def modified(path: str) -> float:
    """Return when a file or folder was last written, in seconds since the epoch; 0.0 where nothing tells."""
    with suppress(Exception):  # each file system has its own
        return (
            os.path.getmtime(local(path)) if not is_url(path) else float(file_system(path).modified(path).timestamp())
        )
    return 0.0


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

    A full or read-only disk is not an error: cached values can be made again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content), durable=False)
    except OSError:
        return False
    return True
