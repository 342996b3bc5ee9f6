"""Small models and data that programs and their tests are tried with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.demos.boring_classes import BoringDataModule as BoringDataModule
    from hasten.demos.boring_classes import BoringModel as BoringModel
    from hasten.demos.boring_classes import DemoModel as DemoModel
    from hasten.demos.lstm import LightningLSTM as LightningLSTM
    from hasten.demos.lstm import SequenceSampler as SequenceSampler
    from hasten.demos.lstm import SimpleLSTM as SimpleLSTM
    from hasten.demos.transformer import LightningTransformer as LightningTransformer
    from hasten.demos.transformer import Transformer as Transformer
    from hasten.demos.transformer import WikiText2 as WikiText2

_HOME = {
    "BoringDataModule": "hasten.demos.boring_classes",
    "BoringModel": "hasten.demos.boring_classes",
    "DemoModel": "hasten.demos.boring_classes",
    "LightningLSTM": "hasten.demos.lstm",
    "LightningTransformer": "hasten.demos.transformer",
    "SequenceSampler": "hasten.demos.lstm",
    "SimpleLSTM": "hasten.demos.lstm",
    "Transformer": "hasten.demos.transformer",
    "WikiText2": "hasten.demos.transformer",
}

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningLSTM",
    "LightningTransformer",
    "SequenceSampler",
    "SimpleLSTM",
    "Transformer",
    "WikiText2",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten.demos' has no attribute {name!r}.{did_you_mean(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
