"""Find a batch size that fits and a learning rate that learns, by trying them; nothing else changes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.tuner.tuner import Tuner as Tuner

__all__ = ["Tuner"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hasten.tuner.tuner"), name)
    raise AttributeError(f"module 'hasten.tuner' has no attribute {name!r}. It has: {', '.join(__all__)}.")
