"""Precisions: the number formats of parameters, inputs and computation.

A precision does not know where the model is, and must not import ``hasten.strategies``, ``hasten.module`` or
``hasten.loops``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach
from hasten.precision.base import Precision
from hasten.precision.bitsandbytes import BitsandbytesPrecision
from hasten.precision.builtin import DoublePrecision, HalfPrecision, MixedPrecision
from hasten.precision.float8 import Float8Precision
from hasten.precision.fsdp import FSDPPrecision
from hasten.precision.transformer_engine import TransformerEnginePrecision

if TYPE_CHECKING:
    from hasten_deepspeed.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from hasten_xla.precision import XLAPrecision as XLAPrecision

__all__ = [
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "Float8Precision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TransformerEnginePrecision",
    "XLAPrecision",
]

# Classes of backends are imported when they are used; ``extend.moved`` says where their modules are.
__getattr__, __dir__, _ = attach(
    __name__,
    {"hasten.precision.deepspeed": "DeepSpeedPrecision", "hasten.precision.xla": "XLAPrecision"},
    also=__all__,
)
