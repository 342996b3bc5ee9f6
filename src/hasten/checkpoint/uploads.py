"""Copies of checkpoints behind a URL: uploaded in the background, once the local files are complete."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from hasten._lib import check
from hasten._lib.errors import CheckpointDamaged, MisconfigurationException, make_error
from hasten._lib.files import local
from hasten._lib.optional import need
from hasten._lib.rank_zero import log
from hasten.checkpoint import files
from hasten.checkpoint.places import Copies, Saved
from hasten.machine import collectives

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike, StorageOptions

# The list of the complete copies: their names below the URL, and when their local files were written.
INDEX = "uploads.json"
# Trying again would not help: the bucket does not exist, writing to it is forbidden, or the local file has changed.
_LASTING = (
    PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, ImportError, TypeError,
    ValueError, CheckpointDamaged,
)  # fmt: skip


class UploadedCheckpointIO(files.CheckpointIO):
    """Writes checkpoints to the local disk, and copies them behind a URL in the background, while training continues.

    The copy of ``folder/last.ckpt`` is ``url/folder/last.ckpt``: any program that reads checkpoints reads it. A copy is
    complete or absent at any moment, and is removed when its original is. ``ckpt_path="last"`` resumes from the newest
    complete checkpoint, local or behind the URL: also on a machine whose disk is empty.

    An upload that fails is tried again, ``tries`` times in all. If the URL cannot be reached, the local files stay, one
    line says so, and what is missing is uploaded with the next checkpoint and once more when the fit ends, which raises
    an error if that fails. If the bucket refuses the copy or does not exist, the error is raised at the next step; with
    several processes at the next save.

    With several processes the first one uploads. Checkpoint folders have to be on a disk that all processes share.

    Args:
        url: the folder of the copies, one for each run: ``"s3://bucket/run"``, or any other URL that fsspec
            understands. Credentials and endpoints come from fsspec's configuration.
        checkpoint_io: writes the local files; by default as without ``plugins``. With ``AsyncCheckpointIO()`` every
            file is also written in the background.
        tries: how often an upload is tried before it waits for the next checkpoint; at least 1.
        retry_seconds: the wait before the second try, in seconds; it doubles with each further try.

    Raises:
        MisconfigurationException: ``url`` is not a URL, or fsspec does not know its protocol; a number is too small.
        ImportError: fsspec, or the package that it needs for the protocol, is not installed.

    Example::

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> io = UploadedCheckpointIO("memory://bucket/run")
        >>> io.save_checkpoint({"step": 3}, f"{folder}/a.ckpt")
        >>> io.teardown()
        >>> files.load(f"memory://bucket/run/{os.path.basename(folder)}/a.ckpt")
        {'step': 3}

    Source: `fsspec <https://filesystem-spec.readthedocs.io>`_.

    """

    def __init__(
        self, url: str, checkpoint_io: files.CheckpointIO | None = None, *, tries: int = 3, retry_seconds: float = 1.0
    ) -> None:
        owner = type(self).__name__
        self.url = _checked_url(owner, url)
        check.declared(UploadedCheckpointIO.__init__, locals())
        self.checkpoint_io = checkpoint_io if checkpoint_io is not None else files.DefaultCheckpointIO()
        check.whole(owner, "tries", tries, at_least=1)
        check.number(owner, "retry_seconds", retry_seconds, at_least=0)
        self._uploads = _Uploads(self.url, tries, retry_seconds)

    @property
    def copies(self) -> _Uploads:
        return self._uploads

    @property
    def wrapped(self) -> files.CheckpointIO:
        return self.checkpoint_io

    @property
    def writes_folders(self) -> bool:
        return self.checkpoint_io.writes_folders

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Have ``checkpoint`` written, and copied once it is complete.

        Raises:
            OSError: it could not be written, or the copy of an earlier one was refused.

        """
        self.copies.raise_refused()
        self.copies.claim(os.fspath(path))
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.checkpoint_io.after(functools.partial(self.copies.add, os.fspath(path)))

    def save_folder(self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None) -> None:
        """Have ``checkpoint`` written by all processes together, and copied by the first one once it is complete.

        Raises:
            OSError, RuntimeError: a process could not write, or the copy of an earlier one was refused.

        """
        for error in collectives.gather_objects(self.copies.take_refused()):
            if error is not None:
                raise error
        self.copies.claim(os.fspath(path))
        self.checkpoint_io.save_folder(checkpoint, path, storage_options=storage_options)
        if not collectives.joined() or dist.get_rank() == 0:
            self.checkpoint_io.after(functools.partial(self.copies.add, os.fspath(path)))

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, which may be the URL of a copy."""
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path`` and its copy; if something before it is still being written or copied, after that."""
        self.checkpoint_io.remove_checkpoint(path)
        self.checkpoint_io.after(functools.partial(self.copies.remove, os.fspath(path)))

    def after(self, function: Callable[[], object]) -> None:
        self.checkpoint_io.after(function)

    def teardown(self) -> None:
        """Wait until everything is written and copied; what could not be copied is reported in a line."""
        try:
            self.checkpoint_io.teardown()
        finally:
            self.copies.close()


def _checked_url(owner: str, url: str) -> str:
    if not isinstance(url, str) or "://" not in url:
        fix = "give a URL, for instance 's3://bucket/run'."
        raise MisconfigurationException(f"{owner}(url={check.shown(url)}):", fix=fix, argument="url")
    fsspec = need("fsspec", purpose=f"A checkpoint at {url}")
    protocol = url.partition("://")[0]
    try:
        # The class alone: a connection that was made here would not survive a fork.
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        fix = "Give for instance 's3://bucket/run'."
        text = f"{owner}(url={url!r}): fsspec does not know the protocol {protocol!r}."
        raise MisconfigurationException(text, fix=fix, argument="url") from None
    return url.rstrip("/")


class _Task(NamedTuple):
    """What is to be done behind the URL."""

    name: str  # below the URL
    path: str  # the local checkpoint
    is_upload: bool  # False: the copy is to be removed


class _Uploads(Copies):
    """Uploads and removes copies in a thread, one after the other, in the order of the saves.

    A copy is removed after those saved before the removal are complete: the one that replaces it is there.
    """

    def __init__(self, url: str, tries: int, retry_seconds: float) -> None:
        self._url, self._tries, self._retry_seconds = url, tries, retry_seconds
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Task] = []
        self._current: _Task | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        # The local path of each copy of this run.
        self._paths: dict[str, str] = {}
        # The last error; whether it was told, and whether it is one that lasts.
        self._error: Exception | None = None
        self._is_told = self._is_refused = False
        self._notify: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[type[_Uploads], tuple[str, int, float]]:
        # Threads and what they do stay in this process.
        return _Uploads, (self._url, self._tries, self._retry_seconds)

    # -- in the thread that saves

    def claim(self, path: str) -> None:
        """Raise ValueError if the copy of another checkpoint has the place of that of ``path``."""
        name = self._name(path)
        path = os.path.abspath(local(path))
        other = self._paths.setdefault(name, path)
        if other != path:
            what = f"UploadedCheckpointIO(url={self._url!r}): {other} and {path} would have the same copy, {name}."
            fix = "Give one of the ModelCheckpoints a folder or a filename= of another name."
            raise make_error(ValueError, what, fix=fix, argument="url")

    def add(self, path: str) -> None:
        """Upload a checkpoint that is complete."""
        name = self._name(path)
        with self._lock:
            of_name = [task for task in self._waiting if task.name == name]
            # One that has not begun takes the state that the files have by then.
            if not of_name or not of_name[-1].is_upload or of_name[-1] is self._current:
                self._waiting.append(_Task(name, path, is_upload=True))
        self._submit()

    def remove(self, path: str) -> None:
        """Remove the copy of a checkpoint, after what is to be uploaded before."""
        name = self._name(path)
        self._paths.pop(name, None)
        with self._lock:
            self._waiting.append(_Task(name, path, is_upload=False))
        self._submit()

    def _name(self, path: str) -> str:
        above, name = os.path.split(os.path.abspath(local(path)))
        return f"{os.path.basename(above)}/{name}"

    def _submit(self) -> Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")
        self._pending = self._executor.submit(self._work)
        return self._pending

    def follow(self, notify: Callable[[], object] | None) -> None:
        self._notify = notify
        if notify is not None:
            self.raise_refused()

    def take_refused(self) -> Exception | None:
        """Return an error that trying again would not cure, once; None without one."""
        if not self._is_refused:
            return None
        error, self._error, self._is_refused = self._error, None, False
        return error

    def raise_refused(self) -> None:
        """Raise what ``take_refused`` returns."""
        if (error := self.take_refused()) is not None:
            raise error

    def finish(self) -> None:
        pending = self._pending
        if pending is None:
            return
        pending.result()
        if self._waiting and not self._is_refused:
            self._submit().result()
        self._pending = None
        error, self._error, self._is_refused = self._error, None, False
        paths = [task.path for task in self._waiting if task.is_upload and _identity(task.path)]
        missing, self._waiting = [*dict.fromkeys(paths)], []
        if error is None or not missing:
            return
        if isinstance(error, _LASTING):
            raise error
        raise OSError(_text(self._url, missing, error)) from error

    def close(self) -> None:
        """Wait for the thread, and release it."""
        try:
            self.finish()
        except Exception as error:
            log.warning(str(error))
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=True)
            self._begin()

    # -- in the thread that uploads

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._error, self._is_told = None, False
                    return
                task = self._current = self._waiting[0]
            error = self._tried(task)
            with self._lock:
                self._current = None
                if error is None:
                    self._waiting.pop(0)
            if error is not None:
                self._fail(task, error)
                return

    def _tried(self, task: _Task) -> Exception | None:
        """Do a task; return the last error if it fails each time."""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(self._retry_seconds * 2 ** (attempt - 1))
            try:
                self._do(task)
                return None
            except _LASTING as error:
                return error
            except Exception as error:  # each file system has its own
                last = error
        return last

    def _fail(self, task: _Task, error: Exception) -> None:
        self._error = error
        if isinstance(error, _LASTING):
            self._is_refused = True
            if self._notify is not None:
                self._notify()
        elif not self._is_told:
            # Once, until it works again.
            self._is_told = True
            again = "It is tried again with the next checkpoint."
            log.warning(f"{_text(self._url, [task.path] if task.is_upload else [], error)} {again}")

    def _do(self, task: _Task) -> None:
        if not task.is_upload:
            self._set_index({name: saved for name, saved in self._index().items() if name != task.name})
            files.remove(f"{self._url}/{task.name}")
            return
        before = _identity(task.path)
        if before is None:
            return  # It is no longer wanted.
        try:
            files.upload(task.path, f"{self._url}/{task.name}")
        except Exception:
            if _identity(task.path) != before:
                return  # It was replaced or removed meanwhile; a new one has a task of its own.
            raise
        self._set_index({**self._index(), task.name: before[1]})

    # -- the list of copies

    def newest_first(self) -> list[Saved]:
        if self._pending is not None:
            self._pending.result()
        found = [Saved(saved, f"{self._url}/{name}") for name, saved in self._index().items()]
        return sorted(found, reverse=True)

    def _index(self) -> dict[str, int]:
        try:
            with files.opened_remote(f"{self._url}/{INDEX}") as file:
                read: dict[str, int] = json.load(file)["checkpoints"]
        except FileNotFoundError:
            return {}
        return read

    def _set_index(self, index: dict[str, int]) -> None:
        data = json.dumps({"checkpoints": index}, indent=1).encode()
        files.write_remote(f"{self._url}/{INDEX}", lambda file: file.write(data))


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a checkpoint from the one that replaces it, the time of its writing last; None without one."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _text(url: str, paths: list[str], error: Exception) -> str:
    why = f"{type(error).__name__}: {error}".rstrip(".")
    if not paths:
        return f"{url} could not be written: {why}."
    are = "is only on this machine" if len(paths) == 1 else "are only on this machine"
    return f"{url} could not be written, so {', '.join(paths)} {are}: {why}."
