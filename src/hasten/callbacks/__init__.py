"""Callbacks: what watches a run and acts at named moments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.callbacks.accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from hasten.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from hasten.callbacks.checkpoint import Checkpoint as Checkpoint
    from hasten.callbacks.device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from hasten.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from hasten.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from hasten.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from hasten.callbacks.lambda_function import LambdaCallback as LambdaCallback
    from hasten.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from hasten.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from hasten.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from hasten.callbacks.model_summary import ModelSummary as ModelSummary
    from hasten.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from hasten.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from hasten.callbacks.progress import ProgressBar as ProgressBar
    from hasten.callbacks.progress import TQDMProgressBar as TQDMProgressBar
    from hasten.callbacks.pruning import ModelPruning as ModelPruning
    from hasten.callbacks.rich_progress import RichProgressBar as RichProgressBar
    from hasten.callbacks.rich_summary import RichModelSummary as RichModelSummary
    from hasten.callbacks.spike import SpikeDetection as SpikeDetection
    from hasten.callbacks.swa import StochasticWeightAveraging as StochasticWeightAveraging
    from hasten.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
    from hasten.callbacks.timer import Timer as Timer
    from hasten.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from hasten.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from hasten.module.callback import Callback as Callback

_HOME = {
    "BackboneFinetuning": "hasten.callbacks.finetuning",
    "BaseFinetuning": "hasten.callbacks.finetuning",
    "BasePredictionWriter": "hasten.callbacks.prediction_writer",
    "BatchSizeFinder": "hasten.callbacks.batch_size_finder",
    "Callback": "hasten.module.callback",
    "Checkpoint": "hasten.callbacks.checkpoint",
    "DeviceStatsMonitor": "hasten.callbacks.device_stats",
    "EMAWeightAveraging": "hasten.callbacks.weight_averaging",
    "EarlyStopping": "hasten.callbacks.early_stopping",
    "GradientAccumulationScheduler": "hasten.callbacks.accumulation",
    "LambdaCallback": "hasten.callbacks.lambda_function",
    "LearningRateFinder": "hasten.callbacks.lr_finder",
    "LearningRateMonitor": "hasten.callbacks.lr_monitor",
    "ModelCheckpoint": "hasten.callbacks.model_checkpoint",
    "ModelPruning": "hasten.callbacks.pruning",
    "ModelSummary": "hasten.callbacks.model_summary",
    "OnExceptionCheckpoint": "hasten.callbacks.on_exception_checkpoint",
    "ProgressBar": "hasten.callbacks.progress",
    "RichModelSummary": "hasten.callbacks.rich_summary",
    "RichProgressBar": "hasten.callbacks.rich_progress",
    "SpikeDetection": "hasten.callbacks.spike",
    "StochasticWeightAveraging": "hasten.callbacks.swa",
    "TQDMProgressBar": "hasten.callbacks.progress",
    "ThroughputMonitor": "hasten.callbacks.throughput",
    "Timer": "hasten.callbacks.timer",
    "WeightAveraging": "hasten.callbacks.weight_averaging",
}

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.callbacks' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
