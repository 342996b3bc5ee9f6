"""Gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def grad_norm(
    module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all together.

    Args:
        module: the module; parameters without a gradient are left out.
        norm_type: p of the p-norm, above 0; ``"inf"`` for the largest value.
        group_separator: between "grad_2.0_norm" and the parameter's name.

    Returns:
        0-d tensors, by name; the last one is ``grad_<p>_norm_total``. Nothing is read from the device.

    Raises:
        ValueError: ``norm_type`` is not above 0.

    Example::

        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.full((1, 1), 3.0)
        >>> grad_norm(layer, 2)
        {'grad_2.0_norm/weight': tensor(3.), 'grad_2.0_norm_total': tensor(3.)}

    Source: `torch.nn.utils.get_total_norm <https://docs.pytorch.org/docs/stable/nn.html>`_.

    """
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"grad_norm(norm_type={norm_type!r}): the norm is a number above 0, or 'inf'.")
    name = f"grad_{power}_norm"
    norms = {
        f"{name}{group_separator}{parameter}": torch.linalg.vector_norm(p.grad.detach(), power)
        for parameter, p in module.named_parameters()
        if p.grad is not None
    }
    if norms:
        norms[f"{name}_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), power)
    return norms
