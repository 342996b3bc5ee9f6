"""Small models and data for experiments and tests, under Lightning's names.

Nothing of hasten uses them. They must not import ``hasten.trainer``, ``hasten.loops`` or ``hasten.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten_lightning.demos.boring_classes import BoringDataModule as BoringDataModule
    from hasten_lightning.demos.boring_classes import BoringModel as BoringModel
    from hasten_lightning.demos.boring_classes import DemoModel as DemoModel
    from hasten_lightning.demos.lstm import LightningLSTM as LightningLSTM
    from hasten_lightning.demos.lstm import SequenceSampler as SequenceSampler
    from hasten_lightning.demos.lstm import SimpleLSTM as SimpleLSTM
    from hasten_lightning.demos.transformer import LightningTransformer as LightningTransformer
    from hasten_lightning.demos.transformer import Transformer as Transformer
    from hasten_lightning.demos.transformer import WikiText2 as WikiText2

# Type checkers know the names above alone.
if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "hasten_lightning.demos.boring_classes": ("BoringDataModule", "BoringModel", "DemoModel"),
            "hasten_lightning.demos.lstm": ("LightningLSTM", "SequenceSampler", "SimpleLSTM"),
            "hasten_lightning.demos.transformer": ("LightningTransformer", "Transformer", "WikiText2"),
        },
    )
