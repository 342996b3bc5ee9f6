"""Loggers: where the values given to ``self.log`` are written."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.loggers.base import DummyLogger as DummyLogger
    from hasten.loggers.base import Logger as Logger
    from hasten.loggers.comet import CometLogger as CometLogger
    from hasten.loggers.csv import CSVLogger as CSVLogger
    from hasten.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from hasten.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from hasten.loggers.wandb import WandbLogger as WandbLogger

_HOME = {
    "CSVLogger": "hasten.loggers.csv",
    "CometLogger": "hasten.loggers.comet",
    "DummyLogger": "hasten.loggers.base",
    "Logger": "hasten.loggers.base",
    "MLFlowLogger": "hasten.loggers.mlflow",
    "TensorBoardLogger": "hasten.loggers.tensorboard",
    "WandbLogger": "hasten.loggers.wandb",
}

# Loggers of the field that are not here: they can be named, and say so when one is made.
_ABSENT = ("LitLogger", "NeptuneLogger")

__all__ = ["CSVLogger", "CometLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _ABSENT:
        from hasten._lib.absent import absent
        from hasten.loggers.base import Logger

        there_are = ", ".join(each for each in __all__ if each != "Logger")
        globals()[name] = absent(
            name, Logger, home=__name__, instead=f"There are {there_are}; or subclass hasten.loggers.Logger."
        )
        return globals()[name]
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.loggers' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
