"""Small models and data for experiments and tests, under Lightning's names.

Nothing of hasten uses them. They must not import ``hasten.trainer``, ``hasten.loops`` or ``hasten.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.demos.boring_classes": ("BoringDataModule", "BoringModel", "DemoModel"),
        "hasten.demos.lstm": ("LightningLSTM", "SequenceSampler", "SimpleLSTM"),
        "hasten.demos.transformer": ("LightningTransformer", "Transformer", "WikiText2"),
    },
)
