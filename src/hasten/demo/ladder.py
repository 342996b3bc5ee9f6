"""Time each row of a task's ladder, rows taking turns, and train at least the fastest in full."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from hasten.demo import plain
from hasten.demo.task import Row, Switches, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

# A sample has at least so many steps: the median batch and as many shorter as longer ones.
SMALLEST_SAMPLE = 3
# Batches whose widths differ by less (but for the narrowest tenth) cost the same.
ALIKE = 1.25
# A switch that wins or loses more than this does so on any measurement; below it, turns decide.
CLEAR = 1.5
# Turns where steps are long, and where they are not.
TURNS, SHORT_TURNS = 2, 5
# A switch is kept unless it makes a step this much longer: less is not to be told from what else a machine does.
LOSS = 1.1
# A probe shorter than this says more about starting than about steps.
PROBE_SECONDS = 0.5
PROBE_STEPS = 20
# Steps of a few milliseconds need more: a GPU's clock follows its load within about a second.
GPU_PROBE_SECONDS = 1.0
# A CUDA graph is warmed up, recorded and replayed, each in a step of its own.
RECORDING_STEPS = 3
# Samples of the batch that first touches the code of a row.
WARM_UP_SAMPLES = 2

Say = Callable[[str], None]


@dataclass
class Result:
    """What was measured of a row.

    Args:
        row: which.
        switches: everything that is on in it.
        steps: optimizer steps of the whole training.
        kept: whether the rows below have its switch, too: not where it lost time.
        step_seconds: of each timed step, when the row was timed over a sample of its steps.
        full_seconds: of each whole training.
        start_seconds: from the call to the first step, compilation included, of each run.
        alike: whether all steps cost the same.
        afterwards_seconds: of the whole training of a row that was sampled, for its accuracy. Not what it is
            compared by: it ran when the others did not.
        part_of_batch: the samples of a batch that were timed, when a whole one would have taken too long.
        pad_share: of what the model computes, 0 to 1.
        refused: why hasten would not train so; such a row has no figures.
        accuracies: on the test samples, 0 to 1, one for each seed it was trained in full with.
        validation_accuracy: on the validation samples.

    """

    row: Row
    switches: Switches
    steps: int
    kept: bool = True
    step_seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    start_seconds: list[float] = field(default_factory=list)
    afterwards_seconds: float | None = None
    part_of_batch: int | None = None
    alike: bool = True
    pad_share: float = 0.0
    refused: str | None = None
    accuracies: list[float] = field(default_factory=list)
    validation_accuracy: float | None = None

    @property
    def accuracy(self) -> float | None:
        """On the test samples, 0 to 1, the mean over the seeds; None when the row was not trained in full."""
        return mean(self.accuracies) if self.accuracies else None

    @property
    def all_in(self) -> float:
        """Seconds from the call to the end of the training: starting and compiling are in the clock."""
        # The longest start: the first run of a row compiles, those after it find the result.
        return self.seconds + max(self.start_seconds, default=0.0)

    @property
    def sampled(self) -> bool:
        """Whether the seconds are those of a sample, scaled to all steps."""
        return not self.full_seconds

    @property
    def estimate(self) -> float:
        """Seconds of the whole training, from the sampled steps; infinite for a row that was refused."""
        if self.refused is not None:
            return math.inf
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
    task: Task,
    *,
    row_seconds: float,
    rounds: int = 3,
    full: bool = False,
    seeds: int = 1,
    say: Say = print,
    keep: Callable[[Sequence[Result]], object] | None = None,
) -> list[Result]:
    """Measure all rows of a task.

    Each row has the switches of those above that paid, and its own: one that loses time is shown, and left out of
    the rows below. A row whose whole training takes at most ``row_seconds`` is trained in full, up to ``rounds``
    times. Any other is timed over a sample of its steps: batches evenly spaced from the narrowest to the widest,
    so that the sample stands for all of them. Rows take turns in each round, so that a machine that slows down or
    speeds up on the way does so for all. The fastest row is trained in full in any case.

    Args:
        task: what to train.
        row_seconds: what a row may cost, all turns together.
        rounds: how often a row is trained in full if ``row_seconds`` allow it; sampled steps are spread over as
            many turns.
        full: train every row in full, once, however long it takes.
        seeds: with how many seeds the first row and the fastest that keeps the maths are trained in full, for
            their accuracy; with 1, the first row is not, where it takes too long.
        say: told in a line what is going on.
        keep: given the results so far after the probes and after each round, so that a run that is cut short has
            not been in vain.

    Returns:
        A result for each row, in the order of the ladder.

    Raises:
        ValueError: when ``row_seconds``, ``rounds`` or ``seeds`` is not positive.

    """
    if row_seconds <= 0:
        raise ValueError(f"row_seconds={row_seconds}: must be above 0.")
    for name, value in (("rounds", rounds), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be 1 or more.")
    results: list[Result] = []
    samples: list[list[list[int]]] = []
    for row in task.rows:
        result, sample = _begin(task, row, results, row_seconds)
        results.append(result)
        samples.append([] if full else sample)
        if result.refused is not None:
            say(f"{row.name}: refused, left out of the rows below: {result.refused}")
            continue
        aside = "" if result.kept else "; it loses: left out of the rows below"
        say(f"{row.name}: about {result.estimate:,.0f} s for {result.steps:,} steps{aside}")
    in_full = [result.refused is None and (full or _short_enough(result, row_seconds)) for result in results]
    # As often for all of them, so that a slow minute of the machine weighs on none more than on another.
    times = 1
    if any(in_full) and not full:
        longest = max(result.estimate for result, short in zip(results, in_full, strict=True) if short)
        times = min(rounds, int(row_seconds / longest))
    turns = 1 if full else rounds
    for turn in range(turns):
        if keep is not None and all(result.step_seconds or result.refused for result in results):
            keep(results)
        for result, sample, short in zip(results, samples, in_full, strict=True):
            if short and turn < times:
                seconds = _train_in_full(task, result, evaluate=turn == 0, bar=full)
                result.full_seconds.append(seconds)
                say(f"{result.row.name}: trained in full in {seconds:,.1f} s")
            elif not short and sample[turn::rounds]:
                _time_steps(task, result, sample[turn::rounds])
                say(f"{result.row.name}: {len(result.step_seconds)} of {result.steps:,} steps timed")
    if keep is not None:
        keep(results)
    _accuracies(task, results, seeds, say)
    return results


def _accuracies(task: Task, results: Sequence[Result], seeds: int, say: Say) -> None:
    """Train the fastest row in full, if none did; with several seeds, the first row as well."""
    fastest = min(results, key=lambda result: result.seconds)
    chosen = {id(fastest): fastest}
    if seeds > 1:
        exact = [result for result in results if result.refused is None and _same_maths(result, results)]
        for result in (results[0], min(exact, key=lambda result: result.seconds)):
            chosen[id(result)] = result
    for result in chosen.values():
        for number in range(len(result.accuracies), seeds if seeds > 1 else 1):
            say(
                f"{result.row.name}: in full for its accuracy, seed {number + 1} of {seeds}, "
                f"about {result.seconds:,.0f} s"
            )
            other = task if number == 0 else task.with_seed(task.seed + number)
            seconds = _train_in_full(other, result, evaluate=True, bar=True)
            if number == 0:
                result.afterwards_seconds = seconds


def _same_maths(result: Result, results: Sequence[Result]) -> bool:
    """Return whether a row, with all it has from those above, computes the same up to rounding."""
    return result.row.same_maths and all(
        above.row.same_maths or not above.kept for above in results[: results.index(result)]
    )


def _begin(
    task: Task, row: Row, above: Sequence[Result], row_seconds: float
) -> tuple[Result, list[list[int]]]:
    """Probe a row on top of those above that paid; return it and the batches left to time."""
    base = next((result for result in reversed(above) if result.kept), None)
    switches = row.on(base.switches if base is not None else Switches())
    try:
        return _probed(task, row, switches, base, row_seconds)
    except ValueError as error:
        # The plain loop and the same in hasten refuse nothing; a switch may not apply to this task.
        if base is None or not base.switches.hasten:
            raise
        return Result(row, switches, 0, kept=False, refused=str(error).splitlines()[0]), []


def _probed(
    task: Task, row: Row, switches: Switches, base: Result | None, row_seconds: float
) -> tuple[Result, list[list[int]]]:
    by_width = _by_width(task, switches)
    widths = [task.width(switches, batch) for batch in by_width]
    result = Result(
        row,
        switches,
        len(by_width),
        alike=widths[-1] <= ALIKE * widths[len(widths) // 10],
        pad_share=task.pad_share(switches),
    )
    sample = _probe(task, result, by_width, row_seconds)
    if base is not None and base.switches.hasten and row.same_maths:
        result.kept = _pays(task, base, result, by_width)
    return result, sample


def _pays(task: Task, base: Result, result: Result, by_width: Sequence[list[int]]) -> bool:
    """Time the median batch with and without a row's switch, taking turns where it is not clear at once."""
    ratio = result.estimate / base.estimate
    if ratio > CLEAR:
        return False
    if ratio < 1 / CLEAR:
        return True
    # Both on the same samples: batches made another way would differ in more than the switch.
    batch = by_width[len(by_width) // 2]
    with_it: list[float] = []
    without: list[float] = []
    for _ in range(TURNS if result.step_seconds[0] >= PROBE_SECONDS else SHORT_TURNS):
        for switches, seconds in ((base.switches, without), (result.switches, with_it)):
            seconds.append(_steady(task, switches, batch, result.step_seconds[0]))
    # Compiling takes its time before the first step: no gain is a loss.
    loss = 1.0 if _compiles(result.switches) > _compiles(base.switches) else LOSS
    return min(with_it) <= loss * min(without)


def _steady(task: Task, switches: Switches, batch: list[int], about: float) -> float:
    count = _probe_steps(task.device, about)
    return _run(task, switches, [batch] * count).step_seconds / count


def _probe_steps(device: torch.device, about: float) -> int:
    """How many steps of about so many seconds tell what one takes."""
    if about >= PROBE_SECONDS:
        return 1
    return max(PROBE_STEPS, int(GPU_PROBE_SECONDS / about)) if device.type == "cuda" else PROBE_STEPS


def _compiles(switches: Switches) -> int:
    """How much is done before the first steps are as quick as the others: nothing, compiling, or recording too."""
    return switches.compiled + 2 * switches.graphs


def _by_width(task: Task, switches: Switches) -> list[list[int]]:
    """The batches of all epochs, the narrowest first."""
    # Packed batches are as long as their samples together, whatever they were padded to.
    if switches.packed or switches.first_token:
        return sorted(
            task.batches(switches), key=lambda batch: sum(task.length(switches, one) for one in batch)
        )
    return sorted(task.batches(switches), key=lambda batch: task.width(switches, batch))


def _short_enough(result: Result, row_seconds: float) -> bool:
    return result.part_of_batch is None and result.estimate <= row_seconds


def _probe(task: Task, result: Result, by_width: Sequence[list[int]], row_seconds: float) -> list[list[int]]:
    """Warm up, time the median batch, and return the batches that are left to time if the row is sampled."""
    middle = by_width[len(by_width) // 2]
    # Its longest samples: they are padded as widely as the whole batch.
    part = sorted(middle, key=lambda sample: task.length(result.switches, sample))[-WARM_UP_SAMPLES:]

    def step_seconds(batch: list[int], count: int = 1) -> float:
        run = _run(task, result.switches, [batch] * count)
        result.start_seconds.append(run.start_seconds)
        return run.step_seconds / count

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
        seconds = step_seconds(middle, _probe_steps(task.device, seconds))
    result.step_seconds.append(seconds)
    count = min(max(SMALLEST_SAMPLE, int(row_seconds / seconds)), len(by_width))
    count -= 1 - count % 2
    places = [(2 * point + 1) * len(by_width) // (2 * count) for point in range(count)]
    # The middle one is timed; the others go from outside in, so that each turn has a narrow and a wide one.
    del places[count // 2]
    pairs = zip(places, reversed(places), strict=True)
    return [by_width[place] for pair in pairs for place in pair][: len(places)]


def _time_steps(task: Task, result: Result, batches: list[list[int]]) -> None:
    run = _run(task, result.switches, batches)
    result.start_seconds.append(run.start_seconds)
    result.step_seconds += [run.step_seconds / len(batches)] * len(batches)


def _train_in_full(task: Task, result: Result, *, evaluate: bool, bar: bool) -> float:
    """Train all steps, measure the accuracy, and return the seconds of the training."""
    run = _run(task, result.switches, bar=bar)
    result.start_seconds.append(run.start_seconds)
    if evaluate:
        result.validation_accuracy = run.accuracy(task.validation_loader())
        result.accuracies.append(run.accuracy(task.test_loader()))
    return run.step_seconds


@dataclass(frozen=True)
class Run:
    """A model that was trained, and how long it took.

    Args:
        model: with its trained weights.
        accuracy: of the model on the samples of a loader, 0 to 1.
        start_seconds: from the call to the first step, and spent compiling.
        step_seconds: all others, to the return.

    """

    model: nn.Module
    accuracy: Callable[[Any], float]
    start_seconds: float
    step_seconds: float


def _run(
    task: Task, switches: Switches, batches: Sequence[list[int]] | None = None, *, bar: bool = False
) -> Run:
    """Train a fresh model on these batches, or in full where there are none."""
    return (_in_hasten if switches.hasten else _by_hand)(task, switches, batches, bar)


def _by_hand(task: Task, switches: Switches, batches: Sequence[list[int]] | None, bar: bool) -> Run:
    begin = _now(task.device)
    loader = task.users_loader(switches) if batches is None else task.loader(switches, batches)
    model = task.model(switches).to(task.device)
    optimizer = task.optimizer(model)
    torch.manual_seed(task.seed)
    first: list[float] = []

    def loss(model: nn.Module, batch: plain.Batch) -> Tensor:
        if not first:
            first.append(_now(task.device))
        return task.loss(model, batch)

    epochs = task.epochs if batches is None else 1
    plain.train(model, loader, optimizer, loss, epochs=epochs, device=task.device)
    end = _now(task.device)
    return Run(
        model,
        lambda data: plain.accuracy(model, data, task.logits, device=task.device),
        first[0] - begin,
        end - first[0],
    )


def _in_hasten(task: Task, switches: Switches, batches: Sequence[list[int]] | None, bar: bool) -> Run:
    import hasten as L
    from hasten.demo.module import Classifier, FirstStep

    begin = _now(task.device)
    chosen = switches.arguments()
    warm_up: list[list[int]] = []
    if batches is None:
        loader = task.users_loader(switches)
    else:
        # They are what batching="length" makes already.
        chosen.pop("batching", None)
        warm_up = _warm_up(task, switches, batches)
        loader = task.loader(switches, [*warm_up, *batches])
    first = FirstStep(lambda: _now(task.device), skip=len(warm_up))
    trainer = L.Trainer(
        max_epochs=task.epochs if batches is None else 1,
        accelerator="cpu" if task.device.type == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar,
        limit_val_batches=0,  # Accuracy is measured afterwards, apart from the clock.
        callbacks=[first],
        **chosen,
    )
    module = Classifier(task, switches)
    torch.manual_seed(task.seed)
    with _no_news():
        trainer.fit(module, loader)
    end = _now(task.device)
    compiling = 0.0
    if _compiles(switches) and batches is None and trainer.compile_report is not None:
        compiling = trainer.compile_report.seconds

    def accuracy(data: Any) -> float:
        with _no_news():
            return float(trainer.test(module, data, verbose=False)[0]["test_acc"])

    return Run(module.model, accuracy, first.seconds - begin + compiling, end - first.seconds - compiling)


def _warm_up(task: Task, switches: Switches, batches: Sequence[list[int]]) -> list[list[int]]:
    """Batches in whose steps all is compiled and recorded that is needed for these."""
    if not switches.graphs:
        return [batches[0]] * switches.compiled
    # Of each width one, the first of a whole batch: graphs are recorded for the batch size of the first.
    found: dict[int, list[int]] = {}
    for batch, width in zip(batches, task.padded_widths(switches, batches), strict=True):
        if len(batch) > len(found.get(width, ())):
            found[width] = batch
    chosen = sorted(found.values(), key=len, reverse=True)
    return [batch for batch in chosen for _ in range(RECORDING_STEPS)]


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
