"""Groups of module hooks, for mixins."""

from __future__ import annotations

from typing import Any

from hasten.module.hook_defaults import ModelHooks


class CheckpointHooks:
    """The checkpoint hooks of a module."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read entries of a checkpoint before it is restored."""


__all__ = ["CheckpointHooks", "ModelHooks"]
