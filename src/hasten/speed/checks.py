"""Whether a lever computes what its class allows: losses, gradients, and samples that leave each other alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hasten._lib.split import measure, split
from hasten.batching.fields import named_time_dims
from hasten.seed import isolate_rng
from hasten.speed.inspect_run import mask_of
from hasten.speed.safety import Safety

# How far mean losses may be apart without any noise, as a share of their size: rounding grows with the steps.
_MEANS = {Safety.SAME_BITS: 1e-3}
_COARSE_MEANS = 2e-2
# The first steps are compared one by one. Each may multiply the rounding of the one before.
_FIRST_STEPS = 3
_GROWTH = 10.0
_FURTHEST = 0.5
# The unchanged program was run once more, and may differ from itself by more the next time.
_BEYOND_ITSELF = 4.0
# The noise is known from two runs or three: the next one may lie a bit further out.
_BEYOND_NOISE = 1.5
_STANDARD_ERRORS = 3.0
_FEWEST_FOR_THIRDS = 6


@dataclass(frozen=True)
class LossVerdict:
    """Whether losses are those of another run.

    Args:
        deviation: how far they are apart; None where there are no losses to compare.
        allowed: how far they may be.
        reason: what is wrong; empty if nothing is.

    """

    deviation: float | None = None
    allowed: float | None = None
    reason: str = ""


def judge_losses(
    base: Sequence[float],
    losses: Sequence[float],
    *,
    safety: Safety,
    again: Sequence[float] = (),
    seeds: Sequence[Sequence[float]] = (),
    alike: bool = True,
    coarse: bool = False,
) -> LossVerdict:
    """Compare the losses of a line with those of its base: the class of what it changes says how far apart they may be.

    Where each step sees the same samples and draws the same random numbers, the first steps are compared one by one:
    their losses may differ by what the class allows and by what the base differs from itself. Otherwise, and for all
    later steps, means over thirds of the run are compared, so that a line that is wrong only late is not hidden by the
    beginning. They may differ by rounding, by the noise (what other seeds make of the base, if steps are not alike),
    and by three standard errors of the difference, which is next to nothing where each step sees the same batch.

    Args:
        base: loss of each step, from the first.
        losses: the same of the line, with the same seed.
        safety: class of the change.
        again: of the base, run once more; it may be shorter.
        seeds: of the base with other seeds.
        alike: each step sees the samples and random numbers that it sees in the base.
        coarse: the base computes with less than 32 bits itself, so that rounding is coarser.

    Example::

        >>> falling = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]
        >>> judge_losses(falling, falling, safety=Safety.SAME_BITS).reason
        ''
        >>> near = [1.001, *falling[1:]]
        >>> [bool(judge_losses(falling, near, safety=Safety(each)).reason) for each in ("same bits", "lower precision")]
        [True, False]

    """
    others = [each for each in (again, *(() if alike else seeds)) if each]
    count = min(len(base), len(losses))
    base, losses = base[:count], losses[:count]
    if not count or not all(map(math.isfinite, base)):
        return LossVerdict()
    wrong = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if wrong is not None:
        return LossVerdict(reason=f"the loss is {losses[wrong]} at step {wrong + 1}")
    size = fmean(map(abs, base)) or 1.0
    noise, tolerance = 0.0, _as_coarse(safety, coarse).loss_tolerance
    for step in range(min(_FIRST_STEPS, count) if alike else 0):
        noise = max(noise, abs(again[step] - base[step]) if step < len(again) else 0.0)
        allowed = (
            min(_FURTHEST, tolerance * _GROWTH**step) * max(size, abs(base[step])) + _BEYOND_ITSELF * noise
        )
        deviation = abs(losses[step] - base[step])
        if deviation > allowed:
            text = f"the loss of step {step + 1} is {deviation:.3g} away from the unchanged program's"
            return LossVerdict(deviation, allowed, f'{text}, and "{safety}" allows {allowed:.3g}')
    floor = _MEANS.get(safety, _COARSE_MEANS) * size
    worst = LossVerdict(0.0, floor)
    parts = 3 if count >= _FEWEST_FOR_THIRDS else 1
    for start, end in pairwise(round(part * count / parts) for part in range(parts + 1)):
        one, other = base[start:end], losses[start:end]
        noise = max(
            (abs(fmean(one) - fmean(run[start:end])) for run in others if len(run) >= end), default=0.0
        )
        difference = pvariance([a - b for a, b in zip(one, other, strict=True)])
        error = math.sqrt(min(difference, pvariance(one) + pvariance(other)) / len(one))
        allowed = floor + _BEYOND_NOISE * noise + _STANDARD_ERRORS * error
        deviation = abs(fmean(one) - fmean(other))
        if deviation * (worst.allowed or 0.0) > (worst.deviation or 0.0) * allowed:
            worst = LossVerdict(deviation, allowed)
    assert worst.deviation is not None
    assert worst.allowed is not None
    if worst.deviation <= worst.allowed or safety == Safety.OTHER_MATHS:
        return worst
    text = f"mean losses are {worst.deviation:.3g} away from the unchanged program's"
    return LossVerdict(worst.deviation, worst.allowed, f"{text}, {worst.allowed:.3g} is within its noise")


def judge_gradients(
    base: Sequence[Sequence[float]],
    gradients: Sequence[Sequence[float]],
    *,
    safety: Safety,
    again: Sequence[Sequence[float]] = (),
    coarse: bool = False,
) -> str:
    """Compare some numbers of the gradients of the first steps, where steps are alike; return what is wrong.

    A loss is one number: it may be right by chance, or something else may be computed on its way to the gradient. The
    arguments are those of ``judge_losses``.

    Example::

        >>> judge_gradients([[1.0, 2.0]], [[1.0, 2.0]], safety=Safety.ROUNDING)
        ''
        >>> judge_gradients([[1.0, 2.0]], [[1.0, 1.9]], safety=Safety.ROUNDING)[:60]
        'the gradients of step 1 are 4.47% away from the unchanged pr'

    """
    noise, tolerance = 0.0, _as_coarse(safety, coarse).gradient_tolerance
    for step, (one, other) in enumerate(zip(base, gradients, strict=False)):
        apart = _apart(one, other)
        if apart is None:
            continue
        noise = max(noise, (_apart(one, again[step]) or 0.0) if step < len(again) else 0.0)
        allowed = min(_FURTHEST, tolerance * _GROWTH**step) + _BEYOND_ITSELF * noise
        if apart > allowed:
            return (
                f"the gradients of step {step + 1} are {100 * apart:.3g}% away from the unchanged program's, and "
                f'"{safety}" allows {100 * allowed:.3g}%'
            )
    return ""


def judge_without_draws(base: Sequence[float], line: Sequence[float], *, coarse: bool) -> str:
    """Compare what a base and a line make of the first batch without dropout; return what is wrong.

    Args:
        base: the loss, then some numbers of the gradient; empty where that was not computed.
        line: the same of a line that draws other random numbers.
        coarse: the base computes with less than 32 bits itself.

    """
    if not base or len(base) != len(line):
        return ""
    safety = _as_coarse(Safety.ROUNDING, coarse)
    if not abs(line[0] - base[0]) <= safety.loss_tolerance * max(abs(base[0]), 1e-6):
        return f"without dropout the loss of the first batch is {line[0]:.6g} instead of {base[0]:.6g}"
    apart = _apart(base[1:], line[1:])
    if apart is not None and apart > safety.gradient_tolerance:
        text = "without dropout the gradients of the first batch are"
        return f"{text} {100 * apart:.3g}% away from the unchanged program's"
    return ""


def _apart(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the distance of two gradients as a share of the first; None where they cannot be compared."""
    if len(one) != len(other) or not one:
        return None
    size = math.sqrt(sum(a * a for a in one))
    if not size or not math.isfinite(size):
        return None
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))
    return distance / size if math.isfinite(distance) else math.inf


def _as_coarse(safety: Safety, coarse: bool) -> Safety:
    return Safety.LOWER_PRECISION if coarse and safety == Safety.ROUNDING else safety


# -- samples of a batch, one by one

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
