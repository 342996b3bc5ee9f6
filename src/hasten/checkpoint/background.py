"""AsyncCheckpointIO: write checkpoints in a thread while training continues."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hasten._lib.tree import map_tensors
from hasten.checkpoint.io import CheckpointIO, Path, TorchCheckpointIO


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

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Copy ``checkpoint`` and return; the thread writes it.

        Raises:
            OSError: an earlier write failed.

        """
        self._collect(wait=False)
        copied = map_tensors(_copied, checkpoint)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(
            self._executor.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options)
        )

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, after everything is written."""
        self._collect(wait=True)
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Path) -> None:
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


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
