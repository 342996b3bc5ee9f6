"""Dropout on the CPU from random bytes: masks with the same statistics as torch's, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten.extend.origin import source_file


def draw(count: int, p: float) -> tuple[Tensor, int]:
    """Return (random bytes, threshold): an element is kept where its byte is at least the threshold.

    A byte has 256 values, and ``p`` need not be a multiple of 1/256: the threshold is drawn from the two nearest
    integers so that each element is dropped with probability ``p``. It may be 256, which no byte reaches: see ``kept``.
    """
    exact = p * 256
    threshold = int(exact)
    if exact != threshold:
        threshold += int(torch.rand(()).item() < exact - threshold)
    words = torch.empty(-(-count // 8), dtype=torch.int64)
    # Both ends included: all 64 bits are random.
    words.random_(-(2**63), None)
    return words.view(torch.uint8)[:count], threshold


def scale_of(p: float) -> float:
    """Return the factor of kept elements; 0 if none is kept."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def kept(random: Tensor, threshold: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return 1 where an element is kept and 0 where it is dropped."""
    if threshold > 255:
        # A byte cannot hold this threshold: torch would wrap it to 0 and keep everything.
        return torch.zeros(shape, dtype=dtype)
    mask = torch.empty(shape, dtype=dtype)
    # Directly as floats: a boolean mask and its conversion take three times as long.
    torch.ge(random.view(shape), threshold, out=mask)
    return mask


@torch.library.custom_op("hasten::dropout", mutates_args=())
def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    random, threshold = draw(x.numel(), p)
    y = kept(random, threshold, x.shape, x.dtype).mul_(x).mul_(scale_of(p))
    return y, random, torch.tensor(threshold)


@_dropout.register_fake
def _(x: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), random, torch.tensor(0)


@torch.library.custom_op("hasten::dropout_backward", mutates_args=())
def _dropout_backward(gradient: Tensor, random: Tensor, threshold: Tensor, p: float) -> Tensor:
    mask = kept(random, int(threshold), gradient.shape, gradient.dtype)
    return mask.mul_(gradient).mul_(scale_of(p))


@_dropout_backward.register_fake
def _(gradient: Tensor, random: Tensor, threshold: Tensor, p: float) -> Tensor:
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, ctx.p = inputs
    _, random, threshold = output
    ctx.save_for_backward(random, threshold)
    ctx.mark_non_differentiable(random, threshold)


def _backward(ctx: Any, gradient: Tensor, *_others: Any) -> tuple[Any, ...]:
    random, threshold = ctx.saved_tensors
    return _dropout_backward(gradient, random, threshold, ctx.p), None


_dropout.register_autograd(_backward, setup_context=_setup_context)


def _setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, random, threshold, ctx.p = inputs
    ctx.save_for_backward(random, threshold)


def _double_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    # The gradient is a product with the mask, and so is its own gradient, which gradient penalties need.
    random, threshold = ctx.saved_tensors
    return _dropout_backward(gradient, random, threshold, ctx.p), None, None, None


_dropout_backward.register_autograd(_double_backward, setup_context=_setup_backward_context)


def dropout(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop elements of a CPU tensor with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Tensors on other devices, sparse and nested ones, and everything inside ``torch.func`` or forward-mode
    differentiation get torch's own dropout.

    Args:
        x: any shape, floating point.
        p: probability of dropping an element, 0 to 1.
        training: if False, return ``x``.
        inplace: change ``x`` and return it. It needs as much memory as torch's: a factor for each element is kept.

    Example::

        >>> import torch
        >>> ones = torch.ones(1000)
        >>> kept = dropout(ones, 0.25)
        >>> sorted(set((kept * 3).round().tolist()))
        [0.0, 4.0]

    Source: Srivastava et al., Dropout, https://jmlr.org/papers/v15/srivastava14a.html

    """
    if not 0.0 <= p <= 1.0:
        raise make_error(ValueError, f"dropout(p={p!r}):", fix="use a probability, 0 to 1.", argument="p")
    if not training or p == 0.0 or not _is_plain(x):
        return torch.nn.functional.dropout(x, p, training, inplace)
    if inplace:
        # Backward needs only the factors, so x may change.
        return x.mul_(0.0 if p == 1.0 else _dropout(torch.ones_like(x, requires_grad=False), p)[0])
    if p == 1.0:
        return x * 0.0
    y: Tensor = _dropout(x, p)[0]
    return y


def _is_plain(x: Tensor) -> bool:
    """Return whether random bytes can be used, unlike inside torch.func or forward-mode differentiation."""
    return (
        x.is_cpu
        and x.is_floating_point()
        and x.layout is torch.strided
        and not x.is_nested
        and not torch_private.is_transformed()
    )


def _forward(module: nn.Dropout, input: Tensor) -> Tensor:
    return dropout(input, module.p, module.training, module.inplace)


# A bound method is pickled by this name: a layer saved in the middle of a run has torch's forward when it is loaded,
# even without hasten.
_forward.__name__ = "forward"


@contextmanager
def fast_dropout(module: nn.Module) -> Iterator[int]:
    """Make the ``nn.Dropout`` layers of a module use ``dropout`` inside the block; yields their number.

    Subclasses of ``nn.Dropout`` and layers with a replaced ``forward`` do not change.

    Args:
        module: the module; only the ``forward`` of these layers changes.

    """
    # Modules that drop channels, or keep mean and variance, have torch's dropout.
    layers = [layer for layer in module.modules() if type(layer) is nn.Dropout and _has_torchs_forward(layer)]
    for layer in layers:
        vars(layer)["forward"] = _forward.__get__(layer)
    try:
        yield len(layers)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _has_torchs_forward(layer: nn.Module) -> bool:
    own = vars(layer).get("forward")
    return (own is None or getattr(own, "__func__", None) is type(layer).forward) and all(
        # By the file of the code, because functools.wraps copies names and module.
        source_file(function) == module.__file__
        for function, module in (
            (type(layer).forward, torch.nn.modules.dropout),
            (torch.nn.functional.dropout, torch.nn.functional),
        )
    )
