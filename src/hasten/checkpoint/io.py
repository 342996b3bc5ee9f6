"""CheckpointIO: write, read and remove checkpoint files; subclass it to store them in another way."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from hasten.checkpoint import files

Path = str | os.PathLike[str]


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints. Subclass it and pass it as ``plugins=MyCheckpointIO()``."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; called in the first process only.

        Args:
            checkpoint: names and values.
            path: a path or a URL.
            storage_options: for the file system.

        """

    @abstractmethod
    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``.

        Args:
            path: a path or a URL.
            map_location: the device of the tensors, as for ``torch.load``.
            weights_only: False reads Python objects too, which can run code: only for files you trust.

        """

    @abstractmethod
    def remove_checkpoint(self, path: Path) -> None:
        """Remove ``path``."""

    def teardown(self) -> None:  # noqa: B027 - most write at once
        """Wait for files that are still being written."""


class TorchCheckpointIO(CheckpointIO):
    """Writes files atomically with ``torch.save``; see ``checkpoint.files``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``; the previous file stays whole until the new one is."""
        files.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``."""
        return files.load(path, map_location=map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove ``path``."""
        files.remove(path)
