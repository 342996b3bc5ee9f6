"""Parameter groups that come and go during a run: their names, their schedulers, their place in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from hasten._lib.names import did_you_mean
from hasten.checkpoint.allowed_types import is_plain

# What some schedulers keep in a group, in proportion to its learning rate or as it is.
_IN_PROPORTION = ("max_lr", "min_lr", "swa_lr")
_AS_IT_IS = ("max_momentum", "base_momentum")


def describe(module: nn.Module, optimizer: Any) -> list[dict[str, Any]] | None:
    """Return the groups of ``optimizer`` with names in place of parameters; None if one is not the module's."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        named = [names.get(id(parameter)) for parameter in group["params"]]
        if None in named:
            return None
        options = {key: value for key, value in group.items() if key != "params" and is_plain(value)}
        groups.append({**options, "params": named})
    return groups


def rebuild(module: nn.Module, optimizer: Any, groups: list[dict[str, Any]], owner: str) -> None:
    """Give ``optimizer`` the groups that ``describe`` returned.

    Raises:
        ValueError: a parameter of them is not in the module.

    """
    parameters = dict(module.named_parameters())
    rebuilt = []
    for group in groups:
        for name in group["params"]:
            if name not in parameters:
                raise ValueError(
                    f"{owner}: the checkpoint has the parameter {name!r} in a group of the optimizer, and "
                    f"{type(module).__name__} has no such parameter.{did_you_mean(name, list(parameters))} "
                    "Resume with the model the run was started with."
                )
        rebuilt.append(
            {**optimizer.defaults, **group, "params": [parameters[name] for name in group["params"]]}
        )
    optimizer.param_groups[:] = rebuilt


def adopt(scheduler: Any, optimizer: Any) -> None:
    """Let a scheduler drive groups added after it was made: in proportion to what it makes of the first group.

    torch's schedulers know as many groups as there were at their beginning, and raise at the next step otherwise.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        adopt(inner, optimizer)
    base_lrs = getattr(scheduler, "base_lrs", None)
    is_its_own = getattr(scheduler, "optimizer", None) is optimizer
    if not is_its_own or not base_lrs:
        return
    groups: list[dict[str, Any]] = optimizer.param_groups
    first, first_lr = groups[0], float(groups[0]["lr"])
    for group in groups[len(base_lrs) :]:
        share = float(group["lr"]) / first_lr if first_lr else 1.0
        group.setdefault("initial_lr", base_lrs[0] * share)
        base_lrs.append(base_lrs[0] * share)
        for key in _IN_PROPORTION:
            if key in first:
                group.setdefault(key, first[key] * share)
        for key in _AS_IT_IS:
            if key in first:
                group.setdefault(key, first[key])
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas:
        lambdas.extend([lambdas[0]] * (len(groups) - len(lambdas)))
