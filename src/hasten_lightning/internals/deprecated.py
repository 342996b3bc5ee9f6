"""Older names of classes that Lightning 2 still has; making an object warns, or is refused."""

from __future__ import annotations

from typing import Any

from hasten._lib.errors import absent
from hasten.accelerators import HPUAccelerator as HPUAccelerator
from hasten.accelerators import XLAAccelerator
from hasten.plugins import (
    BitsandbytesPrecision,
    CheckpointIO,
    DeepSpeedPrecision,
    DoublePrecision,
    Precision,
    TransformerEnginePrecision,
)
from hasten.strategies import Strategy
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


def _of_habana(name: str, base: type) -> Any:
    return absent(name, base, home=__name__, instead="Use a GPU, or the CPU.", why="is discontinued")


PrecisionPlugin = _older("PrecisionPlugin", Precision)
BitsandbytesPrecisionPlugin = _older("BitsandbytesPrecisionPlugin", BitsandbytesPrecision)
DeepSpeedPrecisionPlugin = _older("DeepSpeedPrecisionPlugin", DeepSpeedPrecision)
DoublePrecisionPlugin = _older("DoublePrecisionPlugin", DoublePrecision)
FSDPPrecisionPlugin = _older("FSDPPrecisionPlugin", FSDPPrecision)
HalfPrecisionPlugin = _older("HalfPrecisionPlugin", HalfPrecision)
MixedPrecisionPlugin = _older("MixedPrecisionPlugin", MixedPrecision)
TransformerEnginePrecisionPlugin = _older("TransformerEnginePrecisionPlugin", TransformerEnginePrecision)
XLAPrecisionPlugin = _older("XLAPrecisionPlugin", XLAPrecision)
XLABf16Precision = _older("XLABf16Precision", XLAPrecision, precision="bf16-true")
TPUPrecision = _older("TPUPrecision", XLAPrecision, precision="32-true")
TPUBf16Precision = _older("TPUBf16Precision", XLAPrecision, precision="bf16-true")
XLABf16PrecisionPlugin = _older("XLABf16PrecisionPlugin", XLAPrecision, precision="bf16-true")
TPUPrecisionPlugin = _older("TPUPrecisionPlugin", XLAPrecision, precision="32-true")
TPUBf16PrecisionPlugin = _older("TPUBf16PrecisionPlugin", XLAPrecision, precision="bf16-true")
TPUAccelerator = _older("TPUAccelerator", XLAAccelerator)
SingleTPUStrategy = _older("SingleTPUStrategy", SingleDeviceXLAStrategy)
HPUParallelStrategy = _of_habana("HPUParallelStrategy", Strategy)
SingleHPUStrategy = _of_habana("SingleHPUStrategy", Strategy)
HPUCheckpointIO = _of_habana("HPUCheckpointIO", CheckpointIO)
HPUPrecisionPlugin = _of_habana("HPUPrecisionPlugin", Precision)


class FSDPMixedPrecisionPlugin(FSDPPrecisionPlugin):  # type: ignore[misc]
    """The older name of ``FSDPPrecision``, which takes a device as well."""

    def __init__(self, precision: Any, device: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler)
