"""FSDP: parameters, gradients and optimizer states are divided over the processes (``fully_shard``)."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hasten._lib import check, torch_private
from hasten._lib.device import is_host
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import warn_once
from hasten.memory import recomputed_blocks, repeated_blocks
from hasten.precision.base import Precision
from hasten.precision.builtin import HalfPrecision, MixedPrecision, is_mixed
from hasten.precision.fsdp import FSDPPrecision
from hasten.strategies.sharded import ShardedStrategy, keep_class_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator

# A set of module classes; a function of FSDP1's form (module, recurse, nonwrapped_numel); an object of
# torch.distributed.fsdp.wrap.
WrapPolicy = Collection[type[nn.Module]] | Callable[..., bool]

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


@dataclass(frozen=True)
class ShardLayout:
    """The result of dividing a module: its blocks, the rest, and the mesh.

    Args:
        blocks: names of the parts whose parameters are gathered together, each by itself.
        root: names of the parameters that are gathered with the whole module, for all of its forward.
        mesh: the shape of the device mesh: ``(shards,)`` or ``(replicas, shards)``.

    """

    blocks: tuple[str, ...]
    root: tuple[str, ...]
    mesh: tuple[int, ...]

    def __str__(self) -> str:
        return f"{len(self.blocks)} blocks, {len(self.root)} parameters in the root, mesh {self.mesh}"


class FSDPStrategy(ShardedStrategy):
    """Fully sharded data parallelism: each process holds a part of parameters, gradients and optimizer states.

    Torch's ``fully_shard`` (FSDP2) divides them. Parameters are ``DTensor``; parameters of a block are gathered when
    it computes. Weights, losses and gradient norms equal those of one process up to rounding.

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
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            state_dict_type=state_dict_type, process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        sharding = getattr(sharding_strategy, "name", sharding_strategy)
        sharding = sharding.upper() if isinstance(sharding, str) else sharding
        check.one_of("FSDPStrategy", "sharding_strategy", sharding, (*SHARDING, "NO_SHARD"))
        self.shard_mode: str = sharding
        self._hybrid = "HYBRID" in sharding or sharding == "NO_SHARD"
        self._reshards = sharding in ("FULL_SHARD", "HYBRID_SHARD")
        self._mesh_given = self._checked_mesh(device_mesh)
        self._offload_policy = _offload_policy(cpu_offload)
        self.offloads = _offloads(self._offload_policy)
        self.mixed_precision: Any = _mixed_precision(mixed_precision)
        self._auto_wrap_policy = _checked_policy("auto_wrap_policy", auto_wrap_policy)
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise make_error(
                ValueError,
                "FSDPStrategy(activation_checkpointing=..., activation_checkpointing_policy=...): both say which "
                "modules to recompute.",
                fix="Leave one out.",
                argument="activation_checkpointing",
            )
        recomputes: Any = activation_checkpointing_policy
        if activation_checkpointing is not None:
            recomputes = activation_checkpointing
        which = "activation_checkpointing" + ("_policy" if activation_checkpointing is None else "")
        self._recompute_policy = _checked_policy(which, recomputes)
        self._options = _checked_options(kwargs)
        self.device_mesh: DeviceMesh | None = None
        self.plan: ShardLayout | None = None
        self._recomputes: list[AbstractContextManager[Any]] = []

    def _checked_mesh(self, mesh: Any) -> Any:
        if mesh is None:
            return None
        given = f"FSDPStrategy(device_mesh={mesh!r}, sharding_strategy={self.shard_mode!r})"
        if not self._hybrid or self.shard_mode == "NO_SHARD":
            raise make_error(
                ValueError,
                f"{given}: a mesh is for 'HYBRID_SHARD'.",
                fix="Leave it out, or use that.",
                argument="device_mesh",
            )
        dimensions = len(mesh) if isinstance(mesh, tuple) else getattr(mesh, "ndim", None)
        if dimensions is None:
            raise make_error(
                TypeError, f"{given}:", fix=f"use (replicas, shards) or a DeviceMesh, not {type(mesh).__name__}."
            )
        whole = not isinstance(mesh, tuple) or all(isinstance(size, int) and size > 0 for size in mesh)
        if dimensions != 2 or not whole:
            raise make_error(
                ValueError,
                f"{given}:",
                fix="use two whole numbers, (replicas, shards), or a DeviceMesh of two dimensions.",
                argument="device_mesh",
            )
        return mesh

    # -- facts

    @property
    def sharding_strategy(self) -> object:
        """The name of the way in which parameters are divided."""
        return self.shard_mode

    @property
    def cpu_offload(self) -> object:
        """Whether parameters are kept on the host."""
        return self.offloads

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        if isinstance(self._mesh_given, tuple) and math.prod(self._mesh_given) != self.world_size:
            count = math.prod(self._mesh_given)
            raise make_error(
                ValueError,
                f"FSDPStrategy(device_mesh={self._mesh_given}): a mesh of {count} processes, and the run has "
                f"{self.world_size}.",
                fix="Give two numbers whose product is devices * num_nodes.",
                argument="device_mesh",
            )
        if self.offloads and is_host(self.root_device):
            warn_once(
                "fsdp-cpu-offload", "FSDPStrategy(cpu_offload=...) changes nothing on the CPU.", fix="Leave it out."
            )

    def precision_of(self, name: str, device: str) -> Precision | None:
        return FSDPPrecision(name, device=device) if is_mixed(name) else None

    def set_precision(self, precision: Precision) -> None:
        if isinstance(precision, MixedPrecision) and precision.can_be_sharded:
            name = precision.precision
            raise make_error(
                ValueError,
                f"strategy='fsdp', plugins=[MixedPrecision({name!r})]: sharded parameters are converted when they are "
                "gathered, which this plugin does not do.",
                fix=f"Write precision={name!r}, or plugins=[FSDPPrecision({name!r})].",
                argument="strategy",
            )
        if isinstance(precision, FSDPPrecision):
            self.param_dtype = precision.param_dtype
        elif isinstance(precision, HalfPrecision) and precision.keep_small_updates:
            name = precision.precision
            raise make_error(
                ValueError,
                f"precision={name!r}, strategy='fsdp': the 32-bit copies of its parameters are not divided.",
                fix=f"Use 'bf16-mixed', or plugins=[HalfPrecision({name!r}, keep_small_updates=False)].",
                argument="precision",
            )
        elif not precision.can_be_sharded:
            raise make_error(
                ValueError,
                f"precision={precision.precision!r}, strategy='fsdp': its layers cannot be divided over processes. It "
                "puts them in place of others, whose parameters fully_shard gathers.",
                fix="Use 'bf16-mixed', or strategy='ddp'.",
                argument="precision",
            )
        super().set_precision(precision)

    @property
    def process_group_backend(self) -> str:
        """The backend of the process group; with ``cpu_offload`` on GPUs also one for tensors on the host."""
        backend = super().process_group_backend
        return "cpu:gloo,cuda:nccl" if backend == "nccl" and self.offloads else backend

    @property
    def _device_of_shards(self) -> torch.device:
        return torch.device("cpu") if self.offloads else self.root_device

    # -- once

    def divide(self, module: nn.Module) -> None:
        """Call ``fully_shard`` on the blocks of ``module``, then on the rest of it."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(module, FSDPModule) and self.plan is not None and self.model is module:
            return
        mesh = self._mesh()
        self.device_mesh = mesh
        ignored = self._ignored(module)
        blocks = [block for block in self._blocks(module) if not isinstance(block, FSDPModule)]
        self._recompute(module)
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=self._policy,
            offload_policy=self._offload_policy,
            ignored_params=ignored,
        )
        if self._policy.param_dtype is not None:
            for part in module.modules():
                # Running statistics in 32 bits need parameters in 32 bits.
                if (
                    isinstance(part, torch_private.NormBase)
                    and part.track_running_stats
                    and not isinstance(part, FSDPModule)
                ):
                    in_full = type(self._policy)(torch.float32, torch.float32, self._policy.param_dtype)
                    fully_shard(part, mesh=mesh, mp_policy=in_full, offload_policy=self._offload_policy)
                    keep_class_name(part)
        sharded_blocks: list[Any] = []
        # Inner blocks first: a block has the parameters that no block inside of it has.
        for block in reversed(blocks):
            shard(block, reshard_after_forward=self._reshards)
            sharded_blocks.insert(0, block)
        rest: list[nn.Module] = [module]
        # The rest stays gathered between forward and backward, because backward begins with it.
        after_forward = None if self._reshards else False
        if is_manual(module):
            # Each backward of manual optimization ends the forward of one of the parts. Parts that a toggled
            # optimizer does not train may have no backward.
            rest = children_apart(module, self.name)
            after_forward = True
        for part in rest:
            if not isinstance(part, FSDPModule):
                shard(part, reshard_after_forward=after_forward)
        for part in (*sharded_blocks, *rest):
            keep_class_name(part)
        if self._options.get("forward_prefetch"):
            for block, following in itertools.pairwise(sharded_blocks):
                block.set_modules_to_forward_prefetch([following])
        outer = set(map(id, rest))
        inner = [
            name for name, part in module.named_modules() if isinstance(part, FSDPModule) and id(part) not in outer
        ]
        in_blocks = {id(parameter) for name in inner for parameter in module.get_submodule(name).parameters()}
        root = [name for name, parameter in module.named_parameters() if id(parameter) not in in_blocks]
        self.plan = ShardLayout(tuple(inner), tuple(root), tuple(mesh.shape))

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if isinstance(self._mesh_given, DeviceMesh):
            return self._mesh_given
        kind = self.root_device.type
        if not self._hybrid:
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("data_parallel",))
        shape = self._mesh_given if self._mesh_given is not None else (self.num_nodes, self.num_processes)
        if self.shard_mode == "NO_SHARD":
            # Each process has the only shard.
            shape = (self.world_size, 1)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    @property
    def _policy(self) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.mixed_precision is not None:
            return self.mixed_precision
        reduced = None if self.param_dtype is None else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=reduced)

    def _ignored(self, module: nn.Module) -> set[nn.Parameter] | None:
        ignored = set(self._options.get("ignored_parameters", ()))
        present = set(map(id, module.modules()))
        for part in self._options.get("ignored_modules", ()):
            if id(part) not in present:
                raise make_error(
                    ValueError,
                    f"FSDPStrategy(ignored_modules=[{type(part).__name__}]): {_name_of(module)} does not contain that "
                    "module.",
                    fix="Pass modules of the model that is trained.",
                    argument="ignored_modules",
                )
            ignored |= set(part.parameters())
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        trains = next((names.get(id(parameter), "") for parameter in ignored if parameter.requires_grad), None)
        if trains is not None and self.world_size > 1:
            raise make_error(
                ValueError,
                f"FSDPStrategy(ignored_modules or ignored_parameters): {trains!r} trains, and gradients of ignored "
                "parameters stay on each process.",
                fix="Freeze it with requires_grad_(False), or do not ignore it.",
            )
        return ignored or None

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts to gather by themselves, outer ones before those inside of them."""
        policy = self._auto_wrap_policy
        parts = repeated_blocks(module) if policy is None else _chosen(module, policy, "auto_wrap_policy")
        return gathered_apart(module, parts)

    def _recompute(self, module: nn.Module) -> None:
        if self._recompute_policy is None:
            return
        which = "activation_checkpointing_policy"
        context = recomputed_blocks(_chosen(module, self._recompute_policy, which), "full")
        context.__enter__()
        self._recomputes.append(context)

    def teardown(self) -> None:
        while self._recomputes:
            self._recomputes.pop().__exit__(None, None, None)
        super().teardown()


def _name_of(module: nn.Module) -> str:
    return type(module).__name__


def is_manual(module: nn.Module) -> bool:
    """Return whether a module steps its optimizers itself."""
    return getattr(module, "automatic_optimization", True) is False


def gathered_apart(module: nn.Module, parts: Collection[nn.Module]) -> list[nn.Module]:
    """Return those of ``parts`` that can be gathered by themselves, outer parts before the parts inside of them.

    A parameter is gathered in one place: a part that shares a parameter with other parts is left out.
    """
    order = {id(part): place for place, part in enumerate(module.modules())}
    users = _users(module)
    return sorted(
        (
            block
            for block in parts
            if block is not module
            and any(True for _ in block.parameters())
            and all(users[id(p)] == _users(block)[id(p)] for p in block.parameters())
        ),
        key=lambda block: order[id(block)],
    )


def children_apart(module: nn.Module, strategy: str) -> list[nn.Module]:
    """Return the children of a module with parameters, each of which is gathered by itself.

    Raises:
        ValueError: a parameter does not belong to one child.

    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    users = _users(module)
    for name, child in module.named_children():
        shared = [key for key, p in child.named_parameters() if users[id(p)] != _users(child)[id(p)]]
        own += [f"{name}.{key}" for key in shared]
    if own:
        raise make_error(
            ValueError,
            f"strategy={strategy!r} with manual optimization: the parameter {own[0]!r} does not belong to one child "
            f"of {_name_of(module)}, and each child is gathered by itself.",
            fix="Move it into the child that uses it, or use automatic optimization.",
            argument="strategy",
        )
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    # A list of modules has no forward of its own.
    return [
        part
        for child in children
        for part in (children_apart(child, strategy) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child])
    ]


def _users(module: nn.Module) -> dict[int, int]:
    """Return in how many places of ``module`` each parameter is registered."""
    counts: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


# -- which parts


def _checked_policy(argument: str, policy: Any) -> Any:
    # Some objects of torch.distributed.fsdp.wrap are not functions.
    if policy is None or torch_private.has_policy(policy) or (callable(policy) and not isinstance(policy, type)):
        return policy
    given = [policy] if isinstance(policy, type) else policy
    is_listed = isinstance(given, (set, frozenset, list, tuple))
    if not is_listed or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in given):
        raise make_error(
            TypeError,
            f"FSDPStrategy({argument}={policy!r}):",
            fix=(
                "use a set of module classes, such as {nn.TransformerEncoderLayer}, or a function of "
                "torch.distributed.fsdp.wrap."
            ),
            argument=argument,
        )
    return frozenset(given)


def _chosen(module: nn.Module, policy: Any, argument: str) -> list[nn.Module]:
    """Return the parts of ``module`` that a policy chooses."""
    classes = torch_private.classes_of_policy(policy)
    if isinstance(classes, (set, frozenset)):
        parts = [part for part in module.modules() if isinstance(part, tuple(classes)) and part is not module]
        for kind in classes:
            if not any(isinstance(part, kind) for part in parts):
                present = sorted({type(part).__name__ for part in module.modules()})
                raise make_error(
                    ValueError,
                    f"FSDPStrategy({argument}={{{kind.__name__}}}): {_name_of(module)} has no such module.",
                    fix=f"{did_you_mean(kind.__name__, present)} It has: {', '.join(present[:12])}.",
                    argument=argument,
                )
        return parts
    if torch_private.has_policy(policy):
        return [part for part in torch_private.run_policy(policy, module) if part is not module]
    return _by_function(module, policy)


def _by_function(module: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the parts that a function of FSDP1's form chooses: children first, with their remaining elements."""
    parts: list[nn.Module] = []

    def visit(part: nn.Module, is_root: bool) -> int:
        elements = sum(parameter.numel() for parameter in part.parameters())
        if not policy(module=part, recurse=True, nonwrapped_numel=elements):
            if not is_root and policy(module=part, recurse=False, nonwrapped_numel=elements):
                parts.append(part)
                return elements
            return 0
        wrapped_elements = sum(visit(child, False) for child in part.children())
        if not is_root and policy(module=part, recurse=False, nonwrapped_numel=elements - wrapped_elements):
            parts.append(part)
            return elements
        return wrapped_elements

    visit(module, True)
    return parts


# -- arguments


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
            raise make_error(
                TypeError,
                f"FSDPStrategy({argument}={type(value).__name__}(...)):",
                fix="use a list.",
                argument=argument,
            )
    states = list(taken.pop("ignored_states", None) or ())
    modules = [*(taken.pop("ignored_modules", None) or ()), *(one for one in states if isinstance(one, nn.Module))]
    parameters = [
        *(taken.pop("ignored_parameters", None) or ()),
        *(one for one in states if not isinstance(one, nn.Module)),
    ]
    for argument, values, kind in (
        ("ignored_modules", modules, nn.Module),
        ("ignored_parameters", parameters, nn.Parameter),
    ):
        wrong = [value for value in values if not isinstance(value, kind)]
        if wrong:
            raise make_error(
                TypeError,
                f"FSDPStrategy({argument}=[{wrong[0]!r}]):",
                fix=f"use a list of {kind.__name__} objects.",
                argument=argument,
            )
    prefetch = check.boolean("FSDPStrategy", "forward_prefetch", taken.pop("forward_prefetch", False))
    return {"ignored_modules": modules, "ignored_parameters": parameters, "forward_prefetch": prefetch}


def _offload_policy(cpu_offload: Any) -> Any:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(cpu_offload, OffloadPolicy):
        return cpu_offload
    if isinstance(cpu_offload, CPUOffload):
        cpu_offload = cpu_offload.offload_params
    if cpu_offload is not None and not isinstance(cpu_offload, bool):
        raise make_error(
            TypeError,
            f"FSDPStrategy(cpu_offload={cpu_offload!r}):",
            fix=f"use True, False or torch's CPUOffloadPolicy, not {type(cpu_offload).__name__}.",
            argument="cpu_offload",
        )
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()


def _offloads(policy: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(policy, CPUOffloadPolicy)


def _mixed_precision(given: Any) -> Any:
    if given is None:
        return None
    from torch.distributed.fsdp import MixedPrecision as FirstMixedPrecision
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(given, MixedPrecisionPolicy):
        return given
    if not isinstance(given, FirstMixedPrecision):
        raise make_error(
            TypeError,
            f"FSDPStrategy(mixed_precision={given!r}):",
            fix="use torch.distributed.fsdp.MixedPrecisionPolicy, or leave it out and write precision='bf16-mixed'.",
            argument="mixed_precision",
        )
    if given.keep_low_precision_grads:
        raise make_error(
            ValueError,
            "FSDPStrategy(mixed_precision=MixedPrecision(keep_low_precision_grads=True)): FSDP2 steps with gradients "
            "in the type of the parameters.",
            fix="Leave it out.",
            argument="mixed_precision",
        )
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        cast_forward_inputs=given.cast_forward_inputs or given.cast_root_forward_inputs,
    )
