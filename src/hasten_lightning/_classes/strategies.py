"""Strategies of the Trainer under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from hasten.resolve import REGISTERED_STRATEGIES
from hasten.strategies import base, ddp, fsdp, model_parallel, parallel, single
from hasten_deepspeed import strategy as deepspeed
from hasten_lightning.facades import Facade, accepted, exactly, show_signature
from hasten_lightning.machine.strategy_methods import TrainerFolderMethods, TrainerMethods, TrainerShardedMethods
from hasten_lightning.utilities.enums import StrategyNames, strategies_by_name
from hasten_xla import strategies as xla

if TYPE_CHECKING:
    # Command lines look here for the names of types that ``signatures.txt`` does not look up.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy  # noqa: F401

    from hasten.types import Group, ReduceOperation, Tensors

_DDP = inspect.signature(DistributedDataParallel)


def options_of_ddp(**kwargs: Any) -> dict[str, Any]:
    """Return the options of ``DistributedDataParallel`` that differ from its defaults.

    jsonargparse finds this call, and so the names and types of the options; it passes all of them.
    """
    known = _DDP.parameters
    return {name: value for name, value in kwargs.items() if name not in known or value != known[name].default}


show_signature(
    options_of_ddp, _DDP.replace(parameters=[each for each in _DDP.parameters.values() if each.name != "module"])
)


class Strategy(TrainerMethods, base.Strategy, metaclass=Facade):
    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        # A program defines ``reduce``.
        return self.reduce(tensor, group, reduce_op)


class ParallelStrategy(TrainerMethods, parallel.ParallelStrategy, metaclass=Facade):
    # A program wraps its module in ``setup``.
    wrap = base.Strategy.wrap
    all_reduce = Strategy.all_reduce


class SingleDeviceStrategy(TrainerMethods, single.SingleDeviceStrategy, metaclass=Facade):
    pass


class DDPStrategy(TrainerMethods, ddp.DDPStrategy, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**accepted(DDPStrategy, given), **options_of_ddp(**kwargs))


class FSDPStrategy(TrainerShardedMethods, fsdp.FSDPStrategy, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        kwargs = self.take_arguments(given["precision_plugin"], given["mixed_precision"], given["cpu_offload"], kwargs)
        super().__init__(**accepted(FSDPStrategy, given), **kwargs)


class ModelParallelStrategy(TrainerFolderMethods, model_parallel.ModelParallelStrategy, metaclass=Facade):
    pass


class DeepSpeedStrategy(TrainerMethods, deepspeed.DeepSpeedStrategy, metaclass=Facade):
    pass


class SingleDeviceXLAStrategy(TrainerMethods, xla.SingleDeviceXLAStrategy, metaclass=Facade):
    needs = "torch_xla"


class XLAStrategy(TrainerMethods, xla.XLAStrategy, metaclass=Facade):
    needs = "torch_xla"


FACADES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
# Names that Lightning does not register; hasten takes them all the same.
OWN_NAMES = "fsdp2|ddp_sharded.*"
StrategyRegistry = StrategyNames(
    strategies_by_name(
        (*FACADES, SingleDeviceXLAStrategy, XLAStrategy),
        f"{OWN_NAMES}|xla_fsdp|deepspeed_stage_1_offload",
        xla_debug=(XLAStrategy, {"debug": True}),
        single_tpu=(SingleDeviceXLAStrategy, {}),
    ),
    REGISTERED_STRATEGIES,
)


def as_facade(strategy: base.Strategy, facades: Iterable[Facade] = FACADES) -> None:
    """Make a strategy that was chosen by its name one of these classes, as if the program had made it.

    Its processes then wait for each other half an hour, as in Lightning.
    """
    facade: Any = next((facade for facade in facades if facade.behind is type(strategy)), None)
    if facade is not None:
        strategy.__class__ = facade
        if isinstance(strategy, parallel.ParallelStrategy):
            strategy._timeout = parallel.HALF_AN_HOUR
