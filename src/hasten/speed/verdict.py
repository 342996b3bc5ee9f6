"""What measured turns say: how much faster, and whether the losses are still those of the unchanged program."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance, stdev

from hasten.speed.safety import Safety

# What a comparison of speeds may say.
FASTER, SLOWER, NO_GAIN, UNCLEAR = "faster", "slower", "no gain", "unclear"
# A gain below this is none: nobody writes a line for it.
SMALLEST_GAIN = 0.03
# Risk of a wrong verdict over all looks, and the share of turns that is cut off on each side: one in so many.
_RISK = 0.1
_TRIMMED = 8
# Two turns that agree by chance do not show that turns never differ.
_LEAST_DEVIATION = 0.005
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
class SpeedInterval:
    """Where the logarithm of a speed-up lies.

    Args:
        middle: the estimate.
        low: what it is at least.
        high: what it is at most.

    """

    middle: float
    low: float
    high: float

    def verdict(self, worth: float) -> str:
        """Return "faster", "slower", "no gain", or nothing while more than one of them is possible.

        Args:
            worth: the smallest logarithm of a speed-up that counts.

        Example::

            >>> SpeedInterval(0.7, 0.6, 0.8).verdict(0.03), SpeedInterval(-0.2, -0.3, -0.1).verdict(0.03)
            ('faster', 'slower')
            >>> SpeedInterval(0.01, -0.01, 0.02).verdict(0.03), SpeedInterval(0.3, -0.1, 0.7).verdict(0.03)
            ('no gain', '')

        """
        if self.low > 0 and self.middle >= worth:
            return FASTER
        if self.high < 0 and self.middle <= -worth:
            return SLOWER
        return NO_GAIN if self.high < worth else ""


def interval(log_ratios: Sequence[float], looks: int = 0) -> SpeedInterval:
    """Return the interval of a mean of logarithms that is right over repeated looks at it.

    The mean is trimmed, as turns on a busy machine have outliers (Yuen, "The two-sample trimmed t for unequal
    population variances", Biometrika 1974); the risk of the whole series is ``1 / 10``, of which the look number k
    spends a share of 1 / (k (k + 1)).

    Args:
        log_ratios: of the seconds without and with a change, turn by turn.
        looks: how many there were before.

    Example::

        >>> found = interval([1.38, 1.40])
        >>> round(found.middle, 2), found.low > 1.0
        (1.39, True)

    """
    count = len(log_ratios)
    if count < 2:
        middle = log_ratios[0] if log_ratios else 0.0
        return SpeedInterval(middle, -math.inf, math.inf)
    cut = count // _TRIMMED
    ordered = sorted(log_ratios)
    kept = ordered[cut : count - cut]
    pulled_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    deviation = max(stdev(pulled_in), _LEAST_DEVIATION)
    error = deviation / ((1 - 2 * cut / count) * math.sqrt(count))
    half = error * _students_t(_RISK / ((looks + 1) * (looks + 2)), len(kept) - 1)
    middle = fmean(kept)
    return SpeedInterval(middle, middle - half, middle + half)


@functools.cache
def _students_t(risk: float, freedom: int) -> float:
    """Return what Student's t exceeds with this risk, both sides together."""
    low, high = 0.0, 1.0
    while _risk_beyond(high, freedom) > risk:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _risk_beyond(middle, freedom) > risk else (low, middle)
    return high


def _risk_beyond(t: float, freedom: int) -> float:
    """Return the risk that Student's t is beyond ``t`` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    return 1.0 - (2 / math.pi * (angle + inside) if odd else inside)


@dataclass(frozen=True)
class Losses:
    """Whether the losses of a lever are those of the unchanged program.

    Args:
        ok: they are, or it is known that they are not (a lever that changes the maths).
        deviation: how far they are apart; None where there are no losses to compare.
        allowed: how far they may be.
        reason: what is wrong; empty if nothing is.

    """

    ok: bool
    deviation: float | None
    allowed: float | None
    reason: str = ""


def judge_losses(
    unchanged: Sequence[float],
    lever: Sequence[float],
    *,
    safety: Safety,
    again: Sequence[float] = (),
    seeds: Sequence[Sequence[float]] = (),
    alike: bool = True,
    coarse: bool = False,
) -> Losses:
    """Compare the losses of a lever with those of the unchanged program: its class says how far they may be apart.

    Where each step sees the same samples and draws the same random numbers, the first steps are compared one by one:
    their losses may differ by what the class allows and by what the unchanged program differs from itself. Otherwise,
    and for all later steps, means over thirds of the run are compared, so that a lever that is wrong only late is not
    hidden by the beginning. They may differ by rounding, by the noise (what other seeds make of the unchanged program,
    if steps are not alike), and by three standard errors of the difference, which is next to nothing where each step
    sees the same batch.

    Args:
        unchanged: loss of each step, from the first.
        lever: with the lever on, with the seed of ``unchanged``.
        safety: class of the lever.
        again: losses of the unchanged program, run once more.
        seeds: of the unchanged program with other seeds.
        alike: each step sees the samples and random numbers that it sees without the lever.
        coarse: the unchanged program computes with less than 32 bits itself, so that rounding is coarser.

    Example::

        >>> falling = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]
        >>> judge_losses(falling, falling, safety=Safety.SAME_BITS).ok
        True
        >>> judge_losses(falling, [2 * loss for loss in falling], safety=Safety.SAME_BITS).ok
        False
        >>> near = [1.001, *falling[1:]]
        >>> [judge_losses(falling, near, safety=each).ok for each in (Safety.ROUNDING, Safety.LOWER_PRECISION)]
        [False, True]

    """
    others = [each for each in (again, *(() if alike else seeds)) if each]
    count = min(len(unchanged), len(lever), *(len(other) for other in others))
    if not count:
        return Losses(True, None, None)
    base, mine = unchanged[:count], lever[:count]
    if not all(map(math.isfinite, base)):
        return Losses(True, None, None)
    if not all(map(math.isfinite, mine)):
        step = next(place for place, loss in enumerate(mine) if not math.isfinite(loss))
        return Losses(False, None, None, f"the loss is {mine[step]} at step {step + 1}")
    size = fmean(map(abs, base)) or 1.0
    if alike:
        noise, tolerance = 0.0, _as_coarse(safety, coarse).loss_tolerance
        for step in range(min(_FIRST_STEPS, count)):
            noise = max(noise, abs(again[step] - base[step]) if again else 0.0)
            allowed = (
                min(_FURTHEST, tolerance * _GROWTH**step) * max(size, abs(base[step]))
                + _BEYOND_ITSELF * noise
            )
            deviation = abs(mine[step] - base[step])
            if deviation > allowed:
                return Losses(
                    False,
                    deviation,
                    allowed,
                    f"the loss of step {step + 1} is {deviation:.3g} away from the unchanged program's, and "
                    f'"{safety}" allows {allowed:.3g}',
                )
    floor = _MEANS.get(safety, _COARSE_MEANS) * size
    worst, allowed_there = 0.0, floor
    parts = 3 if count >= _FEWEST_FOR_THIRDS else 1
    for start, end in pairwise(round(part * count / parts) for part in range(parts + 1)):
        one, lot = base[start:end], mine[start:end]
        deviation = abs(fmean(one) - fmean(lot))
        noise = max((abs(fmean(one) - fmean(other[start:end])) for other in others), default=0.0)
        apart = pvariance([a - b for a, b in zip(one, lot, strict=True)])
        error = math.sqrt(min(apart, pvariance(one) + pvariance(lot)) / len(one))
        allowed = floor + _BEYOND_NOISE * noise + _STANDARD_ERRORS * error
        if deviation / allowed > worst / allowed_there:
            worst, allowed_there = deviation, allowed
    if worst <= allowed_there or safety == Safety.OTHER_MATHS:
        return Losses(True, worst, allowed_there)
    return Losses(
        False,
        worst,
        allowed_there,
        f"mean losses are {worst:.3g} away from the unchanged program's, {allowed_there:.3g} is within its noise",
    )


def judge_gradients(
    unchanged: Sequence[Sequence[float]],
    lever: Sequence[Sequence[float]],
    *,
    safety: Safety,
    again: Sequence[Sequence[float]] = (),
    coarse: bool = False,
) -> str:
    """Compare the gradients of the first steps, where steps are alike; return what is wrong, empty if nothing is.

    A loss is one number: it may be right by chance, or on its way to the gradient something else may be computed.

    Args:
        unchanged: some numbers of the gradients of each of the first steps.
        lever: the same with the lever on.
        safety: class of the lever.
        again: of the unchanged program, run once more.
        coarse: the unchanged program computes with less than 32 bits itself.

    Example::

        >>> judge_gradients([[1.0, 2.0]], [[1.0, 2.0]], safety=Safety.ROUNDING)
        ''
        >>> judge_gradients([[1.0, 2.0]], [[1.0, 1.9]], safety=Safety.ROUNDING)[:60]
        'the gradients of step 1 are 4.47% away from the unchanged pr'

    """
    noise, tolerance = 0.0, _as_coarse(safety, coarse).gradient_tolerance
    for step, (one, other) in enumerate(zip(unchanged, lever, strict=False)):
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


def judge_without_draws(unchanged: Sequence[float], lever: Sequence[float], *, coarse: bool) -> str:
    """Compare what two variants make of the first batch without dropout; return what is wrong, empty if nothing is.

    Args:
        unchanged: the loss, then some numbers of the gradient.
        lever: the same with a lever on that draws other random numbers.
        coarse: the unchanged program computes with less than 32 bits itself.

    """
    if not unchanged or len(unchanged) != len(lever):
        return ""
    safety = _as_coarse(Safety.ROUNDING, coarse)
    loss, other = unchanged[0], lever[0]
    if not abs(other - loss) <= safety.loss_tolerance * max(abs(loss), 1e-6):
        return f"without dropout the loss of the first batch is {other:.6g} instead of {loss:.6g}"
    apart = _apart(unchanged[1:], lever[1:])
    if apart is not None and apart > safety.gradient_tolerance:
        return (
            f"without dropout the gradients of the first batch are {100 * apart:.3g}% away from the unchanged "
            "program's"
        )
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
