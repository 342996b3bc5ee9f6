"""Memory of a training step: activation checkpointing, and recovery from out-of-memory errors."""

from __future__ import annotations

from hasten.memory.activation_checkpointing import may_have_changed as may_have_changed
from hasten.memory.activation_checkpointing import nothing_repeated as nothing_repeated
from hasten.memory.activation_checkpointing import recomputed as recomputed
from hasten.memory.activation_checkpointing import repeated_blocks as repeated_blocks

__all__ = ["may_have_changed", "nothing_repeated", "recomputed", "repeated_blocks"]
