"""FSDP with the arguments of Lightning and torch: parameters, gradients and optimizer states are divided."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten.precision.base import Precision
from hasten.strategies.mesh.blocks import WrapPolicy, checked_policy
from hasten.strategies.mesh.sizes import ShardLayout, Size
from hasten.strategies.mesh.strategy import MeshStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator

__all__ = ["FSDPStrategy", "ShardLayout"]

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# Arguments of torch's FullyShardedDataParallel that fully_shard always follows, with the value it follows.
_ALWAYS = {"use_orig_params": True, "limit_all_gathers": True, "sync_module_states": True}
_MAPPED = ("ignored_modules", "ignored_parameters", "ignored_states", "forward_prefetch", "backward_prefetch")
_REFUSED = {
    "param_init_fn": "parts on the meta device get their values from reset_parameters()",
    "device_id": "each process has one device, Trainer(devices=...)",
    "find_unused_parameters": "parameters without a gradient are allowed anyway",
    "process_group": "write device_mesh=(replicas, shards) or a DeviceMesh",
}


class FSDPStrategy(MeshStrategy):
    """Fully sharded data parallelism: each process holds a part of parameters, gradients and optimizer states.

    It is ``MeshStrategy(shard=...)`` with the arguments of FSDP. Torch's ``fully_shard`` (FSDP2) divides parameters,
    which are ``DTensor``; those of a block are gathered when it computes. Weights, losses and gradient norms equal
    those of one process up to rounding.

    Args:
        accelerator: in place of ``Trainer(accelerator=...)``.
        parallel_devices: in place of ``Trainer(devices=...)``.
        cluster_environment: in place of ``Trainer(plugins=...)``.
        checkpoint_io: the same.
        precision_plugin: in place of ``Trainer(precision=...)``.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: see ``ParallelStrategy``.
        cpu_offload: keep parameters, gradients and optimizer states in host memory, and step there: True or torch's
            ``CPUOffloadPolicy``.
        mixed_precision: torch's ``MixedPrecisionPolicy`` (or FSDP1's ``MixedPrecision``). By default it follows
            ``precision``: "bf16-mixed" computes in bfloat16 and reduces gradients in 32 bits.
        auto_wrap_policy: which parts are gathered by themselves: a set of module classes, or a function of FSDP1's
            form. By default every repeated block; ``strategy.plan`` shows the choice.
        activation_checkpointing: classes of modules to recompute in backward.
        activation_checkpointing_policy: the same, or a function of FSDP1's form.
        sharding_strategy: "FULL_SHARD" frees a block's parameters after its forward, "SHARD_GRAD_OP" keeps them until
            its backward; "HYBRID_SHARD" and "_HYBRID_SHARD_ZERO2" do so within a machine and replicate over machines,
            or as ``device_mesh`` says.
        state_dict_type: "full" writes checkpoints as one file, "sharded" as a folder to which each process writes.
        device_mesh: ``(replicas, shards)`` or a ``DeviceMesh`` of two dimensions, for the hybrid strategies.
        kwargs: of torch's FSDP1: ``ignored_modules``, ``ignored_parameters``, ``forward_prefetch``; others are refused
            unless they ask for what FSDP2 does anyway.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a value that FSDP2 does not have.

    Example::

        >>> FSDPStrategy(sharding_strategy="SHARD_GRAD_OP").name
        'fsdp'

    Source: `PyTorch, fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`_; Zhao et
    al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023.

    """

    name = "fsdp"
    _owner: ClassVar[str] = "FSDPStrategy"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
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
        sharding = getattr(sharding_strategy, "name", sharding_strategy)
        sharding = sharding.upper() if isinstance(sharding, str) else sharding
        check.one_of("FSDPStrategy", "sharding_strategy", sharding, (*SHARDING, "NO_SHARD"))
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            what = (
                "FSDPStrategy(activation_checkpointing=..., activation_checkpointing_policy=...): both say which "
                "modules to recompute."
            )
            raise make_error(ValueError, what, fix="Leave one out.", argument="activation_checkpointing")
        recomputes: Any = activation_checkpointing_policy
        if activation_checkpointing is not None:
            recomputes = checked_policy(self._owner, "activation_checkpointing", activation_checkpointing)
        mesh = _checked_mesh(device_mesh, sharding)
        # One copy of the shards in each machine.
        replicate, shard = _SIZES.get(sharding, (1, "auto"))
        super().__init__(
            *(mesh if isinstance(mesh, tuple) else (replicate, shard)),
            auto_wrap_policy=auto_wrap_policy,
            reshard_after_forward=sharding in ("FULL_SHARD", "HYBRID_SHARD"),
            activation_checkpointing_policy=recomputes,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            state_dict_type=state_dict_type,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **_checked_options(kwargs),
        )
        self.shard_mode: str = sharding
        self._given_mesh = mesh

    @property
    def sharding_strategy(self) -> object:
        """The name of the way in which parameters are divided."""
        return self.shard_mode

    @property
    def cpu_offload(self) -> object:
        """Whether parameters are kept on the host."""
        return self.offloads

    def _wrong_sizes(self, num_nodes: int, per_node: int) -> ValueError:
        sizes: Any = self._given_mesh
        return make_error(
            ValueError,
            f"FSDPStrategy(device_mesh={sizes}): a mesh of {math.prod(sizes)} processes, and the run has "
            f"{num_nodes * per_node}.",
            fix="Give two numbers whose product is devices * num_nodes.",
            argument="device_mesh",
        )

    def _make_mesh(self) -> DeviceMesh:
        given: Any = self._given_mesh
        return super()._make_mesh() if given is None or isinstance(given, tuple) else given


# The sizes of the axes "replicate" and "shard".
_SIZES: dict[str, tuple[Size, Size]] = {
    "HYBRID_SHARD": ("auto", "auto"),
    "_HYBRID_SHARD_ZERO2": ("auto", "auto"),
    # Each process has the only shard.
    "NO_SHARD": ("auto", 1),
}


def _checked_mesh(mesh: Any, mode: str) -> Any:
    """Return ``device_mesh``, after checking that it is one of two dimensions."""
    if mesh is None:
        return None
    given = f"FSDPStrategy(device_mesh={check.shown(mesh)}, sharding_strategy={mode!r})"
    if "HYBRID" not in mode:
        what = f"{given}: a mesh is for 'HYBRID_SHARD'."
        raise make_error(ValueError, what, fix="Leave it out, or use that.", argument="device_mesh")
    dimensions = len(mesh) if isinstance(mesh, tuple) else getattr(mesh, "ndim", None)
    if dimensions is None:
        raise make_error(
            TypeError, f"{given}:", fix=f"use (replicas, shards) or a DeviceMesh, not {type(mesh).__name__}."
        )
    whole = not isinstance(mesh, tuple) or all(isinstance(size, int) and size > 0 for size in mesh)
    if dimensions != 2 or not whole:
        what = f"{given}:"
        fix = "use two whole numbers, (replicas, shards), or a DeviceMesh of two dimensions."
        raise make_error(ValueError, what, fix=fix, argument="device_mesh")
    return mesh


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    known = [*_MAPPED, *_ALWAYS, *_REFUSED]
    for name, value in options.items():
        given = f"FSDPStrategy({name}={value!r})"
        if name in _REFUSED:
            raise make_error(
                TypeError, f"FSDPStrategy({name}=...): FSDP2 does not take it; {_REFUSED[name]}.", argument=name
            )
        if name not in known:
            named = [*inspect.signature(FSDPStrategy.__init__).parameters][1:-1]
            hint = did_you_mean(name, [*named, *known])
            raise make_error(TypeError, f"{given}: unknown argument.", fix=hint, argument=name)
        if name in _ALWAYS and value is not _ALWAYS[name]:
            what = f"{given}: FSDP2 always has {name}={_ALWAYS[name]}."
            raise make_error(ValueError, what, fix="Leave it out.", argument=name)
        if name == "backward_prefetch" and getattr(value, "name", value) != "BACKWARD_PRE":
            what = f"{given}: FSDP2 gathers the next block before backward needs it."
            raise make_error(ValueError, what, fix="Leave it out.", argument=name)
    taken = dict(options)
    for argument in ("ignored_states", "ignored_modules", "ignored_parameters"):
        value = taken.get(argument)
        # A module or a tensor may be iterable, too.
        if value is not None and (isinstance(value, (nn.Module, torch.Tensor)) or not isinstance(value, Iterable)):
            what = f"FSDPStrategy({argument}={type(value).__name__}(...)):"
            raise make_error(TypeError, what, fix="use a list.", argument=argument)
    states = list(taken.pop("ignored_states", None) or ())
    modules = [*(taken.pop("ignored_modules", None) or ()), *(one for one in states if isinstance(one, nn.Module))]
    parameters = [
        *(taken.pop("ignored_parameters", None) or ()),
        *(one for one in states if not isinstance(one, nn.Module)),
    ]
    prefetch = check.boolean("FSDPStrategy", "forward_prefetch", taken.pop("forward_prefetch", False))
    return {"ignored_modules": modules, "ignored_parameters": parameters, "forward_prefetch": prefetch}
