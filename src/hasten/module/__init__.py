"""What the user writes: LightningModule, its hooks and hyper-parameters, and the datamodule.

It does not know how a run works, and must not import ``hasten.loops``, ``hasten.strategies`` or ``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.module.module import LightningModule as LightningModule

__getattr__, __dir__, __all__ = attach(__name__, {"hasten.module.module": ("LightningModule",)})
