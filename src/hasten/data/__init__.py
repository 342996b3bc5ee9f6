"""What goes in: loaders made ready for a run, and streams of batches that can be saved and resumed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.data.combined import CombinedLoader as CombinedLoader

__all__ = ["CombinedLoader"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hasten.data.combined"), name)
    raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")
