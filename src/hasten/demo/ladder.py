"""Time each row of a task's ladder, rows taking turns, and train at least the fastest in full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from hasten.demo import plain

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hasten.demo.task import Row, Switches, Task

# A sample has at least so many steps: the median batch and as many shorter as longer ones.
SMALLEST_SAMPLE = 3
# Batches whose widths differ by less (but for the narrowest tenth) cost the same.
ALIKE = 1.25
# A probe shorter than this says more about starting than about steps.
PROBE_SECONDS = 0.5
PROBE_STEPS = 20
# Samples of the batch that first touches the code of a row.
WARM_UP_SAMPLES = 2

Say = Callable[[str], None]


@dataclass
class Result:
    """What was measured of a row.

    Args:
        row: which.
        steps: optimizer steps of the whole training.
        step_seconds: of each timed step, when the row was timed over a sample of its steps.
        full_seconds: of each whole training.
        alike: whether all steps cost the same.
        afterwards_seconds: of the whole training of a row that was sampled, for its accuracy. Not what it is
            compared by: it ran when the others did not.
        part_of_batch: the samples of a batch that were timed, when a whole one would have taken too long.
        accuracy: on the test samples, 0 to 1; None when the row was not trained in full.
        validation_accuracy: likewise, on the validation samples.

    """

    row: Row
    steps: int
    step_seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    afterwards_seconds: float | None = None
    part_of_batch: int | None = None
    alike: bool = True
    accuracy: float | None = None
    validation_accuracy: float | None = None

    @property
    def sampled(self) -> bool:
        """Whether the seconds are those of a sample, scaled to all steps."""
        return not self.full_seconds

    @property
    def estimate(self) -> float:
        """Seconds of the whole training, from the sampled steps."""
        # The mean, not the median: where steps differ in width only the mean stands for their sum, and what
        # disturbs the machine disturbs all rows alike, as long as all are averaged alike.
        return mean(self.step_seconds) * self.steps

    @property
    def repeats(self) -> list[float]:
        """Seconds of the same work, done several times: equal but for what else the machine did."""
        return self.full_seconds or (self.step_seconds if self.alike else [])

    @property
    def seconds(self) -> float:
        """Seconds of the whole training: the median of those run in full, else from the sampled steps."""
        return median(self.full_seconds) if self.full_seconds else self.estimate

    @property
    def basis(self) -> str:
        """What the seconds stand on, in words."""
        if self.full_seconds:
            times = f", median of {len(self.full_seconds)} runs" if len(self.full_seconds) > 1 else ""
            return f"trained in full: {self.steps:,} steps{times}"
        if self.part_of_batch is not None:
            return f"one step of {self.part_of_batch} samples, scaled to all {self.steps:,} steps"
        return f"{len(self.step_seconds)} of {self.steps:,} steps"


def climb(
    task: Task, *, row_seconds: float, rounds: int = 3, full: bool = False, say: Say = print
) -> list[Result]:
    """Measure all rows of a task.

    A row whose whole training takes at most ``row_seconds`` is trained in full, up to ``rounds`` times. Any
    other is timed over a sample of its steps: batches evenly spaced from the narrowest to the widest, so that
    the sample stands for all of them. Rows take turns in each round, so that a machine that slows down or
    speeds up on the way does so for all. The fastest row is trained in full in any case.

    Args:
        task: what to train.
        row_seconds: what a row may cost, all turns together.
        rounds: how often a row is trained in full if ``row_seconds`` allow it; sampled steps are spread over as
            many turns.
        full: train every row in full, once, however long it takes.
        say: told in a line what is going on.

    Returns:
        A result for each row, in the order of the ladder.

    Raises:
        ValueError: when ``row_seconds`` or ``rounds`` is not positive.

    """
    if row_seconds <= 0:
        raise ValueError(f"row_seconds={row_seconds}: must be above 0.")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: must be 1 or more.")
    results: list[Result] = []
    samples: list[list[list[int]]] = []
    for row in task.rows:
        by_width = _by_width(task, row.switches)
        widths = [task.width(row.switches, batch) for batch in by_width]
        result = Result(row, len(by_width), alike=widths[-1] <= ALIKE * widths[len(widths) // 10])
        samples.append([] if full else _probe(task, result, by_width, row_seconds))
        results.append(result)
        if not full:
            say(f"{row.name}: about {result.estimate:,.0f} s for {result.steps:,} steps")
    in_full = [full or _short_enough(result, row_seconds) for result in results]
    # As often for all of them, so that a slow minute of the machine weighs on none more than on another.
    times = 1
    if any(in_full) and not full:
        longest = max(result.estimate for result, short in zip(results, in_full, strict=True) if short)
        times = min(rounds, int(row_seconds / longest))
    for turn in range(1 if full else rounds):
        for result, sample, short in zip(results, samples, in_full, strict=True):
            if short and turn < times:
                seconds = _train_in_full(task, result, evaluate=turn == 0, bar=full)
                result.full_seconds.append(seconds)
                say(f"{result.row.name}: trained in full in {seconds:,.1f} s")
            elif not short and sample[turn::rounds]:
                _time_steps(task, result, sample[turn::rounds])
                say(f"{result.row.name}: {len(result.step_seconds)} of {result.steps:,} steps timed")
    fastest = min(results, key=lambda result: result.seconds)
    if fastest.sampled:
        say(f"{fastest.row.name}: the fastest; now in full, {fastest.seconds:,.0f} s by its sample")
        fastest.afterwards_seconds = _train_in_full(task, fastest, evaluate=True, bar=True)
    return results


def _by_width(task: Task, switches: Switches) -> list[list[int]]:
    """The batches of all epochs, the narrowest first."""
    sampler = task.batches(switches)
    batches = [batch for _ in range(task.epochs) for batch in sampler]
    return sorted(batches, key=lambda batch: task.width(switches, batch))


def _short_enough(result: Result, row_seconds: float) -> bool:
    return result.part_of_batch is None and result.estimate <= row_seconds


def _probe(task: Task, result: Result, by_width: Sequence[list[int]], row_seconds: float) -> list[list[int]]:
    """Warm up, time the median batch, and return the batches that are left to time if the row is sampled."""
    middle = by_width[len(by_width) // 2]
    # Its longest samples: they are padded as widely as the whole batch.
    part = sorted(middle, key=lambda sample: task.width(result.row.switches, [sample]))[-WARM_UP_SAMPLES:]

    def step_seconds(batch: list[int], count: int = 1) -> float:
        return _run(task, result.row.switches, [batch] * count, epochs=1).step_seconds / count

    # The first run of anything pays for loading its code: the second says what it costs.
    of_part = min(step_seconds(part) for _ in range(2)) * len(middle) / len(part)
    if of_part > 2 * row_seconds and len(part) < len(middle):
        result.part_of_batch = len(part)
        result.step_seconds.append(of_part)
        return []
    if result.row is task.rows[0]:
        # The first whole batch of the process also pays for its memory, up to twice a step: no row's share.
        step_seconds(middle)
    seconds = step_seconds(middle)
    if seconds < PROBE_SECONDS:
        seconds = step_seconds(middle, PROBE_STEPS)
    result.step_seconds.append(seconds)
    count = min(max(SMALLEST_SAMPLE, int(row_seconds / seconds)), len(by_width))
    count -= 1 - count % 2
    places = [(2 * point + 1) * len(by_width) // (2 * count) for point in range(count)]
    # The middle one is timed; the others go from outside in, so that each turn has a narrow and a wide one.
    del places[count // 2]
    pairs = zip(places, reversed(places), strict=True)
    return [by_width[place] for pair in pairs for place in pair][: len(places)]


def _time_steps(task: Task, result: Result, batches: list[list[int]]) -> None:
    seconds = _run(task, result.row.switches, batches, epochs=1).step_seconds
    result.step_seconds += [seconds / len(batches)] * len(batches)


def _train_in_full(task: Task, result: Result, *, evaluate: bool, bar: bool) -> float:
    """Train all steps, measure the accuracy, and return the seconds of the training."""
    switches = result.row.switches
    run = _run(task, switches, task.batches(switches), epochs=task.epochs, bar=bar)
    if evaluate:
        result.validation_accuracy = run.accuracy(task.validation_loader())
        result.accuracy = run.accuracy(task.test_loader())
    return run.seconds


@dataclass(frozen=True)
class Run:
    """A model that was trained, and how long it took.

    Args:
        model: with its trained weights.
        accuracy: of the model on the samples of a loader, 0 to 1.
        seconds: of the training from the call to its return.
        step_seconds: of it, from the first step to the return: what a sample of steps is scaled by.

    """

    model: nn.Module
    accuracy: Callable[[Any], float]
    seconds: float
    step_seconds: float


class _Clock:
    """Seconds from its making, and from the first loss computed through it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.begin = self.first_step = _now(task.device)
        self.stepping = False

    def loss(self, model: nn.Module, batch: plain.Batch) -> Tensor:
        if not self.stepping:
            self.stepping, self.first_step = True, _now(self.task.device)
        return self.task.loss(model, batch)

    def stop(self, model: nn.Module, accuracy: Callable[[Any], float]) -> Run:
        now = _now(self.task.device)
        return Run(model, accuracy, now - self.begin, now - self.first_step)


def _run(
    task: Task, switches: Switches, batches: Iterable[list[int]], *, epochs: int, bar: bool = False
) -> Run:
    """Train a fresh model on these batches."""
    loader = task.train_loader(switches, batches)
    return (_in_hasten if switches.hasten else _by_hand)(task, switches, loader, epochs, bar)


def _by_hand(task: Task, switches: Switches, loader: Any, epochs: int, bar: bool) -> Run:
    model = task.model(switches).to(task.device)
    optimizer = task.optimizer(model, switches)
    torch.manual_seed(task.seed)
    clock = _Clock(task)
    plain.train(model, loader, optimizer, clock.loss, epochs=epochs, device=task.device)
    return clock.stop(model, lambda data: plain.accuracy(model, data, task.logits, device=task.device))


def _in_hasten(task: Task, switches: Switches, loader: Any, epochs: int, bar: bool) -> Run:
    import hasten as L
    from hasten.demo.module import Classifier

    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu" if task.device.type == "cpu" else "gpu",
        devices=1,
        precision=switches.precision,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar,
    )
    module = Classifier(task, switches)
    torch.manual_seed(task.seed)
    clock = _Clock(task)
    module.loss = clock.loss
    with _no_news():
        trainer.fit(module, loader)

    def accuracy(data: Any) -> float:
        with _no_news():
            return float(trainer.test(module, data, verbose=False)[0]["test_acc"])

    return clock.stop(module.model, accuracy)


@contextmanager
def _no_news() -> Iterator[None]:
    """Dozens of short runs would each say that they have ended; warnings still come through."""
    log = logging.getLogger("hasten")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
