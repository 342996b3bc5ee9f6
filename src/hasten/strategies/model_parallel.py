"""Model parallel: layers are split over the processes of a group, and groups read different data."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import check, torch_private
from hasten._lib.device import is_host
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten._lib.tree import as_bytes, is_sharded, leaves
from hasten.memory import repeated_blocks
from hasten.optim.fused import on_several_meshes
from hasten.precision.base import Precision
from hasten.precision.builtin import HalfPrecision
from hasten.precision.fsdp import FSDPPrecision
from hasten.seed import RandomGenerators
from hasten.strategies.fsdp import children_apart, gathered_apart, is_manual
from hasten.strategies.parallel import CONTEXT_IN_FABRIC, PIPELINE_IN_FABRIC
from hasten.strategies.sharded import (
    ADVICE,
    DTensorEngine,
    DTensorSharding,
    DTensorState,
    ShardedStrategy,
    keep_class_name,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.strategies.plans import Plan
    from hasten.types import Group

T = TypeVar("T")

Size = int | Literal["auto"]

DATA, TENSOR = "data_parallel", "tensor_parallel"

_OF_PLAN = (
    "if the layer is one that the plan splits or follows one, name both: 'colwise' leaves a part of the features in "
    "each process, which the next 'rowwise' layer takes. For a layer alone, write 'colwise_rep' or 'rowwise_rep'; in "
    "forward(), take the number of heads from the tensor (view(..., -1, head_size))."
)


class ModelParallelStrategy(ShardedStrategy):
    """Split layers over the processes of a group (tensor parallel), and data and parameters over groups (FSDP).

    The processes form a mesh of ``data_parallel_size`` x ``tensor_parallel_size``. The module is divided by one of

    - ``plan``: hasten applies it after ``configure_model``;
    - ``configure_model`` of the LightningModule, with torch's ``parallelize_module`` and ``fully_shard`` on
      ``self.device_mesh["tensor_parallel"]`` and ``self.device_mesh["data_parallel"]``;
    - ``parallelize_fn``, in programs with Fabric.

    hasten shards with ``fully_shard`` whatever is not sharded over the groups by then. All processes of a
    tensor-parallel group read the same batches, and their random generators start equal.

    Args:
        parallelize_fn: called as ``parallelize_fn(module, device_mesh)``; divides the module in place and returns it.
        data_parallel_size: the number of groups; "auto" means one for each machine, or what
            ``tensor_parallel_size`` leaves.
        tensor_parallel_size: the number of processes of a group; "auto" means the devices of a machine, or what
            ``data_parallel_size`` leaves.
        save_distributed_checkpoint: write checkpoints as folders to which each process writes its shards; False
            writes one file with whole tensors.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: see ``ParallelStrategy``.
        plan: a dict of name patterns, relative to the module and with ``*`` between dots, and torch's
            ``ParallelStyle`` objects (or Hugging Face's names of them, such as ``"colwise"``); or "auto": the plan of
            the Hugging Face model in it, and a plan of hasten's for ``nn.TransformerEncoderLayer`` and
            ``nn.TransformerDecoderLayer``, whose feed-forward part is split and whose attention stays whole.
        sequence_parallel: with ``plan="auto"``, split the activations between the blocks of a Hugging Face decoder
            along the sequence.
        loss_parallel: compute cross entropy from logits that stay split over the classes; with ``plan="auto"`` the
            output layer leaves them so.
        expert_parallel: with ``plan="auto"``, divide whole experts of a mixture over the processes of a group, instead
            of splitting the matrices of each.

    Pipeline and context parallel are loops of your own, with Fabric: ``docs/model_parallel.md``.

    Raises:
        ValueError: the sizes do not multiply to the number of processes, or two arguments contradict each other.
        TypeError: an argument has a wrong type or is unknown.

    Example::

        >>> strategy = ModelParallelStrategy(
        ...     data_parallel_size=2, tensor_parallel_size=4, plan={"net.0": "colwise", "net.2": "rowwise"}
        ... )
        >>> strategy.name
        'model_parallel'

    Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053

    """

    name = "model_parallel"
    _advice: ClassVar[dict[str, str]] = {
        **ADVICE,
        "shapes cannot be multiplied": _OF_PLAN,
        "must have same reduction dim": _OF_PLAN,
        "is invalid for input of size": _OF_PLAN,
    }

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], nn.Module] | None = None,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
        *,
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        expert_parallel: bool = False,
        **unknown: object,
    ) -> None:
        owner = type(self).__name__
        for name, given in unknown.items():
            raise make_error(TypeError, f"{owner}({name}={given!r}): {_problem_of_argument(name)}", argument=name)
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise make_error(
                TypeError,
                f"{owner}({parallelize_fn!r}): the first argument is parallelize_fn, a function of module and mesh.",
                fix=f"Write data_parallel_size={parallelize_fn!r}.",
            )
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto":
                check.whole(owner, name, size, at_least=1, allowed="a number of processes of at least 1, or 'auto'")
        check.boolean(owner, "save_distributed_checkpoint", save_distributed_checkpoint)
        check.boolean(owner, "sequence_parallel", sequence_parallel)
        check.boolean(owner, "loss_parallel", loss_parallel)
        check.boolean(owner, "expert_parallel", expert_parallel)
        if not (plan is None or plan == "auto" or (isinstance(plan, dict) and plan)):
            raise check.wrong(owner, "plan", plan, "'auto', a dict {name pattern: ParallelStyle}, or None")
        if plan is not None and parallelize_fn is not None:
            raise MisconfigurationException(
                f"{owner}(parallelize_fn, plan=...): both divide the module.", fix="Leave one out.", argument="plan"
            )
        options = {
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
            "expert_parallel": expert_parallel,
        }
        if plan is None and any(options.values()):
            given = next(name for name, on in options.items() if on)
            raise MisconfigurationException(
                f"{owner}({given}=True): it belongs to a plan.",
                fix="Pass plan='auto' or plan={...}, or leave it out.",
                argument=given,
            )
        super().__init__(
            state_dict_type="sharded" if save_distributed_checkpoint else "full",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._parallelize_fn = parallelize_fn
        self._asked_sizes: tuple[Size, Size] = (data_parallel_size, tensor_parallel_size)
        self._sizes = (1, 1)
        self._plan = plan
        self._options = options
        self._mesh: DeviceMesh | None = None
        self._loss_context = ExitStack()
        # The modules that the plan has split, and how; empty before.
        self.styles: dict[str, ParallelStyle] = {}

    def _make_parts(self) -> tuple[GroupedDTensorSharding, GroupedDTensorEngine, DTensorState]:
        return GroupedDTensorSharding(self), GroupedDTensorEngine(self), DTensorState(self)

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        self._sizes = _sizes(*self._asked_sizes, num_nodes=num_nodes, per_node=len(devices))

    # -- facts

    @property
    def device_mesh(self) -> DeviceMesh:
        """The processes as a mesh with the dimensions "data_parallel" and "tensor_parallel".

        Raises:
            RuntimeError: the processes have not started.

        """
        if self._mesh is None:
            raise make_error(
                RuntimeError,
                "ModelParallelStrategy.device_mesh: the processes have not started.",
                fix="Use it in configure_model(), or after fabric.launch().",
            )
        return self._mesh

    @property
    def data_parallel_size(self) -> int:
        return self._sizes[0]

    @property
    def tensor_parallel_size(self) -> int:
        """The number of processes over which layers are split."""
        return self._sizes[1]

    @property
    def data_parallel_rank(self) -> int:
        return self.global_rank // self.tensor_parallel_size

    @property
    def data_parallel_group(self) -> Group:
        return None if self._mesh is None else self._mesh.get_group(DATA)

    # -- once

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        result: T = super().launch(self._with_mesh, function, args, kwargs, owner=owner)
        return result

    def _with_mesh(self, function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_about_other_things)
            self._mesh = init_device_mesh(self.root_device.type, self._sizes, mesh_dim_names=(DATA, TENSOR))
            # Modules refer to the mesh, and the mesh to its groups: groups that outlive the program may abort it at its
            # end.
            atexit.register(torch_private.registered_groups(self._mesh).clear)
        return function(*args, **kwargs)

    def divide(self, module: nn.Module) -> None:
        """Split and shard ``module`` by the plan or the function, or complete what ``configure_model`` has done.

        Raises:
            ValueError: the plan does not fit the module, or nothing divides it.
            TypeError: ``parallelize_fn`` returned something else than the module.

        """
        parameters = list(module.parameters())
        self._check_earlier(module, parameters)
        if self._plan is not None:
            self._apply_plan(module)
        elif self._parallelize_fn is not None and not any(map(is_sharded, parameters)):
            self._call_function(module)
        elif self._parallelize_fn is None and self.world_size > 1 and not any(map(is_sharded, parameters)):
            raise MisconfigurationException(
                f"ModelParallelStrategy(): nothing divides {type(module).__name__}.",
                fix="Pass plan='auto' or plan={name: style}, or divide it in configure_model() with self.device_mesh.",
            )
        if self.tensor_parallel_size > 1 and not any(map(_is_on_group, module.parameters())):
            rank_zero_warn(
                f"ModelParallelStrategy(tensor_parallel_size={self.tensor_parallel_size}): nothing divides the layers "
                f"of {type(module).__name__} over a group, so its {self.tensor_parallel_size} processes compute the "
                "same.",
                fix="Pass plan={name: style}, or use strategy='fsdp'.",
            )
        if self.data_parallel_size > 1:
            self._shard_over_groups(module)
        if self._options["loss_parallel"] and self.tensor_parallel_size > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            self._loss_context.close()
            self._loss_context.enter_context(loss_parallel())
        self.equal_generators()

    def _check_earlier(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Refuse a module that an earlier run has divided over other sizes."""
        for mesh in (getattr(parameter, "device_mesh", None) for parameter in parameters):
            for name, size in zip((DATA, TENSOR), self._sizes, strict=True):
                if mesh is not None and name in (mesh.mesh_dim_names or ()) and mesh[name].size() != size:
                    raise MisconfigurationException(
                        f"ModelParallelStrategy({name}_size={size}): an earlier run has divided "
                        f"{type(module).__name__} with {name}_size={mesh[name].size()}.",
                        fix="Use the same sizes, or a new module and a checkpoint.",
                    )

    def _call_function(self, module: nn.Module) -> None:
        assert self._parallelize_fn is not None
        returned = self._parallelize_fn(module, self.device_mesh)
        if returned is not module:
            raise make_error(
                TypeError,
                f"ModelParallelStrategy(parallelize_fn): it returned {type(returned).__name__}.",
                fix="Divide the module in place, as parallelize_module and fully_shard do, and return the same module.",
            )

    def _apply_plan(self, module: nn.Module) -> None:
        from hasten.strategies.plans import apply_plan, resolve

        assert self._plan is not None
        if self.tensor_parallel_size == 1:
            # There is nothing to split, but a name that is wrong here is also wrong with more processes.
            resolve(module, self._plan, 1, **self._options)
        else:
            self.styles = apply_plan(module, self.device_mesh[TENSOR], self._plan, **self._options)
        if self._plan == "auto" and self.styles:
            self._warn_of_little(module)

    def _warn_of_little(self, module: nn.Module) -> None:
        """Warn if a model's plan leaves most of it whole: the plans of some models name the output layer only."""
        parameters = list(module.parameters())
        places = ((p.numel(), getattr(p, "placements", ())) for p in parameters)
        split = sum(size for size, found in places if not all(place.is_replicate() for place in found))
        total = sum(p.numel() for p in parameters)
        if split < total / 2:
            warn_once(
                f"model parallel auto {type(module).__name__}",
                f"ModelParallelStrategy(plan='auto') splits {split / total:.0%} of the parameters of "
                f"{type(module).__name__}; the others are whole in each process of a group. trainer.strategy.styles "
                "names what is split.",
                fix="To split more, pass plan={name: style}.",
            )

    def _shard_over_groups(self, module: nn.Module) -> None:
        """Shard over the groups the parameters that the user has not sharded."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        whole = [name for name, parameter in module.named_parameters() if not _is_sharded_over_groups(parameter)]
        if whole and isinstance(module, FSDPModule):
            raise MisconfigurationException(
                f"ModelParallelStrategy(): {type(module).__name__} was sharded before {whole[0]!r} was made, whose "
                "gradient would be that of one group.",
                fix="Make all layers first, or a new module.",
            )
        if not whole:
            return
        mesh = self.device_mesh[DATA]
        parts: list[Any] = []
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            # Inner blocks first: a block has the parameters that no block inside of it has.
            parts = gathered_apart(module, repeated_blocks(module))[::-1]
        for part in parts:
            fully_shard(part, mesh=mesh)
        # Each backward of manual optimization ends the forward of one of the children.
        rest = children_apart(module, self.name) if is_manual(module) else [module]
        for part in rest:
            if not isinstance(part, FSDPModule):
                fully_shard(part, mesh=mesh, reshard_after_forward=True if is_manual(module) else None)
        for part in (*parts, *rest):
            keep_class_name(part)

    def wrap(self, module: nn.Module) -> nn.Module:
        # Code may have drawn random numbers on one process only.
        self.equal_generators()
        return super().wrap(module)

    def set_precision(self, precision: Precision) -> None:
        name = precision.precision
        if precision.scaler is not None:
            raise make_error(
                ValueError,
                f"precision={name!r}, strategy='model_parallel': a gradient scaler sees the gradients of one process.",
                fix="Use 'bf16-mixed'.",
                argument="precision",
            )
        if isinstance(precision, HalfPrecision) and precision.keep_small_updates:
            raise make_error(
                ValueError,
                f"precision={name!r}, strategy='model_parallel': the 32-bit copies of its parameters are not divided.",
                fix=f"Use 'bf16-mixed', or plugins=[HalfPrecision({name!r}, keep_small_updates=False)].",
                argument="precision",
            )
        if not precision.can_be_sharded or isinstance(precision, FSDPPrecision):
            raise make_error(
                ValueError,
                f"precision={name!r}, strategy='model_parallel': its layers cannot be divided over processes.",
                fix="Use 'bf16-mixed'.",
                argument="precision",
            )
        super().set_precision(precision)

    def equal_generators(self) -> None:
        """Give the processes of a tensor-parallel group the states of the random generators of its first."""
        if self.tensor_parallel_size == 1:
            return
        import torch.distributed as dist

        first = self.data_parallel_rank * self.tensor_parallel_size
        generators = RandomGenerators()
        box = [generators.state_dict() if self.global_rank == first else None]
        device = self._collective_device
        group = self.device_mesh.get_group(TENSOR)
        dist.broadcast_object_list(box, src=first, group=group, device=None if is_host(device) else device)
        state = box[0]
        assert state is not None
        if self.global_rank != first:
            generators.load_state_dict(state)

    def teardown(self) -> None:
        self._loss_context.close()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Copies of this process make a mesh of their own.
        return {**super().__getstate__(), "_mesh": None, "_loss_context": ExitStack()}


class GroupedDTensorSharding(DTensorSharding):
    """Layers are split over the processes of a group, which read the same batches and draw the same numbers."""

    strategy: ModelParallelStrategy

    @property
    def shares_batches(self) -> bool:
        """Whether some processes must read the same batches."""
        return self.strategy.tensor_parallel_size > 1

    def check_anomaly_mode(self) -> None:
        if self.shares_batches:
            raise MisconfigurationException(
                f"Trainer(detect_anomaly=True, strategy={self.strategy.name!r}): torch's anomaly mode does not know "
                "tensors that are split over processes.",
                fix="Leave it out, or use on_bad_loss='stop'.",
                argument="detect_anomaly",
            )

    def begin_epoch(self) -> None:
        """Give the processes of a tensor-parallel group the same batches and dropout masks."""
        self.strategy.equal_generators()

    def check_batch(self, batch: object) -> None:
        """Compare the first batch of a pass within a tensor-parallel group.

        Raises:
            RuntimeError: its processes read different batches.

        """
        import torch.distributed as dist

        found: list[str] = [""] * self.strategy.tensor_parallel_size
        dist.all_gather_object(found, _digest(batch), group=self.strategy.device_mesh.get_group(TENSOR))
        if len(set(found)) > 1:
            first = self.strategy.data_parallel_rank * self.strategy.tensor_parallel_size
            other = first + next(rank for rank, digest in enumerate(found) if digest != found[0])
            raise make_error(
                RuntimeError,
                f"Processes {first} and {other} of one tensor-parallel group read different batches.",
                fix=(
                    "Give both the same seeds. A dataset that divides itself must do so by "
                    "trainer.strategy.data_parallel_rank and size."
                ),
            )


class GroupedDTensorEngine(DTensorEngine):
    """The engine of shards, with optimizers whose parameters may be on several meshes."""

    strategy: ModelParallelStrategy

    def check_optimizer(self, optimizer: Optimizer, owner: str) -> None:
        super().check_optimizer(optimizer, owner)
        for group in optimizer.param_groups:
            asked = next((name for name in ("fused", "foreach") if group.get(name)), None)
            if asked is not None and on_several_meshes(group["params"]):
                raise make_error(
                    ValueError,
                    f"{type(optimizer).__name__}({asked}=True) and strategy='model_parallel': torch updates "
                    "parameters together only if all are split over the same processes, and some are not.",
                    fix=f"Pass {asked}=False.",
                )


def _sizes(data: Size, tensor: Size, *, num_nodes: int, per_node: int) -> tuple[int, int]:
    """Return the data-parallel and the tensor-parallel size.

    Raises:
        ValueError: they do not multiply to the number of processes.

    """
    world = num_nodes * per_node
    if data == "auto" and tensor == "auto":
        return num_nodes, per_node
    found_data = world // int(tensor) if data == "auto" else int(data)
    found_tensor = world // int(data) if tensor == "auto" else int(tensor)
    if found_data * found_tensor != world:
        raise MisconfigurationException(
            f"ModelParallelStrategy(data_parallel_size={data!r}, tensor_parallel_size={tensor!r}): multiplied, they "
            f"must be the number of processes, which is {world} (devices={per_node}, num_nodes={num_nodes}).",
            argument="data_parallel_size",
        )
    return found_data, found_tensor


def _problem_of_argument(name: str) -> str:
    """Return the message for an unknown argument."""
    if re.match("pipeline|pp(_|$)", name):
        return f"{PIPELINE_IN_FABRIC}."
    if re.match("context|cp(_|$)", name):
        return f"{CONTEXT_IN_FABRIC}."
    known = [*inspect.signature(ModelParallelStrategy.__init__).parameters][1:-1]
    return f"unknown argument.{did_you_mean(name, known)}"


def _digest(batch: object) -> str:
    """Return a string that is the same for equal batches."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.layout is torch.strided and not leaf.is_nested:
                values = as_bytes(leaf.detach().cpu())
                digest.update(values.numpy().data if values.numel() else b"")
        elif isinstance(leaf, (str, bytes, int, float, type(None))):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _is_about_other_things(record: logging.LogRecord) -> bool:
    """Return False for torch's advice to gather over both dimensions of the mesh at once, which it cannot itself."""
    return not record.getMessage().startswith("While redistributing from")


def _is_on_group(parameter: nn.Parameter) -> bool:
    """Return whether the processes of a group have a parameter in common."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and TENSOR in (mesh.mesh_dim_names or ())


def _is_sharded_over_groups(parameter: nn.Parameter) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and DATA in (mesh.mesh_dim_names or ())
