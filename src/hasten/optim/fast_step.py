"""Step, zero_grad and backward without torch's wrappers around them, wherever the wrappers do nothing.

torch wraps ``optimizer.step`` in a profiler span, look-ups of step hooks and a guard of the grad mode, and
``zero_grad`` and ``backward`` similarly; for small models the wrappers cost more than the arithmetic. The functions
here do the same arithmetic, bit for bit, and fall back to torch's own call whenever a wrapper would do something:
step hooks, an active profiler, an overridden or replaced method. Each call checks this without calling Python
functions.

A wrapper is torch's if its code object is. Attributes prove nothing: ``functools.wraps`` copies them from torch's
functions to the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from hasten._lib.check import shown
from hasten._lib.errors import make_error, with_article
from hasten._lib.explain import explain
from hasten._lib.tree import parameters_of
from hasten.extend.origin import source_file

Step = Callable[..., Any]

_profiler_enabled: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
_pre_hooks: dict[int, Any] | None = getattr(torch_optimizer, "_global_optimizer_pre_hooks", None)
_post_hooks: dict[int, Any] | None = getattr(torch_optimizer, "_global_optimizer_post_hooks", None)
_set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
# Without torch's counter of function modes, assume that one is active.
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


# -- recognising torch's wrappers


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)


def _wrappers_of(maker: Any, file: str | None) -> frozenset[CodeType]:
    """Return the code of the functions that ``maker`` creates, if torch's ``file`` defines it."""
    return frozenset(_codes_within(maker.__code__)) if source_file(maker) == file else frozenset()


# The profiler span and the hooks around the step of every class, the guard of the grad mode inside, and the wrapper by
# which a scheduler notices that the optimizer stepped.
_span_codes = _wrappers_of(getattr(Optimizer, "profile_hook_step", None), torch_optimizer.__file__)
_guard_codes = _wrappers_of(getattr(torch_optimizer, "_use_grad_for_differentiable", None), torch_optimizer.__file__)
_scheduler_codes = _wrappers_of(lr_scheduler.LRScheduler.__init__, lr_scheduler.__file__)


def _cell(function: Any, codes: frozenset[CodeType], name: str) -> Any:
    """Return the closure variable ``name`` of a wrapper; None if ``function`` is not one of these wrappers."""
    if type(function) is not FunctionType or function.__code__ not in codes:
        return None
    names = function.__code__.co_freevars
    if name not in names or function.__closure__ is None:
        return None
    return function.__closure__[names.index(name)].cell_contents


def _if_torchs(function: Any, *files: str | None) -> Any:
    """Return ``function`` if its code is in one of torch's ``files``; None if it was replaced."""
    return function if source_file(function) in files else None


# torch wraps zero_grad in a function of torch._compile.
_zero_grad = _if_torchs(Optimizer.zero_grad, torch_optimizer.__file__, torch._compile.__file__)
_tensor_backward = _if_torchs(Tensor.backward, torch._tensor.__file__)
_autograd: Any = torch.autograd
_autograd_backward = _if_torchs(_autograd.backward, _autograd.__file__)
# Accelerators run backward in separate threads, to which this function passes the context of the caller.
_run_backward_in_threads: Any = _if_torchs(
    getattr(_autograd, "_engine_run_backward", None), torch.autograd.graph.__file__
)
_Variable: Any = getattr(torch.autograd, "Variable", None)
_engine = getattr(_Variable, "_execution_engine", None)
_run_backward: Callable[..., Any] | None = getattr(_engine, "run_backward", None)
_own_folders = (str(Path(torch_optimizer.__file__).parent), str(Path(__file__).parent))


# -- the optimizer


def make_step(optimizer: Optimizer) -> Step:
    """Return ``step(closure=None)`` for an object with a method ``step``, which also gets other arguments."""
    arithmetic = _arithmetic_of_step(optimizer)
    if arithmetic is None or _profiler_enabled is None or _pre_hooks is None or _post_hooks is None:

        def plain_step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)

        return plain_step

    own, kind = vars(optimizer), type(optimizer)
    step_of_class = kind.step
    # A scheduler wraps the instance's step only to notice calls; the step below sets its flag.
    watched = own.get("step")
    profiled, before_all, after_all = _profiler_enabled, _pre_hooks, _post_hooks
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    inner, guarded = arithmetic
    grad_enabled, set_grad_enabled = torch.is_grad_enabled, _set_grad_enabled

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if (
            closure is not None
            or kwargs
            or before
            or after
            or before_all
            or after_all
            or profiled()
            or optimizer.__class__ is not kind
            or kind.step is not step_of_class
            or own.get("step") is not watched
        ):
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        if watched is not None:
            own["_opt_called"] = True
        if not guarded:
            return inner(optimizer)
        enabled = grad_enabled()
        set_grad_enabled(optimizer.defaults["differentiable"])
        try:
            return inner(optimizer)
        finally:
            set_grad_enabled(enabled)

    return step


def clears_gradients(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.zero_grad()`` is torch's, which sets gradients to None."""
    kind: Any = type(optimizer)
    return (
        _zero_grad is not None
        and getattr(kind, "zero_grad", None) is _zero_grad
        and kind.__getattribute__ is object.__getattribute__
        and "zero_grad" not in vars(optimizer)
    )


def make_zero_grad(optimizer: Optimizer) -> Callable[[], None]:
    """Return ``zero_grad()`` for one optimizer, which sets gradients to None."""
    if _profiler_enabled is None or not clears_gradients(optimizer):
        return lambda: optimizer.zero_grad()
    kind: Any = type(optimizer)
    torchs, profiled, own = _zero_grad, _profiler_enabled, vars(optimizer)

    def zero_grad() -> None:
        if profiled() or optimizer.__class__ is not kind or kind.zero_grad is not torchs or "zero_grad" in own:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


class KeptGradient(NamedTuple):
    """A gradient of the first step, and its version, to which each change in place adds one."""

    parameter: Tensor
    gradient: Tensor
    version: int

    def was_added_to(self) -> bool:
        """Return whether one backward has added to it. To set it to zero would be another change, or another tensor."""
        return self.parameter.grad is self.gradient and self.gradient._version == self.version + 1


def keep_gradient(optimizer: Optimizer) -> KeptGradient | None:
    """Return the smallest gradient of an optimizer, to look at in its next step; None if there is none to look at."""
    found = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    smallest = min(found, key=Tensor.numel, default=None)
    gradient = None if smallest is None else smallest.grad
    if smallest is None or gradient is None or gradient.is_inference():
        return None
    return KeptGradient(smallest, gradient, gradient._version)


KEPT = "nothing sets the gradients to zero between the first two steps, so the second uses both."


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` needs a closure because it may call it several times.

    This is known for the optimizers of torch and hasten; others may use a closure whenever they accept one.
    """
    own = getattr(optimizer, "__dict__", {}).get("step")
    if own is not None and _cell(own, _scheduler_codes, "func") is not None:
        own = None
    if own is not None and not _accepts(own):
        return True
    step = getattr(type(optimizer), "step", None)
    for codes in (_span_codes, _guard_codes):
        step = _cell(step, codes, "func") or step
    if str(Path(source_file(step)).parent) in _own_folders:
        return not _accepts(step, optimizer)
    return _accepts(step, optimizer, None)


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether code of the user's runs around ``optimizer.step``: hooks of torch's, or a patched method."""
    own = getattr(optimizer, "__dict__", {})
    hooks = (own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks"), _pre_hooks, _post_hooks)
    patched = "step" in own and _cell(own["step"], _scheduler_codes, "func") is None
    return any(hooks) or patched


def unchanged(optimizer: Optimizer) -> Callable[[], bool]:
    """Return a function that says whether weights and gradients are still what they are now."""

    def state() -> list[Any]:
        return [(p._version, _address(p), p.grad is not None) for p in parameters]

    parameters = parameters_of(optimizer)
    before = state()
    return lambda: state() == before


def _address(parameter: Tensor) -> int:
    # Tensor subclasses, such as quantized weights, may have no storage.
    return parameter.data_ptr() if type(parameter) in (Tensor, nn.Parameter) else 0


def _accepts(function: Any, *arguments: Any) -> bool:
    try:
        # The signature of the wrapper, not of the function it wraps.
        inspect.signature(function, follow_wrapped=False).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass  # Written in C, without a signature.
    return True


# -- the gradients


def backward(loss: Tensor, *args: Any, model: object = None, **kwargs: Any) -> None:
    """Run ``loss.backward(*args, **kwargs)``; a loss without dimensions takes the fast path.

    Only strategies with a separate engine use ``model``, the module of the loss.
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
        or loss.__dict__
        or Tensor.backward is not _tensor_backward
        or _autograd.backward is not _autograd_backward
        or _autograd._engine_run_backward is not _run_backward_in_threads
        or _Variable._execution_engine is not _engine
    ):
        given: object = loss
        if isinstance(given, float | int):
            what = f"backward({loss!r}): a number has no gradients."
            raise make_error(TypeError, what, fix="Give it the loss itself, without .item() or float().")
        if not hasattr(given, "backward"):
            what = f"backward({shown(given)}): {with_article(type(given))} has no gradients."
            raise make_error(TypeError, what, fix="Give it the loss, a tensor of one element.")
        try:
            loss.backward(*args, **kwargs)
        except RuntimeError as error:
            explain(error)
            raise
        return
    run: Any = _run_backward if loss.is_cpu else _run_backward_in_threads
    # New ones each time: a hook on the loss may change them in place.
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
    kind: Any = type(optimizer)
    if (
        not isinstance(optimizer, Optimizer)
        or kind.__getattribute__ is not object.__getattribute__
        or getattr(kind, "_optimizer_step_code", None) is not getattr(Optimizer, "_optimizer_step_code", None)
    ):
        return None
    step = getattr(kind, "step", None)
    own = vars(optimizer).get("step")
    if own is not None:
        watches = _cell(own, _scheduler_codes, "opt_ref")
        if watches is None or watches() is not optimizer or _cell(own, _scheduler_codes, "func") is not step:
            return None
    inner = _cell(step, _span_codes, "func")
    guarded = _cell(inner, _guard_codes, "func")
    if guarded is not None:
        return guarded, True
    return None if inner is None else (inner, False)
