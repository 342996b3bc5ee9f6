"""Races of lines with speed-ups: trials take turns, and each line gets a row with its verdict and figures."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median, stdev
from typing import Any, Protocol

from hasten._lib import check
from hasten_tools.speed import advice
from hasten_tools.speed.advice import Row, composed, figures
from hasten_tools.speed.checks import LossVerdict, judge_gradients, judge_losses, judge_without_draws
from hasten_tools.speed.fit_trial import Orders
from hasten_tools.speed.levers import Lever
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import (
    AGREEING,
    FAILED,
    FASTER,
    NOISY,
    UNCLEAR,
    Comparison,
    LateError,
    SteppedTrial,
    TrialError,
    Turn,
    race,
    speed_text,
)

# Classes in which a leak between samples would hide in losses that differ by chance.
_MAY_LEAK = (Safety.OTHER_DRAWS, Safety.OTHER_BATCHES)
# Most turns of each in a comparison, for each of the plan's rounds.
TURNS_PER_ROUND = 16
# Seconds that a turn lasts, and its most steps.
_TURN_SECONDS = 0.5
_MOST_STEPS = 50
# A longer step is not repeated before the clock runs.
_LONG_STEP_SECONDS = 1.0
# Where fewer steps than this fit into the time, the first step of the unchanged program is all that is looked at.
_STEPS_TO_LOOK_TWICE = 16
# A start that is longer by less than this may be so by chance.
_ONE_TIME_SECONDS = 0.2
# Share of the free memory that two trials at once may fill.
_OF_FREE_MEMORY = 0.6

Levers = tuple[Lever, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The amount of measuring; see ``Trainer.advise``. A number that is too small is a ``ValueError``."""

    rounds: int = 3
    steps: int | None = None
    warm_up: int = 3
    seeds: int = 1
    combine: bool = True
    budget_seconds: float | None = None
    timeout_seconds: float = 900.0
    # Speed-ups of less safe classes are not measured.
    most: Safety = Safety.OTHER_MATHS
    # A budget as a share of the time that the training is planned to take; if inspecting the program takes longer,
    # nothing is measured.
    share_of_training: float | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "warm_up", "seeds"):
            value, optional = getattr(self, name), name == "steps"
            check.whole("advise", name, value, at_least=1, allow_none=optional, error=ValueError)
        for name in ("budget_seconds", "timeout_seconds", "share_of_training"):
            value, optional = getattr(self, name), name != "timeout_seconds"
            check.number("advise", name, value, above=0, allow_none=optional, error=ValueError)


class TrainerTrial(SteppedTrial, Protocol):
    """A trial of ``Trainer.fit``, which answers questions by the handlers of ``hasten_tools.speed.fit_trial``."""

    history: list[Turn]

    def ready(self, until: float = math.inf) -> Mapping[str, Any]:
        """Wait until it is ready to train; return its facts."""

    def ask(self, name: str) -> Any:
        """Return what the trial's handler of this name returns."""

    def close(self) -> None:
        """End it."""


OpenTrial = Callable[[Orders], TrainerTrial]


@dataclasses.dataclass
class TrialRecord:
    """The record of a trial: its turns, of which the first sets up, and the results of its first steps."""

    levers: Levers
    turns: list[Turn]
    # Gradients of the first steps, and the first batch without dropout.
    first_steps: Mapping[str, Any]

    @property
    def losses(self) -> list[float]:
        """The loss of each step from the first; empty if a step had none."""
        every = [loss for turn in self.turns for loss in turn.losses]
        return [] if None in every else [loss for loss in every if loss is not None]

    @property
    def step_seconds(self) -> float:
        """Seconds of a step after the first turn."""
        return median(turn.cost("steps") for turn in self.turns[1:] or self.turns)

    @property
    def start_seconds(self) -> float:
        """Seconds of the first turn beyond its steps: setting up, compiling."""
        return self.turns[0].seconds - self.turns[0].steps * self.step_seconds


@dataclasses.dataclass
class _Entry:
    """A line in a race; its row has no verdict while it runs."""

    line: Levers
    row: Row
    # Speed-ups that only the line or only the base has, and the class of the least safe of them.
    changed: list[Lever]
    safety: Safety
    # Each step reads the samples and random numbers that it reads in the base.
    is_alike: bool
    # The first batch is also computed without dropout, as losses cannot be compared step by step.
    compares: bool
    trial: TrainerTrial = dataclasses.field(init=False)


class Races:
    """Races lines of one program."""

    def __init__(
        self, open_trial: OpenTrial, plan: Plan | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_trial, self._plan, self._clock = open_trial, plan or Plan(), clock
        # Speed-ups that are on in every trial, as the program cannot run without.
        self.always: Levers = ()
        # Found when the unchanged program is inspected: about device, model and data; its own Trainer arguments, as
        # text; steps of the whole training, if known; and the run.
        self.facts: dict[str, Any] = {}
        self.given: Mapping[str, str] = {}
        self.steps_planned: float | None = None
        self.inspected = TrialRecord((), [], {})
        # By the names of the speed-ups of a line: times as fast as the unchanged program.
        self.speeds: dict[frozenset[str], float] = {frozenset(): 1.0}
        # From the start of a trial until it was ready to train.
        self.start_seconds = 0.0
        # How much turns side by side differed, race by race.
        self.noises: list[float] = []
        self.waits: list[float] = []
        # Spent on steps of the unchanged program.
        self.unchanged_seconds = 0.0
        # By the names of the speed-ups, and the seed.
        self._runs: dict[tuple[frozenset[str], int], TrialRecord] = {}

    # -- the unchanged program

    def inspect(self, until: float = math.inf) -> None:
        """Find out about device, model and data, and how long a step takes; ``TrialError`` if it cannot be trained.

        Where few steps fit into the time until ``until``, one is all that it takes of them.
        """
        with self._trial((), inspects=True) as trial:
            began = self._clock()
            self.given = trial.ready(until).get("given", {})
            self.start_seconds = self._clock() - began
            turn = trial.turn(1, until)
            self.inspected = TrialRecord((), [turn], {})
            has_time = until - self._clock() > _STEPS_TO_LOOK_TWICE * turn.seconds
            if has_time:
                turn = trial.turn(1, until)
            if turn.seconds < _TURN_SECONDS:
                turn = trial.turn(self.steps_of(turn.seconds), until)
            parts = trial.ask("parts")
            self.inspected = TrialRecord((), list(trial.history), trial.ask("first_steps"))
            if has_time:
                trial.ask("count")
                trial.turn(1, until)
            found = trial.ask("inspect")
        self.steps_planned = found["steps_planned"]
        self.facts = {**found["facts"], "parts": parts, "faults_per_step": turn.faults / turn.steps}

    @property
    def noise(self) -> float:
        """How much turns side by side differed so far."""
        return median(self.noises) if self.noises else 0.0

    @property
    def waited_share(self) -> float:
        """The share of the turns so far in which other programs had the cores."""
        return median(self.waits) if self.waits else 0.0

    def unchanged_row(self) -> Row:
        """Return the row of the unchanged program."""
        run = self._runs.get((frozenset(), 0), self.inspected)
        shown = self._figures((), run.turns[1:] or self.inspected.turns[1:] or self.inspected.turns)
        return Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0, low=1.0, high=1.0, **shown)

    # -- races

    def run(
        self,
        base: Levers,
        lines: Mapping[str, Levers],
        *,
        until: float = math.inf,
        enough_at: float = math.inf,
        deadline: float = math.inf,
    ) -> list[Row]:
        """Race lines, by the names of their rows, against a base; return a row for each.

        A line that is not ready by ``until`` gets no turns; from ``enough_at`` on, only the turns that any verdict
        needs are taken, and none that would end after ``deadline``. Raises ``TrialError`` if the base fails.
        """
        with ExitStack() as stack:
            # All start at once, and then wait for their turns.
            entries = [self._entry(name, base, line) for name, line in lines.items()]
            first = stack.enter_context(self._trial(base, compares=any(entry.compares for entry in entries)))
            for entry in entries:
                entry.trial = stack.enter_context(self._trial(entry.line, compares=entry.compares))
            began = self._clock()
            first.ready(deadline)
            # The first start of all has imported what later ones share.
            self.start_seconds = min(self.start_seconds, self._clock() - began)
            self._warm_up(first, base, deadline)
            for entry in entries:
                self._get_ready(entry, first, base, until)
            running = [entry for entry in entries if not entry.row.verdict]
            trials = [entry.trial for entry in running]
            before = self._keep(base, first)
            # A line that is already wrong is not worth more turns.
            wrong = all(entry.is_alike and self._judge(entry, before).reason for entry in running)
            found = race(
                first,
                trials,
                steps=self.steps_of(max(trial.history[-1].cost("steps") for trial in (first, *trials))),
                fewest=AGREEING if max(self.noise, self.waited_share) > NOISY and not wrong else 2,
                wary=not wrong,
                most=2 if wrong else TURNS_PER_ROUND * self._plan.rounds,
                until=min(until, enough_at),
                deadline=deadline,
                clock=self._clock,
            )
            before = self._keep(base, first)
            for entry, comparison in zip(running, found, strict=True):
                entry.row = self._judged(entry, comparison, before, first)
        return [entry.row for entry in entries]

    def _entry(self, name: str, base: Levers, line: Levers) -> _Entry:
        added = [lever for lever in line if lever not in base] or line
        changed = [lever for lever in (*base, *line) if (lever in base) != (lever in line)]
        classes = [lever.safety_in(self.facts) for lever in changed]
        # A step that draws numbers draws others in another type.
        redraws = Safety.LOWER_PRECISION in classes and self.facts.get("step_draws", True)
        is_alike = all(each.keeps_batches for each in classes) and not redraws
        compiled = any("compile" in lever.arguments for lever in (*base, *line))
        # Lines that are confirmed were compared speed-up by speed-up.
        is_one_change = bool(base) or len(line) == 1
        compares = bool(self.facts.get("step_draws")) and is_one_change and not compiled and not is_alike
        of_added = max((lever.safety_in(self.facts) for lever in added), default=Safety.SAME_BITS)
        names = [lever.name for lever in line]
        row = Row(name, composed(added), of_added, verdict="", levers=names, base=name_of(base))
        return _Entry(line, row, changed, max(classes, default=Safety.SAME_BITS), is_alike, compares)

    def _get_ready(self, entry: _Entry, first: TrainerTrial, base: Levers, until: float) -> None:
        """Warm a line up; one that cannot be raced gets its verdict."""
        rebatches = any(lever.safety == Safety.OTHER_BATCHES for lever in entry.line if lever not in base)
        leak = first.ask("apart") if rebatches else None
        if leak:
            text = "the samples of a batch affect one another in this model, so other batches train another"
            entry.row.verdict, entry.row.reason = advice.REFUSED, f"{text}: {leak}"
            return
        try:
            self._warm_up(entry.trial, entry.line, until)
        except TrialError as error:
            entry.row = failed(entry.row, error)
            entry.trial.close()

    def _judged(self, entry: _Entry, comparison: Comparison, before: TrialRecord, first: TrainerTrial) -> Row:
        """Return the row of a line that was raced: whether it computes what it may, and how fast it is."""
        if comparison.error is not None:
            return failed(entry.row, comparison.error)
        if len(comparison.turns) > 1:
            pairs = zip(comparison.base, comparison.turns, strict=True)
            self.waits.append(comparison.waited_share)
            self.noises.append(stdev(math.log(a.cost("steps") / b.cost("steps")) for a, b in pairs))
        speed = self.speeds.get(key_of_line(before.levers), 1.0)
        found = self._judge(entry, before)
        # With such a speed-up, a busy machine also shows how much its other programs compute.
        load = any(lever.depends_on_free_cores for lever in entry.line)
        start_seconds = TrialRecord(entry.line, entry.trial.history, {}).start_seconds
        row = dataclasses.replace(
            entry.row,
            verdict=advice.WINS if comparison.verdict == FASTER else comparison.verdict,
            gain=comparison.speed,
            speed=speed * comparison.speed,
            low=speed * comparison.low,
            high=speed * comparison.high,
            # How much another line gained on the base is not certain either.
            least=comparison.least if not before.levers and not load else None,
            one_time_seconds=max(0.0, start_seconds - before.start_seconds),
            loss_deviation=found.deviation,
            loss_noise=found.allowed,
            **self._figures(entry.line, comparison.turns),
        )
        wrong = found.reason
        may_leak = any(lever.safety_in(self.facts) in _MAY_LEAK for lever in entry.changed)
        if row.wins and may_leak and not wrong:
            leak = entry.trial.ask("apart")
            if leak and not first.ask("apart"):
                wrong = f"with it the samples of a batch affect one another: {leak}"
        if wrong:
            row.verdict, row.reason = advice.WRONG, wrong
        elif row.wins:
            self._check_start(row, before, comparison.speed)
        else:
            row.reason = _why_not_faster(row, comparison)
        return row

    def _check_start(self, row: Row, before: TrialRecord, speed: float) -> None:
        """Reject a winner whose longer start is won back only after the training has ended."""
        once = row.one_time_seconds or 0.0
        if once < _ONE_TIME_SECONDS:
            return
        steps, planned = once / (before.step_seconds * (1.0 - 1.0 / speed)), self.steps_planned
        row.break_even_steps = steps
        row.reason = f"starting takes {once:.1f} s more, won back after {math.ceil(steps):,} steps"
        if planned is not None and math.isfinite(planned) and steps > planned:
            row.verdict = advice.NEVER_PAYS
            row.reason += f"; this training has {int(planned):,}"

    # -- what lines compute

    def _judge(self, entry: _Entry, before: TrialRecord) -> LossVerdict:
        """Return how a line exceeds what it may change, with the distance of its losses and what is allowed."""
        run = TrialRecord(entry.line, entry.trial.history, entry.trial.ask("first_steps"))
        again, coarse = self._repeated(before), bool(self.facts.get("coarse"))
        safety, is_alike = entry.safety, entry.is_alike
        judge = functools.partial(judge_losses, again=again.losses, safety=safety, alike=is_alike, coarse=coarse)
        found = judge(before.losses, run.losses)
        if found.reason and not is_alike and found.deviation is not None:
            # Only now is it worth the time to measure how much losses differ by chance.
            seeds = self._losses_by_seed(before.levers, len(run.losses))
            found = judge(before.losses, run.losses, seeds=seeds)
        if found.reason:
            return found
        wrong, one, other = "", before.first_steps, run.first_steps
        if is_alike:
            others = again.first_steps.get("gradients", ())
            gradients = one["gradients"], other["gradients"]
            wrong = judge_gradients(*gradients, again=others, safety=safety, coarse=coarse)
        elif all(lever.keeps_first_batch(self.facts) for lever in entry.changed):
            wrong = judge_without_draws(one["without_draws"], other["without_draws"], coarse=coarse)
        return found._replace(reason=wrong)

    def _keep(self, levers: Levers, trial: TrainerTrial) -> TrialRecord:
        """Return the run of a base; the first one is kept, to be compared with the next."""
        key = (key_of_line(levers), 0)
        run = TrialRecord(levers, list(trial.history), trial.ask("first_steps"))
        if self._runs.get(key, run).turns[0] is run.turns[0]:
            self._runs[key] = run
        return run

    def _repeated(self, run: TrialRecord) -> TrialRecord:
        """Return another run of the same speed-ups with the same seed; one without steps if there was none."""
        known = self._runs[key_of_line(run.levers), 0] if run.levers else self.inspected
        return known if known.turns[0] is not run.turns[0] else TrialRecord(run.levers, [], {})

    def _losses_by_seed(self, levers: Levers, steps: int) -> list[list[float]]:
        found = []
        for seed in range(1, self._plan.seeds + 1):
            known = self._runs.get((key_of_line(levers), seed))
            if known is None or len(known.losses) < steps:
                with self._trial(levers, seed=seed) as trial:
                    trial.turn(steps)
                    known = TrialRecord(levers, list(trial.history), {})
                self._runs[key_of_line(levers), seed] = known
            found.append(known.losses)
        return found

    def _figures(self, line: Levers, turns: Sequence[Turn]) -> dict[str, Any]:
        arguments = {name: repr(value) for name, value in arguments_of(line).items()}
        return figures(turns, self.facts, {**self.given, **arguments}, self.inspected.turns)

    # -- trials

    @contextmanager
    def _trial(self, levers: Levers, **options: Any) -> Iterator[TrainerTrial]:
        every = (*self.always, *levers)
        orders = Orders(
            arguments=arguments_of(every),
            changes=tuple(place for lever in every if (place := lever.place) is not None),
            allocator=next((lever.preload for lever in every if lever.preload is not None), None),
            **options,
        )
        free, turns = self.facts.get("free_bytes"), self.inspected.turns
        fits = free is None or 2 * max(turn.memory_bytes for turn in turns) <= free * _OF_FREE_MEMORY
        trial = self._open_trial(orders) if fits else _Restarted(self._open_trial, orders)
        try:
            yield trial
        finally:
            trial.close()
            if not levers:
                self.unchanged_seconds += sum(turn.seconds for turn in trial.history)

    def _warm_up(self, trial: TrainerTrial, levers: Levers, until: float = math.inf) -> None:
        trial.ready(until)
        trial.turn(1, until)
        more = self._plan.warm_up - 1
        if self.step_seconds(levers) > _LONG_STEP_SECONDS:
            # The second step of a compiled model may compile again.
            more = min(more, any("compile" in lever.arguments for lever in levers))
        if more:
            trial.turn(more, until)

    def steps_of(self, step_seconds: float) -> int:
        """Return the number of steps of a turn."""
        if self._plan.steps is not None:
            return self._plan.steps
        return min(_MOST_STEPS, max(1, math.ceil(_TURN_SECONDS / max(step_seconds, 1e-9))))

    def step_seconds(self, levers: Levers) -> float:
        """Return about how long a step takes with these speed-ups, by the known speed of some of them."""
        line = max((known for known in self.speeds if known <= key_of_line(levers)), key=len)
        return self.inspected.step_seconds / self.speeds[line]


class _Restarted:
    """A trial whose process ends after each turn, for programs that do not fit into memory twice."""

    def __init__(self, open_trial: OpenTrial, orders: Orders) -> None:
        self._open, self._orders = open_trial, orders
        self.history: list[Turn] = []
        self._answers: dict[str, Any] = {}

    def ready(self, until: float = math.inf) -> Mapping[str, Any]:
        return {}

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        """Train one step, which sets up, then so many."""
        trial = self._open(self._orders)
        try:
            trial.turn(1, until)
            turn = trial.turn(steps, until)
            if not self.history:
                self._answers = {name: trial.ask(name) for name in ("first_steps", "apart")}
                self.history += trial.history
            else:
                # Each process begins at the first step: the same losses again say nothing new.
                self.history.append(dataclasses.replace(turn, losses=[]))
        finally:
            trial.close()
        return turn

    def ask(self, name: str) -> Any:
        """Return what the first process answered."""
        return self._answers[name]

    def close(self) -> None:
        """Do nothing: no process is open."""


def failed(row: Row, error: TrialError) -> Row:
    """Return the row of a line whose trial failed."""
    broken = advice.REFUSED if error.refused else FAILED
    verdict = advice.NO_TIME if isinstance(error, LateError) else broken
    return dataclasses.replace(row, verdict=verdict, reason=error.text)


def key_of_line(levers: Levers) -> frozenset[str]:
    """Return the names of the speed-ups of a line, whatever their order."""
    return frozenset(lever.name for lever in levers)


def name_of(levers: Levers) -> str:
    """Return the names of the speed-ups of a line."""
    return " + ".join(lever.name for lever in levers)


def arguments_of(levers: Sequence[Lever]) -> dict[str, Any]:
    """Return the Trainer arguments of the speed-ups of a line."""
    return {name: value for lever in levers for name, value in lever.arguments.items()}


def _why_not_faster(row: Row, comparison: Comparison) -> str:
    factor = speed_text(comparison.speed, comparison.low, comparison.high)
    reasons = [f"{factor} the speed of {row.base or 'the unchanged program'}"] if factor else []
    if row.verdict == UNCLEAR:
        count = len(comparison.turns)
        reasons.append(f"not certain after {count} turn{'s' * (count > 1)}")
    return ", ".join(reasons)
