"""The place of a checkpoint folder's files: on this machine, or behind a URL; and where copies are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from hasten._lib.files import sync_folder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The index of torch.distributed.checkpoint, and a tensor in the contents: {PLACEHOLDER: its key}
INDEX_FILE, PLACEHOLDER = ".metadata", "hasten_tensor"


class Place(ABC):
    """A folder of files that all processes can reach."""

    # Whether a file has to be synced before it is on the disk.
    needs_sync = False

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def inside(self, name: str) -> Place:
        """Return a folder in it."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether it is there, if that is known."""

    @abstractmethod
    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open a file, to read ("rb") or to write ("wb")."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes in bytes of the named files, without files that do not exist."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Give a file another name."""

    def sync(self) -> None:  # noqa: B027 - most need none
        """Make new names in it survive a power cut."""


class LocalPlace(Place):
    """A folder on this machine, or one that it mounts."""

    needs_sync = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def inside(self, name: str) -> Place:
        return LocalPlace(self.path / name)

    def exists(self) -> bool:
        return self.path.is_dir()

    def open(self, name: str, mode: str) -> IO[bytes]:
        return cast("IO[bytes]", open(self.path / name, mode))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        # Each file is looked up by name: a network file system may list an older state of the folder.
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = (self.path / name).stat().st_size
        return found

    def rename(self, old: str, new: str) -> None:
        os.rename(self.path / old, self.path / new)

    def sync(self) -> None:
        sync_folder(self.path)


class RemotePlace(Place):
    """A folder behind a URL."""

    def __init__(self, url: str, system: AbstractFileSystem, path: str) -> None:
        self.url, self.system, self.path = url.rstrip("/"), system, path.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def inside(self, name: str) -> Place:
        return RemotePlace(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def exists(self) -> bool:
        # Object stores have no empty folders.
        return True

    def open(self, name: str, mode: str) -> IO[bytes]:
        return cast("IO[bytes]", self.system.open(f"{self.path}/{name}", mode))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        # Other processes may have written files since the listing was cached.
        self.system.invalidate_cache()
        entries = self.system.ls(self.path, detail=True) if self.system.exists(self.path) else []
        found = {each["name"].rpartition("/")[2]: int(each["size"]) for each in entries if each["type"] == "file"}
        return {name: found[name] for name in names if name in found}

    def rename(self, old: str, new: str) -> None:
        self.system.mv(f"{self.path}/{old}", f"{self.path}/{new}")


class Saved(NamedTuple):
    """A checkpoint, and when it was written."""

    saved_ns: int  # the time in ns at which its original was written
    path: str  # a path or a URL


class Copies:
    """Copies of a run's checkpoints in another place; here none."""

    def newest_first(self) -> list[Saved]:
        """Return the complete copies, also those of earlier runs."""
        return []

    def follow(self, notify: Callable[[], object] | None) -> None:
        """Raise the error of a copy that was refused, and have ``notify`` called if one is refused later.

        With None, the error waits for the next save.
        """

    def finish(self) -> None:
        """Wait until everything is copied.

        Raises:
            OSError: something could not be copied; it names what is not.

        """


# Checkpoints have no copies.
NO_COPIES = Copies()
