"""AdamW with weight decay for matrices only, fused where possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, Unpack

from torch import Tensor, nn
from torch.optim import AdamW

from hasten._lib.errors import make_error
from hasten.optim.fused import fused_where_possible

NamedParameters = list[tuple[str, Tensor]]


class AdamWOptions(TypedDict, total=False):
    """Further arguments of ``torch.optim.AdamW``."""

    amsgrad: bool
    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


def adamw(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    no_decay: Iterable[str] = (),
    **options: Unpack[AdamWOptions],
) -> AdamW:
    """Return torch's AdamW in two groups: matrices decay, biases and scales of normalization do not.

    It is fused (all parameters are updated in one kernel) if their device supports that; pass ``fused=False`` to
    disable it. Call it when the model is on its device, as in ``configure_optimizers``.

    Args:
        model: the model to train; parameters that need no gradient are left out.
        lr: learning rate.
        betas: decay rates of the averages of gradients and their squares.
        eps: added to the root of the averaged squares.
        weight_decay: fraction of a matrix subtracted in each step, times the learning rate.
        no_decay: parts of the names of further parameters that do not decay, for example "embedding".
        options: for ``torch.optim.AdamW``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has nothing to train, or an entry of ``no_decay`` matches no parameter.

    Example::

        >>> optimizer = adamw(nn.Linear(3, 2), lr=3e-4)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.01, 0.0]

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; `torch.optim.AdamW
    <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`_.

    """
    named = trained(model, "adamw")
    patterns = checked_patterns(no_decay, named, "adamw(no_decay=...)")
    decays: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in named:
        plain = parameter.ndim < 2 or any(pattern in name for pattern in patterns)
        (others if plain else decays).append(parameter)
    parts = ((decays, weight_decay), (others, 0.0))
    groups = [{"params": part, "weight_decay": decay} for part, decay in parts if part]
    optimizer = AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
    return fused_where_possible(optimizer)


def trained(model: object, owner: str) -> NamedParameters:
    """Return the names and parameters of a module that need gradients."""
    if not isinstance(model, nn.Module):
        hint = " Pass the module itself, not its parameters()." if hasattr(model, "__iter__") else ""
        raise make_error(TypeError, f"{owner}(model): use a torch.nn.Module, not {type(model).__name__}.", fix=hint)
    named: NamedParameters = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not named:
        raise ValueError(f"{owner}(model): {type(model).__name__} has no parameters that need gradients.")
    return named


def checked_patterns(patterns: Iterable[str], named: NamedParameters, what: str) -> tuple[str, ...]:
    """Return ``patterns`` as a tuple; each must occur in the name of a parameter."""
    if isinstance(patterns, str):
        raise make_error(TypeError, f"{what}:", fix=f"use a list of parts of names, [{patterns!r}].")
    listed = tuple(patterns)
    for pattern in listed:
        if not any(pattern in name for name, _ in named):
            some = ", ".join(name for name, _ in named[:4])
            raise ValueError(f"{what}: no parameter has {pattern!r} in its name. There are {some}, ....")
    return listed
