"""Loggers: where the values given to ``self.log`` are written."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.loggers.base import DummyLogger as DummyLogger
    from hasten.loggers.base import Logger as Logger
    from hasten.loggers.csv import CSVLogger as CSVLogger
    from hasten.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger

_HOME = {
    "CSVLogger": "hasten.loggers.csv",
    "DummyLogger": "hasten.loggers.base",
    "Logger": "hasten.loggers.base",
    "TensorBoardLogger": "hasten.loggers.tensorboard",
}

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.loggers' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
