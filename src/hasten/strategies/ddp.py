"""DDP: every process holds the whole model and trains on its own part of the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten._lib.names import did_you_mean
from hasten.strategies.parallel import ParallelStrategy


class _Routed(nn.Module):
    """The user's module inside DDP, called through the function that is due.

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
        """Call the function that is due."""
        return self.__dict__["function"](*args, **kwargs)


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
        # No device_ids: the batch is on the device already, and DDP need not walk it to move it again.
        wrapped = DistributedDataParallel(_Routed(module), **kwargs)
        if self._comm_hook is not None:
            hook = self._comm_hook if self._comm_wrapper is None else self._comm_wrapper(self._comm_hook)
            wrapped.register_comm_hook(self._comm_state, hook)
        self.model = wrapped
        return wrapped

    def route(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return ``function`` such that DDP sees its call."""
        if not isinstance(wrapped, DistributedDataParallel):
            return function
        inner = wrapped.module
        assert isinstance(inner, _Routed)
        target = inner.__dict__

        def routed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                # Nothing to prepare. DDP would exchange buffers, and wait for processes that have fewer batches.
                return function(*args, **kwargs)
            target["function"] = function
            return wrapped(*args, **kwargs)

        def routed_manual(*args: Any, **kwargs: Any) -> Any:
            def unprepared(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                finally:
                    # Each backward prepared itself and is over: DDP must not wait for another one.
                    wrapped.require_backward_grad_sync = False

            target["function"] = unprepared
            try:
                return wrapped(*args, **kwargs)
            finally:
                wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True

        return routed_manual if _is_manual(inner.module) else routed

    def prepare_backward(self, loss: torch.Tensor, wrapped: nn.Module) -> None:
        """Make DDP exchange the gradients of the backward of ``loss``, which runs before its forward returns."""
        if isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync:
            searches = wrapped.find_unused_parameters and not wrapped.static_graph
            wrapped.reducer.prepare_for_backward([loss] if searches else [])

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves the gradients of this process alone."""
        if not isinstance(wrapped, DistributedDataParallel):
            raise TypeError(
                f"no_backward_sync got a {type(wrapped).__name__}: pass the module that setup() returned."
            )
        return wrapped.no_sync()


def _is_manual(module: nn.Module) -> bool:
    return getattr(module, "automatic_optimization", True) is False
