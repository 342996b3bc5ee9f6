"""Size and cost of a model: summary, FLOPs, throughput, the peak FLOP/s of devices.

It looks at modules and devices, and must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten_tools``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.report.logs import plot_logs as plot_logs
    from hasten.report.summary import LayerSummary as LayerSummary
    from hasten.report.summary import ModelSummary as ModelSummary
    from hasten.report.summary import summarize as summarize

__getattr__, __dir__, __all__ = attach(
    __name__,
    {"hasten.report.logs": ("plot_logs",), "hasten.report.summary": ("LayerSummary", "ModelSummary", "summarize")},
)
