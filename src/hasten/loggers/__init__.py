"""Loggers: where the values given to ``self.log`` are written.

They receive Python numbers and paths, and must not import ``hasten.loops``, ``hasten.module`` or ``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.loggers.base import DummyLogger as DummyLogger
    from hasten.loggers.base import Logger as Logger
    from hasten.loggers.base import rank_zero_experiment as rank_zero_experiment
    from hasten.loggers.comet import CometLogger as CometLogger
    from hasten.loggers.csv import CSVLogger as CSVLogger
    from hasten.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from hasten.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from hasten.loggers.wandb import WandbLogger as WandbLogger

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.loggers.base": ("DummyLogger", "LitLogger", "Logger", "NeptuneLogger", "rank_zero_experiment"),
        "hasten.loggers.comet": ("CometLogger",),
        "hasten.loggers.csv": ("CSVLogger",),
        "hasten.loggers.mlflow": ("MLFlowLogger",),
        "hasten.loggers.tensorboard": ("TensorBoardLogger",),
        "hasten.loggers.wandb": ("WandbLogger",),
    },
    hidden=("DummyLogger", "LitLogger", "NeptuneLogger", "rank_zero_experiment"),
)
