"""The hooks of a module in groups, for classes that bring some of them along."""

from __future__ import annotations

from typing import Any

from hasten.module.hook_defaults import ModelHooks


class CheckpointHooks:
    """What a module adds to its checkpoint, and takes from it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint before it is restored."""


__all__ = ["CheckpointHooks", "ModelHooks"]
