"""How one model lives on many devices."""

from __future__ import annotations

from typing import Any

from hasten import elsewhere
from hasten._lib.errors import absent
from hasten.strategies.base import Strategy
from hasten.strategies.ddp import DDPStrategy
from hasten.strategies.deepspeed import DeepSpeedStrategy
from hasten.strategies.fsdp import FSDPStrategy
from hasten.strategies.model_parallel import ModelParallelStrategy
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.single import SingleDeviceStrategy

__all__ = [
    "DDPStrategy", "DataParallelStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy",
    "ParallelStrategy", "SingleDeviceStrategy", "SingleDeviceXLAStrategy", "Strategy", "XLAFSDPStrategy",
    "XLAStrategy",
]  # fmt: skip

_TPU = "hasten does not train on TPUs. Write Trainer(accelerator='auto')."


def _absent(name: str, instead: str, base: type = ParallelStrategy) -> Any:
    return absent(name, base, home="hasten.strategies", instead=instead)


DataParallelStrategy = absent(
    "DataParallelStrategy",
    ParallelStrategy,
    home="hasten.strategies",
    instead=elsewhere.STRATEGIES["dp"].message(),
    why="is not in hasten",
)
SingleDeviceXLAStrategy = _absent("SingleDeviceXLAStrategy", _TPU, SingleDeviceStrategy)
XLAFSDPStrategy = _absent("XLAFSDPStrategy", _TPU)
XLAStrategy = _absent("XLAStrategy", _TPU)
