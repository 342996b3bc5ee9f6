"""Write checkpoints in the background, while training continues."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.serialization import location_tag

from hasten._lib import check, torch_private
from hasten._lib.device import is_host
from hasten._lib.rank_zero import log
from hasten.checkpoint.files import (
    CheckpointIO,
    DefaultCheckpointIO,
    TorchCheckpointIO,
    folder_target,
    is_plain,
    located_as,
    save,
    save_unchecked,
)
from hasten.checkpoint.places import Copies
from hasten.machine.host import available_memory_bytes

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike, StorageOptions

# ModelCheckpoint saves in the background if there are at least so many bytes of tensors.
LARGE_BYTES = 50_000_000
# Copies take at most this part of the memory that is left.
_SHARE_OF_MEMORY = 0.5


class BackgroundWriter:
    """A thread that writes one save at a time: the next waits for it.

    A save is one file, or what is written between ``begin`` and ``end``: files of the same state, and what is to be
    done once they are complete. After a failure the rest of the save is left out.
    """

    def __init__(self) -> None:
        # Whether no save is open, nothing is being written and no error is left to be raised.
        self.is_idle = True
        self._is_open = False
        self._executor: ThreadPoolExecutor | None = None
        # The last task. Each begins with the result of the one before.
        self._pending: Future[None] | None = None
        # Where files will be once everything is written.
        self.paths = set[str]()
        self._error: BaseException | None = None
        self._undo: Callable[[], object] | None = None
        self._notify: Callable[[], object] | None = None
        self._copies: HostCopies | None = None

    def __reduce__(self) -> tuple[type[BackgroundWriter], tuple[()]]:
        # Threads and what they write stay in this process.
        return BackgroundWriter, ()

    def begin(self, undo: Callable[[], object]) -> None:
        """Wait for the save before, and raise its error; what is written until ``end`` is one save.

        If that fails, ``undo`` is called in the main thread before its error is raised.
        """
        if not self.is_idle:
            self.wait()
        self._undo, self._is_open, self.is_idle = undo, True, False

    def end(self) -> None:
        """End what ``begin`` has begun, without waiting."""
        self._is_open, self.is_idle = False, self._pending is None and self._error is None
        if self._copies is not None:
            self._copies.forget_sources()

    def copy(self, contents: dict[str, Any]) -> Copy | None:
        """Return a copy of a checkpoint, after the save before, whose error it raises; see ``HostCopies.of``."""
        if not self._is_open or self._error is not None:
            self.wait()
        if self._copies is None:
            self._copies = HostCopies()
        if self._is_open:
            return self._copies.of(contents)
        self._undo = None
        try:
            return self._copies.of(contents)
        finally:
            self._copies.forget_sources()

    def save(self, contents: dict[str, Any], path: PathLike, storage_options: StorageOptions) -> None:
        """Write a checkpoint: in the thread if it is large and a save is open, else before this returns."""
        snapshot = self.copy(contents) if self._is_open and _size_bytes(contents) >= LARGE_BYTES else None
        if snapshot is not None:
            self.write(functools.partial(save_unchecked, storage_options=storage_options), snapshot, path)
            return
        # The older state first, if both have the same name.
        self.settle()
        try:
            save(contents, path, storage_options=storage_options)
        finally:
            if self._error is not None:
                self.wait()

    def write(self, save: Callable[[dict[str, Any], PathLike], object], snapshot: Copy, path: PathLike) -> None:
        """Have the thread call ``save(contents, path)``, unless what comes before it fails."""
        self.paths.add(os.fspath(path))
        self._submit(_write, save, snapshot, path)

    def _submit(self, function: Callable[..., object], *args: object) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        before, self.is_idle = self._pending, False

        def task() -> None:
            if before is not None:
                before.result()
            function(*args)

        self._pending = self._executor.submit(task)
        self._pending.add_done_callback(self._tell)

    def after(self, function: Callable[[], object]) -> None:
        """Call ``function`` once everything is written, and not if that fails; at once if nothing is being written."""
        if self._pending is not None:
            self._submit(function)
        elif self._error is None:
            function()

    def remove(self, function: Callable[[PathLike], object], path: PathLike) -> None:
        """Call ``function(path)``, which removes a file, as ``after`` does; an ``OSError`` is a warning."""
        self.after(functools.partial(_remove, function, path))

    def settle(self) -> None:
        """Wait until everything is written. If that fails, the next ``wait`` raises the error."""
        if self._pending is not None:
            error = self._pending.exception()
            self._pending = None
            self.paths.clear()
            if error is not None:
                self._error, undo, self._undo = error, self._undo, None
                if undo is not None:
                    undo()

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: it could not be.

        """
        self.settle()
        error, self._error, self.is_idle = self._error, None, not self._is_open
        if error is not None:
            raise error

    def follow(self, notify: Callable[[], object]) -> None:
        """Raise the error of a save that has failed, and have ``notify`` called in the thread if one fails later."""
        self._notify = notify
        if self._error is not None or (self._pending is not None and self._pending.done()):
            self.wait()

    def close(self) -> None:
        """Wait until everything is written, and release thread and memory.

        Raises:
            OSError: it could not be written.

        """
        try:
            if not self.is_idle:
                self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=True)
            self._executor = self._undo = self._notify = self._copies = None

    def _tell(self, done: Future[None]) -> None:
        notify = self._notify
        if notify is not None and done.exception() is not None:
            notify()


def writer_of(checkpoint_io: CheckpointIO) -> BackgroundWriter | None:
    """Return what writes files of ``checkpoint_io`` in the background; None if all are written at once."""
    while not isinstance(checkpoint_io, AsyncCheckpointIO) and isinstance(checkpoint_io.wrapped, CheckpointIO):
        checkpoint_io = checkpoint_io.wrapped
    if type(checkpoint_io) is DefaultCheckpointIO:
        checkpoint_io.writer = checkpoint_io.writer or BackgroundWriter()
        return checkpoint_io.writer
    return checkpoint_io.writer if isinstance(checkpoint_io, AsyncCheckpointIO) else None


# -- copies


class Copy(NamedTuple):
    """A checkpoint whose tensors are in memory of the host."""

    contents: dict[str, Any]
    # Storage of a copy -> where ``torch.load`` puts it, for those that were on another device.
    locations: dict[int, str]


class HostCopies:
    """Copies checkpoints so that their files are the same to the last bit: each storage once, with all that share it.

    The memory of copies is kept for the next time. A storage that was copied is not copied again before
    ``forget_sources``: until then, nothing may write to it.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._free: list[Tensor] = []
        # The number of a storage -> the storage, so that no other gets the number, and its copy.
        self._copy_of: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def forget_sources(self) -> None:
        """Copy everything next time, into the same memory: what is copied must be written by then."""
        self._copy_of.clear()
        self._free = list(self._memory)

    @torch.inference_mode(False)
    @torch.no_grad()
    def of(self, contents: dict[str, Any]) -> Copy | None:
        """Return a copy; None if something cannot be copied to the last bit, or there is too little memory for it."""
        tensors = _tensors_in(contents)
        if not is_plain(contents) or not all(map(_is_copied_exactly, tensors)):
            return None
        numbers = [torch_private.identity_of(tensor.untyped_storage()) for tensor in tensors]
        storages = {number: tensor.untyped_storage() for number, tensor in zip(numbers, tensors, strict=True)}
        new = {number: storage for number, storage in storages.items() if number not in self._copy_of}
        devices = {storage.device for storage in new.values() if not is_host(storage.device)}
        if not self._copy(new, pinned=bool(devices)):
            return None
        for device in devices:
            torch.accelerator.synchronize(device)
        copies = [self._copy_of[number][1] for number in numbers]
        memo: dict[int, Any] = {
            id(tensor): _on_storage(tensor, one) for tensor, one in zip(tensors, copies, strict=True)
        }
        locations = {
            torch_private.identity_of(self._copy_of[number][1]): location_tag(storage)
            for number, storage in storages.items()
            if not is_host(storage.device)
        }
        return Copy(copy.deepcopy(contents, memo), locations)

    def _copy(self, storages: dict[int, torch.UntypedStorage], *, pinned: bool) -> bool:
        """Copy storages side by side into one piece of memory; return whether there is enough."""
        starts = [0, *itertools.accumulate(-(-each.nbytes() // 64) * 64 for each in storages.values())]
        memory = self._take(starts[-1], pinned=pinned)
        if memory is None:
            return False
        for (number, storage), start in zip(storages.items(), starts, strict=False):
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory[start : start + storage.nbytes()].copy_(source, non_blocking=True)
            # An empty one has no address that it could share with the next.
            place = memory.untyped_storage()[start : start + storage.nbytes()]
            self._copy_of[number] = storage, place if storage.nbytes() else torch.UntypedStorage(0)
        return True

    def _take(self, size: int, *, pinned: bool) -> Tensor | None:
        """Return the smallest free piece of memory that is large enough, or a new one; None if that takes too much."""
        pieces = [piece for piece in self._free if piece.numel() >= size]
        if pieces:
            piece = min(pieces, key=Tensor.numel)
            self._free = [other for other in self._free if other is not piece]
            return piece
        # What was free was too small, and will be.
        self._memory = [other for other in self._memory if all(other is not small for small in self._free)]
        self._free = []
        available = available_memory_bytes()
        if available is not None and size > _SHARE_OF_MEMORY * available:
            return None
        try:
            self._memory.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))
        except RuntimeError:
            # Less than the system says: a limit of the process, or of what may be pinned.
            return None
        return self._memory[-1]


def _tensors_in(contents: object) -> list[Tensor]:
    """Return the tensors in plain data, each once."""
    tensors: dict[int, Tensor] = {}
    stack = [contents]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            stack.extend(value)
    return list(tensors.values())


def _size_bytes(contents: object) -> int:
    """Return how many bytes the tensors in plain data have; memory that several share counts once for each."""
    return sum([tensor.nbytes for tensor in _tensors_in(contents) if tensor.layout is torch.strided])


def _is_copied_exactly(tensor: Tensor) -> bool:
    is_unusual = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta
    return not (is_unusual or tensor.is_conj() or tensor.is_neg() or vars(tensor))


def _on_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor like ``tensor`` that has its values in ``storage``."""
    data = torch.empty(0, dtype=tensor.dtype, device="cpu")
    data.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


# -- the plugin


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in a thread, one after the other.

    ``save_checkpoint`` and ``save_folder`` copy the contents before they return, so later changes are not in the file.
    One save is written at a time, and the next waits for it. An error is raised at the next step or save, or when the
    run ends. A folder gets its name when all processes have written their shards.

    Without it, ``ModelCheckpoint`` saves large files of one process in the same way, and everything else at once.

    Args:
        checkpoint_io: writes the files; ``TorchCheckpointIO`` by default.

    Example: ``Trainer(plugins=AsyncCheckpointIO())``

    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        check.declared(AsyncCheckpointIO.__init__, locals())
        super().__init__()
        self.checkpoint_io = checkpoint_io if checkpoint_io is not None else TorchCheckpointIO()
        self.writer = BackgroundWriter()
        # A BackgroundSaves of sharded.py, created by the first save of a folder.
        self._folders: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Wait for the last save, copy ``checkpoint`` and return; the thread writes it.

        Raises:
            OSError: an earlier write failed.

        """
        snapshot = self.writer.copy(checkpoint)
        if snapshot is None:
            memo: dict[int, Any] = {id(one): one.detach().to("cpu", copy=True) for one in _tensors_in(checkpoint)}
            snapshot = Copy(copy.deepcopy(checkpoint, memo), {})
        save = functools.partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        self.writer.write(save, snapshot, path)

    @property
    def copies(self) -> Copies:
        return self.checkpoint_io.copies

    @property
    def wrapped(self) -> CheckpointIO:
        return self.checkpoint_io

    @property
    def writes_folders(self) -> bool:
        return type(self.checkpoint_io) is TorchCheckpointIO

    def save_folder(self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None) -> None:
        """Wait for the last folder, copy the tensors of this process and return; a thread writes them.

        Raises:
            OSError, RuntimeError: the last folder could not be written, or this one cannot be begun; in all processes.

        """
        if not self.writes_folders:
            super().save_folder(checkpoint, path, storage_options)
        target, functions = folder_target(path, storage_options)
        if self._folders is None:
            from hasten.checkpoint.sharded import BackgroundSaves

            self._folders = BackgroundSaves()
        self._folders.save(checkpoint, target, functions)

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, after everything is written."""
        self.writer.wait()
        if self._folders is not None:
            self._folders.wait()
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``; if something is being written, when it is complete."""
        self.after(functools.partial(_remove, self.checkpoint_io.remove_checkpoint, path))

    def after(self, function: Callable[[], object]) -> None:
        """Call ``function`` once everything saved so far is complete, and not if that fails."""
        if self._folders is not None:
            self._folders.after(function)
        else:
            self.writer.after(function)

    def teardown(self) -> None:
        """Wait for files that are still being written."""
        try:
            self.writer.close()
        finally:
            folders, self._folders = self._folders, None
            if folders is not None:
                folders.close()
            self.checkpoint_io.teardown()


def _write(save: Callable[[dict[str, Any], PathLike], object], snapshot: Copy, path: PathLike) -> None:
    with located_as(snapshot.locations):
        save(snapshot.contents, path)


def _remove(remove: Callable[[PathLike], object], path: PathLike) -> None:
    try:
        remove(path)
    except OSError as error:
        log.warning(f"The checkpoint {path} is no longer needed and could not be removed: {error}.")
