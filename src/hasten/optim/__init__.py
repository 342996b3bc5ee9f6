"""Optimizers: what ``configure_optimizers`` may return, and those that hasten makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.optim.configure import (
    HastenOptimizer,
    LRSchedulerConfig,
    check,
    check_accumulation,
    check_assigned,
    no_accumulation,
    parse,
)
from hasten.optim.fast_step import needs_closure

if TYPE_CHECKING:
    from hasten.optim.averaged import schedule_free
    from hasten.optim.backward import in_backward
    from hasten.optim.decay import adamw
    from hasten.optim.fused import use_fused
    from hasten.optim.matrices import muon

__all__ = [
    "HastenOptimizer",
    "LRSchedulerConfig",
    "adamw",
    "check",
    "check_accumulation",
    "check_assigned",
    "in_backward",
    "muon",
    "needs_closure",
    "no_accumulation",
    "parse",
    "schedule_free",
    "use_fused",
]

# No file is called like its function: importing the file would put the file in the function's place.
_LAZY = {
    "adamw": "hasten.optim.decay",
    "in_backward": "hasten.optim.backward",
    "muon": "hasten.optim.matrices",
    "schedule_free": "hasten.optim.averaged",
    "use_fused": "hasten.optim.fused",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hasten.optim' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
