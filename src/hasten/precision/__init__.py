"""In which numbers a run computes."""

from hasten.precision.base import Precision
from hasten.precision.builtin import DoublePrecision, HalfPrecision, MixedPrecision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"]
