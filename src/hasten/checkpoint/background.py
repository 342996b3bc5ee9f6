"""Write checkpoints in the background, while training continues."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hasten._lib.tree import map_tensors
from hasten.checkpoint.files import CheckpointIO, TorchCheckpointIO, folder_target

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike, StorageOptions


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in a thread, one after the other.

    ``save_checkpoint`` and ``save_folder`` copy the contents before they return, so later changes are not in the file.
    An error is raised at the next save, or when the run ends. A folder gets its name when all processes have written
    their shards; one is written at a time, and the next save waits for it.

    Args:
        checkpoint_io: writes the files; ``TorchCheckpointIO`` by default.

    Example: ``Trainer(plugins=AsyncCheckpointIO())``

    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io if checkpoint_io is not None else TorchCheckpointIO()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        # A BackgroundSaves of sharded.py, created by the first save of a folder.
        self._folders: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Copy ``checkpoint`` and return; the thread writes it.

        Raises:
            OSError: an earlier write failed.

        """
        self._collect(wait=False)
        copied = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), checkpoint)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(self._executor.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options))

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
        self._collect(wait=True)
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path`` after everything is written: it may be the file being written, or one that is replaced.

        While a folder is being written, this returns at once, and removes ``path`` when the folder is complete.
        """
        if self._folders is not None:
            self._folders.after(functools.partial(self.checkpoint_io.remove_checkpoint, path))
            return
        self._collect(wait=True)
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for files that are still being written."""
        try:
            self._collect(wait=True)
        finally:
            folders, self._folders = self._folders, None
            if folders is not None:
                folders.close()
            if self._executor is not None:
                self._executor.shutdown(wait=True)
                self._executor = None
            self.checkpoint_io.teardown()

    def _collect(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            self._pending.pop(0).result()
        if wait and self._folders is not None:
            self._folders.wait()
