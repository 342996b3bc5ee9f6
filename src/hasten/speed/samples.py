"""Whether samples of a batch leave each other alone: loss and gradient are a mean or a sum of those of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hasten._lib.split import measure, split
from hasten.batching.token_fields import named_time_dims
from hasten.seed import isolate_rng
from hasten.speed.inspect_run import mask_of

# Samples of a batch that are looked at, each computed alone as well.
_SAMPLES = 6
# Numbers of each gradient that are compared, spread evenly.
_NUMBERS = 4096
# How far a batch's gradient may be from those of its samples, as a share of their size.
_EXACT, _COARSE = 3e-4, 5e-2

_DROPOUTS = {
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
} | {
    getattr(torch, name)
    for name in (
        *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
    )
}


def why_not_apart(module: nn.Module, batches: Sequence[Any], *, coarse: bool) -> str | None:
    """Return how the samples of a batch affect one another; None where they do not.

    The loss may be any weighted mean or sum over samples: loss and gradient of some samples together must then be such
    a mean or sum of those of each alone, without the padding that it has only because of the others. Dropout is
    off meanwhile. Weights, buffers, gradients and random numbers stay as they are. What cannot be found out (no
    automatic optimization, a batch that cannot be split, other random numbers in the step) counts as none.

    Args:
        module: the module, with the levers that are on.
        batches: some that it was trained on.
        coarse: it computes with less than 32 bits.

    """
    if not getattr(module, "automatic_optimization", True):
        return None
    for batch in batches:
        with _undisturbed(module):
            found = _of_batch(module, batch, _COARSE if coarse else _EXACT)
        if found is not None:
            return found
    return None


def without_draws(module: nn.Module, batch: Any) -> list[float]:
    """Return the loss of a batch and some numbers of its gradient, computed without dropout; empty if it cannot be.

    What two variants of a program that draws random numbers can be compared by.

    Args:
        module: the module, with the levers that are on; it stays as it is.
        batch: a training batch.

    """
    if not getattr(module, "automatic_optimization", True):
        return []
    with _undisturbed(module):
        found = _loss_and_gradient(module, batch, max(8, _NUMBERS // max(1, len(list(module.parameters())))))
    return [] if found is None else found.tolist()


def _of_batch(module: nn.Module, batch: Any, tolerance: float) -> str | None:
    try:
        samples = measure(batch)[0]
        if samples < 2:
            return None
        some = split(batch, min(samples, _SAMPLES))[0][0]
        alone = [_without_padding(part) for part, _ in split(some, 1)]
    except ValueError:
        return None  # It cannot be split.
    together = _loss_and_gradient(module, some, _NUMBERS)
    if together is None or not together.isfinite().all() or together.numel() < 4 * len(alone):
        return None
    columns = []
    for sample in alone:
        try:
            column = _loss_and_gradient(module, sample, _NUMBERS)
        except ValueError as error:
            # Batch normalization of one sample.
            return f"one sample alone cannot be computed: {str(error).splitlines()[0]}"
        if column is None:
            return None
        if not column.isfinite().all():
            return "one sample alone has no finite gradient"
        columns.append(column)
    apart = _distance(together, torch.stack(columns, 1))
    if apart <= tolerance:
        return None
    return f"loss and gradients of {len(alone)} samples together are {apart:.2%} away from those of each sample alone"


def _distance(together: Tensor, alone: Tensor) -> float:
    """Return how far a batch is from a sum or a weighted mean of its samples, as a share of their size.

    Args:
        together: loss and gradient of the batch: ``(numbers,)``.
        alone: the same of each sample: ``(numbers, samples)``.

    """
    # The loss counts as much as all of the gradient.
    size = max(together[1:].norm().item(), alone[1:].norm(dim=0).max().item()) or 1.0
    scale = torch.full_like(together, 1.0 / size)
    scale[0] = 1.0 / max(together[0].abs().item(), alone[0].abs().max().item(), 1e-12)
    together, alone = together * scale, alone * scale[:, None]
    as_sum = (together - alone.sum(1)).norm().item()
    # The weights of a mean add up to one, whatever they are.
    ones = alone.new_ones(1, alone.shape[1])
    shares = torch.linalg.lstsq(
        torch.cat([alone, ones]), torch.cat([together, ones[0, :1]])[:, None], driver="gelsd"
    ).solution[:, 0]
    as_mean = math.hypot((together - alone @ shares).norm().item(), 1.0 - shares.sum().item())
    return float(min(as_sum, as_mean))


def _loss_and_gradient(module: Any, batch: Any, count: int) -> Tensor | None:
    """Return the loss, then some numbers of the gradient, float64 on the host; None where there is none to be had."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = torch.get_rng_state()
    with torch.enable_grad(), _NoDropout():
        output = module.training_step(batch, 0)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
    if not torch.equal(torch.get_rng_state(), before):
        return None  # It draws by itself: two calls cannot be compared.
    # What has no gradient counts as zeros.
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([some_numbers(each, count) for each in (loss, *gradients)])


def some_numbers(values: Tensor, count: int) -> Tensor:
    """Return at most ``count`` numbers of a tensor, spread evenly, scaled to its norm; float64 on the host.

    Example::

        >>> some_numbers(torch.ones(100), 25).norm()
        tensor(10., dtype=torch.float64)

    """
    flat = (values.to_dense() if values.layout != torch.strided else values).detach().reshape(-1)
    some = flat[:: -(-flat.numel() // count) or 1].to("cpu", torch.float64)
    return some * math.sqrt(flat.numel() / max(1, some.numel()))


def _without_padding(batch: Any) -> Any:
    """Return a batch without the columns at its end that are padding in every sample."""
    mask = mask_of(batch)
    if mask is None:
        return batch
    used = (mask != 0).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    if width == mask.shape[1]:
        return batch
    if isinstance(batch, (list, tuple)):
        cut = [_cut(part, mask, width) for part in batch]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    return _cut(batch, mask, width)


def _cut(fields: Any, mask: Tensor, width: int) -> Any:
    if type(fields) is not dict:
        return fields
    cut = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Tensor):
            for dim in named_time_dims(key, value, mask):
                cut[key] = cut[key].narrow(dim, 0, width)
    return cut


class _NoDropout(TorchFunctionMode):
    """Dropout gives back what it is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            value = args[0] if args else given["input"]
            return (
                (value, torch.ones_like(value, dtype=torch.bool)) if func is torch.native_dropout else value
            )
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                given["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            # (..., dropout_p, out_proj_weight, ...) is the eleventh argument.
            if len(args) > 10:
                args = (*args[:10], 0.0, *args[11:])
            else:
                given["dropout_p"] = 0.0
        return func(*args, **given)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Put buffers and random numbers back, and log nothing."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    silent = {name: module.__dict__.get(name) for name in ("log", "log_dict") if hasattr(module, name)}
    for name in silent:
        module.__dict__[name] = _log_nothing
    try:
        with isolate_rng():
            yield
    finally:
        for name, before in silent.items():
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for ``self.log``."""
