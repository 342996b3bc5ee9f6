"""Choose the speed-ups of ``Trainer(speed=...)`` in the training's own process, in a time limited by the possible gain.

One look at the first batch finds which speed-ups gain by construction: attention over padding that is not there, data
that is in memory already, an optimizer in one kernel. They need one check that they compute the same, and a turn
against the unchanged program if the training is long enough for that. What is less certain is raced, for as long
as the allowance lasts: a share of the time that the training is expected to take.

A try trains a few steps with the speed-ups on, on one device, without callbacks and loggers. Afterwards weights, data,
counters and random numbers are those from before (``Trainer.prepared_run``).
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hasten._lib.device import is_out_of_memory, synchronize
from hasten._lib.rank_zero import messages_later
from hasten.arguments import SpeedArguments
from hasten.batching.split import split
from hasten.logged_value import batch_size_of
from hasten.loops.fit import train
from hasten.loops.run import Run
from hasten.module.callback import Callback
from hasten_tools.speed import advice as words
from hasten_tools.speed.advice import Advice, Line, Row, composed, figures
from hasten_tools.speed.checks import draws_numbers, judge_without_draws, why_not_apart, without_draws
from hasten_tools.speed.inspect_run import Observed, facts, is_coarse, mask_of, peak_memory_bytes
from hasten_tools.speed.levers import Lever
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial import function_at, page_faults
from hasten_tools.speed.trial_processes import (
    FASTER,
    SLOWER,
    Comparison,
    LateError,
    SteppedTrial,
    TrialError,
    Turn,
    race,
)

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.types import Batch, Dataloaders, StepOutput

# Share of the expected run that measuring may take.
SHARE = 0.03
# Trainings of fewer batches are over before a look has paid for itself.
FEWEST_BATCHES = 8
# Padding that is worth leaving out without a race: computing less of it gains more than it costs.
_MUCH_PADDING = 0.2
# Tokens of a row from which on attention without the pairs that dropout makes it keep is faster for certain.
_MANY_TOKENS = 96
# Seconds that a fresh page of memory takes, and the share of a step from which on it is worth keeping them.
_PAGE_SECONDS = 2.5e-7
_MUCH_FRESH = 0.03
# From this share of a step on, data that is waited for is worth holding in memory, where it is read more than once.
_MUCH_WAITING = 0.03
# A line that is slower than this after its turns is left.
_NOT_SLOWER = 0.98
# Most turns of the choice, and of a speed-up that may be added to it.
_TURNS, _MORE_TURNS = 4, 8
# Steps of this length or less may be faster with fewer threads.
_SHORT_STEP_SECONDS = 0.01
# Samples of the first batch that are computed with and without a line: the fewest that can affect one another. A short
# training pays for each of them.
_CHECKED_SAMPLES = 2
# A turn in this process is about this long: it is paid for by the training that follows.
_TURN_SECONDS = 0.2
_MOST_STEPS = 50

Levers = tuple[Lever, ...]
# Batches of the whole training -> steps to time; 0 to train none.
Steps = Callable[[float], int]
_no_steps: Steps = lambda batches: 0  # noqa: E731


@dataclasses.dataclass
class Sight:
    """The observations of a try."""

    # About device, model and data.
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Of the whole training; infinite if nothing limits it.
    batches: float = math.inf
    epochs: float = math.inf
    # How long the try took, everything included.
    seconds: float = 0.0
    # Loss and gradients of a few samples without dropout, empty if they cannot be had; what they took.
    numbers: list[float] = dataclasses.field(default_factory=list)
    check_seconds: float = 0.0
    check_faults: int = 0
    # The parts of a step spent waiting for data ("data") and in the optimizer ("optimizer"), 0 to 1.
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    # The steps that were timed; None if there were none.
    turn: Turn | None = None
    # Whether the program computes with less than 32 bits itself.
    coarse: bool = False
    # How the samples of the first batch affect one another, where that was asked.
    apart: str | None = None


class TrialPlace(Protocol):
    """Where lines are tried; a fake needs no model."""

    def line(self, levers: Levers) -> SteppedTrial:
        """Return a line that trains in turns."""

    def look(self, levers: Levers, steps: Steps, *, checks: bool = True, asks_apart: bool = False) -> Sight:
        """Look at the first batch, then time so many steps."""


@dataclasses.dataclass
class Choice:
    """The chosen speed-ups, and the measurements behind the choice."""

    # For the record and for the next run.
    advice: Advice
    # What is left of the allowance; infinite if nothing limits the training.
    left_seconds: float


class FirstChoice:
    """One choice for a training.

    Of ``levers``, those up to the class ``most`` may be switched on. ``given`` are the Trainer's own arguments.
    ``done`` batches were trained before, in the run that this one continues.
    """

    def __init__(
        self,
        place: TrialPlace,
        most: Safety,
        *,
        title: str,
        given: dict[str, Any],
        levers: Sequence[Lever],
        done: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._most, self._title = place, most, title
        self._given, self._done, self._clock = given, done, clock
        self._known = {lever.name: lever for lever in levers}
        self._began = clock()
        self._plain = Sight()
        self._rows: dict[str, Row] = {}
        self._comparison: Comparison | None = None

    def choose(self, known_batches: float = math.inf) -> Choice | None:
        """Return what is faster; None for a training that is too short to look at.

        The number of batches is infinite if it is not known before the training is set up.

        Raises:
            TrialError: the unchanged program cannot be tried.

        """
        if known_batches - self._done < FEWEST_BATCHES:
            return None
        self._plain = self._place.look((), self._steps_to_look)
        left = self._batches_left()
        if left < FEWEST_BATCHES:
            return None
        certain = self._certain()
        line = self._checked(certain) if certain else ()
        line = self._raced(line)
        if self._plain.turn is not None:
            for lever in self._promising(line):
                line = self._extended(line, lever)
        return Choice(self._advice(line), self._left_seconds())

    # -- how much may be spent

    def _steps_to_look(self, batches: float) -> int:
        """Return the steps that the look may time: a third of the allowance, and none where that is not even one."""
        left = batches - self._done
        if math.isinf(left):
            return steps_of(0.0)
        if left < FEWEST_BATCHES:
            return 0
        # One more sets up.
        return min(steps_of(0.0), max(0, int(SHARE * left / 2) - 1))

    def _batches_left(self) -> float:
        return self._plain.batches - self._done

    def _left_seconds(self) -> float:
        turn = self._plain.turn
        if turn is None:
            return 0.0
        return SHARE * self._batches_left() * turn.cost("steps") - (self._clock() - self._began)

    # -- what is certain

    def _levers(self, names: Iterable[str]) -> list[Lever]:
        return [self._known[name] for name in names if name in self._known]

    def _may(self, lever: Lever) -> bool:
        facts = self._plain.facts
        free = is_free(lever, self._given)
        return free and lever.safety_in(facts) <= self._most and lever.applies(facts) is None

    def _certain(self) -> Levers:
        """Return the speed-ups that gain by construction, those that need a check first."""
        facts, sight = self._plain.facts, self._plain
        padding = 1.0 - (1.0 if facts["useful_tokens"] is None else facts["useful_tokens"])
        # torch's attention with dropout computes every pair of tokens on a CPU.
        pairs = facts["device_type"] == "cpu" and facts["attention_dropout"] and (facts["width"] or 0) >= _MANY_TOKENS
        packs_well = padding >= _MUCH_PADDING or bool(pairs)
        wanted = {
            "packed first token": packs_well,
            "packed tokens": packs_well,
            "batches by length": padding >= _MUCH_PADDING or facts["shapes_vary"],
            "resident data": self._reads_often(),
            "fused optimizer": True,
            "kept memory": self._fresh_share() >= _MUCH_FRESH,
        }
        found: list[Lever] = []
        for lever in self._levers(wanted):
            name = lever.name
            packs = any("packed" in other.arguments for other in found)
            if wanted[name] and lever.applies(facts) is None and lever.safety_in(facts) > self._most:
                self._refused(lever, lever.safety_in(facts).words, words.NOT_TRIED)
            if not wanted[name] or not self._may(lever) or (packs and name in ("packed tokens", "batches by length")):
                continue
            if name == "batches by length":
                apart = self._place.look((), _no_steps, checks=False, asks_apart=True).apart
                if apart is not None:
                    text = "the samples of a batch affect one another in this model, so other batches train another"
                    self._refused(lever, f"{text}: {apart}", words.REFUSED)
                    continue
            found.append(lever)
        order = {"packed": 0, "batching": 0}
        found.sort(key=lambda lever: min(order.get(name, 1) for name in lever.arguments))
        # A check needs numbers to compare.
        if not sight.numbers:
            found = [lever for lever in found if "packed" not in lever.arguments]
        return tuple(found)

    def _reads_often(self) -> bool:
        """Return whether holding the data in memory saves more than it costs."""
        facts, sight = self._plain.facts, self._plain
        if facts["samples_draw"]:
            return False
        if facts["held_tensors"]:
            return True
        return sight.epochs > 1 and sight.shares.get("data", 0.0) >= _MUCH_WAITING

    def _fresh_share(self) -> float:
        """Return the share of a step that the system takes to provide memory."""
        sight, turn = self._plain, self._plain.turn
        if turn is not None:
            return turn.faults * _PAGE_SECONDS / turn.seconds
        return sight.check_faults * _PAGE_SECONDS / sight.check_seconds if sight.check_seconds else 0.0

    # -- checks and races

    def _checked(self, levers: Levers) -> Levers:
        """Return the speed-ups of a line that compute what they may, found by one try of all of them."""
        while levers:
            # Only where batches stay can a few samples be compared, and only some speed-ups change what they compute.
            compares = [lever for lever in levers if "packed" in lever.arguments]
            try:
                sight = self._place.look(levers, _no_steps, checks=bool(compares))
            except TrialError as error:
                levers = self._without_one(levers, error.text, words.REFUSED if error.refused else "failed")
                continue
            if not compares or any("batching" in lever.arguments for lever in levers):
                return levers
            wrong = judge_without_draws(self._plain.numbers, sight.numbers, coarse=self._plain.coarse)
            if not wrong and sight.numbers:
                return levers
            levers = self._without(levers, compares[0], wrong or "it cannot be compared", words.WRONG)
        return levers

    def _without_one(self, levers: Levers, reason: str, verdict: str) -> Levers:
        """Return a line without the speed-up that an error is about: that whose argument it names, else the first."""
        named = [lever for lever in levers if any(f"({name}=" in reason for name in lever.arguments)]
        return self._without(levers, (named or list(levers))[0], reason, verdict)

    def _without(self, levers: Levers, lever: Lever, reason: str, verdict: str) -> Levers:
        self._refused(lever, reason, verdict)
        rest = tuple(other for other in levers if other is not lever)
        if lever.name == "packed first token":
            # Without the last block's saving it may do.
            whole = self._known.get("packed tokens")
            return (whole, *rest) if whole is not None and self._may(whole) else rest
        return rest

    def _refused(self, lever: Lever, reason: str, verdict: str) -> None:
        safety = lever.safety_in(self._plain.facts)
        self._rows[lever.name] = Row(lever.name, lever.line, safety, verdict, reason, [lever.name])

    def _raced(self, line: Levers) -> Levers:
        """Return the line if it is not slower: one turn is enough, and a race where that seems to be slower."""
        turn = self._plain.turn
        tried = tuple(lever for lever in line if lever.name != "resident data")
        # A look is about as long as a turn.
        if turn is None or not tried or self._left_seconds() < 1.5 * self._plain.seconds:
            return line
        one = Comparison()
        with suppress(TrialError):
            one.add(turn, self._place.line(tried).turn(turn.steps))
            if one.speed >= _NOT_SLOWER or self._left_seconds() < 2.5 * self._plain.seconds:
                return line
        found = self._race((), tried, most=_TURNS, share=0.5)
        if found is None:
            return tuple(lever for lever in line if lever not in tried)
        self._comparison = found if tried == line else None
        if found.verdict == SLOWER or (found.turns and found.speed < _NOT_SLOWER):
            for lever in tried:
                self._refused(lever, f"{found.speed:.2f}x the speed together: {composed(tried)}", SLOWER)
            return tuple(lever for lever in line if lever not in tried)
        return line

    def _race(self, base: Levers, line: Levers, *, most: int, share: float) -> Comparison | None:
        """Return a race of a line with another within a share of what is left; None if one of them failed."""
        assert self._plain.turn is not None
        deadline = self._clock() + share * self._left_seconds()
        steps = steps_of(self._plain.turn.cost("steps"))
        try:
            (found,) = race(
                self._place.line(base),
                [self._place.line(line)],
                steps=steps,
                most=most,
                until=deadline,
                deadline=deadline,
                clock=self._clock,
            )
        except TrialError:
            return None
        return None if found.error is not None else found

    def _promising(self, line: Levers) -> list[Lever]:
        """Return speed-ups that may gain more, and that this process can switch on and off."""
        facts = self._plain.facts
        assert self._plain.turn is not None
        short = self._plain.turn.cost("steps") < _SHORT_STEP_SECONDS
        on_host = facts["device_type"] == "cpu"
        wanted = {
            "one thread": short,
            "half the threads": short,
            "packed tokens": on_host and bool(facts["attention_dropout"]),
            "fast dropout masks": on_host and facts["dropout"],
        }
        taken = {name for lever in line for name in lever.arguments}
        return [
            lever
            for lever in self._levers(wanted)
            if wanted[lever.name]
            and lever.name not in self._rows
            and taken.isdisjoint(lever.arguments)
            and self._may(lever)
        ]

    def _extended(self, line: Levers, lever: Lever) -> Levers:
        """Return the line with one more speed-up if that is certain to be faster."""
        if any(lever.name in other.conflicts for other in line):
            return line
        if self._left_seconds() < 5.0 * self._plain.seconds:
            self._refused(lever, "measuring it would take more time than it can gain", words.NO_TIME)
            return line
        tried = tuple(other for other in line if other.name != "resident data")
        longer = (*tried, lever)
        if "packed" in lever.arguments and self._checked(longer) != longer:
            return line
        found = self._race(tried, longer, most=_MORE_TURNS, share=0.5)
        if found is None or found.verdict != FASTER:
            reason = "" if found is None else f"{found.speed:.2f}x"
            self._refused(lever, reason, "failed" if found is None else found.verdict)
            return line
        return (*line, lever)

    # -- the result

    def _advice(self, line: Levers) -> Advice:
        facts, turn = self._plain.facts, self._plain.turn
        shown = figures([turn], facts, {}, [turn]) if turn is not None else {}
        unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0, low=1.0, high=1.0, **shown)
        for lever in line:
            safety = lever.safety_in(facts)
            self._rows[lever.name] = Row(lever.name, lever.line, safety, words.WINS, levers=[lever.name])
        lines: list[Line] = []
        if line:
            found = self._comparison
            safety = max(lever.safety_in(facts) for lever in line)
            names = [lever.name for lever in line]
            factors = (found.speed, found.low, found.high) if found is not None else (math.nan, None, None)
            lines.append(Line(safety, composed(line), names, *factors))
        automatic = [lever for lever in line if lever.safety_in(facts).is_automatic]
        return Advice(
            program=self._title,
            unchanged=unchanged,
            rows=list(self._rows.values()),
            lines=lines,
            winners=[lever.name for lever in automatic],
            facts={**facts, "batches": self._batches_left(), "timed": turn is not None},
            seconds=round(self._clock() - self._began, 2),
        )


def is_free(lever: Lever, given: Mapping[str, Any]) -> bool:
    """Return whether the user has not set the argument of a speed-up: values that are set stay, also "off".

    Example::

        >>> from hasten_tools.speed.levers import choose
        >>> (fused,) = choose(["fused optimizer"])
        >>> is_free(fused, {"fused_optimizer": None}), is_free(fused, {"fused_optimizer": False})
        (True, False)

    """
    defaults = {row.name: row.default for row in dataclasses.fields(SpeedArguments)}
    names = {*lever.arguments, *({"num_workers"} if "resident" in lever.arguments else ())}
    return all(given.get(name, defaults.get(name)) == defaults.get(name) for name in names & defaults.keys())


def others(levers: Sequence[Lever]) -> list[Lever]:
    """Return the speed-ups that only other processes can try."""
    here = {"packed first token", "packed tokens", "batches by length", "resident data", "fused optimizer"}
    here |= {"kept memory", "one thread", "half the threads", "fast dropout masks"}
    return [lever for lever in levers if lever.name not in here]


# -- tries


class InPlace:
    """Tries lines of speed-ups on the model of a Trainer: it is trained for a few steps, and restored."""

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule,
        train_dataloaders: Dataloaders,
        datamodule: LightningDataModule | None,
    ) -> None:
        self._trainer, self._model = trainer, model
        self._data, self._datamodule = train_dataloaders, datamodule

    def line(self, levers: Levers) -> LineInPlace:
        """Return a line of speed-ups that trains in turns."""
        return LineInPlace(self, levers)

    def look(self, levers: Levers, steps: Steps, *, checks: bool = True, asks_apart: bool = False) -> Sight:
        """Look at the first batch with these speed-ups on, then train one step and time so many more.

        ``steps`` says how many, by the batches of the whole training. ``checks`` computes a few samples without
        dropout, ``asks_apart`` finds out whether the samples of the first batch affect one another.
        """
        watch = _Watch(checks=checks, asks_draws=not levers, asks_apart=asks_apart)
        began = time.perf_counter()
        try:
            # Important messages are repeated when the training begins.
            with messages_later(), warnings.catch_warnings(), ExitStack() as undo_all:
                warnings.simplefilter("ignore")
                other = self._trainer.with_arguments(**self._arguments(levers))
                for lever in levers:
                    undo = function_at(lever.place)(other, self._model) if lever.place is not None else None
                    if undo is not None:
                        undo_all.callback(undo)
                given = {} if levers else self._trainer.given_arguments
                body = _trains(other, watch, steps, given)
                other.prepared_run("fit", self._model, {"train": self._data}, self._datamodule, body)
        except Exception as error:
            refused = isinstance(error, (ValueError, TypeError, ModuleNotFoundError, NotImplementedError))
            what = "out of memory: " if is_out_of_memory(error) else "" if refused else f"{type(error).__name__}: "
            first = (str(error).splitlines() or [""])[0]
            raise TrialError(f"{what}{first}", refused=refused) from error
        watch.sight.seconds = time.perf_counter() - began
        return watch.sight

    def _arguments(self, levers: Levers) -> dict[str, Any]:
        given = self._trainer.given_arguments
        devices, strategy = given["devices"], given["strategy"]
        arguments = {
            "speed": None,
            "fast_dev_run": False,
            "limit_val_batches": 0,
            "batch_size": None if given["batch_size"] == "auto" else given["batch_size"],
        }
        if self._trainer.runtime.several_processes:
            arguments |= {
                "devices": devices[:1] if isinstance(devices, (list, tuple)) else 1,
                "num_nodes": 1,
                "strategy": strategy if strategy in ("auto", "single_device") else "auto",
            }
        for lever in levers:
            arguments |= lever.arguments
        return arguments


class LineInPlace:
    """A ``SteppedTrial`` of a line in this process."""

    def __init__(self, place: InPlace, levers: Levers) -> None:
        self._place, self.levers = place, levers
        # How long its last turn took, everything included.
        self.seconds = 0.0

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        """Train one step, and time so many more."""
        if time.monotonic() + self.seconds > until:
            raise LateError("time ran out before it began")
        sight = self._place.look(self.levers, lambda batches: steps, checks=False)
        self.seconds = sight.seconds
        if sight.turn is None:
            raise TrialError("the training ended by itself before a step was measured")
        return sight.turn


class _Seen(BaseException):
    """Raised in a try when it has shown enough."""


def _trains(trainer: Trainer, watch: _Watch, wanted: Steps, given: Mapping[str, Any]) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        own: Any = run.module.trainer
        sight = watch.sight
        try:
            steps = float(own.estimated_stepping_batches)
        except Exception:
            # Some data has no length.
            steps = math.inf
        sight.batches, sight.epochs = steps * run.window.accumulate_grad_batches, run.limits.max_epochs
        watch.steps = wanted(sight.batches)
        updates = math.ceil((1 + watch.steps) / run.window.accumulate_grad_batches)
        try:
            with trainer.limited_run("fit", updates, callbacks=[watch]) as few:
                train(few)
        except _Seen:
            pass
        if not given:
            return
        sight.facts = facts(watch.observed, own, run.module, given, quick=True)
        if not watch.timed:
            # No step has shown it.
            sight.facts["step_draws"] = watch.check_draws

    return body


class _Watch(Callback):
    """Looks at the first batch, then times steps."""

    def __init__(self, *, checks: bool, asks_draws: bool, asks_apart: bool) -> None:
        self.steps, self._checks, self._asks_draws, self._asks_apart = 0, checks, asks_draws, asks_apart
        self.sight, self.observed = Sight(), Observed()
        self.timed: list[float] = []
        # Whether a step of a few samples draws random numbers.
        self.check_draws = True
        self._losses: list[float | None] = []
        self._counts: list[tuple[int | None, int | None, int | None]] = []
        self._is_first, self._is_warm = True, False
        self._ended = self._stepping = self._began = 0.0
        self._waited = self._stepped = 0.0
        self._faults = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Compute a few samples of the first batch; note how long a later one was waited for."""
        if self._is_first:
            self._is_first = False
            self._look_at(trainer, pl_module, batch)
            if not self.steps:
                raise _Seen
        if self._is_warm:
            self._waited += time.perf_counter() - self._ended
        self.observed.before_step()

    def _look_at(self, trainer: Trainer, module: LightningModule, batch: Batch) -> None:
        device, sight = trainer.strategy.root_device, self.sight
        sight.coarse = is_coarse(trainer.precision, device, module)
        self.observed.see(batch)
        if self._asks_apart:
            sight.apart = why_not_apart(module, [batch], coarse=sight.coarse)
        if not self._checks or not module.automatic_optimization:
            return
        try:
            some = split(batch, _CHECKED_SAMPLES)[0][0]
        except ValueError:
            # It cannot be split.
            some = batch
        faults, began = page_faults(), time.perf_counter()
        try:
            sight.numbers = without_draws(module, some)
            sight.check_seconds, sight.check_faults = time.perf_counter() - began, page_faults() - faults
            if self._asks_draws:
                self.check_draws = draws_numbers(module, some)
        except Exception:
            # A step may need more around it than a batch: then it is not compared.
            sight.numbers = []

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note when the optimizer begins."""
        self._stepping = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Note a step; the first only sets up."""
        device = trainer.strategy.root_device
        now = time.perf_counter()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._is_warm:
            if self._stepping > self._ended:
                self._stepped += now - self._stepping
            self.timed.append(now - self._ended)
            samples, certain = batch_size_of(batch)
            mask = mask_of(batch)
            tokens = None if mask is None else int(mask.count_nonzero())
            slots = None if mask is None else mask.numel()
            self._counts.append((samples if certain or isinstance(batch, Mapping) else None, tokens, slots))
            self._losses.append(float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else None)
        self.observed.after_step(batch)
        enough = len(self.timed) >= self.steps or now - self._began > _TURN_SECONDS
        if self._is_warm and enough:
            self._finish(device)
            raise _Seen
        if not self._is_warm:
            synchronize(device)
        self._ended = time.perf_counter()
        if not self._is_warm:
            self._is_warm, self._began, self._faults = True, self._ended, page_faults()

    def _finish(self, device: torch.device) -> None:
        synchronize(device)
        total, sight = time.perf_counter() - self._began, self.sight
        samples, tokens, slots = (None if None in counts else sum(counts) for counts in zip(*self._counts, strict=True))
        sight.turn = Turn(
            total,
            self.timed,
            self._losses,
            samples,
            tokens,
            slots,
            faults=page_faults() - self._faults,
            memory_bytes=peak_memory_bytes(device),
        )
        sight.shares = {"data": self._waited / total, "optimizer": self._stepped / total}


def steps_of(step_seconds: float) -> int:
    """Return the number of steps of a turn in this process.

    Example::

        >>> steps_of(0.05), steps_of(10.0)
        (4, 1)

    """
    return min(_MOST_STEPS, max(1, round(_TURN_SECONDS / max(step_seconds, 1e-9))))
