"""Find a batch size that fits and a learning rate that learns, by trying them; nothing else changes.

It must not import ``hasten.trainer`` or ``hasten.strategies``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.tuner.tuner import Tuner as Tuner

__getattr__, __dir__, __all__ = attach(__name__, {"hasten.tuner.tuner": ("Tuner",)})
