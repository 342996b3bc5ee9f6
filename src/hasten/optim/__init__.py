"""Optimizers: the values that ``configure_optimizers`` may return, and hasten's own optimizers.

It must not import ``hasten.module``, ``hasten.strategies``, ``hasten.loops`` or ``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.optim.averaged import schedule_free as schedule_free
    from hasten.optim.backward import in_backward as in_backward
    from hasten.optim.configure import HastenOptimizer as HastenOptimizer
    from hasten.optim.configure import LRSchedulerConfig as LRSchedulerConfig
    from hasten.optim.configure import check as check
    from hasten.optim.configure import check_accumulation as check_accumulation
    from hasten.optim.configure import check_assigned as check_assigned
    from hasten.optim.configure import no_accumulation as no_accumulation
    from hasten.optim.configure import parse as parse
    from hasten.optim.decay import adamw as adamw
    from hasten.optim.fast_step import needs_closure as needs_closure
    from hasten.optim.fused import use_fused as use_fused
    from hasten.optim.matrices import muon as muon

# No file is called like its function: importing the file would put the file in the function's place.
__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.optim.averaged": ("schedule_free",),
        "hasten.optim.backward": ("in_backward",),
        "hasten.optim.configure": (
            "HastenOptimizer",
            "LRSchedulerConfig",
            "check",
            "check_accumulation",
            "check_assigned",
            "no_accumulation",
            "parse",
        ),
        "hasten.optim.decay": ("adamw",),
        "hasten.optim.fused": ("use_fused",),
        "hasten.optim.matrices": ("muon",),
        "hasten.optim.fast_step": ("needs_closure",),
    },
)
