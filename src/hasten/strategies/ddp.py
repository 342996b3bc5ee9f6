"""DDP: every process holds the whole model and trains on its own part of the data."""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.nn.parallel import DistributedDataParallel

from hasten._lib.names import did_you_mean
from hasten.machine import agreement, collectives
from hasten.strategies.parallel import ParallelStrategy


class _Routed(nn.Module):
    """The user's module inside DDP, called through the present function.

    DDP prepares backward around the call of its inner module. A training step is another function than
    ``forward``, and calls ``forward`` itself, so the inner module is this one, and the user's stays untouched.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Past nn.Module's own bookkeeping: it would take a module for a part of this one.
        self.__dict__["function"] = module
        # DDP asks its inner module which names to leave alone; inside this one they have a prefix.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
        if ignored is not None:
            self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the present function."""
        return self.__dict__["function"](*args, **kwargs)


_trains = operator.attrgetter("requires_grad")


class _Registrations:
    """Counts how often a module or parameter was registered in another module, in this process."""

    def __init__(self) -> None:
        self.count = 0
        self._watches = False

    def watch(self) -> None:
        """Begin to count, once a process."""
        if not self._watches:
            self._watches = True
            registration.register_module_module_registration_hook(self._note)
            registration.register_module_parameter_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


_registrations = _Registrations()


_numbers = itertools.count()


class _CurrentDDP:
    """The DDP that trains a module; it is replaced as soon as other parameters train.

    DDP exchanges the gradients of those parameters that trained when it was made. A callback may unfreeze others, or
    put a new head in the place of the old one.

    Args:
        module: the user's.
        make: makes a DDP of it.

    """

    def __init__(self, module: nn.Module, make: Callable[[], DistributedDataParallel]) -> None:
        self._module, self._make = module, make
        # Which of them in this program, and which DDP of it: the same on all processes.
        self._number, self._made = next(_numbers), 0
        self._exchanged: list[nn.Parameter] = []
        self.ddp: DistributedDataParallel | None = None
        _registrations.watch()
        self._parameters = list(module.parameters())
        self._known: list[nn.Parameter] = []
        self._flags: list[bool] = []
        self._count = 0
        self._renew()

    def current(self) -> DistributedDataParallel:
        """Return the DDP for the step to come."""
        if _registrations.count != self._count:
            self._count = _registrations.count
            self._parameters = list(self._module.parameters())
        if self._parameters is not self._known or list(map(_trains, self._parameters)) != self._flags:
            self._follow()
        assert self.ddp is not None
        return self.ddp

    def _follow(self) -> None:
        """Exchange the parameters that train now."""
        assert self.ddp is not None
        training = [parameter for parameter in self._parameters if parameter.requires_grad]
        exchanged, now = set(map(id, self._exchanged)), set(map(id, training))
        # Those that DDP looks for in vain are no harm where it expects that some are not used.
        if training and (now - exchanged or (exchanged - now and not self.ddp.find_unused_parameters)):
            self._agree(training)
            for parameter in self._exchanged:
                if id(parameter) not in now and parameter.grad is not None:
                    # An accumulation that is open has added to it on each process alone, and steps with it.
                    parameter.grad = collectives.all_reduce(
                        parameter.grad, "mean", device=parameter.grad.device
                    )
            self._renew()
        else:
            self._remember()

    def _agree(self, training: list[nn.Parameter]) -> None:
        if collectives.world_size() == 1:
            return
        chosen = set(map(id, training))
        names = [name for name, parameter in self._module.named_parameters() if id(parameter) in chosen]
        by_rank = agreement.require_all(
            f"ddp/{self._number}/{self._made}",
            f"Other parameters of {type(self._module).__name__} train from now on (unfrozen, frozen or replaced)",
            names,
            "Change them on all processes at the same batch.",
        )
        for rank, trained in enumerate(by_rank):
            if trained != by_rank[0]:
                different = sorted(set(trained) ^ set(by_rank[0])) or trained
                raise RuntimeError(
                    f"Rank 0 and rank {rank} train different parameters of {type(self._module).__name__}: "
                    f"{', '.join(different[:5])}. Change requires_grad alike on all processes."
                )

    def is_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the one that is trained."""
        return self._module is module

    def end(self) -> None:
        """Exchange nothing any more, whoever still holds on to the DDP."""
        if self.ddp is not None:
            self.ddp._remove_autograd_hooks()
            # The two know each other: neither would go before the garbage collector comes.
            self.ddp.__dict__.pop("live", None)

    def _renew(self) -> None:
        if self.ddp is not None:
            # Somebody may hold on to the old one, and it must not exchange gradients any more.
            self.ddp._remove_autograd_hooks()
        held: list[nn.Parameter] = []
        if self.ddp is not None and self.ddp.find_unused_parameters:
            # Those that train in turns, such as a generator and its critic, are exchanged from their first turn on.
            own = set(map(id, self._parameters))
            held = [p for p in self._exchanged if id(p) in own and not p.requires_grad]
        for parameter in held:
            parameter.requires_grad = True
        self._exchanged = [parameter for parameter in self._parameters if parameter.requires_grad]
        self.ddp = self._make()
        for parameter in held:
            parameter.requires_grad = False
        # Whoever has an older one finds this one there.
        self.ddp.__dict__["live"] = self
        self._made += 1
        self._remember()

    def _remember(self) -> None:
        self._count = _registrations.count
        self._known = self._parameters
        self._flags = list(map(_trains, self._parameters))


def _current(wrapped: DistributedDataParallel) -> DistributedDataParallel:
    """Return the DDP that has taken the place of ``wrapped``, or ``wrapped``."""
    holder = wrapped.__dict__.get("live")
    return wrapped if holder is None else holder.ddp


@final
class DDPStrategy(ParallelStrategy):
    """Every process holds the whole model; backward averages the gradients.

    Args:
        ddp_comm_hook: a communication hook, for instance
            ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook``.
        ddp_comm_state: the state for the hook.
        ddp_comm_wrapper: wraps the hook.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: how long a collective waits for the other processes.
        start_method: "popen" runs the script again in each process, "spawn", "fork" and "forkserver" start
            copies of this one.
        kwargs: for ``torch.nn.parallel.DistributedDataParallel``, such as ``find_unused_parameters``.

    Raises:
        TypeError: torch's DDP has no such argument.

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020.

    Example::

        >>> DDPStrategy(find_unused_parameters=True).name
        'ddp'

    """

    syncs_gradients = True
    steps_in_backward = False

    def __init__(
        self,
        *,
        ddp_comm_state: Any = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        known = [*inspect.signature(DistributedDataParallel.__init__).parameters][2:]
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"DDPStrategy({name}=...): there is no such argument.{did_you_mean(name, known)} "
                    f"torch's DistributedDataParallel takes: {', '.join(known)}."
                )
        self._ddp_kwargs = kwargs
        self._comm_hook = ddp_comm_hook
        self._comm_state = ddp_comm_state
        self._comm_wrapper = ddp_comm_wrapper
        self._current: dict[int, Callable[[], _CurrentDDP | None]] = {}
        self.name = "ddp" if start_method == "popen" else f"ddp_{start_method}"

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return ``module`` in DistributedDataParallel, or itself if it has nothing to train."""
        self.model = module
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        kwargs = self._ddp_kwargs
        if _is_manual(module) and not kwargs.get("static_graph"):
            # Each backward of manual optimisation may reach other parameters (a GAN's generator, then its critic).
            kwargs = {"find_unused_parameters": True, **kwargs}

        def make() -> DistributedDataParallel:
            # No device_ids: the batch is on the device already, and DDP need not walk it to move it again.
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

    def teardown(self) -> None:
        """Let go of the module; nothing is exchanged any more."""
        if self.model is not None:
            self._end(
                self.model.module.module if isinstance(self.model, DistributedDataParallel) else self.model
            )
        super().teardown()

    def _end(self, module: nn.Module) -> None:
        """Have an earlier DDP of ``module`` exchange nothing any more."""
        holder = self._current.pop(id(module), lambda: None)()
        if holder is not None and holder.is_of(module):
            holder.end()

    def route(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` inside the forward of DDP, which prepares its backward."""
        if not isinstance(wrapped, DistributedDataParallel):
            return function
        inner = wrapped.module
        assert isinstance(inner, _Routed)
        holder: _CurrentDDP = wrapped.__dict__["live"]

        def routed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                # Nothing to prepare. DDP would exchange buffers, and wait for processes that have fewer batches.
                return function(*args, **kwargs)
            wrapped = holder.current()
            wrapped.module.__dict__["function"] = function
            return wrapped(*args, **kwargs)

        def routed_manual(*args: Any, **kwargs: Any) -> Any:
            wrapped = holder.current()

            def unprepared(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                finally:
                    # Each backward prepared itself and is over: DDP must not wait for another one.
                    wrapped.require_backward_grad_sync = False

            wrapped.module.__dict__["function"] = unprepared
            try:
                return wrapped(*args, **kwargs)
            finally:
                wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True

        return routed_manual if _is_manual(inner.module) else routed

    def prepare_backward(self, loss: torch.Tensor, wrapped: nn.Module) -> None:
        """Make DDP exchange the gradients of the backward of ``loss``, which runs before its forward returns."""
        if not isinstance(wrapped, DistributedDataParallel):
            return
        wrapped = _current(wrapped)
        if wrapped.require_backward_grad_sync:
            searches = wrapped.find_unused_parameters and not wrapped.static_graph
            wrapped.reducer.prepare_for_backward([loss] if searches else [])

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves the gradients of this process alone."""
        if not isinstance(wrapped, DistributedDataParallel):
            raise TypeError(
                f"no_backward_sync got a {type(wrapped).__name__}: pass the module that setup() returned."
            )
        return _current(wrapped).no_sync()


def _is_manual(module: nn.Module) -> bool:
    return getattr(module, "automatic_optimization", True) is False
