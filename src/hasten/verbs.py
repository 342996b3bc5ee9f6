"""Step, zero_grad and backward without the wrappers torch puts around them, where those do nothing.

``optimizer.step`` is wrapped in a profiler span, look-ups of step hooks and a guard of the grad mode, and
``zero_grad`` and ``backward`` in similar ones; for small models they cost more than the arithmetic. The verbs
here do the same arithmetic, bit for bit, and fall back to torch's own call whenever a wrapper would do
something: step hooks, an active profiler, an overridden method. That is asked each time, without a
Python-level call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

Step = Callable[..., Any]

_profiler_enabled: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
_pre_hooks: dict[int, Any] | None = getattr(torch_optimizer, "_global_optimizer_pre_hooks", None)
_post_hooks: dict[int, Any] | None = getattr(torch_optimizer, "_global_optimizer_post_hooks", None)
_set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
_engine = getattr(getattr(torch.autograd, "Variable", None), "_execution_engine", None)
_run_backward: Callable[..., Any] | None = getattr(_engine, "run_backward", None)
# Accelerators run backward in threads of their own, which torch hands the context of the caller.
_run_backward_in_threads: Callable[..., Any] = getattr(
    torch.autograd.graph, "_engine_run_backward", None
) or (
    _run_backward  # type: ignore[assignment]
)
# Where torch does not say that no function mode is on, one may be.
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
# The guard of the grad mode around every optimizer's step, recognised by its code.
_guard: Callable[..., Any] | None = getattr(torch_optimizer, "_use_grad_for_differentiable", None)
_guard_code = None if _guard is None else getattr(_guard(lambda: None), "__code__", None)


def make_step(optimizer: Any) -> Step:
    """Return ``step(closure=None)`` for one optimizer.

    Args:
        optimizer: a ``torch.optim.Optimizer`` or anything with ``step``.

    """
    arithmetic = _arithmetic_of_step(optimizer)
    if arithmetic is None or _profiler_enabled is None or _pre_hooks is None or _post_hooks is None:

        def plain_step(closure: Callable[[], Any] | None = None) -> Any:
            return optimizer.step() if closure is None else optimizer.step(closure)

        return plain_step

    own, kind = vars(optimizer), type(optimizer)
    step_of_class = kind.step
    # A scheduler wraps the instance's step only to see that it was called, and is told so here.
    watched = own.get("step")
    profiled, before_all, after_all = _profiler_enabled, _pre_hooks, _post_hooks
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    inner, guarded = arithmetic
    differentiable = bool(optimizer.defaults.get("differentiable", False))
    grad_enabled, set_grad_enabled = torch.is_grad_enabled, _set_grad_enabled

    def step(closure: Callable[[], Any] | None = None) -> Any:
        if (
            closure is not None
            or before
            or after
            or before_all
            or after_all
            or profiled()
            or kind.step is not step_of_class
            or own.get("step") is not watched
        ):
            return optimizer.step() if closure is None else optimizer.step(closure)
        if watched is not None:
            own["_opt_called"] = True
        if not guarded:
            return inner(optimizer)
        enabled = grad_enabled()
        set_grad_enabled(differentiable)
        try:
            return inner(optimizer)
        finally:
            set_grad_enabled(enabled)

    return step


def make_zero_grad(optimizer: Any) -> Callable[[], None]:
    """Return ``zero_grad()`` for one optimizer: gradients become None."""
    if getattr(type(optimizer), "zero_grad", None) is not Optimizer.zero_grad or _profiler_enabled is None:
        return lambda: optimizer.zero_grad()
    profiled, own = _profiler_enabled, vars(optimizer)

    def zero_grad() -> None:
        if profiled() or "zero_grad" in own:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def backward(loss: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
    """Run ``loss.backward(*args, **kwargs)``.

    Args:
        loss: a tensor; the fast way is for one without dimensions, as losses are.
        args: for ``Tensor.backward``.
        model: whose loss it is; only strategies with an engine of their own ask for it.
        kwargs: for ``Tensor.backward``.

    """
    if (
        args
        or kwargs
        or type(loss) is not Tensor
        or _run_backward is None
        or loss.shape
        or not loss.requires_grad
        or loss.is_complex()
        or _function_modes()
    ):
        loss.backward(*args, **kwargs)
        return
    run = _run_backward if loss.is_cpu else _run_backward_in_threads
    # The ones are made anew each time: a hook on the loss may change them in place.
    run(
        (loss,),
        (torch.ones_like(loss, memory_format=torch.preserve_format),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _arithmetic_of_step(optimizer: Any) -> tuple[Step, bool] | None:
    """Return the function under torch's wrappers and whether it needs the grad mode set; None to keep them."""
    own = getattr(optimizer, "__dict__", {}).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return None
    wrapped = getattr(type(optimizer), "step", None)
    if not isinstance(optimizer, Optimizer) or not getattr(wrapped, "hooked", False):
        return None
    inner = getattr(wrapped, "__wrapped__", None)
    if inner is None or getattr(inner, "__code__", None) is None:
        return None
    if _guard_code is not None and inner.__code__ is _guard_code:
        return (inner.__wrapped__, True) if hasattr(inner, "__wrapped__") else None
    return inner, False
