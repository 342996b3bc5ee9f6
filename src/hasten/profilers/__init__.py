"""Profilers: where the time of a run goes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from hasten.profilers.base import PassThroughProfiler as PassThroughProfiler
    from hasten.profilers.base import Profiler as Profiler
    from hasten.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from hasten.profilers.simple import SimpleProfiler as SimpleProfiler
    from hasten.profilers.xla import XLAProfiler as XLAProfiler

_HOME = {
    "AdvancedProfiler": "hasten.profilers.advanced",
    "PassThroughProfiler": "hasten.profilers.base",
    "Profiler": "hasten.profilers.base",
    "PyTorchProfiler": "hasten.profilers.pytorch",
    "SimpleProfiler": "hasten.profilers.simple",
    "XLAProfiler": "hasten.profilers.xla",
}

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "XLAProfiler",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.profilers' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
