"""Strategies: how one model lives on one or several devices.

A strategy does not know the loop that calls it, and must not import ``hasten.module``, ``hasten.loops`` or
``hasten.trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.strategies.base import Strategy as Strategy
    from hasten.strategies.ddp import DDPStrategy as DDPStrategy
    from hasten.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from hasten.strategies.mesh.strategy import MeshStrategy as MeshStrategy
    from hasten.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from hasten.strategies.parallel import DataParallelStrategy as DataParallelStrategy
    from hasten.strategies.parallel import ParallelStrategy as ParallelStrategy
    from hasten.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
    from hasten_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from hasten_xla.strategies import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from hasten_xla.strategies import XLAFSDPStrategy as XLAFSDPStrategy
    from hasten_xla.strategies import XLAStrategy as XLAStrategy

# Type checkers know the names above alone, and find misspelt ones.
if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "hasten.strategies.base": "Strategy",
            "hasten.strategies.ddp": "DDPStrategy",
            "hasten.strategies.fsdp": "FSDPStrategy",
            "hasten.strategies.mesh.strategy": "MeshStrategy",
            "hasten.strategies.model_parallel": "ModelParallelStrategy",
            "hasten.strategies.parallel": "DataParallelStrategy ParallelStrategy",
            "hasten.strategies.single": "SingleDeviceStrategy",
            # ``extend.moved`` says where the modules of backends are.
            "hasten.strategies.deepspeed": "DeepSpeedStrategy",
            "hasten.strategies.xla": "SingleDeviceXLAStrategy XLAFSDPStrategy XLAStrategy",
        },
    )
