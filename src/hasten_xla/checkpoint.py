"""Checkpoint files of runs on XLA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from hasten.checkpoint.files import TorchCheckpointIO
from hasten_xla.steps import on_host

if TYPE_CHECKING:
    from hasten.types import PathLike, StorageOptions


@final
class XLACheckpointIO(TorchCheckpointIO):
    """Write checkpoints as TorchCheckpointIO does, with tensors of XLA devices copied to the host.

    A run on XLA devices does that with any CheckpointIO; this class is for code of yours that calls it directly.

    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write a checkpoint; see ``TorchCheckpointIO.save_checkpoint``."""
        super().save_checkpoint(on_host(checkpoint), path, storage_options)
