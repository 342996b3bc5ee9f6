"""Trials without processes, on a clock that they move: planted timings give the same verdicts on any machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from hasten.arguments import SPEED_NAMES
from hasten_tools.speed.advice import Advice
from hasten_tools.speed.advisor import LineSearch
from hasten_tools.speed.fit_trial import Orders
from hasten_tools.speed.levers import LEVERS, Lever
from hasten_tools.speed.races import Plan
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import LateError, TrialError, Turn

Levers = frozenset[str]


def nothing(trainer: Any, model: Any) -> None:
    """Stand for the change of a speed-up; the fake trial knows it by the lever's argument."""


def lever(name: str, safety: Safety = Safety.SAME_BITS, **options: Any) -> Lever:
    return Lever(name, f"{name}()", safety, {name: True}, change=nothing, **options)


@dataclasses.dataclass
class FakeProgram:
    """Opens trials whose steps take what a function of their speed-ups says."""

    # Of a step, given the speed-ups that are on and the number of the step; of a process; and of the first step.
    step_seconds: Callable[[Levers, int], float]
    _: dataclasses.KW_ONLY
    start_seconds: float = 0.0
    prepare_seconds: Callable[[Levers], float] = lambda levers: 0.0
    losses: Callable[[Levers, int], float] = lambda levers, step: 1.0
    # Raises where speed-ups fail.
    fails: Callable[[Levers], None] = lambda levers: None
    # How samples affect one another.
    apart: Callable[[Levers], str | None] = lambda levers: None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps_planned: float = math.inf
    # The part of the time in which other programs have the cores.
    waited_share: float = 0.0
    now: float = 0.0
    open: int = 0
    opened: list[Levers] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    def advise(self, levers: list[Lever], **plan: Any) -> Advice:
        """Return what a search finds."""
        search = LineSearch(
            lambda orders: FakeTrial(self, orders), Plan(**plan), "fake", say=self.said.append, clock=lambda: self.now
        )
        found = search.advise(levers)
        assert self.open == 0
        return found


def names_in(orders: Orders) -> Levers:
    """Return the speed-ups that orders switch on: hasten's by their effects, planted ones by their argument."""
    known = {
        each.name
        for each in LEVERS
        if (each.arguments and each.arguments.items() <= orders.arguments.items()) or each.place in orders.changes
    }
    return frozenset(
        known | {name for name, value in orders.arguments.items() if name not in SPEED_NAMES and value is True}
    )


class FakeTrial:
    def __init__(self, program: FakeProgram, orders: Orders) -> None:
        self.program, self.levers = program, names_in(orders)
        self.history: list[Turn] = []
        self.steps = 0
        self.is_open = True
        program.opened.append(self.levers)
        program.open += 1

    def ready(self, until: float = math.inf) -> Mapping[str, Any]:
        program = self.program
        if program.now + program.start_seconds > until:
            program.now = max(program.now, until)
            raise LateError("time ran out before it was ready")
        program.now += program.start_seconds
        return {"given": {}}

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        program = self.program
        program.fails(self.levers)
        each = [program.step_seconds(self.levers, self.steps + step) for step in range(steps)]
        if not self.history:
            each[0] += program.prepare_seconds(self.levers)
        if program.now + sum(each) > until:
            program.now = max(program.now, until)
            raise LateError("time ran out before it was ready")
        losses: list[float | None] = [program.losses(self.levers, self.steps + step) for step in range(steps)]
        self.steps += steps
        program.now += sum(each)
        turn = Turn(sum(each), each, losses, samples=steps, waited=program.waited_share * sum(each))
        self.history.append(turn)
        return turn

    def ask(self, name: str, **options: Any) -> Any:
        facts = {"device_type": "cuda", "step_draws": False, "batch_norm": False, **self.program.facts}
        answers: dict[str, Any] = {
            "parts": facts.get("parts", {"forward": 1.0}),
            "first_steps": {"gradients": [], "without_draws": []},
            "count": None,
            "apart": self.program.apart(self.levers),
            "inspect": {"facts": facts, "steps_planned": self.program.steps_planned},
        }
        return answers[name]

    def close(self) -> None:
        self.program.open -= self.is_open
        self.is_open = False


def refusing(name: str, *, refused: bool = True, text: str = "not with this model") -> Callable[[Levers], None]:
    """Return what fails where a speed-up is on."""

    def fails(levers: Levers) -> None:
        if name in levers:
            raise TrialError(text, refused=refused)

    return fails
