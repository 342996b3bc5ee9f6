"""Time each row of a task's ladder, rows taking turns, and train at least the fastest in full."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from hasten.demo import plain

if TYPE_CHECKING:
    from torch import nn

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
        alike: whether all steps cost the same; one that was disturbed is then seen, and does not count.
        part_of_batch: the samples of a batch that were timed, when a whole one would have taken too long.
        accuracy: on the test samples, 0 to 1; None when the row was not trained in full.
        validation_accuracy: likewise, on the validation samples.

    """

    row: Row
    steps: int
    step_seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
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
        return (median if self.alike else mean)(self.step_seconds) * self.steps

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
        batches = list(task.batches(row.switches))
        result = Result(row, task.epochs * len(batches))
        by_width = sorted(batches, key=lambda batch: task.width(row.switches, batch))
        widths = [task.width(row.switches, batch) for batch in by_width]
        result.alike = widths[-1] <= ALIKE * widths[len(widths) // 10]
        rest = [] if full else _probe(task, result, by_width, row_seconds)
        samples.append(rest)
        results.append(result)
        if not full:
            say(f"{row.name}: about {result.estimate:,.0f} s for {result.steps:,} steps")
    runs = [1 if full else _runs(result, row_seconds, rounds) for result in results]
    for turn in range(1 if full else rounds):
        for result, sample, count in zip(results, samples, runs, strict=True):
            if turn < count:
                _train_in_full(task, result, evaluate=turn == 0, bar=full)
                say(f"{result.row.name}: trained in full in {result.full_seconds[-1]:,.1f} s")
            elif count == 0 and sample[turn::rounds]:
                _time_steps(task, result, sample[turn::rounds])
                say(f"{result.row.name}: {len(result.step_seconds)} of {result.steps:,} steps timed")
    fastest = min(results, key=lambda result: result.seconds)
    if fastest.sampled:
        say(f"{fastest.row.name}: the fastest; now in full, {fastest.seconds:,.0f} s by its sample")
        _train_in_full(task, fastest, evaluate=True, bar=True)
    return results


def _runs(result: Result, row_seconds: float, rounds: int) -> int:
    """How often to train the row in full; 0 when once would be too long already."""
    if result.part_of_batch is not None:
        return 0
    return min(rounds, int(row_seconds / result.estimate))


def _probe(task: Task, result: Result, by_width: Sequence[list[int]], row_seconds: float) -> list[list[int]]:
    """Warm up, time the median batch, and return the batches that are left to time if the row is sampled."""
    middle = by_width[len(by_width) // 2]
    switches = result.row.switches
    part = middle[:WARM_UP_SAMPLES]
    seconds = _run(task, switches, [part], epochs=1)[1]
    if seconds * len(middle) / len(part) > 2 * row_seconds and len(middle) > len(part):
        # A whole batch would take longer than all that the row may cost. The first run of anything pays for
        # loading its code, which must not be scaled up: once more.
        seconds = _run(task, switches, [part], epochs=1)[1]
        if seconds * len(middle) / len(part) > 2 * row_seconds:
            result.part_of_batch = len(part)
            result.step_seconds.append(seconds * len(middle) / len(part))
            return []
    seconds = _run(task, switches, [middle], epochs=1)[1]
    if seconds < PROBE_SECONDS:
        seconds = _run(task, switches, [middle] * PROBE_STEPS, epochs=1)[1] / PROBE_STEPS
    result.step_seconds.append(seconds)
    count = min(max(SMALLEST_SAMPLE, int(row_seconds / seconds)), len(by_width))
    count -= 1 - count % 2
    places = [(2 * point + 1) * len(by_width) // (2 * count) for point in range(count)]
    # The middle one is timed; the others go from outside in, so that each turn has a narrow and a wide one.
    del places[count // 2]
    pairs = zip(places, reversed(places), strict=True)
    return [by_width[place] for pair in pairs for place in pair][: len(places)]


def _time_steps(task: Task, result: Result, batches: list[list[int]]) -> None:
    seconds = _run(task, result.row.switches, batches, epochs=1)[1]
    result.step_seconds += [seconds / len(batches)] * len(batches)


def _train_in_full(task: Task, result: Result, *, evaluate: bool, bar: bool) -> None:
    switches = result.row.switches
    trained, seconds = _run(task, switches, task.batches(switches), epochs=task.epochs, bar=bar)
    result.full_seconds.append(seconds)
    if evaluate:
        result.validation_accuracy = trained.accuracy(task.validation_loader())
        result.accuracy = trained.accuracy(task.test_loader())


@dataclass
class _Trained:
    model: nn.Module
    accuracy: Callable[[Any], float]


def _run(
    task: Task, switches: Switches, batches: Iterable[list[int]], *, epochs: int, bar: bool = False
) -> tuple[_Trained, float]:
    """Train a fresh model on these batches; return it and the seconds its training took."""
    loader = task.train_loader(switches, batches)
    gc.collect()
    train = _in_hasten if switches.hasten else _by_hand
    return train(task, switches, loader, epochs, bar)


def _by_hand(task: Task, switches: Switches, loader: Any, epochs: int, bar: bool) -> tuple[_Trained, float]:
    model = task.model(switches).to(task.device)
    optimizer = task.optimizer(model, switches)
    torch.manual_seed(task.seed)
    begin = _now(task.device)
    plain.train(model, loader, optimizer, task.loss, epochs=epochs, device=task.device)
    seconds = _now(task.device) - begin
    return _Trained(model, lambda data: plain.accuracy(model, data, task.logits, device=task.device)), seconds


def _in_hasten(task: Task, switches: Switches, loader: Any, epochs: int, bar: bool) -> tuple[_Trained, float]:
    import hasten as L
    from hasten.demo.module import Classifier

    module = Classifier(task, switches)
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
    torch.manual_seed(task.seed)
    begin = _now(task.device)
    trainer.fit(module, loader)
    seconds = _now(task.device) - begin

    def accuracy(data: Any) -> float:
        return float(trainer.test(module, data, verbose=False)[0]["test_acc"])

    return _Trained(module.model, accuracy), seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
