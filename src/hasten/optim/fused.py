"""Fused optimizers: update all parameters in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from hasten._lib import torch_private
from hasten._lib.errors import Parts, make_error
from hasten._lib.tree import parameters_of
from hasten.extend.origin import comes_from

_Made = TypeVar("_Made", bound=Optimizer)

# The device types for which torch has a fused kernel.
_DEVICES: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("cuda", "cpu", "mps", "xpu"),
    AdamW: ("cuda", "cpu", "mps", "xpu"),
    SGD: ("cuda", "cpu", "mps", "xpu"),
    Adagrad: ("cpu",),
}
# The flags of the user's groups, which checkpoints keep.
_own: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def use_fused(optimizer: Optimizer, fused: bool = True, *, owner: str = "use_fused") -> None:
    """Make an optimizer update all parameters in one kernel, or not, in place.

    The arithmetic is the same in another order: weights are equal up to rounding. The state is kept. Checkpoints have
    the optimizer's original flags, and load into fused and unfused optimizers alike.

    Args:
        optimizer: Adam, AdamW, SGD or Adagrad (on the CPU) of ``torch.optim``, or one that ``hasten.optim`` made.
        fused: False disables it.
        owner: name of the caller, for messages.

    Raises:
        ValueError: torch has no fused kernel for this optimizer, its options, or the device of its parameters.

    Example::

        >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> use_fused(optimizer)
        >>> optimizer.param_groups[0]["fused"]
        True

    Source: `torch.optim.AdamW(fused=True)
    <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`_.

    """
    parts = getattr(optimizer, "fusible_parts", None)
    if parts is not None:
        for part in parts():
            use_fused(part, fused, owner=owner)
        return
    if fused and (reason := why_not_fused(optimizer)) is not None:
        raise make_error(ValueError, f"{owner}: {reason.what}", fix=reason.fix)
    if not isinstance(optimizer, Optimizer) or "fused" not in optimizer.defaults:
        return  # Nothing to disable.
    if optimizer not in _own:
        _own[optimizer] = [_flags(group) for group in optimizer.param_groups]
        optimizer.register_state_dict_post_hook(_with_own_flags)
        optimizer.register_load_state_dict_post_hook(_after_load)
    _switch(optimizer, fused)
    if fused and isinstance(optimizer, SGD):
        torch_private.begin_momentum_at_zero(optimizer)


def on_several_meshes(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters are split over different processes, or some are not split at all."""
    meshes: list[Any] = []
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh not in meshes:
            meshes.append(mesh)
    return len(meshes) > 1


_LEAVE = "Leave fused_optimizer out."


def why_not_fused(optimizer: Optimizer) -> Parts | None:
    """Return why torch has no fused kernel for an optimizer, and what to write; None if it has one."""
    # An optimizer that steps in backward has the arithmetic of another class.
    kind = getattr(optimizer, "optimizer_class", type(optimizer))
    known = ", ".join(sorted(each.__name__ for each in _DEVICES))
    base = next((each for each in _DEVICES if isinstance(optimizer, each) and _same_step(kind, each)), None)
    # A subclass that overrides step computes something else.
    if base is None:
        by_itself = comes_from(type(optimizer), "torch.optim") and "foreach" in optimizer.defaults
        why = ": on a GPU torch updates parameters in few kernels by itself (foreach)" if by_itself else ""
        return Parts(f"torch has no fused {kind.__name__}; it has {known}.", f"Leave fused_optimizer out{why}.")
    for group in optimizer.param_groups:
        if (unfit := _unfit_option(kind.__name__, group)) is not None:
            return unfit
        if on_several_meshes(group["params"]):
            return Parts(
                f"a fused {kind.__name__} needs parameters that are all split over the same processes, and some here "
                "are not.",
                _LEAVE,
            )
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                return Parts(
                    f"a fused {kind.__name__} needs floating-point parameters, and one is {parameter.dtype}.", _LEAVE
                )
            if parameter.device.type not in _DEVICES[base]:
                return Parts(
                    f"torch has no fused {kind.__name__} for {parameter.device.type.upper()}; it has one for "
                    f"{', '.join(device.upper() for device in _DEVICES[base])}.",
                    _LEAVE,
                )
    return None


def _unfit_option(name: str, group: dict[str, Any]) -> Parts | None:
    """Return which option of a group a fused optimizer of this name cannot have, and what to write."""
    if group.get("differentiable"):
        return Parts(f"a fused {name} cannot be differentiated.", "Leave differentiable or fused_optimizer out.")
    if group.get("momentum") and group.get("dampening"):
        what = f"a fused {name} with dampening cannot begin the momentum of layers that are unfrozen later."
        return Parts(what, "Leave dampening or fused_optimizer out.")
    return None


def _same_step(kind: Any, base: type[Optimizer]) -> bool:
    """Return whether two classes share ``step``, which torch wraps once an optimizer of the class exists."""
    return unwrapped(kind.step) is unwrapped(base.step)


def unwrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``step`` of a class without torch's hooks around it, which are for whole steps."""
    # Once: a step of the user that copies the attributes of torch's is another one.
    inner: Callable[..., Any] = getattr(step, "__wrapped__", step)
    return inner if getattr(step, "hooked", False) else step


def check_dense(optimizer: Optimizer, modules: Iterable[nn.Module], owner: str) -> None:
    """Refuse to fuse the step of parameters whose gradients are sparse, before it fails."""
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    for module in modules:
        for name, layer in module.named_modules():
            if getattr(layer, "sparse", None) is True and id(getattr(layer, "weight", None)) in trained:
                raise make_error(
                    ValueError,
                    f"{owner}: a fused {type(optimizer).__name__} cannot take sparse gradients, and {name} is "
                    f"{type(layer).__name__}(sparse=True).",
                    fix="Leave fused_optimizer out, or sparse=True.",
                    argument="fused_optimizer",
                )


def fused_where_possible(optimizer: _Made, module: nn.Module | None = None) -> _Made:
    """Return ``optimizer``, fused if torch has a kernel for it and the user set neither fused nor foreach."""
    chosen = any(group.get("fused") is not None or group.get("foreach") is not None for group in optimizer.param_groups)
    if not chosen and why_not_fused(optimizer) is None:
        with suppress(ValueError):
            check_dense(optimizer, [] if module is None else [module], "")
            _switch(optimizer, True)
    return optimizer


def _switch(optimizer: Any, fused: bool) -> None:
    for group in [optimizer.defaults, *optimizer.param_groups]:
        group["fused"] = fused
        group["foreach"] = False if fused else None
    # A fused kernel unscales by itself, and skips steps with infinite gradients.
    torch_private.set_fused(optimizer, fused)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                on_device = fused or group.get("capturable")
                place = parameter.device if on_device else torch.device("cpu")
                optimizer.state[parameter]["step"] = step.to(place, torch.float32)


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("fused", "foreach") if name in group}


def _with_own_flags(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    own = _own.get(optimizer, [])
    groups = list(state_dict["param_groups"])
    # A group added later gets the flags of the last known group.
    groups = [{**group, **(own[min(i, len(own) - 1)] if own else {})} for i, group in enumerate(groups)]
    return {**state_dict, "param_groups": groups}


def _after_load(optimizer: Optimizer) -> None:
    _switch(optimizer, bool(optimizer.defaults["fused"]))
