"""Strategy: how one model lives on the devices of a run, and its three parts.

The parts in this module belong to a strategy that adds nothing: parameters are whole, autograd and the optimizers of
torch compute, a checkpoint is one file. Loops, Fabric and callbacks call the parts without asking which ones they are.

The names of other parts say what a process holds of a parameter, and which part it is: ``DividedSharding`` and
``DividedState`` for a piece of any kind, ``DTensorSharding``, ``DTensorEngine`` and ``DTensorState`` for a ``DTensor``,
and ``ZeroSharding`` and ``ZeroState`` for a piece of DeepSpeed's.
"""

from __future__ import annotations

import functools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import check
from hasten._lib.device import is_host
from hasten._lib.errors import MisconfigurationException, add_note, make_error
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import by_kind, parameters_of, sharded_parameter
from hasten.checkpoint import contents
from hasten.checkpoint.contents import load_optimizer, load_weights
from hasten.checkpoint.files import DefaultCheckpointIO
from hasten.checkpoint.snapshots import snapshot_optimizer
from hasten.checkpoint.stored import StoredCheckpoint, StoredTensor
from hasten.optim import fast_step
from hasten.optim.backward import InBackward
from hasten.precision.base import Precision
from hasten.strategies.program import ProgramMethods

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.report.summary import LayerTable
    from hasten.strategies.recorded_steps import RecordedSteps
    from hasten.types import Group, MapLocation, PathLike, ReduceOperation, StorageOptions, Tensors

T = TypeVar("T")


class Strategy(ProgramMethods, ABC):
    """How one model lives on the devices of a run: where its processes are, and what they exchange.

    ``attach`` sets once where the run takes place, ``launch`` starts and joins the other processes, and ``wrap``
    returns the module that the loop calls. Three parts do the rest. This class changes nothing:

    - ``sharding``: where parameters are, and how their values get to and from checkpoints;
    - ``engine``: backward, clipping, the step of an optimizer, ``zero_grad``;
    - ``state``: weights and optimizers in checkpoints, and the files.

    A subclass makes others in ``_make_parts``.
    """

    # The name users write, for instance "ddp".
    name: str = ""
    # Runs the operations of a device that records them, once a step; None if operations run at once.
    steps: RecordedSteps | None = None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        check.declared(Strategy.__init__, locals())
        # Arguments that a program passes here and not to the Trainer or Fabric.
        self.given: dict[str, Any] = {
            name: value
            for name, value in {
                "accelerator": accelerator,
                "devices": parallel_devices,
                "cluster": cluster_environment,
                "checkpoint_io": checkpoint_io,
                "precision": precision_plugin,
            }.items()
            if value is not None
        }
        self.accelerator = accelerator
        self.cluster_environment = cluster_environment
        self.parallel_devices: list[torch.device] = parallel_devices or [torch.device("cpu")]
        self.num_nodes = 1
        self._checkpoint_io = checkpoint_io
        self._precision_plugin = precision_plugin
        self.sharding, self.engine, self.state = self._make_parts()

    def _make_parts(self) -> tuple[Sharding, StepEngine, StateIO]:
        return Sharding(self), StepEngine(self), StateIO(self)

    def __getstate__(self) -> dict[str, Any]:
        # The Runtime, which holds this strategy, sets these again.
        return {**self.__dict__, "_runtime": None}

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        """Set where the run takes place."""
        self.accelerator = accelerator
        self.parallel_devices = devices
        self.cluster_environment = cluster
        self.num_nodes = num_nodes

    # -- facts

    @property
    def copies_this_process(self) -> bool:
        """Whether other processes are forked from this one, which must not have used CUDA."""
        return False

    @property
    def launches_functions(self) -> bool:
        """Whether ``launch`` runs its function in copies of this process, so that there must be one."""
        return False

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices, rank = self.parallel_devices, self.local_rank
        if rank >= len(devices):
            what = f"This process has local rank {rank}; the devices of the run are for ranks 0 to {len(devices) - 1}."
            fix = "Look at LOCAL_RANK, RANK and WORLD_SIZE, which torchrun sets, or at the settings of the job."
            raise make_error(RuntimeError, what, fix=fix)
        return devices[rank]

    @property
    def global_rank(self) -> int:
        """Which process of the run this is, from 0."""
        return 0

    @property
    def local_rank(self) -> int:
        """Which process of its machine this is, from 0."""
        return 0

    @property
    def node_rank(self) -> int:
        """Which machine this is, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """``num_replicas`` and ``rank`` where each process reads its own part of the data, else None."""
        return None

    @property
    def data_parallel_size(self) -> int:
        """The number of processes, or groups of them, that read data of their own."""
        return self.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this process reads, from 0."""
        return self.global_rank

    @property
    def data_parallel_group(self) -> Group:
        """The process group over which losses and metrics are averaged; None for all processes."""
        return None

    # -- once

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        """Start the other processes if they do not run yet, and return what ``function`` returns here.

        Args:
            function: called in every process.
            args: for the function.
            owner: an object whose state after the call is needed in this process, even if the call ran in other
                processes. See ``machine.spawn``.
            kwargs: for the function.

        """
        self.setup_environment()
        return function(*args, **kwargs)

    def simulate_one_process(self) -> None:
        """Work in a process whose group does not exist: start none, and compare nothing with others (``hasten plan``).

        Raises:
            ValueError: the strategy cannot.

        """
        what = f"strategy={self.name!r} runs an engine of its own, which cannot be followed without data."
        fix = "Plan with strategy='fsdp2', 'ddp_sharded' or 'ddp', MeshStrategy or ModelParallelStrategy."
        raise make_error(ValueError, what, fix=fix, argument="strategy")

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Replace parameters of ``module`` by this process's shards; called before anything else touches them.

        Args:
            module: the user's module, changed in place.
            stored: names of weights that a checkpoint will provide: they need no initial values.

        """
        self.sharding.shard(module, stored)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module whose call trains over all processes."""
        self.model = module
        return module

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer of the run, in place; called before its first step, possibly several times."""

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients with other processes."""
        raise TypeError(f"{type(self).__name__} exchanges no gradients: there is nothing to hold back.")

    # -- files and number format

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = DefaultCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def precision_plugin(self) -> Precision:
        """The number format of the run."""
        if self._precision_plugin is None:
            self._precision_plugin = Precision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision: Precision) -> None:
        self._precision_plugin = precision
        if self._runtime is None:
            self.given["precision"] = precision

    def set_precision(self, precision: Precision) -> None:
        """Receive the number format that was chosen for the run.

        Raises:
            ValueError: the strategy cannot compute in it.

        """
        self._precision_plugin = precision

    def setup_environment(self) -> None:
        """Make this process's device the current one, and join the other processes; called in each process, first."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)

    def precision_of(self, name: str, device: str) -> Precision | None:
        """Return the precision for ``Trainer(precision=name)``, if this strategy has one of its own."""
        return None

    # -- the end

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the run, before ``on_exception`` of the callbacks."""

    def teardown(self) -> None:
        """Release what the strategy holds, when files that are still being written are complete."""
        self.model = self.lightning_module
        self.checkpoint_io.teardown()

    # -- between processes

    @abstractmethod
    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Reduce ``tensor`` over all processes, element by element and in place, and return it.

        Args:
            tensor: a tensor, or a collection of tensors, of the same shapes on every process.
            group: the processes; all by default.
            reduce_op: "mean", "sum", "max", "min" or "product".

        """

    @abstractmethod
    def all_gather(self, tensor: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension.

        Args:
            tensor: tensors of shape (...), the same on every process.
            group: the processes; all by default.
            sync_grads: let gradients flow back to the processes that the tensors came from.

        Returns:
            tensors of shape (world_size, ...); without a process group, ``tensor`` itself.

        """

    @abstractmethod
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of process ``src``, which can be anything that can be pickled."""

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""

    def gather_objects(self, obj: T) -> list[T]:
        """Return the objects of all processes."""
        return [obj]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes (or any) have decided for it."""
        return decision


class StrategyPart:
    """A part of a strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy


class Sharding(StrategyPart):
    """Where parameters are: whole in each process."""

    @property
    def shares_batches(self) -> bool:
        """Whether some processes must read the same batches, because layers are split over them."""
        return False

    def on_own_part(
        self, step: Callable[..., Any], *, trains: bool, weighing: Callable[[Tensor], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Return a step of the module that computes the part of its batch which belongs to this process.

        If it ``trains``, it returns a loss for backward. Logged means count by a weight in the context that
        ``weighing`` returns.
        """
        return step

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any] | None:
        """Return the context in which modules are made; None for the device of this process."""
        return None

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Replace parameters of ``module`` by this process's shards; see ``Strategy.shard``."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        if (name := sharded_parameter(module)) is not None:
            raise make_error(
                ValueError,
                f"strategy={self.strategy.name!r}: this process has a part of the parameter {name!r}, or none of it.",
                fix=(
                    "After a run with shards, save a checkpoint and load it into a new module; before one, pass the "
                    "module whole. strategy='fsdp' and MeshStrategy can continue with shards."
                ),
                argument="strategy",
            )

    def place(self, module: nn.Module) -> nn.Module:
        """Move ``module`` to the device, in place."""
        strategy = self.strategy
        device = strategy.root_device
        return module.to(device) if strategy.steps is None else strategy.steps.place(module, device)

    def check_devices(self, module: nn.Module, owner: str) -> None:
        """Check that ``place`` can move ``module``."""
        placed: dict[torch.device, str] = {}
        for name, parameter in module.named_parameters():
            placed.setdefault(parameter.device, name)
        if (empty := placed.get(torch.device("meta"))) is not None:
            what = f"{owner}: the parameter {empty!r} is on the meta device and has no values to move."
            fix = "Fill the module first: module.to_empty(device=fabric.device), then load its weights."
            raise make_error(ValueError, what, fix=fix)
        if len(placed) > 1:
            rank_zero_warn(
                f"{owner}: the module has parameters on {', '.join(map(str, placed))}, and all are moved to one "
                "device.",
                fix="Pass move_to_device=False to leave them where they are.",
            )

    def to_host(self, module: nn.Module) -> bool:
        """Move ``module`` to the host, in place, when a run is over; return whether it was on another device."""
        strategy = self.strategy
        if is_host(strategy.root_device):
            return False
        if strategy.steps is not None:
            strategy.steps.place(module, "cpu")
        module.cpu()
        return True

    def require_whole(self, owner: str, why: str, fix: str) -> None:
        """Raise if processes hold parts of parameters, with which ``owner`` cannot work."""

    def without_gradients(self) -> torch.inference_mode | torch.no_grad:
        """Return inference mode where this process computes alone, else ``torch.no_grad``."""
        # DDP's broadcast of buffers needs tensors that may change outside of it, and devices that record operations
        # may not make views in it.
        alone = self.strategy.world_size == 1 and self.strategy.steps is None
        return torch.inference_mode() if alone else torch.no_grad()

    def compile_units(self, whole: T, by_block: Callable[[], T]) -> T:
        """Return how a module is compiled: ``whole``, or ``by_block()`` if parameters are gathered inside of a step."""
        return whole

    def advice_on_optimizers(self) -> str:
        """Return a sentence for optimizers with parameters that the module does not have; empty without shards."""
        return ""

    def check_anomaly_mode(self) -> None:
        """Raise MisconfigurationException if torch's anomaly mode cannot watch a step."""

    def wrap_for_evaluation(self, module: nn.Module) -> nn.Module:
        """Return the module to call when nothing trains."""
        return module

    def layer_table(self, module: nn.Module) -> type[LayerTable] | None:
        """Return the table of layers that shows the parts of this process; None if it has whole layers."""
        return None

    def forward_order(self, module: nn.Module) -> tuple[str, ...]:
        """Return what a step exchanges with other processes, in order; an empty result if processes compute alone."""
        return ()

    def compute_along(self, module: nn.Module) -> None:
        """Take part in an evaluation step of other processes, without a batch."""

    def follow(self, rank: int, group: Group) -> None:
        """Have processes without a batch learn from ``rank``, in the next step, what it exchanges; all call it.

        ``group`` has all processes, and its messages go from host to host.
        """

    def reshard(self) -> None:
        """Free copies of the weights that forwards have left gathered; called when the weights have changed."""

    def begin_epoch(self) -> None:
        """Called before each pass over data, on all processes."""

    def check_batch(self, batch: object) -> None:
        """Raise RuntimeError if the first batch of a pass differs between processes that must read the same.

        All processes call it, with None if there is no batch.
        """

    def checked(self, batches: Iterator[T], batch_of: Callable[[T], object] | None = None) -> Iterator[T]:
        """Return ``batches``, with a check of the first batch if several processes must read the same.

        ``batch_of`` returns the batch of an item; the item itself by default.
        """
        return self._checked(batches, batch_of) if self.shares_batches else batches

    def _checked(self, batches: Iterator[T], batch_of: Callable[[T], object] | None) -> Iterator[T]:
        first: Any = next(batches, _END)
        self.check_batch(None if first is _END else first if batch_of is None else batch_of(first))
        if first is not _END:
            yield first
            yield from batches

    # -- values between a run and a checkpoint

    def to_checkpoint(self, value: object) -> Any:
        """Return a tensor in the form that a checkpoint holds; all processes call it."""
        return value

    def states_to_checkpoint(self, states: T) -> T:
        """Return a collection with its tensors in the form that a checkpoint holds; all processes call it."""
        return states

    def from_checkpoint(self, value: object, target: object) -> Any:
        """Return a tensor of a checkpoint, sharded like ``target``."""
        return value.full() if isinstance(value, StoredTensor) else value


_END: Any = object()
_BY_DEFAULT = {"norm_type": 2.0, "error_if_nonfinite": False}


class StepEngine(StrategyPart):
    """Computes a step: backward by torch's autograd, and the user's optimizers.

    ``set_precision`` chooses the functions once. Where nothing has to be added, they are torch's.
    """

    # Whether backward exchanges gradients, so that a loop that accumulates should enter ``no_sync``.
    syncs_gradients: bool = False
    # Whether the last backward reached no parameter, so that other processes still wait for this one.
    missed_exchange: bool = False
    # Whether an optimizer may step inside backward, before gradients are exchanged.
    steps_in_backward: bool = True
    # Whether a process computes alone until gradients are exchanged, so that it may retry after running out of memory.
    computes_alone: bool = True
    # Whether this computes backward, accumulates, clips and steps by itself, in place of autograd and optimizers.
    owns_step: bool = False
    # Whether there are gradients that no step has used yet, which no checkpoint can hold.
    holds_gradients: bool = False
    # Whether methods of a program step optimizers, with a closure that computes loss and gradients.
    steps_by_program: bool = False
    # Whether a program's strategy or precision computes gradients.
    backward_by_program: bool = False
    # Whether the precision of a program clips gradients.
    clips_by_program: bool = False

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.set_precision(Precision())

    def set_precision(self, precision: Precision) -> None:
        """Choose the functions of a step for a precision."""
        self.precision = precision
        self.scaler = precision.scaler
        # Ids of the optimizers that have been unscaled, and that have stepped, since the scale was adapted.
        self.unscaled: set[int] = set()
        self.stepped: set[int] = set()
        # Those that step by the scaler; made with the first, as it cannot be pickled for processes that are started.
        self._scaled: weakref.WeakSet[Optimizer] | None = None
        # Whether a scaled backward is running; Fabric refuses loss.backward() without scaling.
        self.in_backward = False
        # Compute gradients of a loss, which is scaled if the precision has a scaler.
        self.backward: Callable[..., None] = fast_step.backward if self.scaler is None else self._scaled_backward
        self.unscale: Callable[[Optimizer], None] | None = None if self.scaler is None else self._unscale

    # -- before the first step

    def prepare(self, *, owner: str, accumulation: int | None, clip_norm: float | None) -> None:
        """Receive the settings of ``owner`` ("Trainer" or "Fabric") for a step; None where there are none.

        The accumulation is a number of batches; gradients are clipped to the norm ``clip_norm``, 0 for not at all.

        Raises:
            ValueError: the configuration of an engine says otherwise.

        """

    def make(self, module: nn.Module, optimizers: list[Any], schedulers: list[Any]) -> tuple[list[Any], list[Any]]:
        """Make the engine of a module; return the optimizers and schedulers to train with."""
        return optimizers, schedulers

    def see_loaders(self, loaders: Sequence[Any]) -> None:
        """Receive the training loaders of a run, before its first batch."""

    def check_optimizer(self, optimizer: Optimizer, owner: str) -> None:
        """Raise ValueError if the strategy cannot train with an optimizer; ``owner`` is "Trainer" or "Fabric"."""

    def check_in_backward(self, owner: str, optimizer_name: str) -> None:
        """Raise unless an optimizer may step each parameter in backward; ``owner`` is "Trainer" or "Fabric"."""
        if self.scaler is not None:
            raise make_error(
                ValueError,
                f"in_backward({optimizer_name}) and {owner}(precision={self.precision.precision!r}): whether a scaled "
                "gradient is finite is known when backward is over.",
                fix="Use precision='bf16-mixed', which scales nothing.",
            )
        processes = self.strategy.world_size
        if processes > 1 and not self.steps_in_backward:
            raise make_error(
                ValueError,
                f"in_backward({optimizer_name}) and {processes} processes: each parameter would step before its "
                "gradients are averaged over them.",
                fix=f"Use one process, or torch.optim.{optimizer_name} as it is.",
            )

    def check_compile(self, owner: str, *, trains: bool) -> None:
        """Raise ValueError if steps cannot be compiled by torch."""

    def check_beside(self, conflicts: Callable[[], Iterable[tuple[object, str, str, str]]]) -> None:
        """Raise MisconfigurationException for what an engine that computes and steps by itself cannot do.

        ``conflicts`` returns (whether it is so, what is asked for, why not, what to write) of each.
        """

    def require_parameters(self, optimizer: Optimizer) -> None:
        """Raise MisconfigurationException if an optimizer has nothing to train."""
        if not parameters_of(optimizer):
            raise MisconfigurationException(f"The {type(optimizer).__name__} has no parameters to train.")

    def refuse_outside(self, problem: str, advice: str) -> None:
        """Raise where gradients are averaged over processes, and only those of the module."""
        if self.exchanges:
            raise MisconfigurationException(
                f"{problem}, so their gradients would not be averaged over the processes.", fix=advice
            )

    def require_alone(self, owner: str, advice: str) -> None:
        """Raise if processes wait for each other in a forward: one that runs out of memory would not reach it."""
        if not self.computes_alone:
            raise MisconfigurationException(
                f"{owner}: with strategy={self.strategy.name!r} the processes exchange parts of the model inside a "
                "forward, and one that runs out of memory would leave the others waiting.",
                fix=advice,
            )

    def require_own_parameters(self, owner: str, why: str, fix: str) -> None:
        """Raise if an engine steps copies of the parameters, with which ``owner`` cannot work."""
        if self.owns_step:
            raise MisconfigurationException(f"{owner} and strategy={self.strategy.name!r}: {why}", fix=fix)

    # -- forward

    def make_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` inside ``wrapped``, which prepares its backward."""
        return function

    def make_evaluation_forward(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls a step of an evaluation, which no backward follows."""
        return function

    def share_buffers(self, wrapped: nn.Module) -> None:
        """Give all processes the buffers of the first one, if they are kept equal."""

    # -- backward

    def backward_for(
        self, target: Optimizer | nn.Module | None, tensor: Tensor, *args: object, **kwargs: object
    ) -> None:
        """Compute gradients where a program calls ``Strategy.backward`` with an optimizer or module, ``target``."""
        self.backward(tensor, *args, **kwargs)

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the step to make where a program's ``optimizer_step`` calls that of ``Strategy``; None for its own."""
        return None

    def with_backward(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that computes gradients with ``function`` of the module in place of ``backward``."""
        return function

    def prepare_backward(self, loss: Tensor, wrapped: nn.Module) -> None:
        """Prepare a backward that runs inside the forward of ``wrapped``, as in manual optimization."""

    def with_exchange(self, backward: Callable[[Tensor], None], wrapped: nn.Module) -> Callable[[Tensor], None]:
        """Return ``backward``, which also finds out whether it has exchanged the gradients of ``wrapped``."""
        return backward

    def _scaled_backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.scaler is not None
        self.update_scale()
        self.in_backward = True
        try:
            fast_step.backward(self.scaler.scale(tensor), *args, **kwargs)
        finally:
            self.in_backward = False

    @property
    def needs_loss(self) -> bool:
        """Whether each batch must have a loss, because other processes or an engine wait for its backward."""
        return False

    # -- gradients

    def without_communication(self) -> AbstractContextManager[None]:
        """Have each process step alone within the context: one that fails leaves no other waiting."""
        return set_during(self, syncs_gradients=False)

    def wrap_late(self, module: nn.Module, wrapped: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return the module to call in training: ``wrap(module)`` if it was not wrapped yet.

        A module without parameters to train exchanges nothing; a callback may unfreeze some.
        """
        return wrap(module) if wrapped is module and self.exchanges else wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients."""
        return self.strategy.no_sync(wrapped) if self.exchanges else nullcontext()

    def sync_gradients(self, module: nn.Module) -> None:
        """Exchange gradients that ``no_sync`` holds back outside of the parameters; all processes call it."""

    @property
    def exchanges(self) -> bool:
        """Whether backward exchanges gradients with other processes now."""
        return self.syncs_gradients and self.strategy.world_size > 1

    def make_exchange(
        self, module: nn.Module, wrapped: nn.Module, zero_loss: Callable[[], Tensor]
    ) -> Callable[[], None]:
        """Return a function that exchanges the present gradients, as after a backward.

        ``wrapped`` is what ``Strategy.wrap`` returned; ``zero_loss`` returns a loss that adds nothing to the gradients.
        """
        return self._make_exchange(module, wrapped, zero_loss) if self.exchanges else nothing

    def _make_exchange(
        self, module: nn.Module, wrapped: nn.Module, zero_loss: Callable[[], Tensor]
    ) -> Callable[[], None]:
        forward = self.make_forward(zero_loss, wrapped)

        def exchange() -> None:
            forward().backward()

        return exchange

    def drop_held_gradients(self, optimizer: Optimizer) -> None:
        """Forget gradients of an optimizer's parameters that ``no_sync`` holds back; called with ``zero_grad``."""

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply the gradients with which ``optimizer`` steps next."""
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        for alike in by_kind(gradients):
            torch._foreach_mul_(alike, factor.to(alike[0]) if isinstance(factor, Tensor) else factor)

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Make ``optimizer`` take its next step without gradients."""
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    def _unscale(self, optimizer: Optimizer) -> None:
        # Once per step: a user who clips may unscale before the loop does.
        assert self.scaler is not None
        if id(optimizer) not in self.unscaled and _has_gradients(optimizer):
            self.unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before."""
        options: dict[str, Any] = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        # Without its defaults: programs assert what a replaced function of torch is called with.
        return nn.utils.clip_grad_norm_(parameters, max_norm, **{} if options == _BY_DEFAULT else options)

    def clip_value(self, parameters: Iterable[Tensor], clip_val: float) -> None:
        """Limit each element of the gradients to ``clip_val`` in size."""
        # torch raises if there are no gradients, for instance after batches that were all skipped.
        if parameters := [parameter for parameter in parameters if parameter.grad is not None]:
            nn.utils.clip_grad_value_(parameters, clip_value=clip_val)

    # -- step

    def make_clip(self, algorithm: str) -> Callable[..., Any] | None:
        """Return a function that clips gradients by "norm" or "value" before the step; None if the step clips.

        It is called as ``clip(parameters, max_value)``.
        """
        return self.clip_value if algorithm == "value" else self.clip_norm

    def check_first_step(self, optimizer: Optimizer) -> None:
        """Warn before the first step of an optimizer in Fabric if no backward has computed gradients for it."""
        if not isinstance(optimizer, InBackward) and all(each.grad is None for each in parameters_of(optimizer)):
            what = f"{type(optimizer).__name__}: the first step() found no gradients."
            fix = "Call fabric.backward(loss), then optimizer.step(), then optimizer.zero_grad()."
            rank_zero_warn(what, PossibleUserWarning, fix=fix)

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return ``step(closure=None)`` for ``optimizer``, whose own ``step`` also gets other arguments."""
        self.strategy.prepare_optimizer(optimizer)
        precision = self.precision
        if type(precision).convert_optimizer is not Precision.convert_optimizer:
            precision.convert_optimizer(optimizer)
        scaler = self.scaler
        if scaler is None:
            step = fast_step.make_step(optimizer)
            return self._with_mean_loss(step) if isinstance(optimizer, torch.optim.LBFGS) else step
        if isinstance(optimizer, torch.optim.LBFGS):
            raise make_error(
                ValueError,
                "precision='16-mixed' with LBFGS: it computes the loss several times a step, which a gradient scaler "
                "cannot follow.",
                fix="Use precision='bf16-mixed' or another optimizer.",
                argument="precision",
            )
        others = self._scaled = weakref.WeakSet() if self._scaled is None else self._scaled
        others.add(optimizer)
        stepped = self.stepped

        def scaled_step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = closure() if closure is not None else None
            # If all batches of a step were skipped, there is nothing to unscale.
            if not _has_gradients(optimizer):
                return result
            if id(optimizer) in stepped:
                self.update_scale()
            scaler.step(optimizer, **kwargs)
            stepped.add(id(optimizer))
            # Gradients of others may come from the same backward: they are unscaled with the same scale.
            if not any(_has_gradients(other) for other in others if other is not optimizer):
                self.update_scale()
            return result

        return scaled_step

    def _with_mean_loss(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step whose closure returns the mean loss of all processes, as its gradients are means.

        LBFGS decides by the loss how far to step and whether to evaluate again. All processes must decide alike.
        """

        def step_with_mean(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if closure is None:
                return step(**kwargs)

            @functools.wraps(closure)
            def with_mean() -> Any:
                loss = closure()
                return self.strategy.all_reduce(loss.detach().clone()) if isinstance(loss, Tensor) else loss

            return step(with_mean, **kwargs)

        return step_with_mean

    def update_scale(self) -> None:
        """Adapt the scale of a scaler to what was stepped, or unscaled and dropped, since the last backward."""
        if self.scaler is None:
            return
        waiting = (each for each in self._scaled or () if id(each) in self.unscaled)
        if self.stepped or (self.unscaled and not any(map(_has_gradients, waiting))):
            self.scaler.update()
            self.stepped.clear()
            self.unscaled.clear()

    def make_zero_grad(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return ``zero_grad()`` for ``optimizer``."""
        return fast_step.make_zero_grad(optimizer)

    def may_keep_gradients(self, optimizers: Iterable[Optimizer], *, cleared_by_user: bool) -> bool:
        """Return whether gradients may stay after a step, as those do which the user clears."""
        return cleared_by_user or not all(map(fast_step.clears_gradients, optimizers))


def nothing() -> None:
    """Exchange or compute nothing, where other processes do."""


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class StateIO(StrategyPart):
    """Weights and optimizers in checkpoints, and how checkpoints are written: one file, by the first process."""

    # Whether a checkpoint is a folder that all processes write, each its own shards, and not a file of the first one.
    saves_folders: bool = False

    # -- weights and optimizers

    @property
    def gradient_buckets(self) -> list[list[int]] | None:
        """The parameters in each message of gradients, where that changes in a run; a resumed run begins with these."""
        return None

    @gradient_buckets.setter
    def gradient_buckets(self, stored: list[list[int]] | None) -> None:
        pass

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of the user's module, under the names they have in it."""
        return module.state_dict()

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> None:
        """Restore the weights of the user's module; ``source`` names the file in messages."""
        load_weights(module, state, strict=strict, source=source)

    def load_module(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
        """Restore a module by its own ``load_state_dict`` where it can read ``state``; for Fabric."""
        try:
            module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            add_note(error, f"The weights are those in {source}.")
            raise

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore the state of an optimizer."""
        load_optimizer(optimizer, state)

    def snapshot_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that gives ``optimizer``, in this process, the state it has now."""
        return snapshot_optimizer(optimizer)

    # -- gradients of an accumulation that is not complete

    def collect_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> Any:
        """Return the gradients of all processes, once if they are the same on each; None if there are none."""
        strategy = self.strategy
        return contents.collect_gradients(module, optimizers, strategy.gather_objects, world_size=strategy.world_size)

    def restore_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer], stored: Any) -> None:
        """Give parameters the gradients that ``collect_gradients`` returned."""
        rank, world_size = self.strategy.global_rank, self.strategy.world_size
        contents.restore_gradients(module, optimizers, stored, rank=rank, world_size=world_size)

    # -- files

    def check_checkpoint_io(self) -> None:
        """Raise MisconfigurationException if the strategy saves folders and its ``checkpoint_io`` writes none."""
        io = self.strategy.checkpoint_io
        if self.saves_folders and not io.writes_folders:
            kind = type(io).__name__
            raise MisconfigurationException(
                f"plugins={kind}(): {type(self.strategy).__name__} saves sharded checkpoints, which are folders, and "
                f"{kind} writes files only.",
                fix="Leave it out, use AsyncCheckpointIO(), or have the strategy save whole files.",
                argument="plugins",
            )

    def write(self, path: PathLike, contents: dict[str, Any], storage_options: StorageOptions = None) -> None:
        """Write a checkpoint; all processes must call it, and fail together.

        When they return it is complete, unless ``checkpoint_io`` writes in the background.
        """
        strategy, io = self.strategy, self.strategy.checkpoint_io
        if self.saves_folders:
            io.save_folder(contents, path, storage_options=storage_options)
            return
        if strategy.steps is not None and strategy.is_global_zero:
            contents = strategy.steps.to_host(contents)
        if strategy.world_size == 1:
            io.save_checkpoint(contents, path, storage_options=storage_options)
            return
        error: Exception | None = None
        if strategy.is_global_zero:
            try:
                io.save_checkpoint(contents, path, storage_options=storage_options)
            except Exception as caught:
                error = caught
        # Report a failure to the others: they would wait for this process at the next collective.
        failed = strategy.broadcast(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failed is not None:
            # Contents that cannot be stored are a mistake of all processes alike.
            kind = TypeError if failed.startswith("TypeError") else RuntimeError
            raise kind(f"the first process could not write {os.fspath(path)}: {failed}")

    def read(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint; ``weights_only=False`` also reads Python objects: only for files you trust."""
        io = self.strategy.checkpoint_io
        checkpoint = io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return checkpoint.whole() if isinstance(checkpoint, StoredCheckpoint) else checkpoint
