"""What Fabric's setup cannot take, and what to do then."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten.fabric.wrappers import FabricOptimizer
from hasten.optim.backward import InBackward
from hasten.runtime import Runtime


def check_optimizer(optimizer: Any, method: str) -> None:
    if isinstance(optimizer, FabricOptimizer):
        raise ValueError(f"Fabric.{method}(): this optimizer was set up already. Pass the original, once.")
    if hasattr(optimizer, "step") and hasattr(optimizer, "param_groups"):
        return
    hint = " Pass a scheduler as scheduler=...." if hasattr(optimizer, "get_last_lr") else ""
    raise TypeError(f"Fabric.{method}(): a {type(optimizer).__name__} is not an optimizer.{hint}")


def check_devices(module: nn.Module, method: str, move_to_device: bool) -> None:
    placed: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        placed.setdefault(parameter.device, name)
    if not move_to_device:
        return
    if (empty := placed.get(torch.device("meta"))) is not None:
        raise ValueError(
            f"Fabric.{method}(): the parameter {empty!r} is on the meta device and has no values to move. Fill the "
            "module first: module.to_empty(device=fabric.device), then load its weights."
        )
    if len(placed) > 1:
        rank_zero_warn(
            f"Fabric.{method}(): the module has parameters on {', '.join(map(str, placed))}, and all are moved to one "
            "device. Pass move_to_device=False to leave them where they are."
        )


def check_in_backward(optimizer: InBackward, runtime: Runtime) -> None:
    name = optimizer.optimizer_class.__name__
    if runtime.scaler is not None:
        raise ValueError(
            f"in_backward({name}) and Fabric(precision={runtime.precision.precision!r}): whether a scaled gradient is "
            "finite is known when backward is over. Use precision='bf16-mixed', which scales nothing."
        )
    if runtime.syncs_gradients:
        raise ValueError(
            f"in_backward({name}) and {runtime.world_size} processes: each parameter would step before its gradients "
            f"are averaged over them. Use torch.optim.{name} as it is."
        )


def check_parameters(optimizer: Any, modules: list[nn.Module], method: str, *, needs_all: bool) -> None:
    """Check that an optimizer trains what was set up.

    Args:
        optimizer: the user's.
        modules: those that were set up so far.
        method: what was called, for the message.
        needs_all: whether each parameter has to be in one of the modules, as the gradients of others are not averaged
            over the processes; otherwise one of them is enough.

    Raises:
        ValueError: the parameters are those of a module that was not set up.

    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    outside = [p for p in parameters if id(p) not in known]
    if not outside or (len(outside) < len(parameters) and not needs_all):
        return
    # A tensor by itself, an image that is optimized for instance, needs no setup.
    trained = [p for p in outside if isinstance(p, nn.Parameter)]
    kind = type(optimizer).__name__
    if method == "setup" and trained:
        given = f"the module given with it ({type(modules[-1]).__name__})"
        raise ValueError(
            f"Fabric.setup(): {len(outside)} of the {len(parameters)} parameters of {kind} do not belong to {given}. "
            f"Write {kind}(model.parameters(), ...) with that module, after any change of its layers."
        )
    if any(map(_is_in_a_module, trained)):
        raise ValueError(
            f"Fabric.{method}(): {len(outside)} of the {len(parameters)} parameters of {kind} belong to a module that "
            "was not set up. Call model = fabric.setup_module(model) first, or "
            "model, optimizer = fabric.setup(model, optimizer)."
        )


def _is_in_a_module(parameter: nn.Parameter) -> bool:
    """Return whether some module has the parameter; looks through all objects, so only for a message."""
    for holder in gc.get_referrers(parameter):
        if isinstance(holder, dict):
            for owner in gc.get_referrers(holder):
                attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
                if isinstance(attributes, dict) and attributes.get("_parameters") is holder:
                    return True
    return False
