"""Reports: what a run did, as tables and pictures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.report.plots import plot_logs as plot_logs
    from hasten.report.summary import LayerSummary as LayerSummary
    from hasten.report.summary import ModelSummary as ModelSummary
    from hasten.report.summary import summarize as summarize

_HOME = {
    "LayerSummary": "hasten.report.summary",
    "ModelSummary": "hasten.report.summary",
    "plot_logs": "hasten.report.plots",
    "summarize": "hasten.report.summary",
}

__all__ = ["LayerSummary", "ModelSummary", "plot_logs", "summarize"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.report' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
