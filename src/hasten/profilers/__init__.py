"""Profilers: where the time of a run goes.

They are called with names of actions, and must not import ``hasten.loops``, ``hasten.module`` or ``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from hasten.profilers.base import PassThroughProfiler as PassThroughProfiler
    from hasten.profilers.base import Profiler as Profiler
    from hasten.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from hasten.profilers.simple import SimpleProfiler as SimpleProfiler
    from hasten_xla.profiler import XLAProfiler as XLAProfiler

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.profilers.advanced": "AdvancedProfiler",
        "hasten.profilers.base": "PassThroughProfiler Profiler",
        "hasten.profilers.pytorch": "PyTorchProfiler",
        "hasten.profilers.simple": "SimpleProfiler",
        "hasten.profilers.xla": "XLAProfiler",
    },
)
