"""Checkpoints that all processes write together, each its own shards, into a folder that is complete or absent.

A folder holds ``meta.pt`` (everything that is not a tensor, and where the tensors are), the shards
``__<rank>_0.distcp``, and ``.metadata``, the index with which torch.distributed.checkpoint reads the tensors.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import re
import secrets
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from hasten._lib.errors import make_error
from hasten._lib.files import (
    TEMPORARY,
    in_the_way,
    is_named,
    put_in_place,
    replacing_folder,
    sync_folder,
    why_not_written,
)
from hasten._lib.rank_zero import log
from hasten._lib.tree import is_sharded, map_tensors, rebuilt
from hasten.checkpoint import tensor_files
from hasten.checkpoint.flat import FlatPart
from hasten.checkpoint.places import PLACEHOLDER, LocalPlace, Place, RemotePlace
from hasten.checkpoint.stored import CONTENTS_FILE, FORMAT, SHARDS, differs, is_checkpoint_folder, missing
from hasten.machine.collectives import joined, lost_partner

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Entries whose tensors are stored in files of their own, whether they are sharded or not.
_TENSOR_ENTRIES = ("state_dict", "optimizer_states")
# Name of the folder of a save behind a URL; killed writers leave such folders behind.
_OF_A_SAVE = re.compile(rf"shards-[0-9a-f]{{8}}|{re.escape(CONTENTS_FILE)}\..*{re.escape(TEMPORARY)}")
# How long a process that writes in the background may wait for the others. A process that dies is detected at once.
_PATIENCE = timedelta(hours=2)
_BLOCK_BYTES = 1 << 22


class FileFunctions(NamedTuple):
    """The functions that write files with a checksum."""

    check: Callable[[object], None]  # raises a TypeError for contents that cannot be stored
    make_folder: Callable[[Path], None]
    save: Callable[[dict[str, Any], str], None]


class _Target(ABC):
    """The target of a save: the first process calls ``prepare`` and ``commit``, and all processes call ``end``."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def prepare(self) -> str:
        """Return a name for the folder in which the shards are written, after making it."""

    @abstractmethod
    def place(self, prepared: str) -> Place:
        """Return the folder in which the shards are written."""

    @abstractmethod
    def commit(self, prepared: str, contents: dict[str, Any]) -> None:
        """Write the contents, which completes the checkpoint."""

    @abstractmethod
    def end(self) -> None:
        """Remove what was prepared and not committed."""

    @abstractmethod
    def is_there(self) -> bool:
        """Return whether a checkpoint is there."""


class LocalTarget(_Target):
    """A folder that is renamed when it is complete."""

    def __init__(self, path: Path, files: FileFunctions) -> None:
        self._path, self._files = path, files
        self._held = ExitStack()

    def __str__(self) -> str:
        return str(self._path)

    def prepare(self) -> str:
        path = self._path
        if path.is_dir() and not path.is_symlink() and os.listdir(path) and not is_checkpoint_folder(path):
            text = f"{path} is a folder with other files; a checkpoint needs a name"
            raise IsADirectoryError(errno.EISDIR, text, str(path))
        self._files.make_folder(path.parent)
        return str(self._held.enter_context(replacing_folder(path)))

    def place(self, prepared: str) -> Place:
        return LocalPlace(prepared)

    def commit(self, prepared: str, contents: dict[str, Any]) -> None:
        self._files.save(contents, f"{prepared}/{CONTENTS_FILE}")
        sync_folder(prepared)
        put_in_place(prepared, self._path)

    def end(self) -> None:
        self._held.close()

    def is_there(self) -> bool:
        return os.path.lexists(self._path)


class RemoteTarget(_Target):
    """A folder behind a URL: each save writes to a new subfolder, which the contents, written last, name."""

    def __init__(self, url: str, system: AbstractFileSystem, path: str, files: FileFunctions) -> None:
        self._place, self._system, self._files = RemotePlace(url, system, path), system, files
        self._prepared = ""

    def __str__(self) -> str:
        return str(self._place)

    def prepare(self) -> str:
        if self._system.isfile(self._place.path):
            raise FileExistsError(
                errno.EEXIST, "a file is there; remove it, or give the folder another name", str(self)
            )
        others = [name for name in self._names() if name != CONTENTS_FILE and not _OF_A_SAVE.fullmatch(name)]
        if others:
            text = f"{self} is a folder with other files ({others[0]}); a checkpoint needs a name"
            raise IsADirectoryError(errno.EISDIR, text, str(self))
        self._prepared = f"shards-{secrets.token_hex(4)}"
        self._system.makedirs(f"{self._place.path}/{self._prepared}", exist_ok=True)
        return self._prepared

    def place(self, prepared: str) -> Place:
        return self._place.inside(prepared)

    def commit(self, prepared: str, contents: dict[str, Any]) -> None:
        self._files.save({**contents, SHARDS: prepared}, f"{self._place}/{CONTENTS_FILE}")
        self._prepared = ""
        # Shards of earlier saves, also of those that were killed.
        for name in self._names():
            if _OF_A_SAVE.fullmatch(name) and name != prepared:
                with suppress(Exception):
                    self._system.rm(f"{self._place.path}/{name}", recursive=True)

    def _names(self) -> list[str]:
        """Return the names of the files and folders that are there."""
        self._system.invalidate_cache()
        paths = self._system.ls(self._place.path, detail=False) if self._system.isdir(self._place.path) else []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def end(self) -> None:
        prepared, self._prepared = self._prepared, ""
        if prepared:
            with suppress(Exception):
                self._system.rm(f"{self._place.path}/{prepared}", recursive=True)

    def is_there(self) -> bool:
        return bool(self._system.exists(f"{self._place.path}/{CONTENTS_FILE}"))


def save(contents: dict[str, Any], target: _Target, files: FileFunctions) -> None:
    """Write a checkpoint as a folder; all processes call it, and an error of one is raised by all of them.

    At any moment there is the old checkpoint or the new one, whole; see ``recover`` in ``_lib/files.py``.

    Args:
        contents: nested dicts, lists and tuples with tensors and DTensors. Unsharded values are taken from the first
            process.
        target: the folder. A checkpoint there is replaced.
        files: how files are written.

    Raises:
        TypeError: something in ``contents`` could only be read back by running code; the message says where.
        OSError: a process could not write.
        RuntimeError: another error of a process, or other sharded tensors on one than on the others.

    Source: `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`_.

    """
    one = _Save(contents, target, files, group=None)
    try:
        one.begin()
        one.write()
    finally:
        one.end()


def copy(source: Place, stored: dict[str, Any], target: _Target) -> None:
    """Write a folder once more, in this process alone; a checkpoint at the target is replaced.

    Raises:
        CheckpointDamaged: a file has changed since it was written.
        OSError: a file could not be read or written.

    """
    try:
        prepared = target.prepare()
        place = target.place(prepared)
        for name, (size, checksum) in stored["files"].items():
            found = _copy_file(source, place, name)
            if found != (size, checksum):
                raise differs(source, name)
        place.sync()
        target.commit(prepared, stored)
    finally:
        target.end()


def _copy_file(source: Place, place: Place, name: str) -> tuple[int, int]:
    """Copy a file, and return its size in bytes and its CRC-32."""
    size = checksum = 0
    with source.open(name, "rb") as file, place.open(name, "wb") as copied:
        while block := file.read(_BLOCK_BYTES):
            copied.write(block)
            size, checksum = size + len(block), zlib.crc32(block, checksum)
        if place.needs_sync:
            copied.flush()
            os.fsync(copied.fileno())
    return size, checksum


class BackgroundSaves:
    """Writes folders in a thread, one after the other; ``save`` returns when the tensors are copied.

    Processes agree over a separate process group, so that training continues meanwhile.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._stager: Any = None
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(self, contents: dict[str, Any], target: _Target, files: FileFunctions) -> None:
        """As the function ``save``; an earlier save is completed first, and its error raised."""
        earlier = self._wait()
        if earlier is not None and lost_partner(earlier):
            # The others may be waiting for the one that has ended; this process's end tells them.
            raise earlier
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            if joined():
                self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            # Before the process leaves its group, which would not wait for a save.
            atexit.register(self.close)
        self._stager = tensor_files.stager(self._stager)
        one = _Save(contents, target, files, group=self._group)
        try:
            one.begin(stager=self._stager, earlier=earlier)
        except BaseException:
            one.end()
            raise
        self._pending = self._executor.submit(_complete, one)

    def after(self, function: Callable[[], object]) -> None:
        """Call ``function`` once the save that is being written has succeeded; at once if there is none.

        An error of the file system in it is a warning if it comes later.
        """
        pending = self._pending
        if pending is None or self._executor is None:
            function()
            return

        def follow() -> None:
            pending.result()
            try:
                function()
            except OSError as error:
                log.warning(f"An old checkpoint could not be removed: {error}.")

        self._pending = self._executor.submit(follow)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError, RuntimeError: it could not be written.

        """
        if (error := self._wait()) is not None:
            raise error

    def close(self) -> None:
        """Wait until everything is written, and release threads, memory and process group."""
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=True)
                self._stager.close()
            if self._group is not None and joined():
                dist.destroy_process_group(self._group)
            self._executor = self._stager = self._group = None

    def _wait(self) -> BaseException | None:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()


def _complete(one: _Save) -> None:
    try:
        one.write()
    finally:
        one.end()


class _Save:
    """One save: ``begin``, ``write`` and in any case ``end``. All processes call each; an error of one ends all."""

    def __init__(self, contents: dict[str, Any], target: _Target, files: FileFunctions, group: Any) -> None:
        self._contents, self._target, self._files, self._group = contents, target, files, group
        self._rank = dist.get_rank(group) if joined() else 0
        self._tensors: dict[str, Tensor] = {}
        self._prepared = ""

    def begin(self, *, stager: Any = None, earlier: BaseException | None = None) -> None:
        """Find the tensors, copied by ``stager`` if they may change, and make a temporary folder.

        ``earlier`` is an error to raise on all processes.
        """
        error = earlier
        prepared = ""
        if error is None:
            try:
                prepared = self._prepare(stager)
            except Exception as caught:
                error = caught
        sharded = sorted(key for key, tensor in self._tensors.items() if _is_part(tensor))
        digest = hashlib.sha256("\n".join(sharded).encode()).hexdigest()
        everything = self._agree(error, (prepared, digest))
        self._prepared = everything[0][0]
        if len({each for _, each in everything}) > 1:
            by_rank = list(map(set, self._agree(None, sharded)))
            rank = next(rank for rank, keys in enumerate(by_rank) if keys != by_rank[0])
            raise make_error(
                RuntimeError,
                f"{self._target} was not written: rank 0 and rank {rank} have other sharded tensors, for instance "
                f"{min(by_rank[0] ^ by_rank[rank])}.",
                fix="Save the same model on all processes.",
            )

    def _prepare(self, stager: Any) -> str:
        is_first = self._rank == 0
        self._contents, self._tensors = split(self._contents, is_first=is_first)
        if is_first:
            self._files.check(self._contents)
        if stager is not None:
            # Flat parts are copies already.
            kept = {key: tensor for key, tensor in self._tensors.items() if isinstance(tensor, FlatPart)}
            # Torch's stager takes a DTensor with an offset, as FSDP reduces gradients, for one with a storage.
            others = {
                key: tensor.clone() if type(tensor) is not Tensor and tensor.storage_offset() else tensor
                for key, tensor in self._tensors.items()
                if key not in kept
            }
            self._tensors = {**stager.stage(others), **kept}
            if is_first:
                self._contents = map_tensors(lambda each: each.detach().to("cpu", copy=True), self._contents)
        return self._target.prepare() if is_first else ""

    def write(self) -> None:
        """Write everything, and give the folder its name."""
        place = self._target.place(self._prepared)
        writer = tensor_files.Writer(place)
        try:
            tensor_files.save(self._tensors, writer, self._group)
        except CheckpointException as caught:
            rank, failure = tensor_files.first_failure(caught)
            raise _explained(failure, self._target, rank) from None
        error: BaseException | None = None
        try:
            place.sync()
        except Exception as caught_here:
            error = caught_here
        sums = self._agree(error, writer.sums)
        if self._rank == 0:
            try:
                together = {name: each for one in sums for name, each in one.items()}
                if missing(place, together) is not None:
                    raise RuntimeError(tensor_files.not_shared(str(self._target)))
                layout = json.dumps(writer.layout).encode()
                contents = {FORMAT: 1, "contents": self._contents, "tensors": layout, "files": together}
                self._target.commit(self._prepared, contents)
            except Exception as caught_here:
                error = caught_here
        self._agree(error, None)

    def end(self) -> None:
        """Remove the shards, unless the checkpoint is complete."""
        self._target.end()

    def _agree(self, error: BaseException | None, own: Any) -> list[Any]:
        """Return the objects that the processes pass as ``own``, or raise the error of the first that has one."""
        sent = (None if error is None else _portable(error), own)
        everything: list[Any] = [sent]
        if joined():
            everything = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everything, sent, group=self._group)
        for rank, (theirs, _) in enumerate(everything):
            if theirs is not None:
                raise _explained(theirs, self._target, rank) from error
        return [each for _, each in everything]


def split(contents: dict[str, Any], *, is_first: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``contents`` with placeholders for the tensors that are stored in files of their own, and these tensors.

    These are all DTensors and flat parts and, in the first process, the tensors of weights and optimizers. Other
    tensors stay in the contents: the code that restores them does not read them from a folder.
    """
    tensors: dict[str, Tensor] = {}
    seen: Counter[str] = Counter()

    def walk(value: Any, place: str, takes_all: bool) -> Any:
        if isinstance(value, Tensor):
            seen[place] += 1
            key = place if seen[place] == 1 else f"{place}#{seen[place]}"
            if _is_part(value) or (takes_all and _is_plain(value)):
                tensors[key] = value.detach()
                return {PLACEHOLDER: key}
            return value
        if isinstance(value, dict):
            return rebuilt(value, [walk(each, f"{place}.{key}", takes_all) for key, each in value.items()])
        if type(value) is list or type(value) is tuple:
            return type(value)(walk(each, f"{place}.{index}", takes_all) for index, each in enumerate(value))
        return value

    kept = {name: walk(value, str(name), is_first and name in _TENSOR_ENTRIES) for name, value in contents.items()}
    return kept, tensors


def _is_part(tensor: Tensor) -> bool:
    """Return whether each process has a part of a tensor."""
    return is_sharded(tensor) or isinstance(tensor, FlatPart)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor_files`` can store a tensor; quantized and sparse ones stay in the contents."""
    kinds = (Tensor, nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


# -- errors, which all processes raise alike


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be sent to other processes."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    for kind in (TypeError, ValueError, RuntimeError):
        if type(error) is kind:
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _explained(error: BaseException, target: _Target, rank: int) -> BaseException:
    """Return the error to raise for what happened on ``rank``."""
    if isinstance(error, NotADirectoryError) and not is_named(error):
        return in_the_way(error, os.path.dirname(str(target)))
    said = (IsADirectoryError, NotADirectoryError, FileExistsError, TypeError, ValueError)
    if isinstance(error, said) or _EXPLAINED in str(error):
        return error
    who = f"rank {rank} " if joined() and dist.get_world_size() > 1 else ""
    kept = "what was there before is untouched" if target.is_there() else "nothing is left of it"
    if isinstance(error, OSError):
        why = why_not_written(error, os.path.dirname(str(target)))
        return type(error)(error.errno, f"{who}{_EXPLAINED} ({kept}): {why}", str(target))
    return RuntimeError(f"{who}{_EXPLAINED} {target} ({kept}): {error}")


_EXPLAINED = "could not write the checkpoint"
