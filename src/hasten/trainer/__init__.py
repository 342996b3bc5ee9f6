"""The Trainer: its arguments as attributes, what it shows of a run, and the calls that start one.

It must not import ``hasten.fabric``, ``hasten_tools`` or ``hasten_lightning``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer as Trainer

__getattr__, __dir__, __all__ = attach(__name__, {"hasten.trainer.trainer": ("Trainer",)})
