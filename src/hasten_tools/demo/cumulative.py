"""Measure the rows of a task's ladder: each in its own process, in turns with the row it builds on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from hasten._lib import check
from hasten._lib.device import synchronize
from hasten_tools.demo.task import ENGINEERS_LOOP, LadderRow, RowVariant, Say, Task
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import (
    FASTER,
    UNCLEAR,
    Comparison,
    TrialError,
    TrialStarter,
    Turn,
    race,
    speed_text,
)

# A turn is about this long, so that what happens between two turns does not count. A GPU's clock follows its load
# within about a second.
TURN_SECONDS = {"cpu": 0.5, "cuda": 1.0}
LONGEST_TURN_STEPS = 500
# Graphs are warmed up, recorded and replayed for each width of a batch.
GRAPH_WARM_UP_STEPS = 40
# Training that has not got this many steps has not learned anything.
FEWEST_STEPS = 10
ROW_TARGET = "hasten_tools.demo.row:run"


@dataclass(eq=False)
class Result:
    """The measurements of a row."""

    row: LadderRow
    variant: RowVariant  # Everything that is on in it.
    steps: int  # Optimizer steps of the whole training.
    tokens: int = 1  # Useful tokens of the whole training; what steps are counted in.
    base: Result | None = None  # The row it was compared with.
    comparison: Comparison | None = None  # With it, turn by turn.
    kept: bool = True  # Whether the rows below have its speed-up, too: not where it is not faster.
    ready_seconds: float = 0.0  # From the start of its process to its first step.
    first: Turn | None = None  # Its first steps, which pay for memory and for compiling.
    turns: list[Turn] = field(default_factory=list)  # Its steps after them.
    in_full: bool = False  # Whether ``seconds`` cover the whole training.
    full_seconds: float | None = None  # Of the whole training, of a row that was trained in full.
    refused: str | None = None  # Why hasten would not train so; such a row has no figures.
    # On the test samples, 0 to 1, for each seed it was trained in full with.
    accuracies: list[float] = field(default_factory=list)
    validation_accuracy: float | None = None  # On the validation samples.

    @property
    def accuracy(self) -> float | None:
        """On the test samples, 0 to 1, the mean over the seeds; None when the row was not trained in full."""
        return mean(self.accuracies) if self.accuracies else None

    @property
    def safety(self) -> Safety:
        """What the row may change at most, with all it has from those above."""
        inherited = None if self.base is None or self.row.alone else self.base.safety
        return self.row.safety if inherited is None else max(self.row.safety, inherited)

    @property
    def is_left_out(self) -> bool:
        """Whether the rows below do without its speed-up because it is not faster or was refused."""
        return not self.kept and not self.row.alone

    @property
    def pad_share(self) -> float:
        """Share of padding in what the model computes, 0 to 1."""
        tokens, slots = (sum(getattr(turn, name) or 0 for turn in self.turns) for name in ("tokens", "slots"))
        return max(0.0, 1 - tokens / slots) if slots else 0.0

    @property
    def measured_seconds(self) -> float:
        """Seconds of the whole training, from its own steps alone."""
        done = sum(turn.tokens or 0 for turn in self.turns)
        return sum(turn.seconds for turn in self.turns) / done * self.tokens if done else math.inf

    @property
    def seconds(self) -> float:
        """Seconds of the whole training; infinite for a row that was refused.

        A row that was timed over a sample of its steps is compared with the row it builds on, turn by turn: so a
        slow minute of the machine weighs on both.
        """
        if self.refused is not None:
            return math.inf
        if self.in_full or self.base is None or self.comparison is None:
            return self.measured_seconds
        return self.base.seconds / self.comparison.speed

    @property
    def start_seconds(self) -> float:
        """Seconds before the first step, and what the first steps took longer than later ones: compiling."""
        if self.first is None:
            return self.ready_seconds
        usual = self.measured_seconds / self.tokens * (self.first.tokens or 0)
        return self.ready_seconds + max(0.0, self.first.seconds - usual)

    @property
    def all_in(self) -> float:
        """Seconds from the start to the end of the training: starting and compiling are in the clock."""
        return self.seconds + self.start_seconds

    @property
    def basis(self) -> str:
        """How the seconds were measured, in words."""
        if self.in_full:
            return f"trained in full: {self.steps:,} steps"
        return f"{sum(turn.steps for turn in self.turns):,} of {self.steps:,} steps"


class _RowTrial:
    """A row in its own process: trains it and records its turns in its result."""

    def __init__(self, starter: TrialStarter, task: Task, result: Result) -> None:
        began = time.perf_counter()
        self.process = starter.start(ROW_TARGET, task, result.variant, torch.get_num_threads(), name=result.row.name)
        self.process.ready()
        result.ready_seconds = time.perf_counter() - began
        steps = 2 if result.variant.argument("compile") else 1
        if result.variant.records_graphs:
            steps = min(GRAPH_WARM_UP_STEPS, result.steps)
        result.first = self.process.turn(steps)
        self.result, self.steps_left = result, result.steps - steps
        wanted = TURN_SECONDS[task.device.type] / max(result.first.step_seconds[-1], 1e-6)
        self.steps_of_a_turn = max(1, min(LONGEST_TURN_STEPS, round(wanted)))

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        turn = self.process.turn(steps, until)
        self.steps_left -= steps
        self.result.turns.append(turn)
        return turn


@dataclass(kw_only=True)
class Measurement:
    """Measures the rows of a task, one after another; see :func:`measure` for the arguments."""

    task: Task
    starter: TrialStarter
    row_seconds: float
    rounds: int
    full: bool
    say: Say
    results: list[Result] = field(default_factory=list)
    _open: dict[Result, _RowTrial] = field(default_factory=dict)

    def add(self, row: LadderRow) -> None:
        """Measure a row on top of those above that were faster."""
        kept = [each for each in self.results if each.kept]
        base = (kept[0] if row.alone else kept[-1]) if kept else None
        variant = RowVariant() if base is None else row.on(base.variant)
        tokens = sum(self.task.lengths(RowVariant())) * self.task.epochs
        result = Result(row, variant, self.task.steps(variant), tokens, base)
        self.results.append(result)
        try:
            trial = _RowTrial(self.starter, self.task, result)
            if base is None:
                # Each row that is compared with the first times more steps of it.
                trial.turn(trial.steps_of_a_turn)
            else:
                self._compare(trial, base)
        except TrialError as error:
            # The plain loop and the same in hasten refuse nothing; a speed-up may not apply to this task.
            if base is None or base.variant.trainer is None or not error.refused:
                raise
            result.refused, result.kept = error.text.splitlines()[0], False
            self.say(f"{row.name}: refused, left out of the rows below: {result.refused}")
            return
        self._open[result] = trial
        self._say_measured(result)
        # Rows that nothing builds on any more and that will not be trained in full are done.
        newest = next(each for each in reversed(self.results) if each.kept)
        for each in list(self._open):
            if each not in (newest, self.results[0]) and not self._is_short(each):
                self._open.pop(each).process.close()

    def _compare(self, trial: _RowTrial, base: Result) -> None:
        is_lever = base.variant.trainer is not None
        judged = trial.result.comparison = Comparison()
        # A row that is not faster is raced once more, and judged by all turns: the machine may have been busy.
        for _ in range(2 if is_lever else 1):
            until = time.monotonic() + self.row_seconds
            (found,) = race(self._open[base], [trial], steps=trial.steps_of_a_turn, until=until)
            if found.error is not None:
                raise found.error
            for turns in zip(found.base, found.turns, strict=False):
                judged.add(*turns)
            judged.look()
            judged.end()
            pays = judged.verdict == FASTER or (judged.verdict == UNCLEAR and judged.speed > 1.0)
            if pays:
                break
        # The same in hasten is what all rows below build on. Of the others those stay that are faster.
        trial.result.kept = not trial.result.row.alone and (pays or not is_lever)

    def _say_measured(self, result: Result) -> None:
        text = f"{result.row.name}: about {result.seconds:,.0f} s for {result.steps:,} steps"
        found = result.comparison
        if found is not None and result.base is not None:
            factor = speed_text(found.speed, found.low, found.high)
            text += f", {factor} the speed of: {result.base.row.name}" if factor else ", how fast is not certain yet"
        self.say(text + "; not faster: left out of the rows below" * result.is_left_out)

    def _is_short(self, result: Result) -> bool:
        return result.refused is None and (self.full or result.measured_seconds <= self.row_seconds)

    def finish(self, seeds: int) -> None:
        """Train in full what is short enough, the fastest row, and where that is promised what it is compared with."""
        first, fastest = self.results[0], _fastest(self.results)
        same = _fastest([each for each in self.results if each.safety < Safety.OTHER_MATHS])
        chosen = [*filter(self._is_short, self.results), fastest]
        if seeds > 1:
            chosen += [first, same]
        elif self.task.full_seconds is not None:
            chosen += [first, *(each for each in self.results if each.row.name == ENGINEERS_LOOP)]
        trials = [
            self._open.get(result) or _RowTrial(self.starter, self.task, result) for result in dict.fromkeys(chosen)
        ]
        for turn in range(self.rounds):
            for trial in trials:
                if trial.steps_left > 0:
                    trial.turn(math.ceil(trial.steps_left / (self.rounds - turn)))
        for trial in trials:
            result, found = trial.result, trial.process.ask("accuracy")
            result.full_seconds, result.in_full = result.measured_seconds, first in chosen
            result.accuracies.append(found["test"])
            result.validation_accuracy = found.get("validation")
            trial.process.close()
            self.say(
                f"{result.row.name}: trained in full in {result.full_seconds:,.1f} s, "
                f"test accuracy {result.accuracy:.1%}"
            )
        for result in dict.fromkeys([first, same]):
            for number in range(1, seeds):
                self.say(
                    f"{result.row.name}: in full for its accuracy, seed {number + 1} of {seeds}, "
                    f"about {result.seconds:,.0f} s"
                )
                task = self.task.with_seed(self.task.seed + number)
                process = self.starter.start(ROW_TARGET, task, result.variant, torch.get_num_threads())
                process.turn(result.steps)
                result.accuracies.append(process.ask("accuracy")["test"])
                process.close()


def _fastest(results: Sequence[Result]) -> Result:
    return min(results, key=lambda result: result.seconds)


def shorten(task: Task) -> None:
    """Reduce a task with ``full_seconds`` to as many samples as the plain loop trains in that time on this machine."""
    if task.full_seconds is None:
        return
    variant = RowVariant()
    batch = {name: tensor.to(task.device) for name, tensor in next(iter(task.users_loader(variant))).items()}
    model = task.model(variant).to(task.device).train()
    seconds = []
    # The first pass pays for loading code and for memory.
    for _ in range(2):
        began = time.perf_counter()
        task.loss(model, batch).backward()
        synchronize(task.device)
        seconds.append((time.perf_counter() - began) / len(batch["labels"]))
    steps = max(FEWEST_STEPS, int(task.full_seconds / min(seconds) / task.batch_size))
    task.shorten(min(len(task.lengths(variant)), steps * task.batch_size))


def measure(
    task: Task,
    *,
    row_seconds: float,
    rounds: int = 3,
    full: bool = False,
    seeds: int = 1,
    say: Say = print,
    keep: Callable[[Sequence[Result]], object] = lambda results: None,
) -> list[Result]:
    """Measure all rows of a task; each adds its speed-up to those above that were faster.

    A row may take ``row_seconds`` in turns with the row it builds on. Rows that train longer are timed over a sample of
    their steps, unless ``full``; the fastest is trained in full all the same, in turns of so many ``rounds``. With
    several ``seeds``, the first row and the fastest that keeps the maths are trained in full with each, for their
    accuracy. ``keep`` gets the results so far after each row, so that an interrupted run is not lost.
    """
    check.number("measure", "row_seconds", row_seconds, above=0)
    check.whole("measure", "rounds", rounds, at_least=1)
    check.whole("measure", "seeds", seeds, at_least=1)
    with TrialStarter() as starter:
        starter.preload([*task.imports, ROW_TARGET.partition(":")[0]])
        found = Measurement(task=task, starter=starter, row_seconds=row_seconds, rounds=rounds, full=full, say=say)
        for row in task.rows:
            found.add(row)
            keep(found.results)
        found.finish(seeds)
        keep(found.results)
        return found.results
