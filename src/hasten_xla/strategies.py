"""Training on XLA devices, above all TPUs: on one, with a process for each, or sharded over all of a machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from hasten._lib import check
from hasten._lib.device import as_device
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import warn_once
from hasten.machine import collectives
from hasten.precision.base import Precision
from hasten.strategies.base import Sharding, StateIO, StepEngine
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.single import OneProcess
from hasten_xla.devices import runtime_kind, runtime_started
from hasten_xla.steps import XLASteps, upload

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults

T = TypeVar("T")


class SingleDeviceXLAStrategy(OneProcess):
    """One process that computes on one XLA device.

    Args:
        device: the index of the device on this machine, or ``torch.device("xla", index)``; by default the device in
            ``devices``.
        accelerator: in place of ``Trainer(accelerator=...)``.
        checkpoint_io: in place of ``Trainer(plugins=...)``.
        precision: in place of ``Trainer(precision=...)``.

    Raises:
        TypeError: an argument belongs to the Trainer or Fabric.

    Example::

        >>> SingleDeviceXLAStrategy().name
        'single_xla'

    Source: `PyTorch/XLA, PyTorch on XLA devices
    <https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html>`_.

    """

    name = "single_xla"

    def __init__(
        self,
        device: int | str | torch.device | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        check.declared(SingleDeviceXLAStrategy.__init__, locals())
        super().__init__(accelerator, checkpoint_io, precision)
        given = torch.device("xla", device) if isinstance(device, int) and 0 <= device < 128 else device
        self._device = as_device("SingleDeviceXLAStrategy", given)
        self.steps = XLASteps()

    def _make_parts(self) -> tuple[Sharding, StepEngine, StateIO]:
        return Sharding(self), XLAEngine(self), StateIO(self)

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        if runtime_kind() == "TPU" and not runtime_started():
            self.parallel_devices = [_take_chip(self.root_device)]
        return super().launch(function, *args, owner=owner, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Give Adam its first states before the first step, which is compiled together with them otherwise."""
        make_states(optimizer)


class XLAStrategy(ParallelStrategy):
    """A process for each XLA device, each with the whole model; backward averages the gradients.

    On TPUs gradients are averaged by XLA, over the chips' own links. Everything else that processes exchange (logged
    values, metrics, decisions) goes over gloo between the hosts. With ``PJRT_DEVICE=CPU``, where XLA connects no
    processes, gradients go over gloo, too: slow, and meant for trying a program out.

    On a pod, start the script once on each host and pass ``num_nodes``; addresses come from the TPU's metadata.

    Args:
        accelerator: in place of ``Trainer(accelerator=...)``.
        parallel_devices: in place of ``Trainer(devices=...)``.
        checkpoint_io: in place of ``Trainer(plugins=...)``.
        precision: in place of ``Trainer(precision=...)``.
        sync_module_states: give all processes the first one's weights and buffers before training.
        start_method: "popen" runs the script again in each process, "spawn", "fork" and "forkserver" start
            copies of this one; no XLA device may be in use before.
        timeout: how long the processes wait for each other.

    Raises:
        TypeError: an argument belongs to the Trainer or Fabric.

    Example::

        >>> XLAStrategy(sync_module_states=False).name
        'xla'

    Source: `PyTorch/XLA, PyTorch on XLA devices
    <https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html>`_.

    """

    name = "xla"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        sync_module_states: bool = True,
        *,
        start_method: str = "popen",
        timeout: timedelta | None = timedelta(minutes=10),
    ) -> None:
        check.declared(XLAStrategy.__init__, locals())
        super().__init__(
            accelerator, parallel_devices, None, checkpoint_io, precision,
            process_group_backend="gloo", timeout=timeout, start_method=start_method,
        )  # fmt: skip
        self.sync_module_states = sync_module_states
        self.steps = XLASteps()
        self._exchanges: dict[int, _Exchange] = {}
        self._joined = False

    def _make_parts(self) -> tuple[Sharding, StepEngine, StateIO]:
        return Sharding(self), AveragingEngine(self), StateIO(self)

    @property
    def root_device(self) -> torch.device:
        """The only XLA device that this process sees."""
        return torch.device("xla", 0)

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
        if not self._joined:
            self._join_devices()
        return super()._in_process(function, args, kwargs, None, store)

    def _join_devices(self) -> None:
        """Start XLA in this process, with one device of its own."""
        if runtime_kind() == "CPU":
            os.environ["CPU_NUM_DEVICES"] = "1"
        from torch_xla import runtime
        from torch_xla._internal import pjrt

        if not runtime_started():
            pjrt.initialize_multiprocess(self.local_rank, self.num_processes)
        count = runtime.addressable_device_count()
        if count != 1:
            reason = (
                "XLA was in use before the processes were started"
                if runtime_kind() == "CPU"
                else "a TPU of this version has several for each chip"
            )
            what = f"strategy='xla': this process has {count} XLA devices instead of one: {reason}."
            fix = "Use strategy='xla_fsdp', which trains on all of them in one process."
            raise make_error(RuntimeError, what, fix=fix, argument="strategy")
        self._joined = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exchanges": {}, "_joined": False}

    # -- training

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return ``module``; from now on its backward averages gradients."""
        self.model = module
        if self.engine.exchanges:
            if id(module) not in self._exchanges:
                self._exchanges[id(module)] = _Exchange(module, self._average)
                if self.sync_module_states:
                    self._send_weights(module)
            self._exchanges[id(module)].watch()
        return module

    def _send_weights(self, module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = self.broadcast(tensor.detach().cpu()).to(tensor.device)

    def _average(self, gradients: list[Tensor]) -> None:
        from torch_xla.core import xla_model

        if runtime_kind() == "CPU":
            # A sync point: gloo takes tensors of the host.
            for gradient in gradients:
                gradient.copy_(collectives.all_reduce(gradient.cpu(), "mean", device=torch.device("cpu")))
            return
        xla_model.all_reduce(xla_model.REDUCE_SUM, gradients, scale=1.0 / self.world_size)

    @contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        """Do not average gradients in backward; the next backward outside of the context averages their sum."""
        exchange = self._exchanges.get(id(wrapped))
        if exchange is None:
            yield
            return
        with set_during(exchange, is_held=True):
            yield

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Give Adam its first states before the first step, which is compiled together with them otherwise."""
        make_states(optimizer)

    def teardown(self) -> None:
        for exchange in self._exchanges.values():
            exchange.end()
        self._exchanges.clear()
        super().teardown()


class XLAEngine(StepEngine):
    """Autograd and optimizers record a step, which XLA compiles."""

    def check_compile(self, owner: str, *, trains: bool) -> None:
        """Refuse torch's compiler."""
        what = f"{owner}(compile=...): XLA compiles each step itself."
        raise make_error(ValueError, what, fix="Leave compile out.", argument="compile")


class AveragingEngine(XLAEngine):
    """Gradients are averaged at the end of each backward."""

    syncs_gradients = True
    steps_in_backward = False


class _Exchange:
    """Averages the gradients of a module over the processes, at the end of each backward that reaches it."""

    def __init__(self, module: nn.Module, average: Callable[[list[Tensor]], None]) -> None:
        self._module, self._average = module, average
        self._watched: dict[int, tuple[nn.Parameter, Any]] = {}
        self._reached: set[int] = set()
        self._backward = -1
        self.is_held = False

    def watch(self) -> None:
        """Notice the gradients of all parameters the module has now."""
        for parameter in self._module.parameters():
            if id(parameter) not in self._watched:
                frozen = not parameter.requires_grad
                # torch takes hooks for parameters that train; this one may begin to, in the middle of an epoch.
                if frozen:
                    parameter.requires_grad_(True)
                hook = parameter.register_post_accumulate_grad_hook(self._reach)
                if frozen:
                    parameter.requires_grad_(False)
                self._watched[id(parameter)] = parameter, hook

    def _reach(self, parameter: Tensor) -> None:
        if self.is_held:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            # One that an exception has ended never came to its end.
            self._backward, self._reached = backward, set()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reached.add(id(parameter))

    def _finish(self) -> None:
        reached, self._reached, self._backward = self._reached, set(), -1
        gradients = [
            parameter.grad
            for parameter in self._module.parameters()
            # One that came into the module since ``watch`` counts as reached.
            if parameter.grad is not None and (id(parameter) in reached or id(parameter) not in self._watched)
        ]
        self._average(gradients)

    def end(self) -> None:
        for _, hook in self._watched.values():
            hook.remove()
        self._watched.clear()


class XLAFSDPStrategy(OneProcess):
    """Parameters, gradients and optimizer states are sharded over the XLA devices of one machine, by one process.

    It uses SPMD, as in the newer of torch_xla's two FSDP:
    the program is written for one device, and XLA divides each operation. ``batch_size`` of a loader counts the samples
    of all devices together. Parameters keep their names and shapes, and checkpoints are whole files.

    Args:
        accelerator: in place of ``Trainer(accelerator=...)``.
        parallel_devices: in place of ``Trainer(devices=...)``.
        checkpoint_io: in place of ``Trainer(plugins=...)``.
        precision: in place of ``Trainer(precision=...)``.
        auto_wrap_policy: leave it out: XLA decides itself when it gathers a parameter.
        activation_checkpointing_policy: classes of modules to recompute in backward.
        state_dict_type: "full": checkpoints are one file.
        sequential_save: leave it out: one process saves.
        kwargs: none; arguments of torch_xla's FSDP are refused.

    Raises:
        TypeError: an argument is unknown or does not apply.
        ValueError: ``state_dict_type`` has another value.

    Example::

        >>> XLAFSDPStrategy().name
        'xla_fsdp'

    Source: `PyTorch/XLA, FSDP using SPMD <https://docs.pytorch.org/xla/release/r2.9/perf/fsdp_spmd.html>`_; Xu et al.,
    GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021.

    """

    name = "xla_fsdp"
    takes_all_devices = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        auto_wrap_policy: None = None,
        activation_checkpointing_policy: type[nn.Module] | Collection[type[nn.Module]] | None = None,
        state_dict_type: Literal["full"] = "full",
        sequential_save: bool = False,
        **kwargs: Any,
    ) -> None:
        check.declared(XLAFSDPStrategy.__init__, locals())
        known = ["auto_wrap_policy", "activation_checkpointing_policy", "state_dict_type", "sequential_save"]
        for name in kwargs:
            what = f"XLAFSDPStrategy({name}=...): XLA shards and gathers by itself, and takes no such argument."
            raise make_error(TypeError, what, fix=f"Leave it out.{did_you_mean(name, known)}", argument=name)
        if auto_wrap_policy is not None:
            raise make_error(
                TypeError,
                "XLAFSDPStrategy(auto_wrap_policy=...): nothing is wrapped: XLA decides when it gathers a parameter.",
                fix="Leave it out.",
                argument="auto_wrap_policy",
            )
        if not (isinstance(state_dict_type, str) and state_dict_type == "full"):
            raise make_error(
                ValueError,
                f"XLAFSDPStrategy(state_dict_type={check.shown(state_dict_type)}): one process saves whole files.",
                fix="Use 'full'.",
                argument="state_dict_type",
            )
        if sequential_save:
            what = "XLAFSDPStrategy(sequential_save=True): one process saves."
            raise make_error(TypeError, what, fix="Leave it out.", argument="sequential_save")
        super().__init__(accelerator, checkpoint_io, precision, parallel_devices=parallel_devices)
        self._recomputed = _classes(activation_checkpointing_policy)
        self.mesh: Any = None
        self._optimizers: list[Optimizer] = []
        self._steps = _ShardedSteps(self)
        self.steps = self._steps
        self._patched: list[nn.Module] = []

    def _make_parts(self) -> tuple[Sharding, StepEngine, StateIO]:
        return Sharding(self), XLAEngine(self), StateIO(self)

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        if num_nodes > 1:
            what = f"strategy='xla_fsdp', num_nodes={num_nodes}: it shards over the devices of one machine."
            fix = "Use num_nodes=1, or strategy='xla' over several."
            raise MisconfigurationException(what, fix=fix, argument="strategy")
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)

    @property
    def root_device(self) -> torch.device:
        """The device that stands for all of them."""
        return torch.device("xla", 0)

    @property
    def num_processes(self) -> int:
        return 1

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        wanted = len(self.parallel_devices)
        if runtime_kind() == "CPU" and not runtime_started():
            os.environ["CPU_NUM_DEVICES"] = str(wanted)
        import numpy
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        if not runtime.is_spmd():
            runtime.use_spmd()
        present = runtime.global_runtime_device_count()
        if present != wanted:
            what = (
                f"strategy='xla_fsdp', devices={wanted}: this process has {present} XLA devices and shards over all "
                "of them."
            )
            raise make_error(ValueError, what, fix=f"Use devices={present} or 'auto'.", argument="strategy")
        self.mesh = spmd.Mesh(numpy.arange(present), (present, 1), ("fsdp", "model"))
        return super().launch(function, *args, owner=owner, **kwargs)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard the parameters of ``module``, which is on the device, and return it."""
        self.model = module
        for parameter in module.parameters():
            self._divide(parameter)
        if self._recomputed:
            for part in module.modules():
                if isinstance(part, self._recomputed) and "forward" not in vars(part):
                    from torch_xla.utils.checkpoint import checkpoint

                    part.forward = partial(checkpoint, part.forward)
                    self._patched.append(part)
        return module

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Shard the states of an optimizer, also those it makes or loads later."""
        make_states(optimizer)
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        self._steps.begins = True

    def _divide_states(self) -> None:
        """Shard the states that optimizers have now as the parameters they belong to."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.device.type == "xla":
                        self._divide(value)

    def _divide(self, tensor: Tensor) -> None:
        """Shard a tensor along its first dimension that the devices divide; leave others whole on each."""
        import torch_xla
        from torch_xla.distributed import spmd

        devices = len(self.parallel_devices)
        if devices == 1 or torch_xla._XLAC._get_xla_sharding_spec(tensor):
            return
        dim = next((dim for dim, size in enumerate(tensor.shape) if size % devices == 0), None)
        if dim is not None:
            spmd.mark_sharding(tensor, self.mesh, tuple("fsdp" if i == dim else None for i in range(tensor.dim())))

    def teardown(self) -> None:
        for part in self._patched:
            part.__dict__.pop("forward", None)
        self._patched.clear()
        self._optimizers.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mesh": None}


class _ShardedSteps(XLASteps):
    """Steps whose batches are divided over the devices of a mesh."""

    def __init__(self, strategy: XLAFSDPStrategy) -> None:
        super().__init__()
        self._strategy = strategy
        # Whether optimizers may have states that are not sharded yet: made or loaded since the last step.
        self.begins = True

    def end_step(self, stage: str, batch: object = None, is_last: bool = False) -> None:
        if self.begins and stage == "train":
            self.begins = False
            self._strategy._divide_states()
        super().end_step(stage, batch, is_last)

    def _send(self, tensors: list[Tensor], device: torch.device, send: Callable[..., Any]) -> list[Tensor]:
        from torch_xla.distributed import spmd

        strategy, sent = self._strategy, []
        count = len(strategy.parallel_devices)
        for tensor in tensors:
            divides = tensor.dim() > 0 and tensor.shape[0] % count == 0
            if tensor.dim() > 0 and not divides:
                warn_once(
                    "xla-fsdp-batch",
                    f"strategy='xla_fsdp': a batch of {tensor.shape[0]} cannot be divided over {count} devices, so "
                    "each computes all of it.",
                    fix=f"Use a batch_size that is a multiple of {count} and drop_last=True.",
                )
            spec = spmd.ShardingSpec(strategy.mesh, ("fsdp", *[None] * (tensor.dim() - 1))) if divides else None
            sent += send([tensor], device, spec)
        return sent


# -- what they share


def make_states(optimizer: Optimizer) -> None:
    """Give torch's Adam and AdamW the states that their first step begins with.

    The graph of a step that makes states differs from the other graphs, and would be compiled separately.
    """
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            on_xla = parameter.device.type == "xla" and parameter.dtype in (torch.float32, torch.float64)
            if not on_xla or not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            # Copied from the host: zeros made on the device would be part of the first graph.
            zeros = {
                name: upload(torch.zeros(parameter.shape, dtype=parameter.dtype), parameter.device) for name in names
            }
            optimizer.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32), **zeros}


def _take_chip(device: torch.device) -> torch.device:
    """Make only one chip of a TPU visible to this process, so that others can use the rest; return its device."""
    if "TPU_VISIBLE_CHIPS" in os.environ:
        return device
    from torch_xla._internal import tpu

    os.environ["TPU_VISIBLE_CHIPS"] = str(device.index or 0)
    tpu.configure_one_chip_topology()
    return torch.device("xla", 0)


def _classes(policy: object) -> tuple[type[nn.Module], ...]:
    given: Any = () if policy is None else (policy,) if isinstance(policy, type) else policy
    is_listed = isinstance(given, Collection) and not isinstance(given, (str, bytes))
    if not is_listed or not all(isinstance(k, type) and issubclass(k, nn.Module) for k in given):
        what = f"XLAFSDPStrategy(activation_checkpointing_policy={check.shown(policy)}):"
        fix = "use a set of module classes, such as {torch.nn.TransformerEncoderLayer}."
        raise make_error(TypeError, what, fix=fix, argument="activation_checkpointing_policy")
    return tuple(given)
