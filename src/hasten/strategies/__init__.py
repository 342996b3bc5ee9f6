"""How one model lives on many devices."""

from __future__ import annotations

from hasten import elsewhere
from hasten._lib.errors import absent
from hasten.strategies.base import Strategy
from hasten.strategies.ddp import DDPStrategy
from hasten.strategies.deepspeed import DeepSpeedStrategy
from hasten.strategies.fsdp import FSDPStrategy
from hasten.strategies.model_parallel import ModelParallelStrategy
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.single import SingleDeviceStrategy
from hasten.strategies.xla import SingleDeviceXLAStrategy, XLAFSDPStrategy, XLAStrategy

__all__ = [
    "DDPStrategy", "DataParallelStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy",
    "ParallelStrategy", "SingleDeviceStrategy", "SingleDeviceXLAStrategy", "Strategy", "XLAFSDPStrategy",
    "XLAStrategy",
]  # fmt: skip


DataParallelStrategy = absent(
    "DataParallelStrategy",
    ParallelStrategy,
    home="hasten.strategies",
    instead=elsewhere.STRATEGIES["dp"].message(),
    why="is not in hasten",
)
