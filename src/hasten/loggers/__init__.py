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

# Names of the field that a program may ask for.
_NOT_YET = frozenset({"LitLogger", "NeptuneLogger"})

__all__ = ["CSVLogger", "CometLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _NOT_YET:
        raise AttributeError(
            f"hasten.loggers.{name} is not in this version of hasten. There are {', '.join(__all__)}; "
            "or subclass hasten.loggers.Logger."
        )
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.loggers' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
