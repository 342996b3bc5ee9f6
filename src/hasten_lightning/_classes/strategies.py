"""Strategies of the Trainer under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hasten.strategies import base, ddp, fsdp, model_parallel, parallel, single
from hasten_deepspeed import strategy as deepspeed
from hasten_lightning.facades import Facade, accepted, annotate, exactly, forward, show_signature
from hasten_lightning.machine.strategy_methods import TrainerFolderMethods, TrainerMethods, TrainerShardedMethods
from hasten_xla import strategies as xla

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.precision.base import Precision
    from hasten.strategies.fsdp import WrapPolicy
    from hasten.strategies.model_parallel import Size

HALF_AN_HOUR = timedelta(minutes=30)
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
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        forward(base.Strategy, locals())


class ParallelStrategy(TrainerMethods, parallel.ParallelStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        forward(parallel.ParallelStrategy, locals())


class SingleDeviceStrategy(TrainerMethods, single.SingleDeviceStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        device: torch.device | str = "cpu",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        forward(single.SingleDeviceStrategy, locals())


class DDPStrategy(TrainerMethods, ddp.DDPStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(**accepted(ddp.DDPStrategy, locals()), **options_of_ddp(**kwargs))


class FSDPStrategy(TrainerShardedMethods, fsdp.FSDPStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        cpu_offload: bool | CPUOffloadPolicy | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: type[nn.Module] | Collection[type[nn.Module]] | None = None,
        activation_checkpointing_policy: WrapPolicy | None = None,
        sharding_strategy: str = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        given = dict(locals())
        kwargs = self.take_arguments(precision_plugin, mixed_precision, cpu_offload, kwargs)
        super().__init__(**accepted(fsdp.FSDPStrategy, given), **kwargs)


annotate(FSDPStrategy.__init__, device_mesh=tuple[int, int] | DeviceMesh | None)


class ModelParallelStrategy(TrainerFolderMethods, model_parallel.ModelParallelStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
    ) -> None:
        forward(model_parallel.ModelParallelStrategy, locals())


class DeepSpeedStrategy(TrainerMethods, deepspeed.DeepSpeedStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1048576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: str | int | None = "auto",
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        logging_level: int = 30,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        forward(deepspeed.DeepSpeedStrategy, locals())


class SingleDeviceXLAStrategy(TrainerMethods, xla.SingleDeviceXLAStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        device: torch.device | str | int,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
    ) -> None:
        forward(xla.SingleDeviceXLAStrategy, locals(), precision_plugin="precision")


class XLAStrategy(TrainerMethods, xla.XLAStrategy, metaclass=Facade):
    @exactly
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        **_: Any,
    ) -> None:
        forward(xla.XLAStrategy, locals(), precision_plugin="precision")


_BY_ORIGINAL = {
    kind.behind: kind
    for kind in (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
}


def as_facade(strategy: base.Strategy) -> None:
    """Make a strategy that was chosen by its name one of these classes, as if the program had made it.

    Its processes then wait for each other half an hour, as in Lightning.
    """
    facade: Any = _BY_ORIGINAL.get(type(strategy))
    if facade is not None:
        strategy.__class__ = facade
        if isinstance(strategy, parallel.ParallelStrategy):
            strategy._timeout = HALF_AN_HOUR
