"""Older names of classes that Lightning 2 still has: making an object warns, or is refused."""

from __future__ import annotations

import functools
from typing import Any

from hasten._lib.errors import absent
from hasten.accelerators import Accelerator, XLAAccelerator
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

_PRECISIONS = (BitsandbytesPrecision, DeepSpeedPrecision, DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision)
_PLUGINS = (*_PRECISIONS, Precision, TransformerEnginePrecision, XLAPrecision)
_XLA = {"XLABf16Precision": "bf16-true", "TPUPrecision": "32-true", "TPUBf16Precision": "bf16-true"}
_HPU = {"HPUAccelerator": Accelerator, "HPUParallelStrategy": Strategy, "SingleHPUStrategy": Strategy}
_HABANA: dict[str, type] = {**_HPU, "HPUCheckpointIO": CheckpointIO, "HPUPrecisionPlugin": Precision}
# By name: the class and the arguments that it is made with.
_OLDER: dict[str, tuple[type, dict[str, str]]] = {
    **{f"{kind.__name__}Plugin": (kind, {}) for kind in _PLUGINS},
    **{name + end: (XLAPrecision, {"precision": _XLA[name]}) for name in _XLA for end in ("", "Plugin")},
    "FSDPMixedPrecisionPlugin": (FSDPPrecision, {}),
    "TPUAccelerator": (XLAAccelerator, {}),
    "SingleTPUStrategy": (SingleDeviceXLAStrategy, {}),
}


@functools.cache
def __getattr__(name: str) -> Any:
    if name in _HABANA:
        return absent(name, _HABANA[name], home=__name__, instead="Use a GPU, or the CPU.", why="is discontinued")
    if name not in _OLDER:
        raise AttributeError(name)
    kind, fixed = _OLDER[name]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a method
        rank_zero_deprecation(f"{name} is deprecated: its name is {kind.__name__} now.")
        if name == "FSDPMixedPrecisionPlugin":
            # It took a device, too.
            args = args[:1] + args[2:]
            kwargs.pop("device", None)
        kind.__init__(self, **fixed) if fixed else kind.__init__(self, *args, **kwargs)  # type: ignore[misc]

    document = f"The older name of ``{kind.__name__}``."
    return type(name, (kind,), {"__init__": __init__, "__module__": __name__, "__doc__": document})
