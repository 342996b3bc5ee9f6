"""Strategy: how one model lives on the devices of a run."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hasten._lib.tree import is_sharded, move_to
from hasten.checkpoint.contents import load_optimizer, load_weights
from hasten.checkpoint.files import TorchCheckpointIO
from hasten.checkpoint.stored import StoredTensor
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from typing import Protocol

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.runtime import Runtime
    from hasten.types import Group, PathLike, ReduceOperation, Tensors
    from hasten.xla.steps import XLASteps

    class Trains(Protocol):
        """Whoever has the optimizers and schedulers of a run: a Trainer."""

        optimizers: list[Any]

        @property
        def lightning_module(self) -> Any:
            """The module."""

        @property
        def lr_scheduler_configs(self) -> list[Any]:
            """The schedulers and when they step."""


T = TypeVar("T")


class Strategy(ABC):
    """How one model lives on the devices of a run.

    ``attach`` sets once where the run takes place, ``launch`` starts and joins the other processes, and ``wrap``
    returns the module that the loop calls.
    """

    # The name users write, for instance "ddp".
    name: str = ""
    # Whether backward exchanges gradients, so that a loop that accumulates should enter ``no_sync``.
    syncs_gradients: bool = False
    # Whether an optimizer may step inside backward, before gradients are exchanged.
    steps_in_backward: bool = True
    # Whether a process computes alone until gradients are exchanged: after running out of memory it may begin again.
    computes_alone: bool = True
    # Whether ``shard`` replaces parameters by parts of them, which compute in a forward of the whole module only.
    shards_parameters: bool = False
    # Whether an engine of the strategy computes backward, accumulates, clips and steps.
    owns_step: bool = False
    # Whether some processes must read the same batches: those over which layers are split.
    shares_batches: bool = False
    # Whether a checkpoint is a folder that all processes write, each its own shards, and not a file of the first one.
    saves_folders: bool = False
    # What runs the operations of a device that records them, once a step; None where they run at once.
    steps: XLASteps | None = None
    # The Trainer that runs with this strategy.
    _trainer: Trains | None = None
    # A module that a program has given it outside of a run.
    connected: Any = None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        # What a program gives here and not to the Trainer or Fabric.
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
        # Set by a Runtime, with which the methods of a step compute.
        self.engine: Runtime | None = None
        self._checkpoint_io = checkpoint_io
        self._precision_plugin = precision_plugin
        # The module as the last ``wrap`` returned it.
        self.model: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The Runtime, which holds this strategy, sets itself again.
        return {**self.__dict__, "engine": None}

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
        """Whether other processes are copies of this one as it is, which must not have used CUDA."""
        return False

    @property
    def launches_functions(self) -> bool:
        """Whether ``launch`` runs its function in copies of this process, so that there must be one."""
        return False

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.parallel_devices[self.local_rank]

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

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the Trainer's run; a list that is assigned counts from the next batch on."""
        return [] if self._trainer is None else self._trainer.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._with_trainer("optimizers").optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of the Trainer's run; a list that is assigned counts from the next batch on."""
        return [] if self._trainer is None else self._trainer.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._with_trainer("lr_scheduler_configs").lr_scheduler_configs[:] = configs

    @property
    def lightning_module(self) -> Any:
        """The module of the Trainer's run; None with Fabric."""
        if self.connected is not None:
            return self.connected
        return None if self._trainer is None else self._trainer.lightning_module

    def connect(self, model: Any) -> None:
        """Have ``Trainer.save_checkpoint`` save a module that takes part in no run yet.

        Args:
            model: the module; None for that of the run, as when a run begins.

        """
        self.connected = model

    def _with_trainer(self, name: str) -> Trains:
        if self._trainer is None:
            raise AttributeError(f"{type(self).__name__}.{name} = ...: only during a Trainer's fit.")
        return self._trainer

    # -- once

    @abstractmethod
    def launch(self, function: Callable[..., T], *args: object, owner: object = None, **kwargs: object) -> T:
        """Start the other processes if they do not run yet, and return what ``function`` returns here.

        Args:
            function: called in every process.
            args: for the function.
            owner: an object whose state after the call is wanted in this process, also where the call ran in
                other processes. See ``machine.spawn``.
            kwargs: for the function.

        """

    def stay_alone(self) -> None:
        """Work in a process whose group does not exist: start none, and compare nothing with others (``hasten plan``).

        Raises:
            ValueError: the strategy cannot.

        """
        raise ValueError(
            f"strategy={self.name!r} runs an engine of its own, which cannot be followed without data. Plan with "
            "strategy='fsdp2', 'ddp_sharded' or 'ddp', or ModelParallelStrategy."
        )

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any] | None:
        """Return the context in which modules are made; None for the device of this process."""
        return None

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Replace parameters of ``module`` by this process's shards; called before anything else touches them.

        Args:
            module: the user's module, changed in place.
            stored: names of weights that a checkpoint is going to bring: they need no initial values.

        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        divided = next((name for name, parameter in module.named_parameters() if is_sharded(parameter)), None)
        if divided is not None:
            raise ValueError(
                f"strategy={self.name!r}: the parameter {divided!r} is a DTensor, of which this process has a part. "
                "After a run with shards, save a checkpoint and load it into a new module; before one, pass the module "
                "whole. strategy='fsdp' and ModelParallelStrategy go on with shards."
            )

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module whose call trains over all processes."""
        self.model = module
        return module

    def route(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` inside ``wrapped``, which prepares its backward."""
        return function

    def route_evaluation(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls a step of an evaluation, which no backward follows."""
        return function

    def forward_order(self, module: nn.Module) -> tuple[str, ...]:
        """Return what a step exchanges with other processes, in its order; nothing where processes compute alone."""
        return ()

    def refuses_join(self) -> str:
        """Return why a process without a batch cannot make the steps of the others; "" if it can."""
        return f"strategy={self.name!r} exchanges more than gradients in a step, and only DDP knows how to go without"

    def step_without_batch(  # noqa: B027 - most refuse it
        self, wrapped: nn.Module, touch: Callable[[list[torch.Tensor]], torch.Tensor], *, exchanges: bool
    ) -> None:
        """Take part in forward and backward of other processes, without a batch.

        Args:
            wrapped: as ``wrap`` returned it.
            touch: returns a loss whose backward reaches tensors and adds nothing to their gradients.
            exchanges: whether the others exchange gradients after this batch.

        """

    def share_buffers(self, wrapped: nn.Module, source: int) -> None:  # noqa: B027 - most refuse it
        """Give all processes the buffers of process ``source``, if they are kept equal."""

    def compute_along(self, module: nn.Module) -> None:  # noqa: B027 - most compute alone
        """Take part in a step of an evaluation on other processes, without a batch."""

    def reshard(self) -> None:  # noqa: B027 - most keep nothing
        """Free copies of the weights that forwards have left gathered; called when the weights have changed."""

    def prepare_backward(self, loss: torch.Tensor, wrapped: nn.Module) -> None:  # noqa: B027 - most need none
        """Prepare a backward that runs inside the forward of ``wrapped``, as in manual optimization."""

    def take_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - most change none
        """Prepare an optimizer of the run, in place; called before its first step, possibly several times."""

    # -- what a program may override; where it does, the loops call it

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = TorchCheckpointIO()
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
        if self.engine is None:
            self.given["precision"] = precision

    def use_precision(self, precision: Precision) -> None:
        """Take the number format that was chosen for the run."""
        self._precision_plugin = precision

    @property
    def precision(self) -> Precision:
        """The number format of the run; ``precision_plugin`` under the name that it has in Fabric."""
        return self.precision_plugin

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.precision_plugin = precision

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a Trainer calls ``setup`` before it reads a checkpoint to resume from."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether a Trainer restores optimizers and schedulers when it resumes."""
        return True

    def setup_environment(self) -> None:
        """Make this process's device the current one, and join the other processes; called in each process, first."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: object) -> None:  # noqa: B027 - most need nothing
        """Called by a Trainer when the module is on the device, before the first hook of a fit."""

    def backward(self, closure_loss: torch.Tensor, optimizer: object = None, *args: object, **kwargs: object) -> object:
        """Compute the gradients of a loss.

        Args:
            closure_loss: the loss.
            optimizer: a Trainer gives the optimizer, None with manual optimization; Fabric gives the module.
            args: for ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.

        """
        if self.engine is not None:
            self.engine.backward_by_precision(closure_loss, optimizer, *args, **kwargs)
            return closure_loss
        precision: Any = self.precision_plugin
        precision.pre_backward(closure_loss, optimizer)
        precision.backward(closure_loss, optimizer, *args, **kwargs)
        precision.post_backward(closure_loss, optimizer)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Step an optimizer.

        Args:
            optimizer: the optimizer.
            closure: what computes loss and gradients and clips them, if that is still to be done.
            model: the module; a Trainer's module by default.
            kwargs: for ``optimizer.step``.

        """
        if self.engine is not None:
            return self.engine.step_by_precision(optimizer, closure, model, **kwargs)
        if closure is not None:
            kwargs["closure"] = closure
        return self.precision_plugin.optimizer_step(optimizer, **kwargs)  # type: ignore[arg-type]

    def batch_to_device(self, batch: T, device: torch.device | None = None, dataloader_idx: int = 0) -> T:
        """Return a batch with its tensors on ``device``, by default that of this process."""
        moved: T = move_to(batch, self.root_device if device is None else device)
        return moved

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Call ``training_step`` of the Trainer's module."""
        return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: object, **kwargs: object) -> object:
        """Call ``validation_step`` of the Trainer's module."""
        return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> object:
        """Call ``test_step`` of the Trainer's module."""
        return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> object:
        """Call ``predict_step`` of the Trainer's module."""
        return self.lightning_module.predict_step(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: object = None) -> None:
        """Write a checkpoint; all processes call it.

        Args:
            checkpoint: its contents.
            filepath: the file, or the folder where ``saves_folders``.
            storage_options: for ``checkpoint_io``.

        """
        if self.engine is not None:
            self.engine.write(filepath, checkpoint, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint.

        Args:
            checkpoint_path: the file or folder.
            weights_only: False also reads Python objects, which can run code: only for files you trust.

        """
        if self.engine is not None:
            return self.engine.read(checkpoint_path, weights_only=weights_only)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Delete a checkpoint, from the first process."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the Trainer's module, as a checkpoint holds them."""
        return self.state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the weights of the Trainer's module.

        Args:
            checkpoint: a checkpoint of a Trainer.
            strict: raise for missing and unexpected names.

        """
        self.load_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict, source="the checkpoint")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers of the Trainer's run from a checkpoint of a Trainer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.load_optimizer_state(optimizer, state)

    # -- an engine, where ``owns_step``

    @property
    def holds_gradients(self) -> bool:
        """Whether the engine has gradients that no step has used yet, which no checkpoint can hold."""
        return False

    def prepare_engine(  # noqa: B027 - most have none
        self, *, owner: str, accumulation: int | None, clip_norm: float | None
    ) -> None:
        """Take what ``owner`` ("Trainer" or "Fabric") says about a step; None where it says nothing.

        Args:
            owner: for the messages.
            accumulation: the number of batches of an accumulation.
            clip_norm: the norm to which gradients are clipped, 0 for not at all.

        Raises:
            ValueError: the configuration of the engine says otherwise.

        """

    def make_engine(
        self, module: nn.Module, optimizers: list[Any], schedulers: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Make the engine of a module; return the optimizers and schedulers to train with."""
        return optimizers, schedulers

    def take_batch_size(self, size: int | None) -> None:  # noqa: B027 - most need none
        """Take the number of samples of a batch on a process; None where it is not known."""

    def own_backward(self) -> Callable[..., None] | None:
        """Return what computes gradients in place of ``Tensor.backward``; None for that."""
        return None

    def own_step(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return ``step(closure=None)`` of the engine; None for that of the optimizer."""
        return None

    def scale_gradients(self, factor: float | torch.Tensor) -> None:  # noqa: B027 - gradients are those of the parameters
        """Multiply the gradients with which the engine steps next."""

    def apart(self) -> AbstractContextManager[Any]:
        """Return a context in which each process trains alone: one that fails leaves no other waiting."""
        return nullcontext()

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves the gradients of this process alone."""
        raise TypeError(f"{type(self).__name__} exchanges no gradients: there is nothing to hold back.")

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before."""
        return nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def sync_gradients(self, module: nn.Module) -> None:  # noqa: B027 - most hold nothing back
        """Exchange gradients that ``no_sync`` holds back outside of the parameters; all processes call it."""

    def drop_held_gradients(self, optimizer: Optimizer) -> None:  # noqa: B027 - most hold nothing back
        """Forget gradients of an optimizer's parameters that ``no_sync`` holds back; called with ``zero_grad``."""

    def precision_of(self, name: str, device: str) -> Precision | None:
        """Return the precision for ``Trainer(precision=name)``, if this strategy has one of its own."""
        return None

    def take_precision(self, precision: Precision) -> None:  # noqa: B027 - most convert nothing themselves
        """Set the precision of the run; raise ValueError if the strategy cannot compute in it."""

    def check_optimizer(self, optimizer: Optimizer, owner: str) -> None:  # noqa: B027 - most train with all
        """Raise ValueError if the strategy cannot train with an optimizer; ``owner`` is "Trainer" or "Fabric"."""

    def begin_epoch(self) -> None:  # noqa: B027 - most read different data in each process
        """Called before each pass over data, on all processes."""

    def check_batch(self, batch: object) -> None:  # noqa: B027 - most read different data in each process
        """Raise RuntimeError if the first batch of a pass differs from those of processes that must read the same.

        All processes call it, with None where there is no batch.
        """

    # -- state

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of the user's module, under the names they have in it."""
        return module.state_dict()

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> None:
        """Restore the weights of the user's module; ``source`` names the file in messages."""
        load_weights(module, state, strict=strict, source=source)

    def stored(self, value: object) -> Any:
        """Return a tensor as a checkpoint holds it; all processes call it."""
        return value

    def restored(self, value: object, target: object) -> Any:
        """Return a tensor of a checkpoint as ``target`` is divided."""
        return value.full() if isinstance(value, StoredTensor) else value

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore the state of an optimizer."""
        load_optimizer(optimizer, state)

    def keep_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that gives ``optimizer``, in this process, the state it has now."""
        kept = copy.deepcopy(optimizer.state_dict())
        return lambda: optimizer.load_state_dict(copy.deepcopy(kept))

    # -- the end

    def on_exception(self, exception: BaseException) -> None:  # noqa: B027 - most do nothing
        """Called when an exception ends the run, before ``on_exception`` of the callbacks."""

    def teardown(self) -> None:
        """Give back what the strategy holds."""
        self.model = None

    # -- between processes

    @abstractmethod
    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Return ``tensor`` reduced over all processes, element by element.

        Args:
            tensor: a tensor, or a collection of tensors, of the same shapes on every process.
            group: the processes; all by default.
            reduce_op: "mean", "sum", "max", "min" or "product".

        Returns:
            new tensors of the same shapes.

        """

    def reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Same as ``all_reduce``."""
        return self.all_reduce(tensor, group=group, reduce_op=reduce_op)

    @abstractmethod
    def all_gather(self, tensor: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension.

        Args:
            tensor: tensors of shape (...), the same on every process.
            group: the processes; all by default.
            sync_grads: let gradients flow back to the processes that the tensors came from.

        Returns:
            tensors of shape (world_size, ...); with one process, ``tensor`` itself.

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
        """Return whether all processes (or any) decided so."""
        return decision
