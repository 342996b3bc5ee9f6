"""Groups of module hooks, for mixins."""

from hasten.module.hook_defaults import CheckpointHooks, ModelHooks

__all__ = ["CheckpointHooks", "ModelHooks"]
