"""What Fabric's setup cannot take, and what to do then."""

from __future__ import annotations

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
    raise TypeError(f"Fabric.{method}(): a {type(optimizer).__name__} is no optimizer.{hint}")


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
    name = optimizer.of.__name__
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
