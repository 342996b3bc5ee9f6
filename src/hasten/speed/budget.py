"""What a budget of seconds allows: how long trials take, how many levers fit, and what is said meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hasten.speed.plan import Plan
from hasten.speed.verdict import too_few

# Guesses from one start are wrong by this much, as a rule.
_LONGER_THAN_GUESSED = 1.5
# One lever is measured although that takes longer than the budget, unless it takes longer than so many budgets.
_MOST_OVER = 2.0


@dataclass(frozen=True)
class Turns:
    """How much each variant trains.

    Args:
        rounds: turns of each.
        steps: of a turn.
        warm_up: steps before the clock.

    """

    rounds: int
    steps: int
    warm_up: int


@dataclass(frozen=True)
class Estimate:
    """How long trials take, by the first one, which was the unchanged program.

    Args:
        start_seconds: from the start of a process until it trains: imports, data.
        prepare_seconds: from there to the first step, without the step.
        step_seconds: of a step.
        at_once: processes that start beside one another.
        together: variants held in memory at a time.

    """

    start_seconds: float
    prepare_seconds: float
    step_seconds: float
    at_once: int = 1
    together: int = 8

    def of(self, variants: int, turns: Turns) -> float:
        """Return the seconds that a race of so many variants takes.

        Example::

            >>> Estimate(10.0, 1.0, 0.5, at_once=2).of(3, Turns(rounds=2, steps=3, warm_up=1))
            33.5

        """
        if self.together < 2 <= variants:
            # Each turn has a process of its own.
            steps = (turns.warm_up + turns.steps) * self.step_seconds
            return variants * turns.rounds * (self.start_seconds + self.prepare_seconds + steps)
        steps = (turns.warm_up + turns.rounds * turns.steps) * self.step_seconds
        return math.ceil(variants / self.at_once) * self.start_seconds + variants * (
            self.prepare_seconds + steps
        )

    def one_by_one(self, unchanged: int, levers: int, turns: Turns) -> float:
        """Return the seconds for so many levers, in lots that fit into memory beside the unchanged program.

        Args:
            unchanged: runs of the unchanged program in the first lot; each further lot has one.
            levers: how many.
            turns: of each.

        """
        with_the_first = min(levers, max(0, self.together - unchanged))
        seconds, left = self.of(unchanged + with_the_first, turns), levers - with_the_first
        while left > 0:
            part = min(left, max(1, self.together - 1))
            seconds, left = seconds + self.of(1 + part, turns), left - part
        return seconds


@dataclass(frozen=True)
class Fit:
    """What is measured one by one.

    Args:
        turns: of each.
        levers: how many of them, the first ones.
        seeds: runs of the unchanged program with other seeds.
        least_seconds: what one lever takes, from the first look on.
        all_seconds: what all levers take with the fewest turns.
        until_seconds: when the last race ends at the latest.

    """

    turns: Turns
    levers: int
    seeds: int
    least_seconds: float
    all_seconds: float
    until_seconds: float

    def announced(self, levers: int, budget_seconds: float) -> Iterator[str]:
        """Yield what is said before: what does not fit, and how long it takes at least where that is longer."""
        if self.levers < levers:
            room = f"room for {self.levers} of {levers} levers" if self.levers else "room for no lever"
            whole = f"all of them take about {math.ceil(self.all_seconds)} s"
            yield f"the budget of {budget_seconds:.0f} s has {room}; {whole}"
        if self.least_seconds > budget_seconds:
            longer = f"longer than the budget of {budget_seconds:.0f} s"
            yield f"one lever takes at least about {self.least_seconds:.0f} s, {longer}"

    def left_out(self, budget_seconds: float) -> str:
        """Return why a lever is not measured."""
        enough = math.ceil(self.all_seconds)
        return f"the budget of {budget_seconds:.0f} s is spent before it; about {enough} s are enough for all levers"


def fit(plan: Plan, steps: int, *, levers: int, spent: float, share: float, estimate: Estimate) -> Fit:
    """Return the most that fits into the plan's budget: shorter turns come before fewer levers.

    One lever is measured also where that takes a little longer than the budget, none where it takes much longer.

    Args:
        plan: how much would be measured with all the time in the world, and its budget.
        steps: of a turn, then.
        levers: how many there are.
        spent: seconds of the budget that are gone.
        share: of what is left, for levers one by one.
        estimate: of the trials.

    Example::

        >>> slow = Estimate(start_seconds=10.0, prepare_seconds=0.0, step_seconds=0.02)
        >>> found = fit(Plan(budget_seconds=60), 50, levers=4, spent=15.0, share=1.0, estimate=slow)
        >>> found.turns, found.levers
        (Turns(rounds=2, steps=3, warm_up=1), 2)

    """
    budget = plan.budget_seconds or math.inf
    left = (budget - spent) * share
    every = list(_settings(plan, steps, estimate.step_seconds))
    fewest = every[-1]
    least = spent + estimate.one_by_one(2, 1, fewest)
    whole = spent + estimate.one_by_one(2, levers, fewest) / share
    for turns in every:
        if estimate.one_by_one(2 + plan.seeds, levers, turns) <= left:
            return Fit(turns, levers, plan.seeds, least, whole, budget)
    count = levers
    while count > 1 and estimate.one_by_one(2, count, fewest) > left:
        count -= 1
    until = budget if least <= budget else spent + _LONGER_THAN_GUESSED * (least - spent)
    if least > _MOST_OVER * budget:
        count = 0
    # Without other seeds the noise of the losses is left to their own spread.
    return Fit(fewest, count, 0, least, whole, until)


def _settings(plan: Plan, steps: int, step_seconds: float) -> Iterator[Turns]:
    """Yield turns from the plan's own to the fewest that still give a verdict."""
    yield Turns(plan.rounds, steps, plan.warm_up)
    shorter = [(plan.rounds, fewer, min(plan.warm_up, 2)) for fewer in range(steps - 1, 0, -1)]
    shorter += [(min(plan.rounds, 2), fewer, 1) for fewer in range(steps, 0, -1)]
    for rounds, fewer, warm_up in shorter:
        if not too_few(rounds, rounds * fewer, rounds * fewer * step_seconds):
            yield Turns(rounds, fewer, warm_up)


@dataclass
class Progress:
    """Says which lever of how many is being measured, and how many seconds are left.

    Args:
        say: told a line each.
        levers: how many are measured one by one; 0 while they are measured together.
        until: when the budget is spent, on the monotonic clock.

    """

    say: Callable[[str], None]
    levers: int = 0
    until: float = math.inf
    _number: int = field(default=0, init=False)
    _race_ends: float = field(default=0.0, init=False)

    def begin(self, seconds: float) -> None:
        """Begin a race that takes about so long."""
        self._race_ends = time.monotonic() + seconds

    def prepare(self, name: str, *, is_lever: bool) -> None:
        """Say that a variant gets ready."""
        if is_lever and self.levers:
            self._number += 1
            name = f"lever {self._number} of {self.levers}, {name}"
        self.say(f"preparing {name} ({self._left()})")

    def turn(self, number: int, rounds: int, variants: int) -> None:
        """Say that each variant has its turn."""
        self.say(f"turn {number} of {rounds}, {variants} variants ({self._left()})")

    def _left(self) -> str:
        now = time.monotonic()
        if math.isfinite(self.until):
            return f"{max(0.0, self.until - now):.0f} s of the budget left"
        return f"about {max(1.0, self._race_ends - now):.0f} s left"
