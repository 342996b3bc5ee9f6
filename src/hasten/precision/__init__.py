"""Precisions: the number formats of parameters, inputs and computation."""

from hasten.precision.base import Precision
from hasten.precision.bitsandbytes import BitsandbytesPrecision
from hasten.precision.builtin import DoublePrecision, HalfPrecision, MixedPrecision
from hasten.precision.deepspeed import DeepSpeedPrecision
from hasten.precision.float8 import Float8Precision
from hasten.precision.fsdp import FSDPPrecision
from hasten.precision.transformer_engine import TransformerEnginePrecision
from hasten.precision.xla import XLAPrecision

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
