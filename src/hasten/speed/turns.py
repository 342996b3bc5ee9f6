"""Trials in turns: each trains a few steps, one at a time, over and over (A B C A B C ...)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hasten.speed.budget import Progress
from hasten.speed.changes import usable_cores
from hasten.speed.engine import LateError, TrialError
from hasten.speed.levers import Lever
from hasten.speed.race import Contestant, Start, Variant, costs

# Times as slow as the first: seen once that is enough, however busy the machine is.
_HOPELESS = 4.0
# Turns of each that are taken, also late: a verdict needs them.
_FEWEST_TURNS = 2


class Races:
    """Runs variants against one another.

    Args:
        start: starts the process of a trial.
        scratch: a folder of their own.
        rounds: turns of each variant.
        warm_up: steps of each before the clock.
        timeout_seconds: how long an answer may take: starting, preparing (compiling), a turn.
        progress: says what is being done.
        together: variants held in memory at a time, the unchanged program among them.

    """

    def __init__(
        self,
        start: Start,
        scratch: Path,
        *,
        rounds: int,
        warm_up: int,
        timeout_seconds: float,
        progress: Progress,
        together: int = 1,
    ) -> None:
        self._start, self._scratch, self._progress = start, scratch, progress
        self.rounds, self.warm_up, self.together = rounds, warm_up, together
        self._timeout = timeout_seconds
        self._open: list[Contestant] = []
        # On in every variant, the unchanged program's too: it cannot run without.
        self.always: tuple[Lever, ...] = ()
        # Of the unchanged program, once that is known.
        self.step_seconds = 0.0
        # Trials started so far.
        self.started = 0

    def enter(self, variant: Variant) -> Contestant:
        """Start the process of a variant."""
        contestant = Contestant(
            variant,
            self._start,
            self._scratch,
            warm_up=self.warm_up,
            timeout_seconds=self._timeout,
            always=self.always,
        )
        self._open.append(contestant)
        self.started += 1
        return contestant

    def leave(self, contestant: Contestant) -> None:
        """End the process of a variant."""
        contestant.close()
        if contestant in self._open:
            self._open.remove(contestant)

    def close(self) -> None:
        """End all processes."""
        for contestant in list(self._open):
            self.leave(contestant)

    def run(self, variants: Sequence[Variant], steps: int, *, until: float = math.inf) -> None:
        """Give each variant its turns, one after the other, round by round.

        Where memory is too small for two at once, each turn has a process of its own instead of a place in one.

        Args:
            variants: each gets its turns, or its error; the first is what the others are compared with.
            steps: of a turn.
            until: when the budget is spent, on the monotonic clock: levers that are not ready by then get a
                ``LateError``. The first variant, and the unchanged program, have their turns all the same.

        """
        if self.together < 2 <= len(variants):
            self._run_one_at_a_time(variants, steps, until)
            return
        contestants: list[Contestant] = []
        try:
            for several in _in_lots(variants, usable_cores()):
                # They may import and read their data beside one another; what is measured comes afterwards.
                entered = [self.enter(one) for one in several if not self._is_too_late(one, variants, until)]
                contestants += entered
                for contestant in entered:
                    contestant.until = until if _can_be_late(contestant.variant, variants) else math.inf
                    self._attempt(contestant, contestant.at_fit)
            for contestant in contestants:
                if _can_be_late(contestant.variant, variants):
                    contestant.until = until - self._seconds_of_turns(contestants, steps)
                self._attempt(contestant, lambda one=contestant: self._prepare(one))  # type: ignore[misc]
            for number in range(self.rounds):
                if number >= _FEWEST_TURNS and time.monotonic() > until:
                    break
                running = [
                    one for one in contestants if one.variant.error is None and not one.variant.given_up
                ]
                self._progress.turn(number + 1, self.rounds, len(running))
                for contestant in running:
                    if _can_be_late(contestant.variant, variants):
                        # What is ready has its turns, unless they are hopeless.
                        patience = 2 * _HOPELESS * self._seconds_of_turns(contestants[:1], steps)
                        contestant.until = max(until, time.monotonic() + patience)
                    self._attempt(contestant, lambda one=contestant: self._take_turn(one, steps))  # type: ignore[misc]
                self._give_up_the_hopeless(contestants)
            for contestant in contestants:
                self._look_at_samples(contestant)
        finally:
            for contestant in contestants:
                self.leave(contestant)

    def _run_one_at_a_time(self, variants: Sequence[Variant], steps: int, until: float) -> None:
        for number in range(self.rounds):
            self._progress.turn(number + 1, self.rounds, len(variants))
            for variant in variants:
                if variant.error is not None:
                    continue
                if number < _FEWEST_TURNS and self._is_too_late(variant, variants, until):
                    continue
                if number >= _FEWEST_TURNS and time.monotonic() > until:
                    continue
                contestant = self.enter(variant)
                if _can_be_late(variant, variants):
                    contestant.until = until
                try:
                    self._attempt(contestant, contestant.at_fit)
                    self._attempt(contestant, lambda one=contestant: self._prepare(one))  # type: ignore[misc]
                    self._attempt(contestant, lambda one=contestant: self._take_turn(one, steps))  # type: ignore[misc]
                    if not number:
                        self._look_at_samples(contestant)
                finally:
                    self.leave(contestant)
        for variant in variants:
            # Each process begins anew: the same steps again say nothing new about the losses.
            for turn in variant.turns[1:]:
                turn.losses = []

    def _is_too_late(self, variant: Variant, variants: Sequence[Variant], until: float) -> bool:
        """Return whether a variant is not begun any more; then it has its error."""
        if not _can_be_late(variant, variants) or time.monotonic() <= until:
            return False
        variant.error = LateError("the budget was spent before it began")
        return True

    def _seconds_of_turns(self, contestants: Sequence[Contestant], steps: int) -> float:
        """Return about how long the turns of several take."""
        return len(contestants) * self.rounds * steps * self.step_seconds

    def _give_up_the_hopeless(self, contestants: Sequence[Contestant]) -> None:
        """Take no more turns with variants that need many times as long as the first: the verdict is clear."""
        for contestant in contestants[1:]:
            variant = contestant.variant
            if variant.error is None and not variant.given_up:
                mine, its = costs(contestants[0].variant, variant)
                if mine and its[0] > _HOPELESS * mine[0]:
                    variant.given_up = True
                    self.leave(contestant)

    def _prepare(self, contestant: Contestant) -> None:
        if contestant.variant.prepared is None:
            self._progress.prepare(contestant.variant.name, is_lever=bool(contestant.variant.levers))
        prepared = contestant.prepare()
        if contestant.variant.prepared is None:
            contestant.variant.prepared = prepared

    def _take_turn(self, contestant: Contestant, steps: int) -> None:
        contestant.variant.turns.append(contestant.turn(steps))

    def _look_at_samples(self, contestant: Contestant) -> None:
        """Find out whether samples leave each other alone; after the turns, whose memory it would count in."""
        if contestant.variant.checks_samples:
            contestant.until = math.inf

            def look() -> None:
                contestant.variant.not_apart = contestant.apart()

            self._attempt(contestant, look)

    def _attempt(self, contestant: Contestant, action: Callable[[], None]) -> None:
        if contestant.variant.error is not None or contestant.variant.given_up:
            return
        try:
            action()
        except TrialError as error:
            contestant.variant.error = error
            self.leave(contestant)


def _can_be_late(variant: Variant, variants: Sequence[Variant]) -> bool:
    return bool(variant.levers) and variant is not variants[0]


def _in_lots(things: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(things), size):
        yield things[start : start + size]
