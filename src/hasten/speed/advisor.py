"""The advisor: measures every lever on the user's own program, in turns with it, and says what to write."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from hasten.speed import advice as words
from hasten.speed.advice import Advice, Line, Row, composed
from hasten.speed.budget import Estimate, Progress, Turns, fit
from hasten.speed.changes import usable_cores
from hasten.speed.engine import LateError, TrialError
from hasten.speed.figures import figures, one_time_seconds
from hasten.speed.levers import FITTING, Lever, choose
from hasten.speed.notes import notes
from hasten.speed.plan import AdviceError, Plan, by_promise
from hasten.speed.race import Start, Variant, costs, scratch_folder
from hasten.speed.safety import Safety
from hasten.speed.turns import Races
from hasten.speed.verdict import (
    Speed,
    compare,
    judge_gradients,
    judge_losses,
    judge_without_draws,
    noise_of,
    too_few,
    verdict_on_speed,
)

# Classes whose losses differ by chance: a leak between samples would hide in that.
_LOOKED_INTO = (Safety.OTHER_DRAWS, Safety.OTHER_BATCHES)
# A lever that loses alone may win beside others, unless it loses by more than this.
HOPELESS = 0.5
# Seconds a turn lasts, unless told otherwise, and the steps it then may have.
_TURN_SECONDS = 1.0
_FEWEST, _MOST = 3, 50
_FIRST_LOOK = 3
# A start this much longer than the unchanged one's may as well be chance.
_ONE_TIME_SECONDS = 0.2
# Share of the free memory that trials held at once may fill.
_OF_FREE_MEMORY = 0.6
_MOST_TOGETHER = 8
# Lines to write at the end are measured once more: seldom of more classes than these.
_MOST_LINES = 3
# Share of a budget for levers one by one; the rest is for those that won, together.
_FOR_LEVERS_ALONE = 0.65

_UNCHANGED = "the unchanged program cannot be measured: "

Say = Callable[[str], None]
__all__ = ["AdviceError", "MakeStart", "Plan", "measure"]

# folder of the trials -> what starts one
MakeStart = Callable[[Any], Start]


def measure(
    make_start: MakeStart,
    program: str,
    *,
    levers: Iterable[Lever | str] | None = None,
    plan: Plan | None = None,
    say: Say = lambda line: None,
) -> Advice:
    """Measure levers on a program.

    Args:
        make_start: given a folder for what trials write, returns what starts a trial.
        program: what to call it.
        levers: which, by name or as objects; all by default.
        plan: how much.
        say: told what is being done, a line each.

    Returns:
        What was found. Nothing of the trials is left, whether this returns or raises.

    Raises:
        AdviceError: the unchanged program cannot be measured.
        ValueError: a lever does not exist.

    """
    plan, chosen = plan or Plan(), choose(levers)
    for lever in chosen:
        # Found out before the first process starts.
        _ = lever.place
    with scratch_folder() as scratch:
        races = Races(
            make_start(scratch),
            scratch,
            rounds=plan.rounds,
            warm_up=plan.warm_up,
            timeout_seconds=plan.timeout_seconds,
            progress=(progress := Progress(say)),
        )
        try:
            return _Advisor(races, plan, program, say, progress).advise(chosen)
        finally:
            races.close()


class _Advisor:
    """One measurement, from the first look to the line to write."""

    def __init__(self, races: Races, plan: Plan, program: str, say: Say, progress: Progress) -> None:
        self._races, self._plan, self._program = races, plan, program
        self._say, self._progress = say, progress
        self._facts: dict[str, Any] = {}
        self._given: dict[str, str] = {}
        self._parts: dict[str, float] = {}
        self._steps_planned: float | None = None
        self._steps = plan.steps or _FEWEST
        self._noise = 0.0
        # The unchanged program run again, and with other seeds.
        self._again, self._by_seed = Variant(), list[Variant]()
        self._combinations: list[Row] = []
        # The unchanged program as it was measured first, and how much faster the levers kept are by now.
        self._unchanged, self._speed_so_far = Variant(), 1.0
        self._tokens_per_sample: float | None = None
        self._estimate = Estimate(0.0, 0.0, 0.0)
        # The unchanged program as it was when it was looked at, profiled.
        self._looked = Variant()
        self._began, self._until, self._seeds = time.monotonic(), math.inf, plan.seeds

    def advise(self, levers: Sequence[Lever]) -> Advice:
        self._look(FITTING in levers)
        rows = {lever.name: row for lever in levers if (row := self._unfit(lever)) is not None}
        racing = [lever for lever in levers if lever.name not in rows]
        racing = self._within_the_budget(racing, rows)
        spent = not racing and any(row.verdict == words.NO_TIME for row in rows.values())
        unchanged = self._looked if spent else self._race_alone(racing, rows)
        by_name = {lever.name: lever for lever in racing}
        kept: list[Lever] = []
        if self._plan.combine:
            kept = self._combine(by_name, rows)
        else:
            best = sorted((row for row in rows.values() if row.wins), key=_by_speed)
            best = [row for row in best if row.safety.is_automatic] or best
            kept = [by_name[row.name] for row in best[:1]]
        lines, kept = self._lines(kept, rows)
        automatic = next((line.levers for line in reversed(lines) if line.safety.is_automatic), [])
        safe = [lever for lever in (*self._races.always, *kept) if lever.name in automatic]
        plain = self._unchanged_row(unchanged)
        return Advice(
            program=self._program,
            unchanged=plain,
            rows=[rows[lever.name] for lever in levers],
            combinations=self._combinations,
            lines=lines,
            winners=[lever.name for lever in safe],
            arguments={name: value for lever in safe for name, value in lever.arguments.items()},
            facts=self._facts,
            parts=self._parts,
            notes=notes(self._facts, plain, rows, noise=self._noise, has_losses=bool(unchanged.losses)),
            noise=round(self._noise, 4),
            rounds=self._races.rounds,
            steps=self._steps,
            seconds=round(time.monotonic() - self._began, 1),
        )

    # -- the unchanged program

    def _look(self, may_split: bool) -> None:
        """Find out about device, model and data, and how long a step takes.

        Args:
            may_split: where batches do not fit into memory, let every variant split them.

        """
        self._say("looking at the unchanged program")
        try:
            self._look_at(Variant(looks=True))
        except TrialError as error:
            if not may_split or not error.is_out_of_memory:
                raise AdviceError(_UNCHANGED + error.with_log) from None
            self._say(f"it runs out of memory; all of the following is measured with {FITTING.line}")
            self._races.always = (FITTING,)
            try:
                self._look_at(Variant(looks=True))
            except TrialError as again:
                raise AdviceError(_UNCHANGED + again.with_log) from None
            self._facts["memory_ran_out"] = True

    def _look_at(self, variant: Variant) -> None:
        began = time.monotonic()
        contestant = self._races.enter(variant)
        try:
            contestant.at_fit()
            start_seconds = time.monotonic() - began
            prepared = contestant.prepare()
            # A step of seconds tells enough by itself.
            turn = contestant.turn(1 if prepared.step_seconds[-1] > _TURN_SECONDS else _FIRST_LOOK)
            if self._plan.steps is None:
                wanted = math.ceil(_TURN_SECONDS / max(turn.seconds / turn.steps, 1e-9))
                self._steps = min(_MOST, max(_FEWEST, wanted))
            if turn.seconds < _TURN_SECONDS:
                turn = contestant.turn(self._steps)
            self._facts = contestant.examine()
        finally:
            self._races.leave(contestant)
        self._facts.pop("event", None)
        step_seconds = turn.seconds / turn.steps
        variant.turns, self._looked = [turn], variant
        self._given = variant.given
        self._parts = {part: seconds / turn.steps for part, seconds in turn.parts.items() if seconds}
        self._steps_planned = turn.steps_planned
        free = self._facts.get("free_bytes")
        room = _MOST_TOGETHER if free is None else int(free * _OF_FREE_MEMORY // max(1, turn.memory_bytes))
        self._races.together = max(1, min(_MOST_TOGETHER, room))
        self._races.step_seconds = step_seconds
        self._estimate = Estimate(
            start_seconds,
            max(0.0, prepared.seconds - prepared.steps * step_seconds),
            step_seconds,
            at_once=usable_cores(),
            together=self._races.together,
        )

    def _within_the_budget(self, levers: list[Lever], rows: dict[str, Row]) -> list[Lever]:
        """Choose turns and levers that fit into the budget; return these levers, and add the rows of the others."""
        estimate, planned = self._estimate, self._steps_planned
        self._plan = self._plan.within_share(
            None if planned is None else planned * estimate.step_seconds,
            variants=2 + len(levers),
            step_seconds=estimate.step_seconds,
            start_seconds=estimate.start_seconds / estimate.at_once + estimate.prepare_seconds,
        )
        budget = self._plan.budget_seconds
        if budget is None or not levers:
            return levers
        share = _FOR_LEVERS_ALONE if self._plan.combine and len(levers) > 1 else 1.0
        spent = time.monotonic() - self._began
        found = fit(self._plan, self._steps, levers=len(levers), spent=spent, share=share, estimate=estimate)
        for line in found.announced(len(levers), budget):
            self._say(line)
        turns, self._seeds = found.turns, found.seeds
        self._races.rounds, self._steps, self._races.warm_up = turns.rounds, turns.steps, turns.warm_up
        self._progress.until = self._until = self._began + found.until_seconds
        ordered = by_promise(levers, starts_count=found.levers < len(levers))
        for lever in ordered[found.levers :]:
            reason = found.left_out(budget)
            safety = lever.safety_in(self._facts)
            rows[lever.name] = Row(lever.name, lever.line, safety, words.NO_TIME, reason)
        return ordered[: found.levers]

    def _run(self, variants: Sequence[Variant]) -> None:
        self._progress.begin(self._seconds_of(len(variants)))
        self._races.run(variants, self._steps, until=self._until)

    def _seconds_of(self, variants: int) -> float:
        return self._estimate.of(variants, Turns(self._races.rounds, self._steps, self._races.warm_up))

    def _has_time(self, *races: int) -> bool:
        """Return whether races of so many variants each fit into what is left of the budget."""
        return time.monotonic() + sum(map(self._seconds_of, races)) <= self._until

    def _unfit(self, lever: Lever) -> Row | None:
        """Return the row of a lever that need not be measured; None for the others."""
        row = Row(lever.name, lever.line, lever.safety_in(self._facts), words.NOT_HERE)
        if lever in self._races.always:
            reason = "the unchanged program runs out of memory: all others are measured with it"
            return dataclasses.replace(row, verdict=words.NEEDED, reason=reason)
        set_already = [name for name in lever.arguments if name in self._given]
        if lever.arguments and len(set_already) == len(lever.arguments):
            shown = ", ".join(f"{name}={self._given[name]}" for name in set_already)
            same = all(self._given[name] == repr(lever.arguments[name]) for name in set_already)
            return dataclasses.replace(
                row, verdict=words.ALREADY_ON if same else words.NOT_HERE, reason=f"the program says {shown}"
            )
        why = lever.applies(self._facts)
        if why is not None:
            return dataclasses.replace(row, reason=why)
        meet = self._facts.get("not_apart")
        if row.safety == Safety.OTHER_BATCHES and meet:
            reason = f"the samples of a batch affect one another in this model, so other batches train another: {meet}"
            return dataclasses.replace(row, verdict=words.REFUSED, reason=reason)
        if not self._plan.consent and not row.safety.is_automatic:
            return dataclasses.replace(row, verdict=words.NOT_TRIED, reason=row.safety.words)
        return None

    # -- levers one by one

    def _race_alone(self, levers: Sequence[Lever], rows: dict[str, Row]) -> Variant:
        """Measure each lever by itself; add its row."""
        first, again = self._variant(), self._variant()
        seeds = [Variant(seed=seed) for seed in range(1, self._seeds + 1)]
        # The noise is for levers to be judged by.
        lot = [first, again, *seeds] if levers else [first]
        waiting = list(levers)
        self._progress.levers = len(levers)
        pairs: list[tuple[Variant, Lever, Variant]] = []
        unchanged = first
        while lot or waiting:
            if not lot:
                unchanged = self._variant()
                lot = [unchanged]
            room = max(1, self._races.together - len(lot))
            if unchanged is first and len(lot) >= self._races.together:
                room = 0
            for lever in waiting[:room]:
                variant = self._variant(lever)
                lot.append(variant)
                pairs.append((unchanged, lever, variant))
            del waiting[:room]
            self._say("measuring " + ", ".join(dict.fromkeys(variant.name for variant in lot)))
            self._run(lot)
            self._require(unchanged)
            lot = []
        self._progress.levers = 0
        self._unchanged = first
        tokens, samples = (
            sum(getattr(turn, name) or 0 for each in (first, again, *seeds) for turn in each.turns)
            for name in ("tokens", "samples")
        )
        self._tokens_per_sample = tokens / samples if tokens and samples else None
        if again.turns and again.error is None and first.turns:
            self._noise = noise_of(compare(*costs(first, again)))
        self._again, self._by_seed = again, seeds
        for beside, lever, variant in pairs:
            rows[lever.name] = self._judge(variant, beside)
        return first

    def _require(self, unchanged: Variant) -> None:
        if unchanged.error is not None:
            raise AdviceError(_UNCHANGED + unchanged.error.with_log)

    def _judge(self, variant: Variant, unchanged: Variant, speed: Speed | None = None) -> Row:
        """Return the row of a variant that was measured beside the unchanged program.

        Args:
            variant: what was measured.
            unchanged: what its losses are compared with, and its speed unless that is given.
            speed: how many times as fast as the unchanged program, where it was measured beside another variant.

        """
        classes = [lever.safety_in(self._facts) for lever in variant.levers]
        safety = max(classes, default=Safety.SAME_BITS)
        row = Row(variant.name, composed(variant.levers), safety, words.FAILED)
        if variant.error is not None:
            if isinstance(variant.error, LateError):
                return dataclasses.replace(row, verdict=words.NO_TIME, reason=variant.error.text)
            verdict = words.REFUSED if variant.error.refused else words.FAILED
            return dataclasses.replace(row, verdict=verdict, reason=variant.error.text)
        # What draws by itself draws others in another type.
        alike = all(each.keeps_batches for each in classes) and not (
            Safety.LOWER_PRECISION in classes and self._facts.get("step_draws", True)
        )
        again, coarse = self._again, bool(self._facts.get("coarse"))
        losses = judge_losses(
            unchanged.losses,
            variant.losses,
            safety=safety,
            again=[] if again.error else again.losses,
            seeds=[each.losses for each in self._by_seed if each.error is None],
            alike=alike,
            coarse=coarse,
        )
        if speed is None:
            speed = compare(*costs(unchanged, variant))
        row = dataclasses.replace(
            row,
            speed=speed.median,
            low=speed.low,
            high=speed.high,
            **self._figures(variant),
            one_time_seconds=one_time_seconds(variant, unchanged),
            loss_deviation=losses.deviation,
            loss_noise=losses.allowed,
        )
        wrong = losses.reason
        if not wrong and alike:
            wrong = judge_gradients(
                unchanged.gradients, variant.gradients, safety=safety, again=again.gradients, coarse=coarse
            )
        if not wrong and not alike and all(lever.keeps_first_batch(self._facts) for lever in variant.levers):
            wrong = judge_without_draws(unchanged.without_draws, variant.without_draws, coarse=coarse)
        if not wrong and variant.not_apart and not self._facts.get("not_apart"):
            wrong = f"with it the samples of a batch affect one another: {variant.not_apart}"
        if wrong:
            return dataclasses.replace(row, verdict=words.WRONG, reason=wrong)
        verdict = verdict_on_speed(speed, self._noise)
        reason = ""
        both = variant.turns[: len(unchanged.turns)]
        measured = sum(turn.seconds for turn in both)
        if not variant.given_up and (few := too_few(len(both), sum(turn.steps for turn in both), measured)):
            return dataclasses.replace(row, verdict=words.UNCLEAR, reason=few)
        if verdict == words.UNCLEAR:
            reason = (
                f"{speed.median:.2f}x, {speed.least:.2f}x in its worst turns, and the unchanged program differs from "
                f"itself by {self._noise:.0%}"
            )
        if verdict == words.SLOWER:
            reason = f"{speed.median:.2f}x the speed of the unchanged program"
        if verdict == words.WINS:
            verdict, reason, row.break_even_steps = self._pays_back(row, unchanged, speed.median)
        return dataclasses.replace(row, verdict=verdict, reason=reason)

    def _pays_back(self, row: Row, unchanged: Variant, speed: float) -> tuple[str, str, float | None]:
        """Return verdict, reason and the steps after which a longer start is won back."""
        once = row.one_time_seconds or 0.0
        if once < _ONE_TIME_SECONDS:
            return words.WINS, "", None
        each = median(turn.seconds / turn.steps for turn in unchanged.turns)
        steps = once / (each * (1.0 - 1.0 / speed))
        planned = self._steps_planned
        text = f"starting takes {once:.1f} s more, won back after {math.ceil(steps):,} steps"
        if planned is not None and math.isfinite(planned) and steps > planned:
            return words.NEVER_PAYS, f"{text}; this training has {int(planned):,}", steps
        return words.WINS, text, steps

    def _figures(self, variant: Variant) -> dict[str, Any]:
        return figures(variant, self._facts, self._given, self._tokens_per_sample)

    def _unchanged_row(self, unchanged: Variant) -> Row:
        row = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0, **self._figures(unchanged))
        return dataclasses.replace(row, low=1.0 / (1.0 + self._noise), high=1.0 + self._noise)

    # -- levers together

    def _combine(self, by_name: dict[str, Lever], rows: dict[str, Row]) -> list[Lever]:
        """Add winner after winner, the best first, then what lost alone; keep what gains on top of the others."""
        measured = [row for row in rows.values() if row.speed is not None and row.name in by_name]
        winners = sorted((row for row in measured if row.wins), key=_by_speed)
        safe = [by_name[row.name] for row in winners if row.safety.is_automatic]
        kept = safe[:1]
        if kept:
            self._speed_so_far = rows[kept[0].name].speed or 1.0
        for lever in safe[1:]:
            kept = self._with(kept, [lever])
        if kept:
            # What loses alone may win now: bf16 pays where memory no longer decides, for instance.
            others = [
                by_name[row.name]
                for row in sorted(measured, key=_by_speed)
                if row.verdict in (words.NO_GAIN, words.SLOWER, words.UNCLEAR)
                and (row.speed or 0.0) > HOPELESS
                and row.safety.is_automatic
            ]
            kept = self._with(kept, others)
        if self._plan.consent:
            asking = sorted((row for row in measured if not row.safety.is_automatic), key=_by_speed)
            asking = [row for row in asking if (row.speed or 0.0) > HOPELESS and row.verdict != words.WRONG]
            # What trains another model comes after what trains this one.
            for group in (
                [row for row in asking if row.safety != Safety.OTHER_MATHS],
                [row for row in asking if row.safety == Safety.OTHER_MATHS],
            ):
                if not kept and group and group[0].wins:
                    kept, self._speed_so_far = [by_name[group[0].name]], group[0].speed or 1.0
                    group = group[1:]
                if kept:
                    kept = self._with(kept, [by_name[row.name] for row in group])
        return kept

    def _with(self, kept: list[Lever], candidates: Sequence[Lever]) -> list[Lever]:
        """Return the levers kept, with each candidate that gains on top of them.

        In turns with what is kept, not with the unchanged program, which may be ten times as slow by then: what is
        written is measured against that once more.
        """
        possible = [lever for lever in candidates if not _in_conflict(lever, kept)]
        # Each time the last race, too: it measures what is to be written.
        while possible and self._has_time(2, _MOST_LINES):
            base = Variant(levers=tuple(kept))
            tried = {lever.name: self._variant(*kept, lever) for lever in possible}
            self._say("measuring " + " + ".join([*base.name.split(" + "), " or ".join(tried)]))
            gains: dict[str, float] = {}
            waiting = list(tried.values())
            while waiting and self._has_time(2, _MOST_LINES):
                room = max(1, self._races.together - 1)
                while room > 1 and not self._has_time(1 + min(room, len(waiting)), _MOST_LINES):
                    room = min(room, len(waiting)) - 1
                lot, waiting = waiting[:room], waiting[room:]
                if base.turns:
                    base = Variant(levers=base.levers)
                self._run([base, *lot])
                if base.error is not None:
                    return kept
                for variant in lot:
                    row, over = self._judge_on_top(variant, base)
                    if row.wins:
                        gains[variant.levers[-1].name] = over
                    self._combinations.append(row)
            if not gains:
                return kept
            best = max(gains, key=lambda name: gains[name])
            kept = [*kept, next(lever for lever in possible if lever.name == best)]
            self._speed_so_far *= gains[best]
            # The others gained, too, on what was there before: they are tried again on top of the best.
            possible = [
                lever
                for lever in possible
                if lever.name in gains and lever.name != best and not _in_conflict(lever, kept)
            ]
        return kept

    def _judge_on_top(self, variant: Variant, base: Variant) -> tuple[Row, float]:
        """Return the row of a variant measured in turns with the levers it adds one to, and what that one gains."""
        if variant.error is not None:
            return self._judge(variant, self._unchanged), 0.0
        over = compare(*costs(base, variant))
        so_far = self._speed_so_far
        speed = Speed(so_far * over.median, so_far * over.low, so_far * over.high, over.turns)
        row = self._judge(variant, self._unchanged, speed)
        if row.wins and verdict_on_speed(over, self._noise) != words.WINS:
            reason = f"{over.median:.2f}x with {variant.levers[-1].name} on top of {base.name}"
            row = dataclasses.replace(row, verdict=words.NO_GAIN, reason=reason)
        return row, over.median

    def _lines(self, kept: Sequence[Lever], rows: dict[str, Row]) -> tuple[list[Line], list[Lever]]:
        """Measure what is to be written, safest first, against the unchanged program; drop what then does not win."""
        ordered = sorted(kept, key=lambda lever: lever.safety_in(self._facts))
        sets: list[list[Lever]] = []
        for safety in Safety:
            upto = [lever for lever in ordered if lever.safety_in(self._facts) <= safety]
            if upto and upto not in sets:
                sets.append(upto)
        always = self._races.always
        needed = [self._line_of(always, 1.0)] if always else []
        if not sets:
            return needed, []
        if len(sets) == 1 and len(sets[0]) == 1:
            # Measured already, by itself.
            return [self._line_of([*always, *sets[0]], rows[sets[0][0].name].speed or 1.0)], list(sets[0])
        if not self._has_time(1 + len(sets)):
            return self._best_alone(kept, rows)
        plain, variants = self._variant(), [self._variant(*levers) for levers in sets]
        self._say("measuring what to write against the unchanged program")
        self._run([plain, *variants])
        self._require(plain)
        lines: list[Line] = []
        written: list[Lever] = []
        for levers, variant in zip(sets, variants, strict=True):
            row = self._judge(variant, plain)
            self._combinations.append(row)
            if row.wins and row.speed is not None and (not lines or row.speed > lines[-1].speed):
                lines.append(self._line_of([*always, *levers], row.speed))
                written = levers
        if not written and any(isinstance(variant.error, LateError) for variant in variants):
            return self._best_alone(kept, rows)
        return lines or needed, written

    def _variant(self, *levers: Lever) -> Variant:
        """Return a variant with these levers, and with what else is computed where losses alone cannot be compared."""
        classes = {lever.safety_in(self._facts) for lever in levers}
        return Variant(
            levers=levers,
            compares=bool(self._facts.get("step_draws"))
            and not any("compile" in lever.arguments for lever in levers),
            checks_samples=not classes.isdisjoint(_LOOKED_INTO),
        )

    def _line_of(self, levers: Sequence[Lever], speed: float) -> Line:
        safety = max(lever.safety_in(self._facts) for lever in levers)
        return Line(safety, composed(levers), [lever.name for lever in levers], speed)

    def _best_alone(self, kept: Sequence[Lever], rows: dict[str, Row]) -> tuple[list[Line], list[Lever]]:
        """Return the line of the best lever, which was measured beside the unchanged program by itself."""
        always, best = self._races.always, kept[0]
        if rows[best.name].wins:
            return [self._line_of([*always, best], rows[best.name].speed or 1.0)], [best]
        return [self._line_of(always, 1.0)] if always else [], []


def _by_speed(row: Row) -> float:
    return -(row.speed or 0.0)


def _in_conflict(lever: Lever, kept: Sequence[Lever]) -> bool:
    return any(
        other.name in lever.conflicts
        or lever.name in other.conflicts
        or not set(lever.arguments).isdisjoint(other.arguments)
        for other in kept
    )
