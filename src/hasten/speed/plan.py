"""How much the advisor measures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from hasten.speed.levers import LEVERS, Lever

# Levers that gain much where they gain at all; when time is short they go first.
_PROMISING = (
    "packed first token",
    "packed tokens",
    "batches by length",
    "kept memory",
    "bf16 autocast",
    "compile",
    "resident data",
    "data on the device",
    "fast dropout masks",
    "no attention dropout",
    "fused optimizer",
    "loader workers",
    "one thread",
)

# Share of the time for levers one by one; the rest is for those that won, together.
_FOR_THE_FIRST_RACE = 0.6


class AdviceError(RuntimeError):
    """The unchanged program cannot be measured."""


class TooShortError(AdviceError):
    """Measuring would take too large a part of the training."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        rounds: turns of each lever.
        steps: of a turn; None for about a second's worth, 3 to 50.
        warm_up: steps of each lever before the clock.
        seeds: runs of the unchanged program with other seeds, which say how much losses differ by chance.
        combine: also measure the winners together.
        consent: also measure levers that change more than rounding.
        budget_seconds: about how long all of it may take: turns become shorter and fewer, and the levers that then do
            not fit are left out, the least promising first; None for as long as it takes.
        share_of_training: what measuring may take at most, as a share of the time that the training is planned to take;
            where not even the fewest turns fit, nothing is measured. None for as long as it takes.
        timeout_seconds: how long the program may take to start training, a lever to prepare, or a turn to last.

    Raises:
        ValueError: a number is too small.

    """

    rounds: int = 3
    steps: int | None = None
    warm_up: int = 3
    seeds: int = 1
    combine: bool = True
    consent: bool = True
    budget_seconds: float | None = None
    share_of_training: float | None = None
    timeout_seconds: float = 900.0

    def __post_init__(self) -> None:
        for name, least in {"rounds": 1, "steps": 1, "warm_up": 1, "seeds": 1}.items():
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"advise({name}={value!r}): use a whole number of at least {least}.")
        for name in ("timeout_seconds", "budget_seconds", "share_of_training"):
            value = getattr(self, name)
            if value is None and name != "timeout_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"advise({name}={value!r}): use a number of seconds above 0.")

    def within_share(
        self, planned_seconds: float | None, *, variants: int, step_seconds: float, start_seconds: float
    ) -> Plan:
        """Return the plan with the budget that a training of this length allows.

        Args:
            planned_seconds: of the whole training; None where it has no end.
            variants: how many are measured one by one.
            step_seconds: of the unchanged program.
            start_seconds: of a process, up to its first step.

        Raises:
            TooShortError: the fewest turns take longer than ``share_of_training`` of it.

        Example::

            >>> plan = Plan(share_of_training=0.1)
            >>> plan.within_share(3600.0, variants=10, step_seconds=0.5, start_seconds=3.0).budget_seconds
            360.0

        """
        if self.share_of_training is None or planned_seconds is None or not math.isfinite(planned_seconds):
            return self
        budget = self.share_of_training * planned_seconds
        fewest = variants * (start_seconds + 3 * step_seconds) / _FOR_THE_FIRST_RACE
        if fewest > budget:
            raise TooShortError(
                f"it takes about {planned_seconds:,.0f} s, and measuring at least {fewest:,.0f} s. `hasten advise` "
                "measures it all the same, and its verdict is used here"
            )
        return dataclasses.replace(self, budget_seconds=min(budget, self.budget_seconds or budget))


def by_promise(levers: Iterable[Lever], *, starts_count: bool = False) -> list[Lever]:
    """Return levers in the order in which they are measured when time is short.

    Args:
        levers: in any order. Those that hasten does not know come first: somebody registered or named them.
        starts_count: there is not time for all: those that compile, for nobody knows how long, go last.

    Example::

        >>> from hasten.speed.levers import choose
        >>> [lever.name for lever in by_promise(choose(["fused optimizer", "compile"]))]
        ['compile', 'fused optimizer']
        >>> [lever.name for lever in by_promise(choose(["fused optimizer", "compile"]), starts_count=True)]
        ['fused optimizer', 'compile']

    """
    places = {name: place for place, name in enumerate(_PROMISING)}
    last = {lever.name: len(places) for lever in LEVERS}
    return sorted(
        levers,
        key=lambda lever: (
            starts_count and bool(lever.arguments.get("compile")),
            places.get(lever.name, last.get(lever.name, -1)),
        ),
    )
