"""Callbacks: what watches a run and acts at named moments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.callback import Callback as Callback
    from hasten.callbacks.checkpoint import Checkpoint as Checkpoint
    from hasten.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from hasten.callbacks.lambda_function import LambdaCallback as LambdaCallback
    from hasten.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from hasten.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from hasten.callbacks.model_summary import ModelSummary as ModelSummary
    from hasten.callbacks.progress import ProgressBar as ProgressBar
    from hasten.callbacks.progress import TQDMProgressBar as TQDMProgressBar
    from hasten.callbacks.timer import Timer as Timer

_HOME = {
    "Callback": "hasten.callback",
    "Checkpoint": "hasten.callbacks.checkpoint",
    "EarlyStopping": "hasten.callbacks.early_stopping",
    "LambdaCallback": "hasten.callbacks.lambda_function",
    "LearningRateMonitor": "hasten.callbacks.lr_monitor",
    "ModelCheckpoint": "hasten.callbacks.model_checkpoint",
    "ModelSummary": "hasten.callbacks.model_summary",
    "ProgressBar": "hasten.callbacks.progress",
    "TQDMProgressBar": "hasten.callbacks.progress",
    "Timer": "hasten.callbacks.timer",
}

# Names of the field that a program may ask for.
_NOT_YET = frozenset(
    {
        "BackboneFinetuning",
        "BaseFinetuning",
        "BasePredictionWriter",
        "BatchSizeFinder",
        "DeviceStatsMonitor",
        "EMAWeightAveraging",
        "GradientAccumulationScheduler",
        "LearningRateFinder",
        "ModelPruning",
        "OnExceptionCheckpoint",
        "RichModelSummary",
        "RichProgressBar",
        "SpikeDetection",
        "StochasticWeightAveraging",
        "ThroughputMonitor",
        "WeightAveraging",
    }
)

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "TQDMProgressBar",
    "Timer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _NOT_YET:
        raise AttributeError(
            f"hasten.callbacks.{name} is not in this version of hasten. There are: {', '.join(__all__)}; "
            "or write a hasten.Callback."
        )
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.callbacks' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
