"""Older names of classes that Lightning 2 still has; making an object warns."""

from __future__ import annotations

from typing import Any

from hasten.accelerators import XLAAccelerator
from hasten.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    Precision,
    TransformerEnginePrecision,
)
from hasten_lightning._classes.fabric_plugins import XLAPrecision
from hasten_lightning._classes.plugins import FSDPPrecision, HalfPrecision, MixedPrecision
from hasten_lightning._classes.strategies import SingleDeviceXLAStrategy
from hasten_lightning.utilities import rank_zero_deprecation


def _older(name: str, kind: type, **fixed: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a method
        rank_zero_deprecation(f"{name} is deprecated: its name is {kind.__name__} now.")
        kind.__init__(self, **fixed) if fixed else kind.__init__(self, *args, **kwargs)  # type: ignore[misc]

    document = f"The older name of ``{kind.__name__}``."
    return type(name, (kind,), {"__init__": __init__, "__module__": __name__, "__doc__": document})


PrecisionPlugin = _older("PrecisionPlugin", Precision)
BitsandbytesPrecisionPlugin = _older("BitsandbytesPrecisionPlugin", BitsandbytesPrecision)
DeepSpeedPrecisionPlugin = _older("DeepSpeedPrecisionPlugin", DeepSpeedPrecision)
DoublePrecisionPlugin = _older("DoublePrecisionPlugin", DoublePrecision)
FSDPPrecisionPlugin = _older("FSDPPrecisionPlugin", FSDPPrecision)
FSDPMixedPrecisionPlugin = _older("FSDPMixedPrecisionPlugin", FSDPPrecision)
HalfPrecisionPlugin = _older("HalfPrecisionPlugin", HalfPrecision)
MixedPrecisionPlugin = _older("MixedPrecisionPlugin", MixedPrecision)
TransformerEnginePrecisionPlugin = _older("TransformerEnginePrecisionPlugin", TransformerEnginePrecision)
XLAPrecisionPlugin = _older("XLAPrecisionPlugin", XLAPrecision)
XLABf16PrecisionPlugin = _older("XLABf16PrecisionPlugin", XLAPrecision, precision="bf16-true")
TPUPrecisionPlugin = _older("TPUPrecisionPlugin", XLAPrecision, precision="32-true")
TPUBf16PrecisionPlugin = _older("TPUBf16PrecisionPlugin", XLAPrecision, precision="bf16-true")
TPUAccelerator = _older("TPUAccelerator", XLAAccelerator)
SingleTPUStrategy = _older("SingleTPUStrategy", SingleDeviceXLAStrategy)
