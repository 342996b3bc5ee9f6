"""Checkpoints: their contents, and files that are complete or absent.

It reads and writes plain data, and must not import ``hasten.module``, ``hasten.strategies`` or ``hasten.loops``.
"""

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.checkpoint.background import AsyncCheckpointIO as AsyncCheckpointIO
    from hasten.checkpoint.files import CheckpointIO as CheckpointIO
    from hasten.checkpoint.files import TorchCheckpointIO as TorchCheckpointIO
    from hasten.checkpoint.uploads import UploadedCheckpointIO as UploadedCheckpointIO

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.checkpoint.background": ("AsyncCheckpointIO",),
        "hasten.checkpoint.files": ("CheckpointIO", "TorchCheckpointIO"),
        "hasten.checkpoint.uploads": ("UploadedCheckpointIO",),
    },
)
