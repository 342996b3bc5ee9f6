"""What measured turns say: how much faster, and whether the losses are still those of the unchanged program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pvariance

from hasten.speed.levers import CONSENT, SAME

# A gain below this is none: nobody writes a line for it.
SMALLEST_GAIN = 0.03
# A gain below this that is within the noise counts as none; above it, more turns may show it.
_WORTH_MORE_TURNS = 0.10
# What a verdict takes: chance alone makes one step of some milliseconds twice as fast as another.
_FEWEST_TURNS, _FEWEST_STEPS = 2, 6
# So much time measured is enough, however few its steps are.
_ENOUGH_SECONDS = 4.0
# Fewer turns have no quartiles worth the name: their extremes count.
_FEWEST_FOR_QUARTILES = 4
# How far losses may be apart without any noise, as a share of their size. "Same maths" may still sum in another
# order; "same up to rounding" computes in bf16, with 8 bits.
_ROUNDING = {SAME: 1e-3}
_COARSE_ROUNDING = 2e-2
# The noise is known from two runs or three: the next one may lie a bit further out.
_BEYOND_NOISE = 1.5
_STANDARD_ERRORS = 3.0
_FEWEST_FOR_THIRDS = 6


@dataclass(frozen=True)
class Speed:
    """How many times as fast as the unchanged program, by turns.

    Args:
        median: of the turns.
        low: their lower quartile.
        high: their upper quartile.
        turns: how many.

    """

    median: float
    low: float
    high: float
    turns: int = _FEWEST_FOR_QUARTILES

    @property
    def least(self) -> float:
        """What it is at least: the lower quartile, or the worst of two or three turns."""
        return self.low if self.turns >= _FEWEST_FOR_QUARTILES else self.median - 2 * (self.median - self.low)

    @property
    def most(self) -> float:
        """What it is at most: the upper quartile, or the best of two or three turns."""
        return (
            self.high if self.turns >= _FEWEST_FOR_QUARTILES else self.median + 2 * (self.high - self.median)
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated.

    Example::

        >>> quantile([1.0, 2.0, 4.0], 0.25)
        1.5

    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def compare(unchanged: Sequence[float], lever: Sequence[float]) -> Speed:
    """Return how many times as fast a lever is, turn by turn.

    Args:
        unchanged: seconds for the same work in each turn, without the lever.
        lever: with it, in the turns beside them.

    Example::

        >>> compare([2.0, 2.0, 2.2], [1.0, 1.0, 1.0]).median
        2.0

    """
    ratios = [a / max(b, 1e-12) for a, b in zip(unchanged, lever, strict=True)]
    return Speed(median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75), len(ratios))


def noise_of(again: Speed | None) -> float:
    """Return by how much the unchanged program differs from itself: 0.1 for a tenth.

    Args:
        again: the unchanged program compared with itself; None where that was not measured.

    """
    return 0.0 if again is None else max(again.most, 1.0 / max(again.least, 1e-9)) - 1.0


def too_few(turns: int, steps: int, seconds: float) -> str:
    """Say why so little gives no verdict; empty where it is enough.

    Args:
        turns: of a variant.
        steps: of all of them.
        seconds: they took.

    Example::

        >>> too_few(2, 2, 0.04)
        'measured in 2 turns of 2 steps in all; a verdict takes 2 turns and 6 steps'
        >>> too_few(2, 6, 0.04), too_few(2, 2, 30.0)
        ('', '')

    """
    if turns >= _FEWEST_TURNS and (steps >= _FEWEST_STEPS or seconds >= _ENOUGH_SECONDS):
        return ""
    plural = "" if turns == 1 else "s"
    return (
        f"measured in {turns} turn{plural} of {steps} steps in all; a verdict takes {_FEWEST_TURNS} turns and "
        f"{_FEWEST_STEPS} steps"
    )


def verdict_on_speed(speed: Speed, noise: float) -> str:
    """Return "wins", "slower", "unclear" or "no gain".

    It wins where it is faster even in its worst turns, should the unchanged program have been as slow as it is by
    chance just then.

    Args:
        speed: of the lever.
        noise: see ``noise_of``.

    Example::

        >>> verdict_on_speed(Speed(2.0, 1.9, 2.1), noise=0.1), verdict_on_speed(Speed(0.8, 0.7, 0.9), noise=0.1)
        ('wins', 'slower')
        >>> verdict_on_speed(Speed(1.68, 1.4, 1.9), noise=0.46)
        'unclear'

    """
    if speed.median >= 1.0 + SMALLEST_GAIN and speed.least > 1.0 + noise:
        return "wins"
    if speed.median >= 1.0 + _WORTH_MORE_TURNS:
        return "unclear"
    return "slower" if speed.median <= 1.0 / (1.0 + max(SMALLEST_GAIN, noise)) else "no gain"


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
    unchanged: Sequence[float], others: Sequence[Sequence[float]], lever: Sequence[float], *, safety: str
) -> Losses:
    """Compare the losses of a lever with those of the unchanged program, and with its noise.

    Means over thirds of the run are compared, not single steps: a lever may batch differently, and one that is
    wrong only late must not be hidden by the beginning. They may differ by rounding, by what other seeds make of the
    unchanged program, and by three standard errors of the difference, which is next to nothing where each step sees
    the same batch.

    Args:
        unchanged: loss of each step, from the first.
        others: the same of the unchanged program again and with other seeds: the noise.
        lever: with the lever on, with the seed of ``unchanged``.
        safety: of the lever.

    Example::

        >>> falling = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]
        >>> judge_losses(falling, [falling], falling, safety="same maths").ok
        True
        >>> judge_losses(falling, [falling], [2 * loss for loss in falling], safety="same maths").ok
        False

    """
    count = min(len(unchanged), len(lever), *(len(other) for other in others))
    if not count:
        return Losses(True, None, None)
    base, mine = unchanged[:count], lever[:count]
    if not all(map(math.isfinite, base)):
        return Losses(True, None, None)
    if not all(map(math.isfinite, mine)):
        step = next(place for place, loss in enumerate(mine) if not math.isfinite(loss))
        return Losses(False, None, None, f"the loss is {mine[step]} at step {step + 1}")
    floor = _ROUNDING.get(safety, _COARSE_ROUNDING) * (fmean(map(abs, base)) or 1.0)
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
    if worst <= allowed_there or safety == CONSENT:
        return Losses(True, worst, allowed_there)
    return Losses(
        False,
        worst,
        allowed_there,
        f"mean losses are {worst:.3g} away from the unchanged program's, {allowed_there:.3g} is within its noise",
    )
