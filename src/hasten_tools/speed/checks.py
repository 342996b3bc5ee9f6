"""Check that a speed-up computes what its class allows: losses, gradients, and samples that stay independent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import fmean, pvariance
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hasten._lib import torch_private
from hasten._lib.observers import set_until
from hasten.batching.fields import token_dims
from hasten.batching.split import measure, split
from hasten.checkpoint.snapshots import SavedBuffers
from hasten.hooks import nothing
from hasten.seed import isolate_rng
from hasten_tools.speed.inspect_run import generator_states, mask_of
from hasten_tools.speed.safety import Safety

if TYPE_CHECKING:
    from hasten.types import Batch

# How far mean losses may be apart without any noise, as a share of their size: rounding grows with the steps.
_MEANS = {Safety.SAME_BITS: 1e-3}
_COARSE_MEANS = 2e-2
# The first steps are compared one by one. Each may multiply the rounding of the one before.
_FIRST_STEPS = 3
_GROWTH = 10.0
_FURTHEST = 0.5
# The unchanged program ran twice, and may differ from itself by more the next time.
_BEYOND_ITSELF = 4.0
# The noise is known from two runs or three: the next one may lie a bit further out.
_BEYOND_NOISE = 1.5
_STANDARD_ERRORS = 3.0
_FEWEST_FOR_THIRDS = 6


class LossVerdict(NamedTuple):
    """Whether losses equal the losses of another run: their distance, the distance allowed, and what is wrong."""

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
    """Compare the losses of a line with the losses of its base; the class of the change sets how far apart they may be.

    If each step reads the same samples and draws the same random numbers, the first steps are compared one by one:
    their losses may differ by what the class allows and by what the base differs from itself. Otherwise, and for all
    later steps, means over thirds of the run are compared, so that an error that shows late is not hidden by the
    beginning. They may differ by rounding, by the noise (what other seeds make of the base, if steps are not alike),
    and by three standard errors of the difference, which is next to nothing if each step reads the same batch.

    There is one loss for each step, from the first, with the same seed in both. ``again`` is another run of the base,
    which may be shorter; ``seeds`` are runs of it with other seeds. ``alike`` says that each step reads the samples and
    random numbers that it reads in the base, ``coarse`` that the base computes with less than 32 bits itself.

    Example::

        >>> falling = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]
        >>> judge_losses(falling, falling, safety=Safety.SAME_BITS).reason
        ''
        >>> near = [1.001, *falling[1:]]
        >>> [bool(judge_losses(falling, near, safety=Safety(each)).reason) for each in ("same bits", "lower precision")]
        [True, False]

    """
    count = min(len(base), len(losses))
    base, losses = base[:count], losses[:count]
    if not count or not all(map(math.isfinite, base)):
        return LossVerdict()
    wrong = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if wrong is not None:
        return LossVerdict(reason=f"the loss is {losses[wrong]} at step {wrong + 1}")
    size, noise = fmean(map(abs, base)) or 1.0, 0.0
    tolerance = _as_coarse(safety, coarse).loss_tolerance
    for step in range(min(_FIRST_STEPS, count) if alike else 0):
        noise = max(noise, abs(again[step] - base[step]) if step < len(again) else 0.0)
        share = min(_FURTHEST, tolerance * _GROWTH**step)
        allowed = share * max(size, abs(base[step])) + _BEYOND_ITSELF * noise
        deviation = abs(losses[step] - base[step])
        if deviation > allowed:
            text = f"the loss of step {step + 1} is {deviation:.3g} away from the unchanged program's"
            return LossVerdict(deviation, allowed, f'{text}, and "{safety}" allows {allowed:.3g}')
    others = [run for run in (again, *(() if alike else seeds)) if run]
    floor = _MEANS.get(safety, _COARSE_MEANS) * size
    parts = 3 if count >= _FEWEST_FOR_THIRDS else 1
    found = []
    for start, end in pairwise(round(part * count / parts) for part in range(parts + 1)):
        one, other = base[start:end], losses[start:end]
        by_chance = (abs(fmean(one) - fmean(run[start:end])) for run in others if len(run) >= end)
        difference = pvariance([a - b for a, b in zip(one, other, strict=True)])
        error = math.sqrt(min(difference, pvariance(one) + pvariance(other)) / len(one))
        allowed = floor + _BEYOND_NOISE * max(by_chance, default=0.0) + _STANDARD_ERRORS * error
        found.append((abs(fmean(one) - fmean(other)), allowed))
    deviation, allowed = max(found, key=lambda pair: pair[0] / pair[1])
    if deviation <= allowed or safety == Safety.OTHER_MATHS:
        return LossVerdict(deviation, allowed)
    text = f"mean losses are {deviation:.3g} away from the unchanged program's"
    return LossVerdict(deviation, allowed, f"{text}, {allowed:.3g} is within its noise")


def judge_gradients(
    base: Sequence[Sequence[float]],
    gradients: Sequence[Sequence[float]],
    *,
    safety: Safety,
    again: Sequence[Sequence[float]] = (),
    coarse: bool = False,
) -> str:
    """Compare some numbers of the gradients of the first steps, if steps are alike; return what is wrong.

    A loss is one number: it may be right by chance, or an error may lie between it and the gradient. The arguments are
    the same as of ``judge_losses``.

    Example::

        >>> judge_gradients([[1.0, 2.0]], [[1.0, 2.0]], safety=Safety.ROUNDING)
        ''
        >>> judge_gradients([[1.0, 2.0]], [[1.0, 1.9]], safety=Safety.ROUNDING)[:60]
        'the gradients of step 1 are 4.47% away from the unchanged pr'

    """
    noise, tolerance = 0.0, _as_coarse(safety, coarse).gradient_tolerance
    for step, (one, other) in enumerate(zip(base, gradients, strict=False)):
        noise = max(noise, _apart(one, again[step]) if step < len(again) else 0.0)
        apart = _apart(one, other)
        allowed = min(_FURTHEST, tolerance * _GROWTH**step) + _BEYOND_ITSELF * noise
        if apart > allowed:
            text = f"the gradients of step {step + 1} are {100 * apart:.3g}% away from the unchanged program's"
            return f'{text}, and "{safety}" allows {100 * allowed:.3g}%'
    return ""


def judge_without_draws(base: Sequence[float], line: Sequence[float], *, coarse: bool) -> str:
    """Compare what ``without_draws`` returned for a base and a line that draws other numbers; return what is wrong."""
    if not base or len(base) != len(line):
        return ""
    safety = _as_coarse(Safety.ROUNDING, coarse)
    if not abs(line[0] - base[0]) <= safety.loss_tolerance * max(abs(base[0]), 1e-6):
        return f"without dropout the loss of the first batch is {line[0]:.6g} instead of {base[0]:.6g}"
    apart = _apart(base[1:], line[1:])
    if apart > safety.gradient_tolerance:
        text = "without dropout the gradients of the first batch are"
        return f"{text} {100 * apart:.3g}% away from the unchanged program's"
    return ""


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two gradients as a share of the first; 0 if they cannot be compared."""
    size = math.hypot(*one)
    if len(one) != len(other) or not size or not math.isfinite(size):
        return 0.0
    distance = math.dist(one, other)
    return distance / size if math.isfinite(distance) else math.inf


def _as_coarse(safety: Safety, coarse: bool) -> Safety:
    return Safety.LOWER_PRECISION if coarse and safety == Safety.ROUNDING else safety


# -- samples of a batch, one by one

# Samples of a batch that are also computed alone.
_SAMPLES = 6
# Numbers of each gradient that are compared, spread evenly.
NUMBERS = 4096
# How far a batch's gradient may be from the gradients of its samples, as a share of their size.
_EXACT, _COARSE = 3e-4, 5e-2

_KINDS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_DROPOUTS = {
    *(getattr(torch, name) for kind in _KINDS for name in (kind, f"{kind}_")),
    *(getattr(F, kind) for kind in ("dropout", "alpha_dropout", "feature_alpha_dropout")),
    *(F.dropout1d, F.dropout2d, F.dropout3d, torch.native_dropout),
}
# Functions that drop out inside: name and position of their probability.
_ATTENTIONS = {F.scaled_dot_product_attention: ("dropout_p", 4), F.multi_head_attention_forward: ("dropout_p", 10)}
# The attention of ``packed=True``, which draws the masks itself.
_PACKED_ATTENTION = "hasten.packed_attention.default"


def why_not_apart(module: nn.Module, batches: Sequence[Batch], *, coarse: bool) -> str | None:
    """Return how the samples of a batch affect one another; None if they do not.

    The loss may be any weighted mean or sum over samples: loss and gradient of some samples together must then be the
    same mean or sum of the samples' own, each computed alone without the padding that it has only because of the
    others. Dropout is off meanwhile. Weights, buffers, gradients and random numbers are restored. If it cannot be found
    out (no automatic optimization, a batch that cannot be split, other random numbers in the step), the result is None.
    """
    if not getattr(module, "automatic_optimization", True):
        return None
    with _undisturbed(module):
        found = (_why_not_apart(module, batch, _COARSE if coarse else _EXACT) for batch in batches)
        return next((why for why in found if why is not None), None)


def without_draws(module: nn.Module, batch: Batch) -> list[float]:
    """Return the loss of a batch and some numbers of its gradient, computed without dropout; empty if it cannot be.

    Variants of a program that draw different random numbers can be compared by it.
    """
    if not getattr(module, "automatic_optimization", True):
        return []
    with _undisturbed(module):
        found = _loss_and_gradient(module, batch, max(8, NUMBERS // max(1, len(list(module.parameters())))))
    return [] if found is None else found.tolist()


def draws_numbers(module: nn.Module, batch: Batch) -> bool:
    """Return whether a training step of a batch draws random numbers from torch's generators."""
    with _undisturbed(module), torch.no_grad():
        before = generator_states()
        cast(Any, module).training_step(batch, 0)
        return any(not torch.equal(one, other) for one, other in zip(before, generator_states(), strict=False))


def _why_not_apart(module: nn.Module, batch: Any, tolerance: float) -> str | None:
    try:
        samples = measure(batch)
        if samples < 2:
            return None
        some = split(batch, min(samples, _SAMPLES))[0][0]
        alone = [_without_padding(part) for part, _ in split(some, 1)]
    except ValueError:
        return None  # It cannot be split.
    together = _loss_and_gradient(module, some, NUMBERS)
    if together is None or not together.isfinite().all() or len(together) < 4 * len(alone):
        return None
    columns = []
    for sample in alone:
        try:
            column = _loss_and_gradient(module, sample, NUMBERS)
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

    ``together`` is loss and gradient of the batch, ``(numbers,)``; ``alone`` those of each sample, ``(numbers,
    samples)``.
    """
    # The loss counts as much as all of the gradient.
    size = max(together[1:].norm().item(), alone[1:].norm(dim=0).max().item()) or 1.0
    scale = torch.full_like(together, 1.0 / size)
    scale[0] = 1.0 / max(together[0].abs().item(), alone[0].abs().max().item(), 1e-12)
    together, alone = together * scale, alone * scale[:, None]
    as_sum = (together - alone.sum(1)).norm().item()
    # The weights of a mean add up to one, whatever they are.
    ones = alone.new_ones(1, alone.shape[1])
    equations, results = torch.cat([alone, ones]), torch.cat([together, ones[0, :1]])[:, None]
    shares = torch.linalg.lstsq(equations, results, driver="gelsd").solution[:, 0]
    as_mean = math.hypot((together - alone @ shares).norm().item(), 1.0 - shares.sum().item())
    return float(min(as_sum, as_mean))


def _loss_and_gradient(module: Any, batch: Any, count: int) -> Tensor | None:
    """Return the loss, then some numbers of the gradient, float64 on the host; None if they cannot be had."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = torch.get_rng_state()
    with torch.enable_grad(), _NoDropout():
        output = module.training_step(batch, 0)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True, materialize_grads=True)
    if not torch.equal(torch.get_rng_state(), before):
        return None  # It draws by itself: two calls cannot be compared.
    return torch.cat([some_numbers(each, count) for each in (loss, *found)])


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
    if not isinstance(batch, (list, tuple)):
        return _narrowed(batch, mask, width)
    cut = [_narrowed(part, mask, width) for part in batch]
    return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)


def _narrowed(fields: Any, mask: Tensor, width: int) -> Any:
    if type(fields) is not dict:
        return fields
    cut = dict(fields)
    for key, value in fields.items():
        for dim in token_dims(key, value, mask):
            cut[key] = cut[key].narrow(dim, 0, width)
    return cut


class _NoDropout(TorchFunctionMode):
    """Dropout returns its input."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            value = args[0] if args else given["input"]
            is_native = func is torch.native_dropout
            return (value, torch.ones_like(value, dtype=torch.bool)) if is_native else value
        if func in _ATTENTIONS:
            name, place = _ATTENTIONS[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                given[name] = 0.0
        if str(func) == _PACKED_ATTENTION:
            place = torch_private.argument_names(func).index("p")
            args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **given)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers, and log nothing."""
    buffers = SavedBuffers(module)
    buffers.save()
    with ExitStack() as undo:
        undo.callback(buffers.restore, all_values=True)
        for name in ("log", "log_dict"):
            if hasattr(module, name):
                set_until(undo, vars(module), name, nothing)
        undo.enter_context(isolate_rng())
        yield
