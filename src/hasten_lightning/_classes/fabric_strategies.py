"""Strategies of Fabric under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.resolve import REGISTERED_STRATEGIES
from hasten.strategies import base, ddp, fsdp, model_parallel, parallel, single
from hasten_deepspeed import strategy as deepspeed
from hasten_lightning._classes.strategies import OWN_NAMES, options_of_ddp
from hasten_lightning.facades import Facade, accepted, exactly
from hasten_lightning.machine.strategy_methods import FabricFolderMethods, FabricMethods, FabricShardedMethods
from hasten_lightning.utilities.enums import StrategyNames, strategies_by_name
from hasten_xla import strategies as xla

if TYPE_CHECKING:
    # Command lines look here for the names of types that ``signatures.txt`` does not look up.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy  # noqa: F401


class Strategy(FabricMethods, base.Strategy, metaclass=Facade):
    pass


class ParallelStrategy(FabricMethods, parallel.ParallelStrategy, metaclass=Facade):
    # A program wraps its module in ``setup_module``.
    wrap = base.Strategy.wrap


class SingleDeviceStrategy(FabricMethods, single.SingleDeviceStrategy, metaclass=Facade):
    pass


class DDPStrategy(FabricMethods, ddp.DDPStrategy, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**accepted(DDPStrategy, given), **options_of_ddp(**kwargs))


class FSDPStrategy(FabricShardedMethods, fsdp.FSDPStrategy, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        kwargs = self.take_arguments(given["precision"], given["mixed_precision"], given["cpu_offload"], kwargs)
        super().__init__(**accepted(FSDPStrategy, given), **kwargs)


class ModelParallelStrategy(FabricFolderMethods, model_parallel.ModelParallelStrategy, metaclass=Facade):
    pass


class DeepSpeedStrategy(FabricMethods, deepspeed.DeepSpeedStrategy, metaclass=Facade):
    pass


class SingleDeviceXLAStrategy(FabricMethods, xla.SingleDeviceXLAStrategy, metaclass=Facade):
    needs = "torch_xla"


class XLAStrategy(FabricMethods, xla.XLAStrategy, metaclass=Facade):
    needs = "torch_xla"


class XLAFSDPStrategy(FabricMethods, xla.XLAFSDPStrategy, metaclass=Facade):
    needs = "torch_xla"

    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        if given["state_dict_type"] == "sharded":
            given["state_dict_type"] = "full"  # One process saves whole files: there are no shards.
        super().__init__(**accepted(XLAFSDPStrategy, given), **kwargs)


FACADES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
StrategyRegistry = StrategyNames(
    strategies_by_name(
        (*FACADES, SingleDeviceXLAStrategy, XLAFSDPStrategy, XLAStrategy),
        rf"{OWN_NAMES}|single_device|ddp_find_unused_parameters_false|ddp_\w+_find_unused_\w+",
        dp=(parallel.DataParallelStrategy, {}),
        single_tpu=(SingleDeviceXLAStrategy, {}),
    ),
    REGISTERED_STRATEGIES,
)
