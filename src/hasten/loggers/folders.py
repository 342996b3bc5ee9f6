"""The folders of runs, on disk or behind a URL, and files written whole."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any


def is_url(path: str) -> bool:
    """Return whether ``path`` is for fsspec, such as "s3://..." or "memory://..."."""
    return "://" in path and not path.startswith("file://")


def local(path: str) -> str:
    """Return a local path without "file://"."""
    return path.removeprefix("file://")


def file_system(path: str) -> Any:
    """Return the fsspec file system of a URL."""
    from hasten._lib.optional import need

    return need("fsspec.core", purpose=f"the path {path}").url_to_fs(path)[0]


def make_folder(path: str) -> None:
    """Make a folder and those above it."""
    if is_url(path):
        file_system(path).makedirs(path, exist_ok=True)
    else:
        os.makedirs(local(path), exist_ok=True)


def make_writable(owner: str, argument: str, path: str) -> None:
    """Make a folder that ``owner`` writes to.

    Args:
        owner: who asks, for the message.
        argument: the argument that says where the folder is, with its value.
        path: the folder; URLs are left to their file system.

    Raises:
        OSError: the folder cannot be made or written to; of the type of the cause, such as PermissionError.

    """
    if is_url(path):
        make_folder(path)
        return
    path = local(path)
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{owner}({argument}) cannot write to {os.path.abspath(path)}: {error.strerror}. Give a folder that can "
            "be written to",
            error.filename or path,
        ) from error


def exists(path: str) -> bool:
    """Return whether there is a file or folder."""
    return bool(file_system(path).exists(path)) if is_url(path) else os.path.exists(local(path))


def entries(path: str) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    if is_url(path):
        system = file_system(path)
        if not system.isdir(path):
            return []
        return [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in system.ls(path, detail=False)]
    return os.listdir(local(path)) if os.path.isdir(local(path)) else []


def next_version(root: str) -> int:
    """Return the number after the largest of the folders ``version_N`` in ``root``.

    Example::

        >>> next_version("no_such_folder")
        0

    """
    numbers = [name.removeprefix("version_") for name in entries(root) if name.startswith("version_")]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


def version_folder(version: int | str) -> str:
    """Return the name of a run's folder."""
    return version if isinstance(version, str) else f"version_{version}"


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that, whenever the process dies, either the old or the new one is there."""
    if is_url(path):
        with file_system(path).open(path, "wb") as file:
            file.write(data)
        return
    path = local(path)
    beside = f"{path}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(beside)
        raise
