"""The advisor: finds the fastest line for a program by hill climbing, and measures a verdict on each speed-up.

The unchanged program is inspected once, and speed-ups are ordered by the gain expected from what was found. The first
is raced against the unchanged program, and each next one against the fastest line so far, whose steps are short then.
At the end removals are tried, and the lines to write are measured once against the unchanged program. When the time is
over the search stops, with the best speed-ups behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hasten._lib.errors import make_error
from hasten._lib.observers import set_during
from hasten_tools.speed import advice as words
from hasten_tools.speed.advice import Advice, Line, Row, composed, notes
from hasten_tools.speed.fit_trial import Orders
from hasten_tools.speed.levers import FITTING, Lever, choose, expected_gain, waits_for_data
from hasten_tools.speed.races import (
    TURNS_PER_ROUND,
    Levers,
    OpenTrial,
    Plan,
    Races,
    TrainerTrial,
    arguments_of,
    failed,
    key_of_line,
    name_of,
)
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import (
    NO_GAIN,
    NOISY,
    SLOWER,
    UNCLEAR,
    WORTH_A_LINE,
    LateError,
    TrialError,
    TrialStarter,
)

# A speed-up that lost on a line this much slower than the final one is tried again, unless it lost by more than half.
_MUCH_FASTER = 1.2
_HOPELESS = 0.5
# About the steps that confirming the lines takes of the unchanged program, and that a comparison takes at least.
_STEPS_TO_CONFIRM = 6
_STEPS_TO_COMPARE = 6
# The same with one turn of each.
_STEPS_OF_ONE_TURN = 4
# Largest share of a budget that is kept for confirming.
_MOST_TO_CONFIRM = 0.25
# If the best line needs consent, share of the time that the search for one that needs none may take.
_SHARE_OF_UNCHANGED = 0.25
# A speed-up that promises less is not part of that search.
_WORTH_A_SECOND_SEARCH = 1.02
# A line that is this fast without a speed-up does not need it.
_AS_FAST = 0.98
# An unclear speed-up that seems to gain more is tried again with the others of its kind.
_SEEMS_TO_GAIN = 1.02
# A speed-up that compiles gets as much time as so many others: it starts slowly.
_TIMES_TO_COMPILE = 3
_UNCHANGED = "the unchanged program cannot be measured: "

Say = Callable[[str], None]


class AdviceError(RuntimeError):
    """The unchanged program cannot be measured."""


class TooShortError(AdviceError):
    """Measuring would take too large a part of the training."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is measured."""

    title: str
    # The function of a trial's process, "package.module:function", and its arguments after session and orders.
    target: str
    arguments: tuple[Any, ...] = ()
    # Written to a file whose path is the last argument.
    payload: bytes | None = None
    # Modules that trials share.
    preload: Sequence[str] = ()


def measure(
    program: Program,
    *,
    levers: Iterable[Lever | str] | None = None,
    plan: Plan | None = None,
    say: Say = lambda line: None,
    began: float | None = None,
) -> Advice:
    """Measure speed-ups (all by default) on a program; ``say`` is called with lines of progress.

    Nothing of the trials is left, whether this returns or raises. After Ctrl-C the result is what was measured so far.

    The budget is spent from ``began`` on, of ``time.monotonic``; now by default.

    Raises:
        AdviceError: the unchanged program cannot be measured.
        ValueError: a speed-up does not exist.

    """
    plan, chosen = plan or Plan(), choose(levers)
    for lever in chosen:
        # A change that cannot be found is an error before the first process starts.
        _ = lever.place
    began = time.monotonic() if began is None else began
    deadline = began + (plan.budget_seconds or math.inf)
    with TrialStarter(timeout_seconds=plan.timeout_seconds, deadline=deadline) as starter:
        search = LineSearch(trial_opener(starter, program), plan, program.title, say=say, began=began)
        return search.advise(chosen)


def trial_opener(starter: TrialStarter, program: Program) -> OpenTrial:
    """Return a function that starts trials of a program."""
    starter.preload(program.preload)
    arguments = program.arguments
    if program.payload is not None:
        path = starter.scratch / "payload.pickle"
        path.write_bytes(program.payload)
        arguments = (*arguments, str(path))

    def open_trial(orders: Orders) -> TrainerTrial:
        return starter.start(program.target, orders, *arguments, allocator=orders.allocator)

    return open_trial


class LineSearch:
    """One search, from the first inspection to the lines to write."""

    def __init__(
        self,
        open_trial: OpenTrial,
        plan: Plan,
        title: str,
        *,
        say: Say = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self._plan, self._title, self._say, self._clock = plan, title, say, clock
        self._races = Races(open_trial, plan, clock=clock)
        self._began = clock() if began is None else began
        self._until = self._began + (plan.budget_seconds or math.inf)
        self._to_try: list[Lever] = []
        self._rows: dict[str, Row] = {}
        self._combinations: list[Row] = []
        # The fastest line so far.
        self._fastest: Levers = ()
        self._is_interrupted = False

    def advise(self, levers: Sequence[Lever]) -> Advice:
        """Return the verdicts and the lines to write."""
        try:
            self._inspect(may_split=FITTING in levers)
            lines = self._search(levers)
        except KeyboardInterrupt:
            if not self._races.inspected.turns:
                raise
            self._is_interrupted = True
            lines = self._lines_so_far()
        return self._advice(levers, lines)

    def _search(self, levers: Sequence[Lever]) -> list[Line]:
        """Measure; return the lines to write."""
        if not self._facts:
            return []
        self._limit_to_share()
        fit = []
        for lever in levers:
            safety = lever.safety_in(self._facts)
            verdict, reason = self._why_unfit(lever, safety)
            if verdict:
                self._rows[lever.name] = Row(lever.name, lever.line, safety, verdict, reason)
            else:
                fit.append(lever)
        # Where a program waits for its data, all else shows less than what ends the wait.
        waits = waits_for_data(self._facts)
        fit.sort(key=lambda lever: (not (waits and lever.brings_data), -expected_gain(lever, self._facts)))
        other_models = [lever for lever in fit if lever.safety == Safety.OTHER_MATHS]
        same_model = [lever for lever in fit if lever.safety != Safety.OTHER_MATHS]
        # Compilers come last, the one of a whole model after the one of its blocks: their time is unknown.
        compiled = [lever for lever in same_model if "compile" in lever.arguments]
        compiled.sort(key=lambda lever: lever.arguments["compile"] != "regional")
        self._to_try = fit
        kept = self._climb((), [lever for lever in same_model if lever not in compiled])
        # Speed-ups that train another model are tried on top of those that train this one.
        whole = self._climb(kept, other_models)
        kept = self._climb(kept, compiled)
        if self._plan.combine:
            kept = self._with_unclear(kept, same_model)
            kept = self._removed(self._climb(kept, self._worth_another_try(same_model, kept), again=True))
            whole = (*kept, *(lever for lever in whole if lever.safety == Safety.OTHER_MATHS))
            lines = self._confirmed([*self._by_class(self._automatic_line(same_model, kept), kept), whole])
        else:
            lines = self._best_alone(levers)
        return lines

    def _lines_so_far(self) -> list[Line]:
        """Return the lines to write if nothing more is measured."""
        if not self._plan.combine:
            return self._best_alone(choose(None))
        classes = {lever.name: lever.safety_in(self._facts) for lever in self._fastest}
        found: list[Line] = []
        for most in sorted(set(classes.values())):
            line = tuple(one for one in self._fastest if classes[one.name] <= most)
            speed = self._races.speeds.get(key_of_line(line)) or self._concluded(line)
            if speed > (found[-1].speed if found else 1.0) * WORTH_A_LINE:
                found.append(self._line_of(line, speed))
        return found

    @property
    def _facts(self) -> dict[str, Any]:
        return self._races.facts

    def _advice(self, levers: Sequence[Lever], lines: list[Line]) -> Advice:
        races, facts = self._races, self._facts
        late = "interrupted" if self._is_interrupted else "time ran out before it began"
        for lever in levers:
            row = Row(lever.name, lever.line, lever.safety_in(facts), words.NO_TIME, late)
            self._rows.setdefault(lever.name, row)
        noise, waited = races.noise, races.waited_share
        if max(noise, waited) > NOISY:
            # What is not certain on a busy machine is not a line to write; without some speed-ups nothing runs.
            needed = [dataclasses.replace(self._line_of((), 1.0), least=1.0)] if races.always else []
            lines = [line for line in lines if line.least is not None] or needed
            written = {name for line in lines for name in line.levers}
            for row in (*self._rows.values(), *self._combinations):
                if row.wins and not written.issuperset(row.levers):
                    row.verdict = UNCLEAR
                if row.gain is not None and row.verdict in (NO_GAIN, SLOWER, UNCLEAR):
                    # Instead of a factor.
                    row.reason = "this machine was too busy to say by how much"
        best = next((line.levers for line in reversed(lines) if line.safety.is_automatic), [])
        every = {lever.name: lever for lever in (*races.always, *levers)}
        safe = [lever for name, lever in every.items() if name in best]
        unchanged = races.unchanged_row()
        has_losses = bool(races.inspected.losses)
        return Advice(
            program=self._title,
            unchanged=unchanged,
            rows=list(self._rows.values()),
            combinations=self._combinations,
            lines=lines,
            winners=[lever.name for lever in safe],
            arguments=arguments_of(safe),
            facts=facts,
            parts=facts.get("parts", {}),
            notes=notes(facts, unchanged, self._rows, noise=noise, waited=waited, has_losses=has_losses),
            noise=round(noise, 4),
            waited_share=round(waited, 4),
            rounds=TURNS_PER_ROUND * self._plan.rounds,
            steps=races.steps_of(races.inspected.step_seconds),
            seconds=round(self._clock() - self._began, 1),
            unchanged_seconds=round(races.unchanged_seconds, 1),
            needed_seconds=self._needed_seconds(),
            interrupted=self._is_interrupted,
        )

    def _needed_seconds(self) -> float | None:
        """Return about the budget with which all speed-ups would have been measured; None if they were."""
        late = sum(row.verdict == words.NO_TIME for row in self._rows.values())
        if not late:
            return None
        races = self._races
        # A speed-up that compiles takes longer than the others; how long is not known.
        seconds = late * (races.start_seconds + 1.5 * _STEPS_TO_COMPARE * races.step_seconds(self._fastest))
        seconds += self._clock() - self._began + races.start_seconds
        return 30.0 * math.ceil((seconds + _STEPS_TO_CONFIRM * races.inspected.step_seconds) / 30.0)

    # -- before the first race

    def _inspect(self, *, may_split: bool) -> None:
        """Find out about device, model and data; if batches do not fit into memory, every trial may split them."""
        self._say(f"starting the unchanged program and looking at it ({self._left()})")
        races = self._races
        try:
            races.inspect(self._until)
        except LateError:
            if races.inspected.turns:
                return
            seconds = self._clock() - self._began
            more = 30.0 * math.ceil(4 * seconds / 30.0)
            what = f"{_UNCHANGED}its first step had not ended after {seconds:.0f} s."
            raise make_error(AdviceError, what, fix=f"Use a budget of {more:.0f} or more") from None
        except TrialError as error:
            if races.always or not may_split or not error.is_out_of_memory:
                raise AdviceError(_UNCHANGED + error.with_log) from None
            self._say(f"it runs out of memory; everything else is measured with {FITTING.line}")
            races.always = (FITTING,)
            self._inspect(may_split=False)
            self._facts["memory_ran_out"] = True

    def _limit_to_share(self) -> None:
        share, planned = self._plan.share_of_training, self._races.steps_planned
        if share is None or planned is None or not math.isfinite(planned):
            return
        seconds = planned * self._races.inspected.step_seconds
        if share * seconds < 2 * (self._clock() - self._began):
            raise TooShortError(
                f"it takes about {seconds:,.0f} s, and measuring more than {share:.0%} of that. `hasten advise` "
                "measures it all the same, and its result is used here"
            )
        self._until = min(self._until, self._began + share * seconds)

    def _why_unfit(self, lever: Lever, safety: Safety) -> tuple[str, str]:
        """Return the verdict and the reason of a speed-up that is not measured; empty for one that is."""
        if lever in self._races.always:
            return words.NEEDED, "the unchanged program runs out of memory: all others are measured with it"
        given = self._races.given
        if lever.arguments and all(name in given for name in lever.arguments):
            shown = ", ".join(f"{name}={given[name]}" for name in lever.arguments)
            same = all(given[name] == repr(value) for name, value in lever.arguments.items())
            return words.ALREADY_ON if same else words.NOT_HERE, f"the program has {shown}"
        why = lever.applies(self._facts)
        if why is not None:
            return words.NOT_HERE, why
        return (words.NOT_TRIED, safety.words) if safety > self._plan.most else ("", "")

    # -- climbing

    def _climb(self, base: Levers, levers: Sequence[Lever], *, again: bool = False) -> Levers:
        """Try speed-ups one after another on the fastest line so far, beginning with ``base``; return that line.

        Speed-ups that are tried ``again`` have a row already, which only a win replaces.
        """
        if again:
            self._to_try = list(levers)
        for lever in levers:
            line = _with(base, lever)
            # A line of one speed-up was measured against the unchanged program already.
            reserve = 0.0 if again and len(base) < 2 else self._reserve()
            if base and not again:
                # Those that stay unclear are raced together.
                reserve += 2 * self._least_seconds(base)
            if not base and self._until - reserve - self._clock() < self._least_seconds(base):
                # A line of one speed-up is not confirmed, and one turn shows a large gain.
                reserve = 0.0
            left = self._until - reserve - self._clock()
            if left < self._races.start_seconds + _STEPS_OF_ONE_TURN * self._races.step_seconds(base):
                # It would take the time of the lines that are confirmed, and end without a verdict.
                self._late(lever, again=again)
                continue
            on_top = f" on top of {name_of(base)}" if base else ""
            self._say(f"{lever.name}{on_top} ({len(self._to_try)} to try, {self._left()})")
            share = _parts_of_time(lever) / sum(map(_parts_of_time, self._to_try))
            # What one does not need is for those after it.
            (row,) = self._race(base, {lever.name: line}, share=share * left, reserve=reserve)
            self._to_try = [other for other in self._to_try if other is not lever]
            if not again or row.wins:
                self._rows[lever.name] = row
            if row.wins and self._plan.combine:
                base = self._fastest = line
                self._races.speeds[key_of_line(line)] = row.speed or 1.0
        return base

    def _late(self, lever: Lever, *, again: bool) -> None:
        self._to_try = [other for other in self._to_try if other is not lever]
        if not again:
            reason = "time ran out before it began"
            row = Row(lever.name, lever.line, lever.safety_in(self._facts), words.NO_TIME, reason)
            self._rows[lever.name] = row

    def _with_unclear(self, base: Levers, levers: Sequence[Lever]) -> Levers:
        """Try all speed-ups at once that seem to gain but stayed unclear: together they may be certain."""
        rows = self._rows
        found = [
            lever
            for lever in levers
            if lever not in base
            and rows[lever.name].verdict == UNCLEAR
            and (rows[lever.name].gain or 0.0) > _SEEMS_TO_GAIN
        ]
        line: Levers = functools.reduce(_with, found, base)
        added = tuple(lever for lever in line if lever in found)
        if len(added) < 2 or not base:
            return base
        self._say(f"{name_of(added)} on top of {name_of(base)}: together ({self._left()})")
        (together,) = self._race(base, {name_of(added): line})
        self._combinations.append(together)
        if not together.wins:
            return base
        for lever in added:
            row = rows[lever.name]
            row.verdict, row.reason = words.WINS, f"{together.gain:.2f}x together: {name_of(added)}"
        self._races.speeds[key_of_line(line)] = together.speed or 1.0
        return line

    def _worth_another_try(self, levers: Sequence[Lever], kept: Levers) -> list[Lever]:
        """Return speed-ups that lost on a much slower line, where bf16 may not help yet, or stayed unclear."""
        found = []
        for lever in levers:
            row = self._rows[lever.name]
            if lever in kept or row.gain is None or row.speed is None:
                continue
            was_slow = self._races.speeds[key_of_line(kept)] > _MUCH_FASTER * row.speed / row.gain
            lost = row.verdict in (NO_GAIN, SLOWER) and row.gain > _HOPELESS
            if (row.verdict == UNCLEAR and math.isfinite(self._until)) or (lost and was_slow):
                found.append(lever)
        return found

    def _removed(self, line: Levers) -> Levers:
        """Return a line without the speed-ups that do not make it faster; the last one was tried on the others."""
        for lever in line[:-1]:
            if self._clock() + self._least_seconds(line) + self._reserve() > self._until:
                break
            self._say(f"without {lever.name} ({self._left()})")
            without = tuple(other for other in line if other != lever)
            (row,) = self._race(line, {f"without {lever.name}": without})
            self._combinations.append(row)
            if row.wins or (row.verdict == NO_GAIN and (row.gain or 0.0) > _AS_FAST):
                line = without
                self._races.speeds[key_of_line(line)] = row.speed or 1.0
        return line

    def _automatic_line(self, levers: Sequence[Lever], kept: Levers) -> Levers:
        """Return the best line that needs no consent; a second search finds it if the best line of all needs it."""
        safe = [lever for lever in levers if lever.safety_in(self._facts).is_automatic]
        automatic = tuple(lever for lever in kept if lever in safe)
        if automatic == kept:
            return automatic
        self._races.speeds.setdefault(key_of_line(automatic), self._concluded(automatic))
        spent = self._clock() - self._began
        allowed = (_SHARE_OF_UNCHANGED * spent - self._races.unchanged_seconds) / (1 - _SHARE_OF_UNCHANGED)
        if allowed < self._least_seconds(automatic):
            return automatic
        others = [
            lever
            for lever in safe
            if lever not in automatic and expected_gain(lever, self._facts) > _WORTH_A_SECOND_SEARCH
        ]
        with set_during(self, _until=min(self._until, self._clock() + allowed + self._reserve())):
            return self._climb(automatic, others, again=True)

    def _by_class(self, automatic: Levers, kept: Levers) -> list[Levers]:
        """Return the best line without consent, then the parts of the fastest by their class, the safest first."""
        classes = {lever.name: lever.safety_in(self._facts) for lever in kept}
        lines = [tuple(one for one in kept if classes[one.name] <= most) for most in sorted(set(classes.values()))]
        for line in lines:
            self._races.speeds.setdefault(key_of_line(line), self._concluded(line))
        left = self._until - self._clock() - self._reserve()

        def is_worth_it(line: Levers) -> bool:
            promises = self._races.speeds[key_of_line(line)] > WORTH_A_LINE
            return promises or self._least_seconds(line) < left

        return list(filter(is_worth_it, (automatic, *lines)))

    def _concluded(self, line: Levers) -> float:
        """Return about how many times as fast as the unchanged program a part of the fastest line is."""
        names, seconds = key_of_line(line), 1.0
        for row in (self._rows[lever.name] for lever in line):
            gain, speed = row.gain or 1.0, row.speed or 1.0
            share = 1.0 - 1.0 / gain
            # On top of speed-ups that the line does not have, it saves the time that it saved there.
            seconds -= share * seconds if names.issuperset(row.levers) else share * min(seconds, gain / speed)
        return 1.0 / seconds

    def _race(
        self, base: Levers, lines: dict[str, Levers], *, share: float = math.inf, reserve: float | None = None
    ) -> list[Row]:
        """Return the rows of lines that are raced against a base, within this share of the time if possible."""
        now, until = self._clock(), self._until - (self._reserve() if reserve is None else reserve)
        error: TrialError = LateError("time ran out before it began")
        if now < until:
            try:
                return self._races.run(base, lines, until=until, enough_at=now + share, deadline=self._until)
            except LateError as late:
                error = late
            except TrialError as failure:
                if not base:
                    raise AdviceError(_UNCHANGED + failure.with_log) from None
                error = failure
        last = ((name, line[-1]) for name, line in lines.items())
        rows = (Row(name, lever.line, lever.safety_in(self._facts), "") for name, lever in last)
        return [failed(row, error) for row in rows]

    # -- the lines to write

    def _confirmed(self, lines: Sequence[Levers]) -> list[Line]:
        """Measure lines against the unchanged program, all in one race; return those that win, safest first."""
        chosen = [line for number, line in enumerate(lines) if line and line not in lines[:number]]
        rows = [self._rows[line[0].name] for line in chosen]
        pairs = list(zip(rows, chosen, strict=True))
        direct = all(row.levers == [row.name] and len(line) == 1 for row, line in pairs)
        if not direct:
            rows = self._against_the_unchanged(chosen)
            for line, row in zip(chosen, rows, strict=True):
                self._note(line, row)
        found: list[Line] = []
        for line, row in zip(chosen, rows, strict=True):
            speed = row.speed or 0.0
            if not direct and row.verdict in (words.NO_TIME, UNCLEAR):
                # Concluded from race to race.
                speed = self._races.speeds.get(key_of_line(line), 0.0)
            elif not row.wins:
                continue
            if speed > (found[-1].speed if found else 1.0) * WORTH_A_LINE:
                found.append(self._line_of(line, speed))
        return found or ([self._line_of((), 1.0)] if self._races.always else [])

    def _against_the_unchanged(self, lines: Sequence[Levers]) -> list[Row]:
        named = {name_of(line): line for line in lines}
        if self._until - self._clock() < self._races.start_seconds + 2 * self._races.inspected.step_seconds:
            late = LateError("time ran out before it began")
            classes = [max(lever.safety_in(self._facts) for lever in line) for line in lines]
            return [failed(Row(name, "", safety, ""), late) for name, safety in zip(named, classes, strict=True)]
        self._say(f"measuring what to write against the unchanged program ({self._left()})")
        return self._race((), named, reserve=0.0)

    def _best_alone(self, levers: Sequence[Lever]) -> list[Line]:
        """Return the line of the best speed-up by itself; one that needs no consent if there is one."""
        rows = sorted((row for row in self._rows.values() if row.wins), key=lambda row: -(row.speed or 0.0))
        best = next((row for row in rows if row.safety.is_automatic), rows[0] if rows else None)
        line = tuple(lever for lever in levers if best is not None and lever.name == best.name)
        return [self._line_of(line, best.speed or 1.0)] if best is not None else []

    def _note(self, line: Levers, row: Row) -> None:
        """Keep one row for each configuration: a direct measurement replaces a conclusion."""
        for known in (*self._rows.values(), *self._combinations):
            if frozenset(known.levers) == key_of_line(line) and known.speed is not None:
                if row.speed is None:
                    return
                known.speed, known.low, known.high, known.least = row.speed, row.low, row.high, row.least
                if known.wins and not row.wins:
                    known.verdict, known.reason = row.verdict, row.reason
                return
        self._combinations.append(row)

    def _line_of(self, levers: Levers, speed: float) -> Line:
        every = (*self._races.always, *levers)
        safety = max(lever.safety_in(self._facts) for lever in every)
        rows = [*self._rows.values(), *self._combinations]
        # The ends of the interval belong to this speed, not to a conclusion from other races.
        row = next((row for row in rows if frozenset(row.levers) == key_of_line(levers) and row.speed == speed), None)
        ends = (None, None, None) if row is None else (row.low, row.high, row.least)
        return Line(safety, composed(every), [lever.name for lever in every], speed, *ends)

    # -- time

    def _least_seconds(self, line: Levers) -> float:
        """Return about the seconds that a comparison with a line takes at least."""
        return self._races.start_seconds + _STEPS_TO_COMPARE * self._races.step_seconds(line)

    def _reserve(self) -> float:
        """Return about the seconds that measuring the lines against the unchanged program takes."""
        seconds = self._races.start_seconds + _STEPS_TO_CONFIRM * self._races.inspected.step_seconds
        return min(seconds, _MOST_TO_CONFIRM * (self._until - self._began))

    def _left(self) -> str:
        if math.isfinite(self._until):
            return f"{max(0.0, self._until - self._clock()):.0f} s left"
        return f"{self._clock() - self._began:.0f} s so far"


def _parts_of_time(lever: Lever) -> int:
    return _TIMES_TO_COMPILE if "compile" in lever.arguments else 1


def _with(base: Levers, lever: Lever) -> Levers:
    """Return a line with one more speed-up, in place of those that conflict with it."""

    def conflicts(other: Lever) -> bool:
        named = other.name in lever.conflicts or lever.name in other.conflicts
        return named or not set(lever.arguments).isdisjoint(other.arguments)

    return (*(other for other in base if not conflicts(other)), lever)
