"""Several processes, each with one device."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hasten import elsewhere
from hasten._lib import check, torch_private
from hasten._lib.errors import absent, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import rank_zero_only
from hasten.elsewhere import conventions
from hasten.extend.origin import comes_from
from hasten.machine import collectives, watchdog
from hasten.machine.cluster import LightningEnvironment, check_world_size, number_of_processes
from hasten.machine.launch import (
    Launcher,
    RunScriptAgain,
    children_that_left,
    command_of_this_program,
    joint_call,
    print_while_waiting,
)
from hasten.machine.rendezvous import Party
from hasten.machine.spawn import StartCopies
from hasten.seed import reset_seed
from hasten.strategies.base import Strategy

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.precision.base import Precision
    from hasten.runtime import Runtime
    from hasten.strategies.program import Trains
    from hasten.types import Group, ReduceOperation, Tensors

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
HALF_AN_HOUR = timedelta(minutes=30)
# Windows has no fork.
START_METHODS = ("popen", *multiprocessing.get_all_start_methods())
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# What to write in place of stages and schedules of torch.
PIPELINE_IN_FABRIC = (
    "A schedule runs forward and backward of all micro-batches itself. Use MeshStrategy(pipeline=2), or write the loop "
    "with Fabric, as examples/pipeline_parallel.py does"
)


def is_of_pipeline(value: object) -> bool:
    """Return whether ``value`` is a stage or a schedule of ``torch.distributed.pipelining``."""
    return any(comes_from(kind, "torch.distributed.pipelining") for kind in type(value).__mro__)


def _check_backend(owner: str, given: str) -> None:
    """Refuse names that are not a backend of ``torch.distributed``, also in "cpu:gloo,cuda:nccl"."""
    if not torch.distributed.is_available():
        return
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    for part in str(given).split(","):
        name = part.rpartition(":")[2].strip()
        if name.lower() not in known:
            raise check.wrong(
                owner,
                "process_group_backend",
                given,
                f"one of {', '.join(map(repr, known))}, or import the package that registers it first",
                hint=did_you_mean(name, known),
            )
        if name.lower() == "nccl" and not torch.distributed.is_nccl_available():
            what = f"{owner}(process_group_backend={given!r}): torch {torch.__version__} has no NCCL."
            fix = "Leave process_group_backend out, or use 'gloo'."
            raise make_error(ValueError, what, fix=fix, argument="process_group_backend")


class LayerSync(ABC):
    """Changes layers so that the processes of a run compute them together: ``Trainer(plugins=MyLayerSync())``.

    Without effect if one process trains alone.
    """

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Change the layers of ``model`` in place, and return it; called before ``fit`` makes optimizers.

        Args:
            model: the user's module.

        """

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Undo what ``apply`` changed, and return ``model``; called at the end of ``fit``.

        Args:
            model: the user's module.

        """


class TorchSyncBatchNorm(LayerSync):
    """Batch normalization with the statistics of the batches of all processes; ``Trainer(sync_batchnorm=True)``.

    Example::

        >>> model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        >>> sync = TorchSyncBatchNorm()
        >>> type(sync.apply(model)[1]).__name__
        'SyncBatchNorm'
        >>> type(sync.revert(model)[1]).__name__
        'BatchNorm1d'

    Source: https://pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html

    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with ``torch.nn.SyncBatchNorm`` in place of its batch normalizations.

        Override it to share statistics within some processes only.

        """
        kept = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch_private.BatchNorm)}
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.SyncBatchNorm) and layer is not kept.get(name):
                # Not as a submodule: it has the same parameters.
                layer.__dict__["replaced_layer"] = kept[name]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the layers that ``apply`` replaced, and the weights and statistics they have now.

        Other ``SyncBatchNorm`` layers become a batch normalization for inputs of any shape.

        """
        for parent in list(model.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.SyncBatchNorm):
                    parent._modules[name] = _alone(layer)
        return _alone(model) if isinstance(model, nn.SyncBatchNorm) else model


def _alone(layer: nn.SyncBatchNorm) -> nn.Module:
    original: nn.Module | None = layer.__dict__.get("replaced_layer")
    if original is None:
        original = _AnyBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    original._parameters, original._buffers = layer._parameters, layer._buffers
    original.training = layer.training
    return original


class _AnyBatchNorm(torch_private.BatchNorm):
    """Batch normalization for inputs of any shape (batch, features, ...)."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Do nothing: which shapes the original layer took is not known."""


class ParallelStrategy(Strategy):
    """The base of strategies with several processes: their ranks, how they start and how they communicate.

    Args:
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: how long the others wait for a process within a step, 10 minutes by default; then the run ends, with
            the place of each rank. Checkpoints, ``prepare_data`` and barriers may take three times as long.
        start_method: "popen" runs the script again in each process, "spawn", "fork" and "forkserver" start
            copies of this one.
        accelerator: in place of ``Trainer(accelerator=...)``.
        parallel_devices: in place of ``Trainer(devices=...)``.
        cluster_environment: in place of ``Trainer(plugins=...)``.
        checkpoint_io: the same.
        precision_plugin: in place of ``Trainer(precision=...)``.

    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
    ) -> None:
        check.declared(ParallelStrategy.__init__, locals())
        super().__init__(
            accelerator,
            checkpoint_io,
            precision_plugin,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
        )
        allowed = "a datetime.timedelta, such as timedelta(minutes=10)"
        check.instance(type(self).__name__, "timeout", timeout, timedelta, allowed, allow_none=True)
        if timeout is not None and timeout <= timedelta(0):
            raise check.wrong(type(self).__name__, "timeout", timeout, "a positive one, such as timedelta(minutes=10)")
        self._backend = process_group_backend
        if timeout is None:
            timeout = HALF_AN_HOUR if conventions.current().groups_wait_half_an_hour else TIMEOUT
        self._timeout = timeout
        check.one_of(type(self).__name__, "start_method", start_method, START_METHODS)
        self._launcher: Launcher = RunScriptAgain() if start_method == "popen" else StartCopies(start_method)
        self._global_rank = 0
        self._local_rank = 0
        # The store through which the processes find each other while they join.
        self._store: Any = None
        # Changes layers so that the processes compute them together.
        self.layer_sync: LayerSync | None = None

    @abstractmethod
    def wrap(self, module: torch.nn.Module) -> torch.nn.Module: ...

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        cluster.set_world_size(self.world_size)
        # Of the process that starts the others of its machine, too: it is not the first one on every machine.
        self._set_rank(cluster.local_rank())

    def _set_rank(self, local_rank: int) -> None:
        cluster = self.cluster_environment
        assert cluster is not None
        self._local_rank = local_rank
        cluster.set_global_rank(cluster.node_rank() * self.num_processes + local_rank)
        self._global_rank = cluster.global_rank()
        rank_zero_only.rank = self._global_rank

    # -- facts

    @property
    def copies_this_process(self) -> bool:
        return isinstance(self._launcher, StartCopies) and self._launcher.start_method == "fork"

    @property
    def launches_functions(self) -> bool:
        return isinstance(self._launcher, StartCopies)

    @property
    def global_rank(self) -> int:
        return self._global_rank

    @property
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def node_rank(self) -> int:
        return self.cluster_environment.node_rank() if self.cluster_environment is not None else 0

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def process_group_backend(self) -> str:
        """The backend of the process group."""
        return self._backend or _BACKENDS.get(self.parallel_devices[0].type, "gloo")

    # -- once

    def _simulate_collectives(self) -> None:
        """Start and join no other process, and assume that the others would say the same as this one."""
        own: Any = self
        own._in_process = lambda function, args, kwargs, *_: function(*args, **kwargs)
        own.broadcast = lambda obj, src=0: obj
        own.barrier = lambda name=None: None
        own.gather_objects = lambda obj: [obj] * self.world_size
        own.reduce_boolean_decision = lambda decision, all=True: decision

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        cluster = self.cluster_environment
        assert cluster is not None
        if cluster.creates_processes_externally:
            check_world_size(type(cluster).__name__, number_of_processes(cluster), self.num_processes, self.num_nodes)
        if collectives.joined() and collectives.world_size() == 1 < self.world_size:
            # Left over from a run of one process.
            collectives.leave()
        if collectives.joined():
            # The processes run already: an earlier call of this program started them.
            return self._in_process(function, args, kwargs, cluster.local_rank(), None)
        run = partial(self._in_process, function, args, kwargs)
        return self._launcher.launch(run, cluster, self.num_processes, owner)

    def _in_process(
        self,
        function: Callable[..., T],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        local_rank: int | None,
        store: Any,
    ) -> T:
        if local_rank is not None:
            self._set_rank(local_rank)
        with set_during(self, _store=store):
            self.setup_environment()
        watchdog.start(rank=self.global_rank, world_size=self.world_size, timeout=self._timeout)
        with joint_call(), collectives.naming_who_ended():
            return function(*args, **kwargs)

    def join_run(self, runtime: Runtime | None = None, trainer: Trains | None = None) -> None:
        super().join_run(runtime, trainer)
        if trainer is not None:
            # The processes may have drawn different numbers so far, and setup() may split a dataset at random.
            reset_seed()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._backend is not None and not collectives.joined():
            # Not earlier: a program may import the package that registers the backend until now.
            _check_backend(type(self).__name__, self._backend)
        store = self._store
        with self._notice(store):
            collectives.join(
                Party(
                    self.global_rank,
                    self.world_size,
                    # A short timeout is meant for steps: processes may need longer to start on a busy machine.
                    max(self._timeout, TIMEOUT),
                    per_machine=self.num_processes,
                    started_by_hasten=store is not None and self.num_nodes == 1,
                    left=children_that_left,
                ),
                backend=self.process_group_backend,
                device=self.root_device,
                # The watchdog acts first, and reports more.
                timeout=watchdog.LONG_FACTOR * self._timeout + timedelta(minutes=1),
                store=store,
            )

    def _notice(self, store: Any) -> AbstractContextManager[Any]:
        """Return a context that prints which other machines this one waits for."""
        # torchrun has brought its processes together before they start.
        if self.num_nodes == 1 or store is not None or collectives.joined() or "TORCHELASTIC_RUN_ID" in os.environ:
            return nullcontext()
        command = None
        if isinstance(self.cluster_environment, LightningEnvironment):
            with suppress(RuntimeError):  # a session, which has no command
                command = command_of_this_program()
        return print_while_waiting(
            command, node_rank=self.node_rank, num_nodes=self.num_nodes, local_rank=self.local_rank
        )

    # -- between processes

    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        return collectives.all_reduce(tensor, reduce_op, device=self._collective_device, group=group)

    def all_gather(self, tensor: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        device = self._collective_device
        return collectives.all_gather(tensor, device=device, group=group, sync_grads=sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        with joint_call():
            return collectives.broadcast(obj, src, device=self._collective_device)

    def barrier(self, name: str | None = None) -> None:
        with joint_call():
            collectives.barrier(self._collective_device)

    def gather_objects(self, obj: T) -> list[T]:
        with joint_call():
            return collectives.gather_objects(obj)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        flag = torch.tensor(int(decision))
        # A sync point.
        return bool(self.all_reduce(flag, reduce_op="min" if all else "max").item())

    @property
    def _collective_device(self) -> torch.device:
        """The device on which the backend exchanges tensors."""
        return self.root_device if "nccl" in self.process_group_backend else torch.device("cpu")


DataParallelStrategy = absent(
    "DataParallelStrategy",
    ParallelStrategy,
    home="hasten.strategies",
    instead=elsewhere.STRATEGIES["dp"].message(),
    why="is not in hasten",
)
