"""DDP: every process holds the whole model and trains on its own part of the data."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten._lib import check, torch_private
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import parameters_of
from hasten.machine import agreement, collectives
from hasten.strategies.base import Sharding, StateIO, StepEngine
from hasten.strategies.optimizer_shard import OptimizerShard, shard_of
from hasten.strategies.parallel import TIMEOUT, ParallelStrategy

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.precision.base import Precision


class _Routed(nn.Module):
    """The user's module inside DDP, called through the present function.

    DDP prepares backward around the call of its inner module. A training step is another function than ``forward``,
    and calls ``forward`` itself, so this module stands between DDP and the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # In __dict__: nn.Module would register a module as a child.
        self.__dict__["function"] = module
        # DDP reads from its inner module which names to ignore; inside this one they have a prefix.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
        if ignored is not None:
            self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the present function."""
        return self.__dict__["function"](*args, **kwargs)


# How long the others have to reach the end of a backward that reached no further here.
_SAME_MOMENT_SECONDS = 5.0
_trains = operator.attrgetter("requires_grad")
_numbers = itertools.count()


class _Counter:
    count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@functools.cache
def _registrations() -> _Counter:
    """Return how often a module or parameter was registered in another module, in this process."""
    counter = _Counter()
    registration.register_module_module_registration_hook(counter)
    registration.register_module_parameter_registration_hook(counter)
    return counter


class _CurrentDDP:
    """The DDP that trains a module; it is replaced as soon as other parameters train.

    DDP exchanges the gradients of those parameters that trained when it was made. A callback may unfreeze others, or
    replace the head of a model.
    """

    def __init__(self, module: nn.Module, make: Callable[[], DistributedDataParallel]) -> None:
        self._module, self._make = module, make
        # Numbers of this object and of its present DDP, the same on all processes.
        self._number, self._made = next(_numbers), 0
        self._exchanged: list[nn.Parameter] = []
        self.ddp: DistributedDataParallel | None = None
        # Whether a step has asked for the DDP.
        self.called = False
        # A small parameter, which tells whether a backward reached the parameters at all.
        self.witness: nn.Parameter | None = None
        self._registrations = _registrations()
        self._count = 0
        self._flags: list[bool] = []
        self._parameters = list(module.parameters())
        self._renew()

    def current(self) -> DistributedDataParallel:
        """Return the DDP for the next step."""
        self.called = True
        if self._registrations.count != self._count:
            self._count = self._registrations.count
            self._parameters, self._flags = list(self._module.parameters()), []
        if list(map(_trains, self._parameters)) != self._flags:
            self._follow()
        assert self.ddp is not None
        return self.ddp

    def _follow(self) -> None:
        """Exchange the gradients of the parameters that train now."""
        assert self.ddp is not None
        training = [parameter for parameter in self._parameters if parameter.requires_grad]
        exchanged, now = set(map(id, self._exchanged)), set(map(id, training))
        # With find_unused_parameters, DDP accepts parameters that stopped training.
        if training and (now - exchanged or (exchanged - now and not self.ddp.find_unused_parameters)):
            self._agree(now)
            for parameter in self._exchanged:
                if id(parameter) not in now and parameter.grad is not None:
                    # Each process has added its own gradients to an open accumulation, and would step with them.
                    parameter.grad = collectives.all_reduce(parameter.grad, "mean", device=parameter.grad.device)
            self._renew()
        else:
            self._remember()

    @property
    def place(self) -> str:
        """Where processes agree on the present DDP."""
        return f"ddp/{self._number}/{self._made}"

    def _agree(self, chosen: set[int]) -> None:
        if collectives.world_size() == 1:
            return
        kind = type(self._module).__name__
        by_rank = agreement.require_all(
            self.place,
            f"Other parameters of {kind} train from now on (unfrozen, frozen or replaced)",
            [name for name, parameter in self._module.named_parameters() if id(parameter) in chosen],
            "Change them on all processes at the same batch.",
        )
        for rank, trained in enumerate(by_rank):
            if trained != by_rank[0]:
                different = sorted(set(trained) ^ set(by_rank[0])) or trained
                what = f"Rank 0 and rank {rank} train different parameters of {kind}: {', '.join(different[:5])}."
                raise make_error(RuntimeError, what, fix="Change requires_grad alike on all processes.")

    def exchanged_names(self) -> list[str]:
        """Return the names of the parameters whose gradients are exchanged, in the order of DDP."""
        return [name for name, _ in self._reduced()]

    def _reduced(self) -> list[tuple[str, nn.Parameter]]:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        named = [(names.get(id(each), ""), each) for each in self._exchanged]
        return [(name, each) for name, each in named if name not in ("", *ignored)]

    def end(self) -> None:
        """Stop the exchange of gradients, whatever still refers to the DDP."""
        if self.ddp is not None:
            torch_private.remove_ddp_hooks(self.ddp)
            # The two refer to each other, so neither would be freed before the garbage collector runs.
            self.ddp.__dict__.pop("live", None)

    def _renew(self) -> None:
        held: list[nn.Parameter] = []
        if self.ddp is not None:
            # Other objects may still refer to the old DDP, which must not exchange gradients any more.
            torch_private.remove_ddp_hooks(self.ddp)
            if self.ddp.find_unused_parameters:
                # Parameters that train in turns (a generator and its critic) are exchanged from their first turn on.
                own = set(map(id, self._parameters))
                held = [p for p in self._exchanged if id(p) in own and not p.requires_grad]
        for parameter in held:
            parameter.requires_grad = True
        self._exchanged = [parameter for parameter in self._parameters if parameter.requires_grad]
        self.witness = min((each for _, each in self._reduced()), key=nn.Parameter.numel, default=None)
        self.ddp = self._make()
        for parameter in held:
            parameter.requires_grad = False
        # Leads from an older DDP to this one.
        self.ddp.__dict__["live"] = self
        self._made += 1
        self._remember()

    def _remember(self) -> None:
        self._count = self._registrations.count
        self._flags = list(map(_trains, self._parameters))


def _current(wrapped: DistributedDataParallel) -> DistributedDataParallel:
    """Return the DDP that has replaced ``wrapped``, or ``wrapped``."""
    holder = wrapped.__dict__.get("live")
    return wrapped if holder is None else holder.ddp


class DDPStrategy(ParallelStrategy):
    """Every process holds the whole model; backward averages the gradients.

    Args:
        accelerator: this and the next four: see ``ParallelStrategy``.
        parallel_devices: see there.
        cluster_environment: see there.
        checkpoint_io: see there.
        precision_plugin: see there.
        ddp_comm_hook: a communication hook, for instance
            ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook``.
        ddp_comm_state: the state for the hook.
        ddp_comm_wrapper: wraps the hook.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: how long the others wait for a process within a step, 10 minutes by default; then the run ends, with
            a report of where each rank is. Checkpoints, ``prepare_data`` and barriers may take three times as long.
        start_method: "popen" runs the script again in each process, "spawn", "fork" and "forkserver" start
            copies of this one.
        shard_optimizer: divide the optimizers' states over the processes (ZeRO-1). Each process steps its part of the
            parameters and sends it to the others.
        kwargs: for ``torch.nn.parallel.DistributedDataParallel``, such as ``find_unused_parameters``.

    Raises:
        TypeError: torch's DDP has no such argument.

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020; Rajbhandari et
    al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.

    Example::

        >>> DDPStrategy(find_unused_parameters=True).name
        'ddp'
        >>> DDPStrategy(shard_optimizer=True).name
        'ddp_sharded'

    """

    engine: DDPEngine

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        check.declared(DDPStrategy.__init__, locals())
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method,
        )  # fmt: skip
        known = [*inspect.signature(DistributedDataParallel.__init__).parameters][2:]
        if unknown := next((name for name in kwargs if name not in known), None):
            raise make_error(
                TypeError,
                f"DDPStrategy({unknown}=...): unknown argument.",
                fix=f"{did_you_mean(unknown, known)} torch's DistributedDataParallel takes: {', '.join(known)}.",
                argument=unknown,
            )
        self._ddp_kwargs = kwargs
        self._comm_hook = ddp_comm_hook
        # Those of the run that this one resumes, and those with which a run has ended.
        self._first_buckets: list[list[int]] | None = None
        self._last_buckets: list[list[int]] | None = None
        self._comm_state = ddp_comm_state
        self._comm_wrapper = ddp_comm_wrapper
        self._current: dict[int, Callable[[], _CurrentDDP | None]] = {}
        check.instance("DDPStrategy", "shard_optimizer", shard_optimizer, bool, "True or False")
        self._shards_optimizers = shard_optimizer
        name = "ddp_sharded" if shard_optimizer else "ddp"
        self.name = name if start_method == "popen" else f"{name}_{start_method}"

    def _make_parts(self) -> tuple[Sharding, DDPEngine, DDPState]:
        return Sharding(self), DDPEngine(self), DDPState(self)

    def simulate_one_process(self) -> None:
        self._simulate_collectives()

    def exchange_with(self, hook: Callable[..., Any]) -> float | None:
        """Make DDP exchange gradients by ``hook`` alone, and nothing when it is made (``hasten plan``).

        Returns:
            the size of a bucket in MiB; None for torch's.

        Raises:
            ValueError: the user has given a hook.

        """
        if self._comm_hook is not None:
            what = "DDPStrategy(ddp_comm_hook=...): what it sends is not known before it runs."
            raise make_error(ValueError, what, fix="Plan without it.", argument="ddp_comm_hook")
        # These two read tensors, to find out which gradients to wait for.
        reads = ("find_unused_parameters", "static_graph")
        self._ddp_kwargs = {name: value for name, value in self._ddp_kwargs.items() if name not in reads}
        self._ddp_kwargs["init_sync"] = False
        self._comm_hook = hook
        cap: float | None = self._ddp_kwargs.get("bucket_cap_mb")
        return cap

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return ``module`` in DistributedDataParallel, or itself if it has nothing to train."""
        self.model = module
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        if self._shards_optimizers and getattr(module, "_ddp_params_and_buffers_to_ignore", None):
            what = (
                "strategy='ddp_sharded': the module has _ddp_params_and_buffers_to_ignore, parameters that each "
                "process trains alone, and here one process steps a parameter for all."
            )
            raise make_error(ValueError, what, fix="Use strategy='ddp'.", argument="strategy")
        kwargs = self._ddp_kwargs
        if _is_manual(module):
            # Each backward of manual optimization may reach other parameters (a GAN's generator, then its critic). DDP
            # learns a static graph from what forward returns, and would exchange nothing: backward runs within it.
            kwargs = {"find_unused_parameters": True, **kwargs, "static_graph": False}

        def make() -> DistributedDataParallel:
            # No device_ids: the batch is on the device already, and DDP need not walk it to move it again.
            buckets, self._first_buckets, self._last_buckets = self._first_buckets, None, None
            with nullcontext() if buckets is None else torch_private.with_gradient_buckets(buckets):
                wrapped = DistributedDataParallel(_Routed(module), **kwargs)
            if self._comm_hook is not None:
                hook = self._comm_hook if self._comm_wrapper is None else self._comm_wrapper(self._comm_hook)
                wrapped.register_comm_hook(self._comm_state, hook)
            self.model = wrapped
            return wrapped

        self._end(module)
        holder = _CurrentDDP(module, make)
        self._current[id(module)] = weakref.ref(holder)
        assert holder.ddp is not None
        return holder.ddp

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # An error of the program may be that of one process, and the others may be elsewhere. A signal stops them all.
        if isinstance(self.model, DistributedDataParallel) and isinstance(exception, Exception):
            self._last_buckets = torch_private.gradient_buckets(self.model, alone=True)
            self.model = self.model.module.module

    def teardown(self) -> None:
        model = self.model
        # For checkpoints that are saved after the run.
        self._last_buckets = self.state.gradient_buckets
        if model is not None:
            self._end(model.module.module if isinstance(model, DistributedDataParallel) else model)
        super().teardown()

    def _end(self, module: nn.Module) -> None:
        """Stop the exchange of an earlier DDP of ``module``."""
        holder = self._current.pop(id(module), lambda: None)()
        if holder is not None:
            holder.end()

    # -- optimizers

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Divide the state of an optimizer over the processes, if it is not divided already."""
        if self._shards_optimizers and self.world_size > 1 and not _consolidates(optimizer) and not shard_of(optimizer):
            OptimizerShard(
                optimizer,
                rank=self.global_rank,
                world_size=self.world_size,
                device=self._collective_device,
                exchanges=lambda: self.engine.exchanges,
            )

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(wrapped, DistributedDataParallel):
            # If nothing trains, nothing was wrapped.
            return nullcontext()
        ddp = _current(wrapped)
        if ddp.static_graph and "has_seen_graph" not in ddp.__dict__:
            # DDP learns a static graph in its first backward, and has to exchange in it. The mean over the processes is
            # the same when a part of it is exchanged twice.
            ddp.__dict__["has_seen_graph"] = True
            return nullcontext()
        return ddp.no_sync()


class DDPEngine(StepEngine):
    """Backward runs inside of DDP, which exchanges gradients while they are computed."""

    strategy: DDPStrategy
    syncs_gradients = True
    steps_in_backward = False

    def make_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` inside the forward of DDP, which prepares its backward."""
        if not isinstance(wrapped, DistributedDataParallel):
            return function
        inner = wrapped.module
        assert isinstance(inner, _Routed)
        holder: _CurrentDDP = wrapped.__dict__["live"]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                # DDP would exchange buffers, and wait for processes that have fewer batches.
                return function(*args, **kwargs)
            wrapped = holder.current()
            wrapped.module.__dict__["function"] = function
            try:
                return wrapped(*args, **kwargs)
            except RuntimeError as error:
                raise self._named(error, holder) from error.__cause__

        def manual_forward(*args: Any, **kwargs: Any) -> Any:
            wrapped = holder.current()

            def unprepared(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                finally:
                    # Each backward has been prepared and is over: DDP must not wait for another one.
                    wrapped.require_backward_grad_sync = False

            wrapped.module.__dict__["function"] = unprepared
            try:
                return wrapped(*args, **kwargs)
            finally:
                wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True

        return manual_forward if _is_manual(inner.module) else forward

    def check_first_step(self, optimizer: Optimizer) -> None:
        super().check_first_step(optimizer)
        trained = {id(each) for each in parameters_of(optimizer) if each.grad is not None}
        for holder in (each() for each in self.strategy._current.values()):
            if holder is not None and not holder.called and not trained.isdisjoint(map(id, holder._exchanged)):
                kind = type(holder._module).__name__
                rank_zero_warn(
                    f"The {kind} that was given to Fabric.setup() is called, and not the module that it returned: the "
                    "gradients stay on each process, which then train different weights.",
                    fix="Write model, optimizer = fabric.setup(model, optimizer), and call that model.",
                )

    def _named(self, error: RuntimeError, holder: _CurrentDDP) -> RuntimeError:
        """Return an error that names the parameters which a step has left without a gradient; others as they are."""
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if indices is None:
            return error
        exchanged = holder.exchanged_names()
        names = [exchanged[int(index)] for index in indices[1].split()]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        plain = not self.strategy._ddp_kwargs and self.strategy._comm_hook is None
        write = (
            f"strategy='{self.strategy.name}_find_unused_parameters_true'" if plain else "find_unused_parameters=True"
        )
        advice = f"If only some steps use them, write {write}. If none does, delete them, or freeze them with "
        advice += "requires_grad_(False)."
        if self.strategy._ddp_kwargs.get("find_unused_parameters"):
            advice = "What the step returns depends on them, and its loss does not: return only what the loss needs."
        return make_error(
            RuntimeError,
            f"strategy={self.strategy.name!r}: in the last step of rank {self.strategy.global_rank}, "
            f"{', '.join(names[:5])}{more} got no gradient, and the processes exchange the gradients of all parameters "
            "that train.",
            fix=advice,
        )

    def prepare_backward(self, loss: torch.Tensor, wrapped: nn.Module) -> None:
        """Make DDP exchange the gradients of the backward of ``loss``, which runs before its forward returns."""
        if not isinstance(wrapped, DistributedDataParallel):
            return
        wrapped = _current(wrapped)
        if wrapped.require_backward_grad_sync:
            wrapped.reducer.prepare_for_backward([loss] if wrapped.find_unused_parameters else [])

    def with_exchange(
        self, backward: Callable[[torch.Tensor], None], wrapped: nn.Module
    ) -> Callable[[torch.Tensor], None]:
        if not isinstance(wrapped, DistributedDataParallel):
            return backward
        holder: _CurrentDDP = wrapped.__dict__["live"]

        def exchanging_backward(loss: torch.Tensor) -> None:
            assert holder.ddp is not None
            witness = None if holder.ddp.find_unused_parameters or holder.ddp.static_graph else holder.witness
            before = None if witness is None else witness.grad
            version = None if before is None else before._version
            backward(loss)
            if witness is None or not holder.ddp.require_backward_grad_sync:
                self.missed_exchange = False
                return
            # Before any other exchange, which would meet the gradients of processes that wait.
            is_over, after = self._check_exchanged(holder), witness.grad
            missed = after is None or (after is before and after._version == version)
            self.missed_exchange = is_over and missed

        return exchanging_backward

    def _check_exchanged(self, holder: _CurrentDDP) -> bool:
        """Return whether no exchange is unfinished.

        Raises:
            RuntimeError: the backward of this process has left gradients for which others wait.

        """
        assert holder.ddp is not None
        try:
            torch_private.check_ddp_exchanged(holder.ddp)
        except RuntimeError as error:
            # If all have left the same ones, nobody waits now, but the next forward cannot begin.
            if not agreement.all_at(f"{holder.place}/unfinished", patience_seconds=_SAME_MOMENT_SECONDS):
                raise self._named(error, holder) from None
            return False
        return True

    def share_buffers(self, wrapped: nn.Module) -> None:
        if isinstance(wrapped, DistributedDataParallel) and _current(wrapped).broadcast_buffers:
            torch_private.share_ddp_buffers(_current(wrapped))


class DDPState(StateIO):
    """States of optimizers that are divided over the processes are whole in checkpoints."""

    strategy: DDPStrategy

    @property
    def gradient_buckets(self) -> list[list[int]] | None:
        """The order in which gradients are added up, on which the last digit of their sum depends."""
        model = self.strategy.model
        if not isinstance(model, DistributedDataParallel):
            return self.strategy._last_buckets
        return torch_private.gradient_buckets(model)

    @gradient_buckets.setter
    def gradient_buckets(self, stored: list[list[int]] | None) -> None:
        self.strategy._first_buckets = stored

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the whole optimizer; an empty dict in all processes but the first if it is divided."""
        if (shard := shard_of(optimizer)) is not None:
            return shard.collect()
        if not _consolidates(optimizer):
            return super().optimizer_state(optimizer)
        # torch's ZeroRedundancyOptimizer, made by the user.
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        return super().optimizer_state(optimizer) if self.strategy.is_global_zero else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if (shard := shard_of(optimizer)) is not None:
            shard.load(state)
        else:
            # A ZeroRedundancyOptimizer empties the entries of other processes.
            super().load_optimizer_state(optimizer, {**state, "state": dict(state.get("state", {}))})

    def snapshot_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that gives ``optimizer``, in this process, the state it has now."""
        shard = shard_of(optimizer)
        return super().snapshot_optimizer(optimizer) if shard is None else shard.keep()


def _consolidates(optimizer: Any) -> bool:
    """Return whether an optimizer is divided over the processes by itself."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


def _is_manual(module: nn.Module) -> bool:
    return getattr(module, "automatic_optimization", True) is False
