"""Callbacks: objects whose hooks run during a run, in addition to the hooks of the module.

They use public attributes of the Trainer that they are given, and must not import ``hasten.trainer`` or
``hasten.fabric``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.callbacks.accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from hasten.callbacks.checkpoint import Checkpoint as Checkpoint
    from hasten.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
    from hasten.callbacks.checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from hasten.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from hasten.callbacks.finders import BatchSizeFinder as BatchSizeFinder
    from hasten.callbacks.finders import LearningRateFinder as LearningRateFinder
    from hasten.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from hasten.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from hasten.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from hasten.callbacks.lambda_function import LambdaCallback as LambdaCallback
    from hasten.callbacks.memory_snapshot import MemorySnapshot as MemorySnapshot
    from hasten.callbacks.model_summary import ModelSummary as ModelSummary
    from hasten.callbacks.model_summary import RichModelSummary as RichModelSummary
    from hasten.callbacks.monitors import DeviceStatsMonitor as DeviceStatsMonitor
    from hasten.callbacks.monitors import LearningRateMonitor as LearningRateMonitor
    from hasten.callbacks.monitors import ThroughputMonitor as ThroughputMonitor
    from hasten.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from hasten.callbacks.progress import ProgressBar as ProgressBar
    from hasten.callbacks.progress import TQDMProgressBar as TQDMProgressBar
    from hasten.callbacks.pruning import ModelPruning as ModelPruning
    from hasten.callbacks.rich_progress import RichProgressBar as RichProgressBar
    from hasten.callbacks.spike import SpikeDetection as SpikeDetection
    from hasten.callbacks.timer import Timer as Timer
    from hasten.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from hasten.callbacks.weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from hasten.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from hasten.module.callback import Callback as Callback

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.callbacks.accumulation": ("GradientAccumulationScheduler",),
        "hasten.callbacks.checkpoint": ("Checkpoint", "ModelCheckpoint", "OnExceptionCheckpoint"),
        "hasten.callbacks.early_stopping": ("EarlyStopping",),
        "hasten.callbacks.finders": ("BatchSizeFinder", "LearningRateFinder"),
        "hasten.callbacks.finetuning": ("BackboneFinetuning", "BaseFinetuning"),
        "hasten.callbacks.garbage_collection": ("GarbageCollection",),
        "hasten.callbacks.lambda_function": ("LambdaCallback",),
        "hasten.callbacks.memory_snapshot": ("MemorySnapshot",),
        "hasten.callbacks.model_summary": ("ModelSummary", "RichModelSummary"),
        "hasten.callbacks.monitors": ("DeviceStatsMonitor", "LearningRateMonitor", "ThroughputMonitor"),
        "hasten.callbacks.prediction_writer": ("BasePredictionWriter",),
        "hasten.callbacks.progress": ("ProgressBar", "TQDMProgressBar"),
        "hasten.callbacks.pruning": ("ModelPruning",),
        "hasten.callbacks.rich_progress": ("RichProgressBar",),
        "hasten.callbacks.spike": ("SpikeDetection",),
        "hasten.callbacks.timer": ("Timer",),
        "hasten.callbacks.weight_averaging": ("EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"),
        "hasten.module.callback": ("Callback",),
    },
)
