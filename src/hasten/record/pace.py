"""How fast a fit trains, where its time goes, and how long it still takes.

How long each batch was waited for is added up; everything else is computed about once a second, from counters that are
there anyway. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hasten._lib.rank_zero import rank_zero_info
from hasten._lib.tree import Arrival, send_to_host
from hasten.logged_value import batch_size_of
from hasten.machine.signals import StopRequests
from hasten.record.step_times import ASIDE, PARTS, StepTimes, compile_seconds

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.record.ranks import RankTimes, Slowest
    from hasten.record.step_times import StepFunctions
    from hasten.types import PathLike

T = TypeVar("T")

# The first step may compile, and is not counted. The first timed step comes this long after it.
_FIRST_SECONDS = 0.2
# Between two lines of the record, and between two timed steps; in a long fit a thousandth of its time.
_SECONDS = 1.0
_SHARE = 1e-3
# Over which a speed is taken, and over which the time to the end is.
_RECENT_SECONDS = 5.0
_LONG_SECONDS = 60.0
_SPACING_SECONDS = 0.5
# When it is said that a fit takes long, and how long that is.
_SAYS_AFTER_SECONDS = 30.0
_LONG_FIT_SECONDS = 600.0
# Assumed cost of a validation batch relative to a training batch, until one was measured.
_VALIDATION_COST = 1 / 3

_TOKENS, _MASK = "input_ids", "attention_mask"


class _Totals(NamedTuple):
    """Totals up to a moment; seconds do not include validation and checkpoints."""

    seconds: float
    batches: int
    steps: int
    samples: int
    tokens: int
    waited: float


@dataclass(frozen=True)
class Speed:
    """How fast a fit trains at the moment; for all processes together."""

    batches: float  # Those of one process in a second.
    samples: float | None  # In a second; None if batches do not show how many they have.
    tokens: float | None  # In a second; None if batches have no ``input_ids``.
    waiting: float | None  # The share of the time in which the device waits for data; None if it is not known.


class Pace:
    """How fast a fit trains: its speed, the time of its steps, its time to the end.

    A fit is measured where a progress bar or a record shows it: the first process shows it, and the others tell it how
    long they take. Otherwise nothing stands between the loop and its batches.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        # Seconds in which values were published.
        self.published = 0.0
        # When ``_after_batch`` is due. In seconds of time.perf_counter, as all moments here.
        self._due = 0.0
        # Called by the loop with each batch: counts samples and tokens, where batches have tokens.
        self.counts: list[Callable[[Any], None]] = []
        # When the time of the fit is up.
        self.deadline = math.inf
        # Whether a fit is measured, and whether the first process is to write a record of it.
        self.measures = self.is_recorded = False
        # What the processes report about their steps, and the slowest of them; None before the first report.
        self.ranks: RankTimes | None = None
        self.slowest: Slowest | None = None
        self._ranks_due = 0.0
        self.validated = self.saved = 0.0
        self._last_validation: float | None = None
        self._run: Run | None = None
        self._times: StepTimes | None = None
        self._began = self._speed_due = self._sample_due = 0.0
        self._aside_since: float | None = None
        self._samples = self._tokens = self._counted = self._size = 0
        self._sizes_known = False
        self._history: deque[_Totals] = deque()
        self._last_written: _Totals | None = None
        # How often the process had been stopped when the counting began.
        self._continued = 0
        self._batches_of_epoch = math.inf
        self._says = False
        # Of the device's waiting, among the host's: a busy device does not wait.
        self._waits_of_device = (0.0, 0.0)
        self._useful: tuple[int, Arrival] | None = None
        self._useful_share: float | None = None
        # Seconds spent compiling in this process, as of the last line.
        self._compiled = 0.0
        self._sample: _Sample | None = None
        self._sample_from = self._sample_before = _Counters(0, 0.0, 0.0, 0.0)

    # -- of the loop

    def begin(self, run: Run, make_step: Callable[[], Callable[..., Any]], *, says: bool = True) -> None:
        """Begin to measure a fit."""
        runtime, record = run.runtime, run.observers.record
        if runtime.several_processes:
            from hasten.record.ranks import RankTimes

            self.ranks = run.limits.stop.carried = RankTimes(runtime.global_rank, runtime.world_size)
        leads = runtime.is_global_zero
        shown = run.arguments.enable_progress_bar or (record.writes if leads else self.is_recorded and self.ranks)
        if not shown or not (leads or self.ranks):
            return
        self._run, self._began, self._due, self.measures = run, perf_counter(), 0.0, True
        self._compiled = compile_seconds()
        self._says = says and leads and not run.conventions.bars_have_counters
        if record.writes or self.ranks is not None or runtime.device.type == "cuda":
            self._times = StepTimes(run, make_step)
        if self.ranks is not None:
            self.ranks.begin(self._progress)
            self.ranks.on_report = self._report_ranks if leads else None

    def watched(self, functions: StepFunctions, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the same batches; where a fit is measured, what is due after a batch is done before the next one."""
        return self._timed(functions, iter(batches)) if self.measures else batches

    def _timed(self, functions: StepFunctions, batches: Iterator[Any]) -> Iterator[Any]:
        clock = perf_counter
        while True:
            began = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            came = clock()
            self.waited += came - began
            yield batch
            if came >= self._due:
                self._after_batch(functions)

    def timed_publishing(self, publish: Callable[..., None]) -> Callable[..., None]:
        """Return ``publish``, whose seconds are counted where a fit is measured."""
        if not self.measures:
            return publish

        def timed_publish(*args: Any, **kwargs: Any) -> None:
            began = perf_counter()
            publish(*args, **kwargs)
            self.published += perf_counter() - began

        return timed_publish

    def _after_batch(self, functions: StepFunctions) -> None:
        """Do what is due after a batch: write a line, begin or end to time a step."""
        run, times, now = self._run, self._times, perf_counter()
        assert run is not None
        # Whether an optimizer has stepped after the batch, and whether it is the last of its epoch.
        completes, is_last = run.window.is_end, run.window.is_last_batch
        if not self._history:
            self._begin_counting(run)
            if run.observers.record.writes:
                run.observers.record.add("first_step", **self._position(run), compile_seconds=self._newly_compiled())
            self._due = self._sample_due = now + _FIRST_SECONDS
            self._speed_due = now + _SECONDS
            return
        self._leave_out_stops(run)
        if not is_last and not self.counts and self._sizes_known and run.logged.batch is not None:
            self._size = batch_size_of(run.logged.batch)[0]
        if times is not None and times.running:
            if not completes:
                times.next_batch()
                return
            self._end_sample(run, times)
        if times is not None:
            self._take_sample(run, times)
        gap = max(_SECONDS, _SHARE * (now - self._began))
        if now >= self._speed_due:
            self._write_speed(run)
            self._speed_due = now + gap
        if self._says and now - self._began > _SAYS_AFTER_SECONDS:
            self._says = False
            self._say_how_long(now)
        self._due = self._speed_due
        if times is None:
            return
        self._due = min(self._due, self._sample_due)
        # A timed step begins with the wait for its first batch.
        if now < self._sample_due or not completes or is_last:
            return
        self._sample_due = now + gap
        if not times.possible():
            return
        self._begin_sample(run, functions, times)
        self._due = 0.0

    def _leave_out_stops(self, run: Run) -> None:
        """Restart the counts if the process was stopped since the last line: the clocks went on while it was."""
        if self._continued != StopRequests.continued:
            self._continued = StopRequests.continued
            self.drop_sample()
            self._last_written = self._totals()
            self._history = deque([self._last_written])
            self._sample_before = self._counters(run)

    def _say_how_long(self, now: float) -> None:
        """Tell the user that a fit will take long, while there is time to do something about it."""
        left = self.seconds_left()
        if left is None or now - self._began + left < _LONG_FIT_SECONDS:
            return
        today, program = datetime.now(), os.path.basename(sys.argv[0] if sys.argv else "")
        advise = f"hasten advise {program if program.endswith('.py') else 'program.py'}"
        ends = moment(today + timedelta(seconds=left), today)
        rank_zero_info(
            f"This fit takes about {about(now - self._began + left)}: it ends {ends}. To find out what makes it "
            f"faster: {advise}"
        )

    def drop_sample(self) -> None:
        """Drop the timing of an unfinished step: its functions are chosen again, or the epoch is over."""
        if self._times is not None:
            self._times.drop()

    def end_epoch(self) -> None:
        """Record how many batches the epoch had."""
        self.drop_sample()
        if self._run is not None and self._run.progress.last_batch:
            self._batches_of_epoch = self._run.progress.batch

    def end(self) -> None:
        """Write what the last line does not have; called when the fit is over."""
        run = self._run
        if run is not None:
            if self.ranks is not None:
                self.ranks.end()
            self.drop_sample()
            if self._times is not None:
                self._take_sample(run, self._times)
            if self._history:
                self._leave_out_stops(run)
                self._write_speed(run)
            self._run, self.measures = None, False

    def fetch(self, take: Callable[[], T]) -> T:
        """Return ``take()``, which gives a batch to a step that fetches its batches itself."""
        clock = self._times.clock if self._times is not None and self._times.running else None
        began = perf_counter()
        if clock is not None:
            clock.enter("data")
        try:
            return take()
        finally:
            self.waited += perf_counter() - began
            if clock is not None:
                clock.leave()

    def pause(self) -> _Aside:
        """Pause step timing while a validation or checkpoint runs."""
        aside = _Aside(perf_counter(), self.saved, self._aside_since)
        if self._aside_since is None:
            self._aside_since = aside.began
        if self._times is not None and self._times.running:
            self._times.clock.enter(ASIDE)
        return aside

    def _resume(self, aside: _Aside) -> float:
        """Return the seconds of a validation or checkpoint that is over, without checkpoints within it."""
        self._aside_since = aside.outer
        if self._times is not None and self._times.running:
            self._times.clock.leave()
        return perf_counter() - aside.began - (self.saved - aside.saved)

    def end_validation(self, aside: _Aside) -> None:
        """Count a validation that has ended; ``aside`` is what ``pause`` returned when it began."""
        seconds = self._resume(aside)
        self.validated += seconds
        self._last_validation = seconds
        if self._run is not None:
            self._run.observers.record.add("validation", **self._position(self._run), seconds=seconds)

    def end_checkpoint(self, aside: _Aside, path: PathLike, callbacks: Iterable[object]) -> None:
        """Count a checkpoint that was saved, maybe by one of the callbacks, or is being written in the background."""
        seconds, run = self._resume(aside), self._run
        self.saved += seconds
        if run is not None and run.observers.record.writes:
            facts = {"monitor": None, "best": False, "bytes": _size_bytes(path, seconds)} | _reason(path, callbacks)
            run.observers.record.add("checkpoint", **self._position(run), path=str(path), seconds=seconds, **facts)

    # -- for those who show it

    @property
    def seconds(self) -> float:
        """Seconds since the fit began."""
        return perf_counter() - self._began

    def speed(self) -> Speed | None:
        """Return how fast the last seconds were; None before the second step."""
        if self._run is None or not self._history:
            return None
        self._leave_out_stops(self._run)
        now = self._look()
        if now.batches <= self._history[0].batches:
            return None
        before = next(
            (totals for totals in reversed(self._history) if now.seconds - totals.seconds >= _RECENT_SECONDS),
            self._history[0],
        )
        seconds = max(now.seconds - before.seconds, 1e-9)
        replicas, factor = _replicas(self._run), self._waiting_factor(self._run)
        return Speed(
            batches=(now.batches - before.batches) / seconds,
            samples=(now.samples - before.samples) * replicas / seconds if self._sizes_known else None,
            tokens=None if not self.counts else (now.tokens - before.tokens) * replicas / seconds,
            waiting=None if factor is None else min(1.0, factor * (now.waited - before.waited) / seconds),
        )

    def seconds_left(self) -> float | None:
        """Return about how long the fit still takes, validations and checkpoints included; None if it has no end.

        Before the second step it is not known, and the result is None too.
        """
        run = self._run
        if run is None or not self._history:
            return None
        now, left = self._look(), self.deadline - perf_counter()
        first = self._history[0]
        if now.batches <= first.batches:
            return None
        per_batch = (now.seconds - first.seconds) / max(1, now.batches - first.batches)
        batches = self._batches_left(run)
        if not math.isinf(batches):
            all_batches = now.batches - first.batches
            checkpoints = batches * self.saved / max(1, all_batches)
            each = self._last_validation
            if each is None:
                each = per_batch * _VALIDATION_COST * _batches_of_validation(run)
            validations = run.data.validation_schedule.left(run, batches) * each if batches and each else 0.0
            if self._aside_since is not None and run.state.stage != "train":
                validations += max(0.0, each - (perf_counter() - self._aside_since))
            left = min(left, batches * per_batch + validations + checkpoints)
        return None if math.isinf(left) else max(0.0, left)

    def memory_bytes(self) -> int | None:
        """Return the most memory that tensors had on the device; None where it is not known."""
        device = None if self._run is None else self._run.runtime.device
        return None if device is None or device.type != "cuda" else torch.cuda.max_memory_allocated(device)

    # -- counting

    def _begin_counting(self, run: Run) -> None:
        # Only the first process shows samples and tokens.
        batch = run.logged.batch if run.runtime.is_global_zero else None
        tokens = batch.get(_TOKENS) if isinstance(batch, Mapping) else None
        if isinstance(tokens, Tensor) and tokens.dim() == 2:
            self.counts.append(self._count_tokens)
            self._size, self._sizes_known = tokens.shape[0], True
        else:
            self._size, self._sizes_known = (0, False) if batch is None else batch_size_of(batch)
        self._counted = run.progress.total_batches
        self._continued = StopRequests.continued
        self._history.append(self._totals())
        self._last_written = self._history[0]
        self._sample_before = self._counters(run)

    def count_last(self) -> None:
        """Count the current batch separately: the last one of an epoch may be smaller."""
        run = self._run
        if run is None or self.counts or not self._sizes_known or not self._history:
            return
        new = run.progress.total_batches - self._counted
        if new > 0 and run.logged.batch is not None:
            self._samples += self._size * (new - 1) + batch_size_of(run.logged.batch)[0]
            self._counted += new

    def _count_tokens(self, batch: Any) -> None:
        tokens = batch.get(_TOKENS) if isinstance(batch, Mapping) else None
        if isinstance(tokens, Tensor):
            self._samples += tokens.shape[0]
            self._tokens += tokens.numel()

    def _totals(self) -> _Totals:
        run = self._run
        assert run is not None
        progress = run.progress
        if not self.counts:
            # A batch that was looked at stands for those since.
            self._samples += self._size * (progress.total_batches - self._counted)
            self._counted = progress.total_batches
        now = perf_counter() if self._aside_since is None else self._aside_since
        seconds = now - self._began - self.validated - self.saved
        return _Totals(seconds, progress.total_batches, progress.logged_step, self._samples, self._tokens, self.waited)

    def _look(self) -> _Totals:
        now, history = self._totals(), self._history
        if now.seconds - history[-1].seconds >= _SPACING_SECONDS:
            history.append(now)
            while len(history) > 2 and now.seconds - history[1].seconds > _LONG_SECONDS:
                history.popleft()
        return now

    def _waiting_factor(self, run: Run) -> float | None:
        """Return which share of the host's waiting for data the device waited too; None if that is not known."""
        if run.runtime.steps is not None:
            return None
        if run.runtime.device.type != "cuda":
            return 1.0
        device, host = self._waits_of_device
        return min(1.0, device / host) if host > 0 else None

    # -- the other processes

    def _progress(self) -> tuple[int, float, float, float] | None:
        """Return what ``StepsDone`` of this process is; None before its second step."""
        run = self._run
        if run is None or not self._history:
            return None
        now = self._totals()
        return now.steps, now.seconds, now.waited, self._waiting_factor(run) or 0.0

    def _report_ranks(self, slowest: Slowest) -> None:
        """Take the reports of all processes, which have just come: name the slowest, and write a line."""
        run, ranks, now = self._run, self.ranks, perf_counter()
        assert run is not None
        assert ranks is not None
        self.slowest = slowest
        if sentence := ranks.to_say(slowest):
            rank_zero_info(sentence)
        if run.observers.record.writes and now >= self._ranks_due:
            self._ranks_due = now + _SHARE * (now - self._began)
            run.observers.record.add(
                "ranks",
                **self._position(run),
                **slowest._asdict(),
                slow=slowest.is_slow,
                ranks=dict(ranks.for_record()),
            )

    def _batches_left(self, run: Run) -> float:
        progress, per_epoch = run.progress, run.data.train.limit
        if math.isinf(per_epoch):
            per_epoch = self._batches_of_epoch
        epochs = run.limits.max_epochs - progress.epoch
        # Without an end of the epochs, an epoch without an end does not matter.
        by_epochs = math.inf if math.isinf(epochs) else max(0.0, epochs * per_epoch - progress.batch)
        steps = run.limits.max_steps - progress.global_step
        if math.isinf(steps) or not progress.global_step:
            return by_epochs
        done, updates = progress.total_batches, progress.global_step
        return min(by_epochs, max(0.0, steps) * done / updates)

    # -- lines of the record

    @staticmethod
    def _position(run: Run) -> dict[str, int]:
        return {"step": max(0, run.progress.logged_step - 1), "epoch": run.progress.epoch}

    def _write_speed(self, run: Run) -> None:
        if not run.observers.record.writes or self._last_written is None:
            return
        before, now = self._last_written, self._totals()
        batches = now.batches - before.batches
        if batches <= 0:
            return
        self._last_written = now
        replicas, factor = _replicas(run), self._waiting_factor(run)
        tokens = None if not self.counts else (now.tokens - before.tokens) * replicas
        useful = self._useful_tokens(run)
        # From the module alone: to count them here would put code into the program that trains.
        flops = getattr(run.module, "flops_per_batch", None)
        run.observers.record.add(
            "speed",
            **self._position(run),
            steps=now.steps - before.steps,
            seconds=now.seconds - before.seconds,
            samples=(now.samples - before.samples) * replicas,
            tokens=tokens,
            useful_tokens=None if tokens is None or useful is None else round(tokens * useful),
            data_seconds=None if factor is None else factor * (now.waited - before.waited),
            compile_seconds=self._newly_compiled(),
            lr=learning_rates(run.optimizers),
            memory_bytes=self.memory_bytes(),
            flops=int(flops) * batches if isinstance(flops, int | float) else None,
            peak_flops=_peak_flops(run),
        )

    def _newly_compiled(self) -> float:
        """Return the seconds spent compiling since the last call."""
        before, self._compiled = self._compiled, compile_seconds()
        return self._compiled - before

    def _useful_tokens(self, run: Run) -> float | None:
        """Return the share of tokens that are no padding, of a batch of the interval before if the device has them."""
        if not self.counts:
            return None
        if self._useful is not None and self._useful[1].ready():
            of, arrival = self._useful
            self._useful, self._useful_share = None, arrival.values()[0] / of
        batch = run.logged.batch
        if self._useful is None and isinstance(batch, Mapping):
            real = useful_positions(batch)
            if real is not None:
                self._useful = real.numel(), send_to_host([real.sum()])
                if not real.is_cuda:
                    self._useful_share = self._useful[1].values()[0] / real.numel()
                    self._useful = None
        return self._useful_share

    # -- timed steps

    def _begin_sample(self, run: Run, functions: StepFunctions, times: StepTimes) -> None:
        self._sample = None  # The one before, if the device has not come to its end in a second.
        self._sample_from = self._counters(run)
        times.begin(functions)

    def _end_sample(self, run: Run, times: StepTimes) -> None:
        times.end()
        now = self._counters(run)
        # What does not happen in each step, or not evenly, is a mean over the steps since the last timed one.
        self._sample = _Sample(
            self._position(run), within=now.minus(self._sample_from), since=now.minus(self._sample_before)
        )
        self._sample_before = now
        self._take_sample(run, times)

    def _take_sample(self, run: Run, times: StepTimes) -> None:
        """Write the line of the last timed step, once the device has come to its end."""
        sample = self._sample
        if sample is None or not times.clock.ready():
            return
        self._sample = None
        found, within, since = times.clock.seconds(), sample.within, sample.since
        if self.ranks is not None:
            self.ranks.add_step(found)
        if run.runtime.device.type == "cuda":
            device = found.get("data", 0.0)
            self._waits_of_device = (self._waits_of_device[0] + device, self._waits_of_device[1] + within.waited)
        if not run.observers.record.writes:
            return
        steps, factor = max(1, since.steps), self._waiting_factor(run)
        parts = {part: found.get(part, 0.0) for part in PARTS}
        parts["data"] = (1.0 if factor is None else factor) * since.waited / steps
        parts["other"] = max(0.0, parts["other"] - within.published)
        parts["logging"] += since.published / steps
        parts["checkpoints"] = since.saved / steps
        run.observers.record.add("step_time", **sample.position, seconds=sum(parts.values()), parts=parts)

    def _counters(self, run: Run) -> _Counters:
        return _Counters(run.progress.logged_step, self.waited, self.published, self.saved)


class _Aside(NamedTuple):
    """The start of something that is not a step, the seconds of checkpoints until then, and what contains it."""

    began: float
    saved: float
    outer: float | None


class _Counters(NamedTuple):
    """Counts up to a moment: steps, and seconds of work that is not spread evenly over the steps."""

    steps: int
    waited: float
    published: float
    saved: float

    def minus(self, before: _Counters) -> _Counters:
        return _Counters(
            self.steps - before.steps, self.waited - before.waited, self.published - before.published,
            self.saved - before.saved,
        )  # fmt: skip


class _Sample(NamedTuple):
    """A step that was timed: what was counted within it, and since the one before."""

    position: dict[str, int]
    within: _Counters
    since: _Counters


# -- what batches and optimizers show


def useful_positions(batch: Mapping[Any, Any]) -> Tensor | None:
    """Return which positions of a batch of tokens are no padding; None where it does not say."""
    tokens, mask, documents = batch.get(_TOKENS), batch.get(_MASK), batch.get("document_ids")
    if not isinstance(tokens, Tensor):
        return None
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        return mask != 0
    # Of batching.pack: -1 is the padding at the end of a row.
    return documents >= 0 if isinstance(documents, Tensor) and documents.shape == tokens.shape else None


def learning_rates(optimizers: Sequence[Any]) -> dict[str, float]:
    """Return the learning rates by the names that LearningRateMonitor gives them, without "lr-".

    Rates that are on a device are left out: nothing waits for them.

    Example::

        >>> learning_rates([torch.optim.SGD([torch.zeros(1)], lr=0.5)])
        {'SGD': 0.5}

    """
    seen: Counter[str] = Counter()
    found: dict[str, float] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        name = f"{kind}-{seen[kind]}" if seen[kind] else kind
        seen[kind] += 1
        groups = optimizer.param_groups
        for index, group in enumerate(groups, 1):
            rate = group.get("lr")
            if rate is not None and not (isinstance(rate, Tensor) and not rate.is_cpu):
                found[name if len(groups) == 1 else f"{name}/{group.get('name', f'pg{index}')}"] = float(rate)
    return found


def _replicas(run: Run) -> int:
    """Return how many processes read batches of their own."""
    return int((run.runtime.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def _peak_flops(run: Run) -> float | None:
    """Return the operations a second that the device reaches at most; None if that is not known."""
    from hasten.report.peaks import known_peak
    from hasten.report.throughput import compute_dtype

    return known_peak(run.runtime.device, compute_dtype(run.runtime.precision))


def _batches_of_validation(run: Run) -> float:
    if not run.data.validation.loaded or run.data.validation.is_off():
        return 0.0
    batches = sum(run.data.validation.all_limits())
    return 0.0 if math.isinf(batches) else batches


def _reason(path: PathLike, callbacks: Iterable[object]) -> dict[str, Any]:
    """Return why a callback saves a file: the value it monitors, and whether it is the best so far."""
    for callback in callbacks:
        scores = getattr(callback, "best_k_models", {})
        if path in scores:
            name, best = getattr(callback, "monitor", None), getattr(callback, "best_model_path", "")
            return {"monitor": {str(name): float(scores[path])}, "best": path == best}
    return {}


def _size_bytes(path: Any, seconds: float) -> int | None:
    """Return the size of a file or folder written in these last seconds; None for a URL, and while it is written."""
    with suppress(OSError, TypeError, ValueError):
        file = Path(path)
        if file.stat().st_mtime < time.time() - seconds - 1.0:
            return None
        if file.is_dir():
            return sum(part.stat().st_size for part in file.rglob("*") if part.is_file())
        return file.stat().st_size
    return None


# -- times as text


def time_text(seconds: float) -> str:
    """Return a time as digits: minutes and seconds, hours, or days.

    Example::

        >>> time_text(75), time_text(3 * 3600 + 5), time_text(200_000)
        ('1:15', '3:00:05', '2 days 7:33')

    """
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days} day{'s' * (days > 1)} {hours}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def about(seconds: float) -> str:
    """Return a long time in words, to two units.

    Example::

        >>> about(11_890), about(780), about(200_000)
        ('3 h 20 min', '13 min', '2 days 8 h')

    """
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} min"
    if seconds < 86400:
        minutes = 10 * round(seconds / 600)
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    hours = round(seconds / 3600)
    days = f"{hours // 24} day{'s' * (hours >= 48)}"
    return f"{days} {hours % 24} h" if hours % 24 else days


def seconds_text(seconds: float) -> str:
    """Return a short or a long time, to two units or three digits.

    Example::

        >>> seconds_text(0.00042), seconds_text(75), seconds_text(7500), seconds_text(200000)
        ('0.42 ms', '1 min 15 s', '2 h 05 min', '2 d 7 h')

    """
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(when: datetime, now: datetime) -> str:
    """Return a moment as someone would say it now.

    Example::

        >>> now = datetime(2026, 11, 23, 13, 5)
        >>> moment(datetime(2026, 11, 23, 16, 30), now), moment(datetime(2026, 11, 27, 4, 0), now)
        ('at 16:30', 'on Friday, 27 November, at 04:00')

    """
    clock = f"at {when:%H:%M}"
    if when.date() == now.date():
        return clock
    if when.date() - now.date() == timedelta(days=1):
        return f"tomorrow {clock}"
    return f"on {when:%A}, {when.day} {when:%B}, {clock}"
