"""One mesh for all axes: copies of the model, shards of its parameters, sequences and layers that are divided."""

from __future__ import annotations

import atexit
import inspect
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hasten._lib import check, torch_private
from hasten._lib.device import is_host
from hasten._lib.errors import MisconfigurationException, add_note, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import warn_once
from hasten._lib.torch_private import ShardedPart
from hasten._lib.tree import is_absent, is_sharded
from hasten.machine import collectives
from hasten.precision.base import Precision
from hasten.precision.builtin import HalfPrecision, MixedPrecision, is_mixed
from hasten.precision.fsdp import FSDPPrecision
from hasten.seed import RandomGenerators
from hasten.strategies.mesh.blocks import WrapPolicy, is_manual, name_of
from hasten.strategies.mesh.initial_values import fill
from hasten.strategies.mesh.layer_split import LayerSplit
from hasten.strategies.mesh.parameter_shards import ParameterShards
from hasten.strategies.mesh.sizes import (
    BATCHES,
    CONTEXT,
    DATA,
    EXPERT,
    PIPELINE,
    REPLICATE,
    TENSOR,
    MeshSizes,
    ShardLayout,
    Size,
)
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.sharded import (
    DTensorEngine,
    DTensorSharding,
    DTensorState,
    named_tensors,
    refuse_hooks,
    roots_of,
    sharded_parts,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.strategies.context import ContextSplit
    from hasten.strategies.mesh.pipeline import Pipeline
    from hasten.strategies.plans import Plan
    from hasten.types import Group

T = TypeVar("T")

_ADVICE = {
    "got mixed torch.Tensor and DTensor": (
        "parameters are whole only inside the forward of the part that gathers them (trainer.strategy.plan names the "
        "parts). Call a part itself, part(x), not a method of it and not the layers inside of it; or name the part "
        "with FSDPStrategy(auto_wrap_policy={...}). For a term of the loss that reads parameters, such as a norm, use "
        "weight_decay, or add its gradient in on_before_optimizer_step."
    ),
    "numpy() is not supported for tensor subclasses": (
        "this process has a part of the tensor. Write tensor.full_tensor().detach().cpu().numpy(); all processes call "
        "full_tensor()."
    ),
    "under selective activation checkpoint": (
        "zero-bubble schedules go backward twice through a block. Use memory='full', or schedule='Interleaved1F1B'."
    ),
    "FSDP does not support deepcopy": (
        "a divided module cannot be copied. Copy it in setup() or before, or save a checkpoint and load it into a new "
        "module."
    ),
}
_OF_PLAN = (
    "if the layer is one that the plan splits or follows one, name both: 'colwise' leaves a part of the features in "
    "each process, which the next 'rowwise' layer takes. For a layer alone, write 'colwise_rep' or 'rowwise_rep'; in "
    "forward(), take the number of heads from the tensor (view(..., -1, head_size))."
)
_ADVICE_ON_LAYERS = {
    **_ADVICE,
    "shapes cannot be multiplied": _OF_PLAN,
    "must have same reduction dim": _OF_PLAN,
    "is invalid for input of size": _OF_PLAN,
}
_NOT_BESIDE_EXPERTS = {
    "expert_parallel": "one divides experts over processes with the same tokens, the other with different ones.",
    "pipeline": "experts are not divided within the stages of a pipeline.",
}
_ALL_CALL = (
    "a process has ended, or the processes have called different things. What exchanges parameters, such as a forward, "
    "full_tensor(), save_checkpoint() or fabric.save(), has to be called by all processes, not inside `if rank == 0:`."
)


class MeshStrategy(ParallelStrategy):
    """Divide the model over all processes, along several axes at once.

    The sizes of the axes multiply to the number of processes. An axis of size 1 costs nothing. Weights, losses and
    gradient norms equal those of one process up to rounding, for every combination. ``FSDPStrategy`` and
    ``ModelParallelStrategy`` are other spellings of this class.

    - ``shard``: each process has a part of parameters, gradients and optimizer states, and gathers a block when it
      computes (torch's ``fully_shard``, FSDP2). It reads data of its own.
    - ``replicate``: copies of all shards; gradients are averaged over them once a step. Parameters are gathered within
      one copy only, so its processes should be close to each other (hybrid sharding).
    - ``tensor``: layers are split over the processes of a group, which read the same batches and exchange activations
      in each layer. The group should be within one machine.
    - ``context``: each process has a part of every sequence and of its activations. Attention sees the whole sequence;
      there processes exchange tokens for heads. Parameters are sharded over these processes, too.
    - ``pipeline``: each process computes some of the blocks, one after the other, and a batch goes through them in
      parts. The steps of the module stay as they are; the last stage computes the loss.

    ``expert`` is no further axis: it says over how many of the processes of the other axes the experts of a mixture are
    divided. Each of these processes computes the other layers for tokens of its own, which travel to the processes of
    the experts that they chose, and back.

    The layers are split by ``plan``, or by ``configure_model`` of the module with torch's ``parallelize_module`` on
    ``self.device_mesh["tensor_parallel"]``, or by ``parallelize_fn`` in programs with Fabric. Dividing a module in
    ``configure_model`` with ``fully_shard`` on ``self.device_mesh["data_parallel"]`` works, too; what is not divided by
    then is divided by hasten.

    Args:
        replicate: the number of copies.
        shard: the number of shards. "auto", for one of the axes, is what the others leave. If two are "auto", the
            outer one gets the number of machines.
        tensor: the number of processes over which layers are split.
        context: the number of processes over which sequences are divided, in the steps of a Trainer. In a loop of your
            own, use ``hasten.strategies.context.ContextSplit``.
        pipeline: the number of processes over which blocks are divided, in the steps of a Trainer.
        expert: the number of processes over which the experts of a mixture are divided, whole. It divides
            ``shard * context * tensor``, over which they are sharded as far as it is smaller, or is a multiple of it.
        split: with ``pipeline``, names of the blocks at which stages begin, but the first: ``["model.layers.6"]``. By
            default, the blocks of the ``nn.ModuleList`` or ``nn.Sequential`` with the most parameters are divided
            evenly.
        schedule: the order in which stages compute, by its name in torch: "1F1B", "GPipe", "Interleaved1F1B",
            "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV". All but the first two have two stages
            in each process, or as many as ``split`` makes.
        micro_batches: into how many parts a batch is divided; two for each stage by default.
        plan: a dict of name patterns, relative to the module and with ``*`` between dots, and torch's
            ``ParallelStyle`` objects (or Hugging Face's names of them, such as ``"colwise"``); or "auto": the plan of
            the Hugging Face model in it, and a plan of hasten's for ``nn.TransformerEncoderLayer`` and
            ``nn.TransformerDecoderLayer``, whose feed-forward part is split and whose attention stays whole.
        parallelize_fn: called as ``parallelize_fn(module, device_mesh)``; divides the module in place and returns it.
        sequence_parallel: with ``plan="auto"``, split the activations between the blocks of a Hugging Face decoder
            along the sequence.
        loss_parallel: compute cross entropy from logits that stay split over the classes; with ``plan="auto"`` the
            output layer leaves them so.
        expert_parallel: with ``plan="auto"``, divide whole experts of a mixture over the processes of a tensor-parallel
            group, which read the same tokens, instead of splitting the matrices of each.
        auto_wrap_policy: which parts are gathered by themselves: a set of module classes, or a function of FSDP1's
            form. By default every repeated block; ``strategy.plan`` shows the choice.
        reshard_after_forward: free the parameters of a block after its forward, and gather them again for its
            backward; False keeps them until then.
        forward_prefetch: gather the next block while one computes its forward.
        ignored_modules: modules whose parameters stay whole in each process. They must not train.
        ignored_parameters: the same for parameters.
        activation_checkpointing_policy: which modules to recompute in backward, in the form of ``auto_wrap_policy``.
        cpu_offload: keep parameters, gradients and optimizer states in host memory, and step there: True or torch's
            ``CPUOffloadPolicy``.
        mixed_precision: torch's ``MixedPrecisionPolicy``. By default it follows ``precision``: without split layers
            "bf16-mixed" computes in bfloat16 and reduces gradients in 32 bits; with them it is autocast.
        state_dict_type: "full" writes checkpoints as one file with whole tensors, "sharded" as a folder to which each
            process writes its shards. Both can be read with any other sizes.
        accelerator: in place of ``Trainer(accelerator=...)``.
        parallel_devices: in place of ``Trainer(devices=...)``.
        cluster_environment: in place of ``Trainer(plugins=...)``.
        checkpoint_io: the same.
        precision_plugin: in place of ``Trainer(precision=...)``.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: see ``ParallelStrategy``.

    Raises:
        ValueError: the sizes do not multiply to the number of processes, or two arguments contradict each other.
        TypeError: an argument has a wrong type or is unknown.

    Example::

        >>> MeshStrategy(replicate=2, shard="auto", tensor=8, plan="auto").name
        'mesh'

    Source: `PyTorch, fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`_; Shoeybi et
    al., Megatron-LM, https://arxiv.org/abs/1909.08053; Liang et al., TorchTitan, https://arxiv.org/abs/2410.06511.

    """

    sharding: DTensorSharding
    engine: DTensorEngine

    name = "mesh"
    # The name of the class in messages, and the arguments that ask for the sizes.
    _owner: ClassVar[str] = "MeshStrategy"
    _arguments: ClassVar[dict[str, str]] = {
        name: name for name in ("replicate", "shard", "context", "tensor", "pipeline")
    }
    # Dimensions that the mesh has even if their size is 1.
    _always: ClassVar[tuple[str, ...]] = ()
    _recompute_argument: ClassVar[str] = "activation_checkpointing_policy"

    def __init__(
        self,
        replicate: Size = 1,
        shard: Size = "auto",
        tensor: Size = 1,
        context: Size = 1,
        pipeline: int = 1,
        expert: int = 1,
        *,
        split: Sequence[str] | None = None,
        schedule: str = "1F1B",
        micro_batches: int | None = None,
        plan: Plan | None = None,
        parallelize_fn: Callable[[Any, DeviceMesh], nn.Module] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        expert_parallel: bool = False,
        auto_wrap_policy: WrapPolicy | None = None,
        reshard_after_forward: bool = True,
        forward_prefetch: bool = False,
        ignored_modules: Collection[nn.Module] = (),
        ignored_parameters: Collection[nn.Parameter] = (),
        activation_checkpointing_policy: WrapPolicy | None = None,
        cpu_offload: bool | CPUOffloadPolicy | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
        **unknown: object,
    ) -> None:
        check.declared(MeshStrategy.__init__, locals())
        owner = self._owner
        self._refuse_unknown(unknown)
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        self._asked: dict[str, Size] = {
            "pipeline": check.whole(owner, "pipeline", pipeline, at_least=1, at_most=2**20),
            "replicate": replicate,
            "shard": shard,
            "tensor": tensor,
            "context": context,
        }
        for axis, size in self._asked.items():
            if not (isinstance(size, str) and size == "auto"):
                allowed = "a number of processes of at least 1, or 'auto'"
                check.whole(owner, self._arguments.get(axis, axis), size, at_least=1, allowed=allowed)
        if list(self._asked.values()).count("auto") > 2:
            raise MisconfigurationException(
                f"{owner}({self._sizes_text()}): at most two sizes can be 'auto'.", fix="Give one as a number."
            )
        self._expert = check.whole(owner, "expert", expert, at_least=1)
        for argument, given in (("expert_parallel", expert_parallel), ("pipeline", pipeline > 1)):
            if self._expert > 1 and given:
                what = f"{owner}(expert={expert}, {argument}=...): {_NOT_BESIDE_EXPERTS[argument]}"
                raise MisconfigurationException(what, fix=f"Leave {argument} out, or expert.", argument="expert")
        check.one_of(owner, "state_dict_type", state_dict_type, ("full", "sharded"))
        self.layers = LayerSplit(
            owner,
            self._arguments["tensor"],
            plan,
            parallelize_fn,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            expert_parallel=expert_parallel,
        )
        self.shards = ParameterShards(
            owner,
            self._recompute_argument,
            auto_wrap_policy=auto_wrap_policy,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            ignored_modules=ignored_modules,
            ignored_parameters=ignored_parameters,
            activation_checkpointing_policy=activation_checkpointing_policy,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
        )
        self.sizes = MeshSizes()
        # What divides sequences in a run; None if nothing does.
        self.context: ContextSplit | None = None
        self._context_of_run = ExitStack()
        # Whether a run with more processes would split layers, as which it behaves with fewer, too.
        self.splits_layers = tensor != 1 or self.layers.is_given
        # The parts that ``fully_shard`` was applied to, of all modules.
        self._parts: list[Any] = []
        self._mesh: DeviceMesh | None = None
        # The processes by the batches that they read; None where each reads others.
        self._mesh_of_batches: DeviceMesh | None = None
        # The processes by the experts that they have; None where experts are not divided.
        self._mesh_of_experts: DeviceMesh | None = None
        self.state.saves_folders = state_dict_type == "sharded"
        # What computes steps in stages; None without a pipeline.
        self.pipeline: Pipeline | None = None
        if pipeline > 1:
            self._make_pipeline(schedule, split, micro_batches)
            return
        parts = {"split": split is not None, "micro_batches": micro_batches is not None, "schedule": schedule != "1F1B"}
        if without := [name for name, is_given in parts.items() if is_given]:
            what = f"{owner}({without[0]}=...): it is for a pipeline."
            raise MisconfigurationException(what, fix="Pass pipeline=2, or leave it out.", argument=without[0])

    def _make_pipeline(self, schedule: str, split: Sequence[str] | None, micro_batches: int | None) -> None:
        """Make what computes steps in stages."""
        from hasten.strategies.mesh.pipeline import Pipeline
        from hasten.strategies.mesh.staged import StagedEngine, StagedSharding, StagedState

        check.whole(self._owner, "micro_batches", micro_batches, at_least=1, allow_none=True)
        if split is not None and (
            isinstance(split, str) or not split or not all(isinstance(one, str) for one in split)
        ):
            allowed = "a list of names of blocks, such as ['layers.4']"
            raise check.wrong(self._owner, "split", split, allowed)
        if self.state.saves_folders:
            raise MisconfigurationException(
                f"{self._owner}(pipeline={self._asked['pipeline']}, state_dict_type='sharded'): checkpoints of stages "
                "are files.",
                fix="Leave state_dict_type out.",
                argument="state_dict_type",
            )
        size = int(self._asked["pipeline"])
        self.pipeline = Pipeline(self, size, schedule=schedule, split=split, micro_batches=micro_batches)
        self.sharding, self.engine, self.state = StagedSharding(self), StagedEngine(self), StagedState(self)

    def _make_parts(self) -> tuple[DTensorSharding, DTensorEngine, DTensorState]:
        return DTensorSharding(self), DTensorEngine(self), DTensorState(self)

    def _refuse_unknown(self, unknown: Mapping[str, object]) -> None:
        for name, given in unknown.items():
            what = f"{self._owner}({name}={given!r}): {self._problem_of_argument(name)}"
            raise make_error(TypeError, what, argument=name)

    def _problem_of_argument(self, name: str) -> str:
        if name.startswith(("pipeline", "pp")):
            return "layers are divided into stages by MeshStrategy(pipeline=N)."
        if name.startswith(("context", "cp")):
            return "sequences are divided by MeshStrategy(context=N)."
        if name.startswith(("expert", "ep")):
            return "experts are divided by MeshStrategy(expert=N)."
        known = [*inspect.signature(type(self).__init__).parameters][1:-1]
        return f"unknown argument.{did_you_mean(name, known)}"

    def _sizes_text(self) -> str:
        sizes = {argument: self._asked[axis] for axis, argument in self._arguments.items()}
        sizes = {name: size for name, size in sizes.items() if size != 1 or name not in ("context", "pipeline")}
        return ", ".join(f"{argument}={size!r}" for argument, size in sizes.items())

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        try:
            self.sizes = MeshSizes.of(self._asked, num_nodes=num_nodes, per_node=len(devices), expert=self._expert)
        except ValueError:
            raise self._wrong_sizes(num_nodes, len(devices)) from None
        if self._expert > 1:
            self._check_experts()
        if self.pipeline is not None:
            self._check_beside_stages()
        if self.offloads and is_host(self.root_device):
            what = f"{self._owner}(cpu_offload=...) changes nothing on the CPU."
            warn_once("fsdp-cpu-offload", what, fix="Leave it out.")

    def _check_experts(self) -> None:
        try:
            self.sizes.dimensions_of_experts()
        except ValueError:
            copy = self.sizes.shard * self.sizes.context * self.sizes.tensor
            raise MisconfigurationException(
                f"{self._owner}(expert={self._expert}): of {self.sizes.processes} processes, {copy} hold a copy of the "
                "parameters, and experts cannot be divided evenly over them.",
                fix=f"Use a divisor of {copy}, or a multiple of {copy} that divides {self.sizes.processes}.",
                argument="expert",
            ) from None

    def _check_beside_stages(self) -> None:
        """Refuse what needs all layers, or shards where nothing is sharded, or whole parameters where they are."""
        assert self.pipeline is not None
        if self.splits_layers:
            self.layers.check_beside_stages()
        if not self._shards_parameters and (asked := self.shards.asked):
            what = f"{self._owner}(pipeline={self.sizes.pipeline}, {asked[0]}=...): nothing is sharded."
            fix = f"Leave {asked[0]} out, or use shard=2 or more."
            raise MisconfigurationException(what, fix=fix, argument=asked[0])
        if self._shards_parameters and self.pipeline.schedule.in_two_parts:
            raise MisconfigurationException(
                f"{self._owner}({self._sizes_text()}): this schedule computes gradients of parameters in a separate "
                "pass, which fully_shard does not support.",
                fix="Use schedule='1F1B' or 'Interleaved1F1B', or one process for each stage.",
                argument="schedule",
            )

    def _wrong_sizes(self, num_nodes: int, per_node: int) -> ValueError:
        return MisconfigurationException(
            f"{self._owner}({self._sizes_text()}): multiplied, they must be the number of processes, which is "
            f"{num_nodes * per_node} (devices={per_node}, num_nodes={num_nodes}).",
            argument=next(iter(self._arguments.values())),
        )

    # -- facts

    @property
    def device_mesh(self) -> DeviceMesh:
        """The processes as a mesh with the dimensions "replicate", "data_parallel" and "tensor_parallel".

        Dimensions of size 1 are left out, but for "data_parallel".

        Raises:
            RuntimeError: the processes have not started.

        """
        if self._mesh is None:
            what = f"{self._owner}.device_mesh: the processes have not started."
            raise make_error(RuntimeError, what, fix="Use it in configure_model(), or after fabric.launch().")
        return self._mesh

    @property
    def plan(self) -> ShardLayout | None:
        """How parameters are sharded; None before the run."""
        return self.shards.layout

    @property
    def styles(self) -> dict[str, ParallelStyle]:
        """The modules that the plan has split, and how; empty before the run."""
        return self.layers.styles

    @property
    def divides_activations(self) -> bool:
        """Whether the processes of a tensor-parallel group have parts of what goes from block to block."""
        return self.sizes.tensor > 1 and self.layers.divides_sequences

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept on the host."""
        return self.shards.offloads

    @property
    def tensor_parallel_size(self) -> int:
        """The number of processes over which layers are split."""
        return self.sizes.tensor

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.batches

    @property
    def data_parallel_rank(self) -> int:
        return self._rank_in_stage // self.sizes.alike

    @property
    def _rank_in_stage(self) -> int:
        return self.global_rank % (self.sizes.processes // self.sizes.pipeline)

    @property
    def owner(self) -> str:
        """The class that a program has written, for messages."""
        return self._owner

    @property
    def keeps_whole(self) -> bool:
        """Whether this process gathers whole tensors of a checkpoint: the first, or the first of each stage."""
        return self._rank_in_stage == 0

    @property
    def data_parallel_group(self) -> Group:
        if self._mesh is None or self.sizes.tensor * self.sizes.pipeline == 1:
            return None
        if self.sizes.replicate == 1:
            return self._mesh.get_group(DATA)
        return torch_private.group_over(self._mesh, (REPLICATE, DATA))

    def precision_of(self, name: str, device: str) -> Precision | None:
        return FSDPPrecision(name, device=device) if is_mixed(name) and not self._autocasts else None

    @property
    def _autocasts(self) -> bool:
        """Whether a number format is autocast, and not the type in which parameters are gathered."""
        return self.splits_layers or self.pipeline is not None

    def set_precision(self, precision: Precision) -> None:
        (self._check_autocast if self._autocasts else self._check_converted)(precision)
        super().set_precision(precision)

    def _check_autocast(self, precision: Precision) -> None:
        """Check a number format in which split layers compute."""
        given = f"precision={precision.precision!r}, strategy={self.name!r}"
        if precision.scaler is not None:
            what = f"{given}: a gradient scaler sees the gradients of one process."
            raise make_error(ValueError, what, fix="Use 'bf16-mixed'.", argument="precision")
        self._check_divisible(precision)
        if isinstance(precision, FSDPPrecision):
            raise self._not_divisible(precision, "Use 'bf16-mixed'.")

    def _check_converted(self, precision: Precision) -> None:
        """Check a number format into which parameters are converted when they are gathered."""
        name = precision.precision
        if isinstance(precision, MixedPrecision) and is_mixed(name) and precision.can_be_sharded:
            raise make_error(
                ValueError,
                f"strategy={self.name!r}, plugins=[MixedPrecision({name!r})]: sharded parameters are converted when "
                "they are gathered, which this plugin does not do.",
                fix=f"Write precision={name!r}, or plugins=[FSDPPrecision({name!r})].",
                argument="strategy",
            )
        self._check_divisible(precision)
        self.shards.param_dtype = precision.param_dtype

    def _check_divisible(self, precision: Precision) -> None:
        if isinstance(precision, HalfPrecision) and precision.keep_small_updates:
            name = precision.precision
            what = f"precision={name!r}, strategy={self.name!r}: the 32-bit copies of its parameters are not divided."
            fix = f"Use 'bf16-mixed', or plugins=[HalfPrecision({name!r}, keep_small_updates=False)]."
            raise make_error(ValueError, what, fix=fix, argument="precision")
        if not precision.can_be_sharded:
            raise self._not_divisible(
                precision, "Use 'bf16-mixed'." if self.splits_layers else "Use 'bf16-mixed', or strategy='ddp'."
            )

    def _not_divisible(self, precision: Precision, fix: str) -> ValueError:
        return make_error(
            ValueError,
            f"precision={precision.precision!r}, strategy={self.name!r}: its layers cannot be divided over processes. "
            "It puts them in place of others, whose parameters fully_shard gathers.",
            fix=fix,
            argument="precision",
        )

    @property
    def process_group_backend(self) -> str:
        """The backend of the process group; with ``cpu_offload`` on GPUs also one for tensors on the host."""
        backend = super().process_group_backend
        return "cpu:gloo,cuda:nccl" if backend == "nccl" and self.offloads else backend

    @property
    def device_of_shards(self) -> torch.device:
        """Where parameters are between the steps."""
        return torch.device("cpu") if self.offloads else self.root_device

    # -- once

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        result: T = super().launch(self._with_mesh, function, args, kwargs, owner=owner)
        return result

    def _with_mesh(self, function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
        if self._mesh is None:
            self._mesh = self._make_mesh()
            if self.sharding.shares_batches:
                self._mesh_of_batches = self._make_mesh_of_batches()
            if self.sizes.expert > 1:
                self._mesh_of_experts = self._mesh_over(self.sizes.dimensions_of_experts())
        return function(*args, **kwargs)

    def _make_mesh(self) -> DeviceMesh:
        return self._mesh_over(self.sizes.dimensions(always=self._always))

    def _mesh_over(self, dimensions: dict[str, int]) -> DeviceMesh:
        logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_about_other_things)
        return _mesh_over(self.root_device.type, dimensions)

    def _make_mesh_of_batches(self) -> DeviceMesh:
        sizes = {BATCHES: self.sizes.batches, CONTEXT: self.sizes.context, TENSOR: self.sizes.tensor}
        if self.pipeline is not None:
            sizes = {PIPELINE: self.sizes.pipeline, **sizes}
        return self._mesh_over(sizes)

    def simulate_one_process(self) -> None:
        if self.pipeline is not None:
            self.pipeline.simulate_one_process()
        this: Any = self
        self._simulate_collectives()
        # The first process would draw the values, and send the state of its random generators.
        this._fill = lambda module, stored: module.to_empty(device=self.device_of_shards)
        this.equal_generators = lambda: None
        this.sharding.check_batch = lambda batch: None

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Divide ``module``, with the first process's weights; fill what is on the meta device.

        Args:
            module: the user's module, changed in place.
            stored: names of weights that a checkpoint is going to bring: they need no initial values.

        Raises:
            ValueError: a part on the meta device has no ``reset_parameters``, a layer is lazy, or a parameter has a
                hook.

        """
        lazy = next((name for name, tensor in named_tensors(module) if is_lazy(tensor)), None)
        if lazy is not None:
            what = f"strategy={self.name!r}: {lazy!r}, of a lazy layer, has no shape yet that could be divided."
            fix = "Write the layer with its input size, or run a batch through the module in configure_model()."
            raise make_error(ValueError, what, fix=fix, argument="strategy")
        refuse_hooks(module, self.name)
        # ``fully_shard`` and ``parallelize_module`` make new parameters: attributes that the program has set on one are
        # kept.
        notes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
        if self.pipeline is None or not self.pipeline.check(module):
            self._send_all(module)
        self.divide(module)
        ids = set(map(id, self._parts))
        self._parts += [part for part in sharded_parts(module).values() if id(part) not in ids]
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            self._fill(module, stored)
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_sharded(tensor) and tensor.device != self.root_device:
                tensor.data = tensor.data.to(self.root_device)
        for name, parameter in module.named_parameters():
            for attribute, value in notes.get(name, {}).items():
                vars(parameter).setdefault(attribute, value)

    def _fill(self, module: nn.Module, stored: Container[str]) -> None:
        fill(self, module, stored)

    def _send_all(self, module: nn.Module) -> None:
        if any(map(is_absent, module.parameters())):
            raise MisconfigurationException(
                f"strategy={self.name!r}: an earlier run has divided {name_of(module)} into stages, and this process "
                "has some of them.",
                fix="Save a checkpoint, and load it into a new module.",
                argument="strategy",
            )
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta and not is_sharded(tensor):
                    self.send_values(tensor.data)

    def send_values(self, tensor: Tensor) -> None:
        """Give ``tensor`` the values that it has in the first process; all processes call it."""
        if self.engine.exchanges:
            device = self._collective_device
            moved = tensor.to(device).contiguous()
            torch.distributed.broadcast(moved, 0)
            tensor.copy_(moved)

    def divide(self, module: nn.Module) -> None:
        """Split the layers of ``module``, then shard what ``configure_model`` has not sharded.

        Raises:
            ValueError: the plan does not fit the module, or nothing divides it.
            TypeError: ``parallelize_fn`` returned something else than the module.

        """
        self._check_earlier(module)
        if self.pipeline is not None:
            self.pipeline.divide(module, partial(self._divide_layers, module))
        else:
            self._divide_layers(module)
        self.equal_generators()

    def _divide_layers(self, module: nn.Module) -> None:
        """Divide the layers that this process has: all of them, or those of its stages."""
        if self.sizes.context > 1:
            self._divide_sequences(module)
        if self._mesh_of_experts is not None:
            self._divide_experts(module, self._mesh_of_experts)
        if self.splits_layers:
            self.layers.apply(module, self.device_mesh, self.sizes)
        if self._shards_parameters or not (self.splits_layers or self.pipeline):
            self.shards.apply(module, _without(self.device_mesh, PIPELINE, TENSOR), self.name)
        else:
            self.shards.recompute(module)
        if self.sizes.tensor > 1:
            self.layers.split_losses()

    @property
    def _shards_parameters(self) -> bool:
        """Whether several processes have the same layers, or the same parts of them, and divide their parameters."""
        return self.sizes.batches * self.sizes.context > 1

    def _divide_experts(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the experts of ``module``, and shard those of each process."""
        from hasten.strategies.experts import divide_experts

        sizes = self.sizes
        alike = self.device_mesh[TENSOR] if sizes.tensor > 1 else None
        # They have the gradients of all tokens of their group, where other parameters have the mean over its batches.
        self.layers.styles = divide_experts(module, mesh[EXPERT], alike, sizes.tensor / sizes.expert, self._owner)
        self.shards.shard_experts(map(module.get_submodule, self.layers.styles), _without(mesh, EXPERT))

    def _divide_sequences(self, module: nn.Module) -> None:
        """Let the attention of ``module`` see whole sequences, of which each process has a part."""
        from hasten.strategies.context import ContextSplit

        if is_manual(module):
            raise MisconfigurationException(
                f"{self._owner}(context={self.sizes.context}): {name_of(module)} optimizes manually, so its loss "
                "cannot be weighed by the tokens of this process.",
                fix="Use automatic optimization, or a loop with Fabric and hasten.strategies.context.ContextSplit.",
                argument="context",
            )
        if self.context is None:
            assert self._mesh_of_batches is not None
            self.context = ContextSplit(self._mesh_of_batches.get_group(CONTEXT))
            self.context.prepare(module)
            self._context_of_run.callback(self.context.release)
            self._context_of_run.enter_context(self.context.active())

    def _check_earlier(self, module: nn.Module) -> None:
        """Refuse a module that an earlier run has divided over other sizes."""
        axes = {PIPELINE: "pipeline", REPLICATE: "replicate", DATA: "shard", TENSOR: "tensor", EXPERT: "expert"}
        sizes = {**_sizes_of(self.device_mesh), EXPERT: self.sizes.expert}
        for mesh in (getattr(parameter, "device_mesh", None) for parameter in module.parameters()):
            earlier = {} if mesh is None else _sizes_of(mesh)
            for name, axis in axes.items():
                if earlier.get(name, sizes.get(name, 1)) != sizes.get(name, 1):
                    argument = self._arguments.get(axis, axis)
                    raise MisconfigurationException(
                        f"{self._owner}({argument}={sizes.get(name, 1)}): an earlier run has divided "
                        f"{name_of(module)} with {argument}={earlier[name]}.",
                        fix="Use the same sizes, or a new module and a checkpoint.",
                    )

    # -- a step

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return ``module``, which ``shard`` has divided."""
        # Code may have drawn random numbers on one process only.
        self.equal_generators()
        self.model = module
        return module

    @contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        """Leave gradients unreduced in backward; the next backward outside of this context reduces their sum."""
        roots = roots_of(wrapped)
        for root in roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.engine.has_held_gradients = True
            for root in roots:
                root.set_requires_gradient_sync(True)

    def equal_generators(self) -> None:
        """Give processes that read the same batches the states of the random generators of the first of them."""
        if not self.sharding.shares_batches:
            return
        import torch.distributed as dist

        first = dist.get_process_group_ranks(self.group_alike)[0]
        generators = RandomGenerators()
        box = [generators.state_dict() if self.global_rank == first else None]
        device = self._collective_device
        dist.broadcast_object_list(box, src=first, group=self.group_alike, device=None if is_host(device) else device)
        state = box[0]
        assert state is not None
        if self.global_rank != first:
            generators.load_state_dict(state)

    @property
    def group_alike(self) -> Group:
        """The group of the processes that read the same batches as this one."""
        mesh = self._mesh_of_batches
        assert mesh is not None
        sizes = _sizes_of(mesh)
        names = tuple(name for name in (PIPELINE, CONTEXT, TENSOR) if sizes.get(name, 1) > 1)
        return torch_private.group_over(mesh, names) if len(names) > 1 else mesh.get_group(names[0])

    # -- the end

    def on_exception(self, exception: BaseException) -> None:
        """Add the usual fix to an error of torch, and let the module begin its next step from a clean state.

        The exception may have ended a forward or backward half-way.
        """
        text, known = str(exception), _ADVICE_ON_LAYERS if self.splits_layers else _ADVICE
        advice = next((advice for part, advice in known.items() if part in text), None)
        if advice is None and collectives.lost_partner(exception):
            advice = _ALL_CALL
        if advice is not None:
            add_note(exception, f"strategy={self.name!r}:", fix=advice)
        for part in self._parts:
            state = ShardedPart(part)
            if state.is_root:
                state.begin_anew()

    def teardown(self) -> None:
        # Another run may continue with the same module.
        self._context_of_run.close()
        self.context = None
        self.layers.close()
        self.shards.close()
        self.engine.drop_all_held_gradients()
        self._parts = []
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Copies of this process make a mesh of their own.
        return {**super().__getstate__(), "_mesh": None, "_mesh_of_batches": None, "_mesh_of_experts": None}


# The meshes that this process has made. Another strategy with the same axes takes the same one: the groups of a mesh
# hold threads, connections and memory of the device until the program ends.
_meshes: dict[tuple[object, ...], DeviceMesh] = {}


def _mesh_over(device: str, dimensions: dict[str, int]) -> DeviceMesh:
    """Return the mesh of all processes with these dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    key = (dist.group.WORLD, device, *dimensions.items())
    if key not in _meshes:
        if not _meshes:
            collectives.before_leaving(_meshes.clear)
            atexit.register(_meshes.clear)
        _meshes[key] = init_device_mesh(device, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
        # Modules refer to the mesh, and the mesh to its groups: groups that outlive the program may abort it at its
        # end.
        atexit.register(torch_private.registered_groups(_meshes[key]).clear)
    return _meshes[key]


def _sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each dimension of a mesh, by name."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))


def _without(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return the part of a mesh that has its other dimensions."""
    others = tuple(name for name in mesh.mesh_dim_names or () if name not in names)
    return mesh if others == mesh.mesh_dim_names or not others else mesh[others]


def _is_about_other_things(record: logging.LogRecord) -> bool:
    """Return False for torch's advice to gather over both dimensions of the mesh at once, which it cannot itself."""
    return not record.getMessage().startswith("While redistributing from")
