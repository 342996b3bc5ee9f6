"""How parameters are sharded: which parts ``fully_shard`` gathers together, in which types, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten._lib import check, torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.tree import is_absent, is_sharded
from hasten.memory import recomputed_blocks, repeated_blocks
from hasten.strategies.mesh.blocks import (
    WrapPolicy,
    checked_policy,
    children_apart,
    chosen,
    gathered_apart,
    is_manual,
    name_of,
)
from hasten.strategies.mesh.sizes import EXPERT, TENSOR, ShardLayout
from hasten.strategies.sharded import keep_class_name, sharded_parts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


class ParameterShards:
    """How the parameters of a module are divided by ``fully_shard``; see ``MeshStrategy`` for the arguments.

    Raises:
        ValueError: an argument has a value that ``fully_shard`` does not have.
        TypeError: an argument has a wrong type.

    """

    def __init__(
        self,
        owner: str,
        recompute_argument: str,
        *,
        auto_wrap_policy: WrapPolicy | None,
        reshard_after_forward: bool,
        forward_prefetch: bool,
        ignored_modules: Collection[nn.Module],
        ignored_parameters: Collection[nn.Parameter],
        activation_checkpointing_policy: WrapPolicy | None,
        cpu_offload: bool | CPUOffloadPolicy | None,
        mixed_precision: MixedPrecisionPolicy | None,
    ) -> None:
        self._owner = owner
        self._wrap_policy = checked_policy(owner, "auto_wrap_policy", auto_wrap_policy)
        self._reshards = check.boolean(owner, "reshard_after_forward", reshard_after_forward)
        self._prefetches = check.boolean(owner, "forward_prefetch", forward_prefetch)
        self._ignored = _checked_ignored(owner, ignored_modules, ignored_parameters)
        self._recompute_argument = recompute_argument
        self._recompute_policy = checked_policy(owner, recompute_argument, activation_checkpointing_policy)
        given = {
            "auto_wrap_policy": auto_wrap_policy,
            "reshard_after_forward": not reshard_after_forward,
            "forward_prefetch": forward_prefetch,
            "ignored_modules": self._ignored[0],
            "ignored_parameters": self._ignored[1],
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
        }
        self._recomputes = ExitStack()
        self._offload_policy = _offload_policy(owner, cpu_offload)
        self.offloads = _offloads(self._offload_policy)
        self.mixed_precision: Any = _mixed_precision(owner, mixed_precision)
        # The arguments that ask for something of shards.
        self.asked = [name for name, value in given.items() if value]
        # The type in which parameters are gathered; None for their own.
        self.param_dtype: torch.dtype | None = None
        self.layout: ShardLayout | None = None

    def apply(self, module: nn.Module, mesh: DeviceMesh, strategy: str) -> None:
        """Call ``fully_shard`` on the blocks of ``module``, then on the rest of it, as far as it is not sharded.

        The mesh has the dimensions (shards,) or (replicas, shards).
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        ignored, policy = self._ignored_in(module, mesh.size()), self._policy
        ignored |= set(filter(is_absent, module.parameters()))
        kept = set(map(id, ignored))
        whole = [
            name
            for name, parameter in module.named_parameters()
            if id(parameter) not in kept and not _is_sharded_over_groups(parameter)
        ]
        if whole and isinstance(module, FSDPModule):
            raise MisconfigurationException(
                f"{self._owner}(): {name_of(module)} was sharded before {whole[0]!r} was made, whose gradient would be "
                "that of one group.",
                fix="Make all layers first, or a new module.",
            )
        self.recompute(module)
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=self._offload_policy,
            ignored_params=ignored or None,
            shard_placement_fn=partial(_of_few_experts, mesh.size(-1)),
        )
        if policy.param_dtype is not None:
            self._shard_statistics(module, policy, shard)
        blocks = self._blocks(module) if whole else []
        # Inner blocks first: a block has the parameters that no block inside of it has.
        new: list[Any] = [block for block in blocks[::-1] if self._shard_part(block, shard, after=self._reshards)]
        rest: list[nn.Module] = [module]
        # The rest stays gathered between forward and backward, because backward begins with it.
        after = None if self._reshards else False
        if is_manual(module):
            # Each backward of manual optimization ends the forward of one of the parts. Parts that a toggled
            # optimizer does not train may have no backward.
            rest, after = children_apart(module, strategy), True
        for part in rest if whole else ():
            self._shard_part(part, shard, after=after)
        if self._prefetches:
            for following, block in pairwise(new):
                block.set_modules_to_forward_prefetch([following])
        self.layout = _layout(module, rest, mesh)

    def _shard_statistics(self, module: nn.Module, policy: Any, shard: Callable[..., Any]) -> None:
        """Shard batch normalizations in 32 bits, as their running statistics are."""
        in_full = type(policy)(torch.float32, torch.float32, policy.param_dtype)
        for part in module.modules():
            if isinstance(part, torch_private.NormBase) and part.track_running_stats:
                self._shard_part(part, partial(shard, mp_policy=in_full))

    def shard_experts(self, experts: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        """Call ``fully_shard`` on modules that hold some of the experts; called before ``apply``.

        The mesh, (shards,) or (copies, shards), has the processes with the same experts.
        """
        from torch.distributed.fsdp import fully_shard

        # Their inputs keep the types that they have in a block.
        policy = replace(self._policy, cast_forward_inputs=False, output_dtype=None)
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=self._offload_policy,
            shard_placement_fn=partial(_by_features, mesh.size(-1)),
        )
        for part in experts:
            self._shard_part(part, shard, after=self._reshards)

    def _shard_part(self, part: nn.Module, shard: Callable[..., Any], after: bool | None = None) -> bool:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(part, FSDPModule):
            return False
        shard(part, reshard_after_forward=after)
        keep_class_name(part)
        return True

    @property
    def _policy(self) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.mixed_precision is not None:
            return self.mixed_precision
        reduced = None if self.param_dtype is None else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=reduced)

    def _ignored_in(self, module: nn.Module, processes: int) -> set[nn.Parameter]:
        modules, parameters = self._ignored
        ignored = set(parameters)
        present = set(map(id, module.modules()))
        for part in modules:
            if id(part) not in present:
                raise make_error(
                    ValueError,
                    f"{self._owner}(ignored_modules=[{name_of(part)}]): {name_of(module)} does not contain that "
                    "module.",
                    fix="Pass modules of the model that is trained.",
                    argument="ignored_modules",
                )
            ignored |= set(part.parameters())
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        trains = next((names.get(id(parameter), "") for parameter in ignored if parameter.requires_grad), None)
        if trains is not None and processes > 1:
            raise make_error(
                ValueError,
                f"{self._owner}(ignored_modules or ignored_parameters): {trains!r} trains, and gradients of ignored "
                "parameters stay on each process.",
                fix="Freeze it with requires_grad_(False), or do not ignore it.",
            )
        return ignored

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts to gather by themselves, outer ones before those inside of them."""
        policy = self._wrap_policy
        parts = repeated_blocks(module) if policy is None else chosen(module, policy, self._owner, "auto_wrap_policy")
        return gathered_apart(module, [part for part in parts if not all(map(is_absent, part.parameters()))])

    def recompute(self, module: nn.Module) -> None:
        """Recompute the modules in backward that the program has chosen, until ``close``."""
        if self._recompute_policy is None:
            return
        parts = chosen(module, self._recompute_policy, self._owner, self._recompute_argument)
        self._recomputes.enter_context(recomputed_blocks(parts, "full"))

    def close(self) -> None:
        """End recomputing."""
        self._recomputes.close()


def _layout(module: nn.Module, rest: list[nn.Module], mesh: DeviceMesh) -> ShardLayout:
    """Return how a module is divided."""
    outer = set(map(id, rest))
    inner = [name for name, part in sharded_parts(module).items() if id(part) not in outer]
    in_blocks = {id(parameter) for name in inner for parameter in module.get_submodule(name).parameters()}
    root = [name for name, parameter in module.named_parameters() if id(parameter) not in in_blocks]
    return ShardLayout(tuple(inner), tuple(root), tuple(mesh.shape))


def _is_sharded_over_groups(parameter: nn.Parameter) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and tuple(mesh.mesh_dim_names or ()) not in ((TENSOR,), (EXPERT,))


def _by_features(shards: int, parameter: nn.Parameter) -> Any:
    """Return how a parameter of experts is sharded: each expert evenly if possible, because a process has few."""
    from torch.distributed.tensor import Shard

    even = [dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % shards == 0]
    return Shard(even[0]) if even else None


def _of_few_experts(shards: int, parameter: nn.Parameter) -> Any:
    """Return how a parameter is sharded: one of fewer experts than processes by features.

    Divided by experts, each process would take and send the memory of a whole one, also those that have none.
    """
    is_of_few = parameter.ndim == 3 and parameter.shape[0] < shards and not is_sharded(parameter)
    return _by_features(shards, parameter) if is_of_few else None


# -- arguments


def _checked_ignored(owner: str, modules: Any, parameters: Any) -> tuple[list[nn.Module], list[nn.Parameter]]:
    found: list[list[Any]] = []
    for argument, values, kind in (
        ("ignored_modules", modules, nn.Module),
        ("ignored_parameters", parameters, nn.Parameter),
    ):
        values = () if values is None else values
        check.instance(owner, argument, values, Collection, f"a list of {kind.__name__} objects", allow_none=True)
        # Tensors and arrays without dimensions cannot be iterated.
        listed = list(values) if getattr(values, "ndim", 1) else [values]
        wrong = [value for value in listed if not isinstance(value, kind)]
        if wrong:
            what = f"{owner}({argument}=[{check.shown(wrong[0])}]):"
            raise make_error(TypeError, what, fix=f"use a list of {kind.__name__} objects.", argument=argument)
        found.append(listed)
    return found[0], found[1]


def _offload_policy(owner: str, cpu_offload: Any) -> Any:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(cpu_offload, OffloadPolicy):
        return cpu_offload
    if isinstance(cpu_offload, CPUOffload):
        cpu_offload = cpu_offload.offload_params
    if cpu_offload is not None and not isinstance(cpu_offload, bool):
        allowed = "True, False or torch's CPUOffloadPolicy"
        raise check.wrong_type(owner, "cpu_offload", cpu_offload, allowed, error=TypeError)
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()


def _offloads(policy: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(policy, CPUOffloadPolicy)


def _mixed_precision(owner: str, given: Any) -> Any:
    if given is None:
        return None
    from torch.distributed.fsdp import MixedPrecision as FirstMixedPrecision
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(given, MixedPrecisionPolicy):
        return given
    if not isinstance(given, FirstMixedPrecision):
        what = f"{owner}(mixed_precision={check.shown(given)}):"
        fix = "use torch.distributed.fsdp.MixedPrecisionPolicy, or leave it out and write precision='bf16-mixed'."
        raise make_error(TypeError, what, fix=fix, argument="mixed_precision")
    if given.keep_low_precision_grads:
        raise make_error(
            ValueError,
            f"{owner}(mixed_precision=MixedPrecision(keep_low_precision_grads=True)): FSDP2 steps with gradients in "
            "the type of the parameters.",
            fix="Leave it out.",
            argument="mixed_precision",
        )
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        # FSDP2 reduces in the type of the parameters from torch 2.15 on, FSDP1 in the type of the computation.
        reduce_dtype=given.reduce_dtype or given.param_dtype,
        cast_forward_inputs=given.cast_forward_inputs or given.cast_root_forward_inputs,
    )
