"""Loggers that write to folders, on disk or behind a URL: ``save_dir/name/version_N``."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from hasten._lib import check
from hasten._lib.errors import add_note
from hasten._lib.files import file_system as file_system
from hasten._lib.files import is_url as is_url
from hasten._lib.files import local as local
from hasten._lib.files import require_folder, write_atomically
from hasten.extend.origin import comes_from
from hasten.loggers.base import StartedLogger, T, plain


def make_writable(owner: str, argument: str, path: str) -> None:
    """Make a folder, or raise an ``OSError`` of the type of its cause that names the logger and its argument."""
    if is_url(path):
        file_system(path).makedirs(path, exist_ok=True)
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
    """Return whether there is a file or folder; an error of a bucket names it."""
    if not is_url(path):
        return os.path.exists(local(path))
    try:
        return bool(file_system(path).exists(path))
    except OSError as error:
        add_note(error, f"It was asked for {path}.")
        raise


def is_folder(path: str) -> bool:
    """Return whether there is a folder."""
    return bool(file_system(path).isdir(path)) if is_url(path) else os.path.isdir(local(path))


def entries(path: str) -> list[str]:
    """Return the names in a folder; none if it does not exist."""
    if not is_folder(path):
        return []
    if not is_url(path):
        return os.listdir(local(path))
    return [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in file_system(path).ls(path, detail=False)]


def next_version(root: str) -> int:
    """Return the number after the largest of the folders ``version_N`` or ``version_N_...`` in ``root``; else 0."""
    numbers = {name: name.split("_")[1] for name in entries(root) if name.startswith("version_")}
    found = sorted(((int(n), name) for name, n in numbers.items() if n.isdecimal()), reverse=True)
    return next((number for number, name in found if is_folder(os.path.join(root, name))), -1) + 1


def version_folder(version: int | str) -> str:
    """Return the name of a run's folder."""
    return version if isinstance(version, str) else f"version_{version}"


def write_whole(path: str, data: bytes) -> None:
    """Write a small file; if the process dies, the old file or the new one is there."""
    if is_url(path):
        with file_system(path).open(path, "wb") as file:
            file.write(data)
    else:
        write_atomically(local(path), data, durable=False)


def write_hparams(path: str, params: Mapping[str, Any]) -> None:
    """Write hyper-parameters as YAML: plain data only, so that reading them never runs code."""
    import yaml

    text = yaml.safe_dump(data := plain(params), sort_keys=False, allow_unicode=True)
    if "\x85" in text or "\u2028" in text or "\u2029" in text:
        # Line breaks for YAML, which would read them back as spaces.
        text = yaml.safe_dump(data, sort_keys=False)
    write_whole(path, text.encode())


class FolderLogger(StartedLogger[T]):
    """Base of the loggers that write a run to the folder ``<save_dir>/<name>/version_<N>``; see ``CSVLogger``."""

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | os.PathLike[str] | None,
        version: int | str | None,
        prefix: str | None,
    ) -> None:
        check.declared(FolderLogger.__init__, locals())
        super().__init__()
        owner = next(kind.__name__ for kind in type(self).__mro__ if comes_from(kind, "hasten.loggers"))
        path = os.fspath(check.path(owner, "save_dir", save_dir))
        self._save_dir = path if is_url(path) else os.path.expanduser(local(path))
        if not is_url(path):
            require_folder(owner, "save_dir", self._save_dir)
        self._name = "" if name is None else os.fspath(check.path(owner, "name", name))
        if version is not None and not isinstance(version, str):
            allowed = "a whole number of at least 0, a string, or None for the next free number"
            version = check.whole(owner, "version", version, at_least=0, allowed=allowed)
        self._version = version
        for argument, text in (("name", self._name), ("version", version)):
            if isinstance(text, str) and _leaves_folder(text):
                raise check.wrong(owner, argument, text, "a folder name below save_dir")
        self._prefix = prefix

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._name

    @property
    def version(self) -> int | str:
        """Which run of the experiment this is; the next free number is taken when it is first read."""
        if self._version is None:
            self._version = self._get_next_version()
        return self._version

    def _get_next_version(self) -> int | str:
        """Return the version of a new run; subclasses of programs for Lightning override it."""
        return next_version(self._versions_dir)

    @property
    def save_dir(self) -> str:
        """Folder under which the runs are kept."""
        return self._save_dir

    @property
    def _root_dir(self) -> str:
        # Programs for Lightning read and set it, and read the file system.
        return self._save_dir

    @_root_dir.setter
    def _root_dir(self, folder: str) -> None:
        self._save_dir = folder

    @property
    def _fs(self) -> Any:
        return file_system(self._save_dir)

    @property
    def root_dir(self) -> str:
        """Folder of the experiment: ``save_dir/name``."""
        return os.path.join(self.save_dir, self.name)

    @property
    def _versions_dir(self) -> str:
        return self.root_dir

    @property
    def log_dir(self) -> str:
        """Folder of this run: ``save_dir/name/version_N``."""
        return os.path.join(self._versions_dir, version_folder(self.version))

    def identity(self) -> dict[str, Any]:
        """Return the folder, the name and the version of this run."""
        return {"save_dir": self.save_dir, "name": self.name, "version": self.version}

    def take_identity(self, identity: dict[str, Any]) -> None:
        """Take over the folder, the name and the version of another process' logger."""
        self._save_dir, self._name = identity["save_dir"], identity["name"]
        self._version = identity["version"]


def _leaves_folder(text: str) -> bool:
    return os.path.isabs(text) or ".." in text.replace("\\", "/").split("/") or "\0" in text
