"""Precisions: the number formats of parameters, inputs and computation.

A precision does not know where the model is, and must not import ``hasten.strategies``, ``hasten.module`` or
``hasten.loops``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.precision.base import Precision as Precision
    from hasten.precision.bitsandbytes import BitsandbytesPrecision as BitsandbytesPrecision
    from hasten.precision.builtin import DoublePrecision as DoublePrecision
    from hasten.precision.builtin import HalfPrecision as HalfPrecision
    from hasten.precision.builtin import MixedPrecision as MixedPrecision
    from hasten.precision.float8 import Float8Precision as Float8Precision
    from hasten.precision.fsdp import FSDPPrecision as FSDPPrecision
    from hasten.precision.transformer_engine import TransformerEnginePrecision as TransformerEnginePrecision
    from hasten_deepspeed.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from hasten_xla.precision import XLAPrecision as XLAPrecision

# Type checkers know the names above alone, and find misspelt ones.
if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "hasten.precision.base": "Precision",
            "hasten.precision.bitsandbytes": "BitsandbytesPrecision",
            "hasten.precision.builtin": "DoublePrecision HalfPrecision MixedPrecision",
            "hasten.precision.float8": "Float8Precision",
            "hasten.precision.fsdp": "FSDPPrecision",
            "hasten.precision.transformer_engine": "TransformerEnginePrecision",
            # ``extend.moved`` says where the modules of backends are.
            "hasten.precision.deepspeed": "DeepSpeedPrecision",
            "hasten.precision.xla": "XLAPrecision",
        },
    )
