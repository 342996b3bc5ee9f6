"""Names of strategies that this version does not have: using one says what to write instead."""

from __future__ import annotations

from typing import Any

from hasten._lib.errors import absent
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.single import SingleDeviceStrategy

_SHARDED = "Write strategy='ddp', which keeps the whole model on each device."
_TPU = "hasten does not train on TPUs. Write Trainer(accelerator='auto')."


def _strategy(name: str, instead: str, base: type = ParallelStrategy) -> Any:
    return absent(name, base, home="hasten.strategies", instead=instead)


DataParallelStrategy = _strategy(
    "DataParallelStrategy", "Write strategy='ddp', which does not copy the model to each device in each step."
)
DeepSpeedStrategy = _strategy("DeepSpeedStrategy", _SHARDED)
FSDPStrategy = _strategy("FSDPStrategy", _SHARDED)
ModelParallelStrategy = _strategy("ModelParallelStrategy", _SHARDED)
SingleDeviceXLAStrategy = _strategy("SingleDeviceXLAStrategy", _TPU, SingleDeviceStrategy)
XLAFSDPStrategy = _strategy("XLAFSDPStrategy", _TPU)
XLAStrategy = _strategy("XLAStrategy", _TPU)
