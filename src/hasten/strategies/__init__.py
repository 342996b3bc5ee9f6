"""Strategies: how one model lives on one or several devices.

A strategy does not know the loop that calls it, and must not import ``hasten.module``, ``hasten.loops`` or
``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten import elsewhere
from hasten._lib.errors import absent
from hasten._lib.lazy import attach
from hasten.strategies.base import Strategy
from hasten.strategies.ddp import DDPStrategy
from hasten.strategies.fsdp import FSDPStrategy
from hasten.strategies.model_parallel import ModelParallelStrategy
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.single import SingleDeviceStrategy

if TYPE_CHECKING:
    from hasten_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from hasten_xla.strategies import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from hasten_xla.strategies import XLAFSDPStrategy as XLAFSDPStrategy
    from hasten_xla.strategies import XLAStrategy as XLAStrategy

DataParallelStrategy = absent(
    "DataParallelStrategy",
    ParallelStrategy,
    home="hasten.strategies",
    instead=elsewhere.STRATEGIES["dp"].message(),
    why="is not in hasten",
)

__all__ = [
    "DDPStrategy", "DataParallelStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy",
    "ParallelStrategy", "SingleDeviceStrategy", "SingleDeviceXLAStrategy", "Strategy", "XLAFSDPStrategy",
    "XLAStrategy",
]  # fmt: skip

# Classes of backends are imported when they are used; ``extend.moved`` says where their modules are.
__getattr__, __dir__, _ = attach(
    __name__,
    {
        "hasten.strategies.deepspeed": "DeepSpeedStrategy",
        "hasten.strategies.xla": "SingleDeviceXLAStrategy XLAFSDPStrategy XLAStrategy",
    },
    also=__all__,
)
