"""Write, read and remove checkpoint files, at once or in a thread; subclass CheckpointIO for another way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hasten._lib.tree import map_tensors
from hasten.checkpoint import files

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints. Subclass it and pass it as ``plugins=MyCheckpointIO()``."""

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Write ``checkpoint`` to ``path``; called in the first process only.

        Args:
            checkpoint: names and values.
            path: a path or a URL.
            storage_options: for the file system.

        """

    @abstractmethod
    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``.

        Args:
            path: a path or a URL.
            map_location: the device of the tensors, as for ``torch.load``.
            weights_only: False reads Python objects too, which can run code: only for files you trust.

        """

    @abstractmethod
    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``."""

    def teardown(self) -> None:  # noqa: B027 - most write at once
        """Wait for files that are still being written."""


class TorchCheckpointIO(CheckpointIO):
    """Writes files atomically with ``torch.save``; see ``checkpoint.files``."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Write ``checkpoint``; the previous file stays whole until the new one is."""
        files.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``."""
        return files.load(path, map_location=map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``."""
        files.remove(path)


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in a thread, one after the other.

    ``save_checkpoint`` copies the contents before it returns, so later changes are not in the file. An error is
    raised at the next save, or when the run ends.

    Args:
        checkpoint_io: writes the files; ``TorchCheckpointIO`` by default.

    Example: ``Trainer(plugins=AsyncCheckpointIO())``

    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io if checkpoint_io is not None else TorchCheckpointIO()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Copy ``checkpoint`` and return; the thread writes it.

        Raises:
            OSError: an earlier write failed.

        """
        self._collect(wait=False)
        copied = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), checkpoint)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(
            self._executor.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options)
        )

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, after everything is written."""
        self._collect(wait=True)
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``, after everything is written: it may be what is being written."""
        self._collect(wait=True)
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for files that are still being written."""
        try:
            self._collect(wait=True)
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=True)
                self._executor = None
            self.checkpoint_io.teardown()

    def _collect(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            self._pending.pop(0).result()
