"""How long training waits for its data: measured over the first seconds of a run, and said only where it is long."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten._lib.rank_zero import rank_zero_warn
from hasten.data.memory.dataset_parts import changed, fingerprint
from hasten.data.memory.resident import is_resident

if TYPE_CHECKING:
    from hasten.loops.run import Run

# Shorter runs are not worth a warning, and their figures are those of a warm-up.
_SECONDS = 5.0
_WARM_UP = 3
# With fewer, a validation among them would be taken for a step.
_STEPS = 10
# Less is what any loader costs.
_SHARE = 1 / 3
# What starting processes may cost in each epoch: in seconds, and as a share of the epoch.
_SECONDS_OF_STARTS = 1.0
_SHARE_OF_STARTS = 0.05


class Waiting:
    """The times of a run's first batches: waited for, and computed on; and what starting workers costs an epoch."""

    def __init__(self) -> None:
        self.done = False
        # Of the epochs that began in this run: when, and what the data of workers was then.
        self._epochs = 0
        self._began = 0.0
        self._datasets: dict[str, Any] = {}
        # Seconds for which workers were started again while batches were timed.
        self._starting = 0.0
        self._number = 0
        self._waited: list[float] = []
        self._computed: list[float] = []
        self._idle = 0
        self._end = 0.0

    def watched(self, run: Run, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the same batches; once enough is known, nothing stands between them and the loop."""
        self._epochs += 1
        if self.done and self._epochs > 2:
            return batches
        iterator = iter(batches)
        if not self.done:
            iterator = itertools.chain(self._timed(run, iterator), iterator)
        starting = _starting_loaders(run)
        return self._first_of_epoch(run, iterator, starting) if starting else iterator

    def _first_of_epoch(
        self, run: Run, batches: Iterator[Any], starting: list[DataLoader[Any]]
    ) -> Iterator[Any]:
        """Return the same batches; the first of an epoch tells what starting workers costs each epoch."""
        first = list(itertools.islice(batches, 1))
        if self._waited:
            self._starting += run.train.worker_start_seconds
        if self._epochs <= 2:
            before, began = self._datasets, self._began
            self._datasets, self._began = (
                fingerprint([loader.dataset for loader in starting]),
                time.perf_counter(),
            )
            # Workers that live on would not see what was changed.
            if before and not any(place and place in before for place in changed(before, self._datasets)):
                _judge_starts(run, self._began - began, starting[0])
        return itertools.chain(first, batches)

    def _timed(self, run: Run, batches: Iterator[Any]) -> Iterator[Any]:
        clock, device = time.perf_counter, run.runtime.device
        on_cuda = device.type == "cuda"
        while not self.done:
            began = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            came = clock()
            self._number += 1
            counts = self._number > _WARM_UP
            if counts:
                if not self._waited:
                    self._end = came + _SECONDS
                self._waited.append(came - began)
                # The host is ahead of a GPU: only one that has nothing left to do has waited for the batch.
                self._idle += torch.cuda.current_stream(device).query() if on_cuda else True
            yield batch
            if counts:
                now = clock()
                self._computed.append(now - came)
                if now > self._end and len(self._computed) >= _STEPS:
                    self.done = True
                    self._judge(run)

    def _judge(self, run: Run) -> None:
        steps = len(self._waited)
        # The mean, as batches of workers come in bursts; and no mean where validation and checkpoints are in it.
        waited, computed = sum(self._waited) / steps, statistics.median(self._computed)
        share = waited / (waited + computed)
        if share < _SHARE or self._idle < steps / 2:
            return
        loader = run.train.loaders[0]
        rank_zero_warn(
            f"Training waits for its data: {100 * share:.0f} % of the time of the first {steps} steps "
            f"({1000 * waited:.3g} of {1000 * (waited + computed):.3g} ms a step). "
            + _advice(run, loader, starts=self._starting > sum(self._waited) / 2)
        )


def _starting_loaders(run: Run) -> list[DataLoader[Any]]:
    """Return the loaders that start their processes again in each epoch, and could keep them."""
    if run.arguments.reload_dataloaders_every_n_epochs:
        return []
    streams = [*run.train.streams(), *(run.validation.streams() if run.validation.loaded else ())]
    return [
        loader
        for loader in streams
        if isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.persistent_workers
    ]


def _judge_starts(run: Run, epoch_seconds: float, loader: DataLoader[Any]) -> None:
    """Warn where starting processes costs seconds in each epoch."""
    train, validation = run.train.worker_start_seconds, run.validation.worker_start_seconds
    seconds = train + validation
    if seconds < max(_SECONDS_OF_STARTS, _SHARE_OF_STARTS * epoch_seconds):
        return
    whose = " and ".join(name for name, cost in (("training", train), ("validation", validation)) if cost)
    rank_zero_warn(
        f"Starting the worker processes for {whose} takes {seconds:.1f} of the {epoch_seconds:.1f} s of an epoch. "
        f"{_kept(loader)} keeps them."
    )


def _kept(loader: DataLoader[Any]) -> str:
    return f"DataLoader(..., num_workers={loader.num_workers}, persistent_workers=True)"


def _advice(run: Run, loader: Any, *, starts: bool) -> str:
    """Return what would help.

    Args:
        run: the run.
        loader: of the training.
        starts: most of the waiting is for processes that start.

    """
    speed = run.arguments.speed
    if not isinstance(loader, DataLoader):
        return (
            f"Make what {type(loader).__name__} does for a batch cheaper, or do it ahead in another thread."
        )
    if is_resident(loader):
        return "The data is in memory already: what is left is the collate function and the sampler."
    if starts:
        return f"Most of it is the start of worker processes in each epoch: {_kept(loader)} keeps them."
    if isinstance(loader.dataset, IterableDataset):
        # It divides its samples among workers itself: hasten neither counts them nor holds the data.
        if loader.num_workers:
            return f"Make the samples cheaper, or give the DataLoader more than num_workers={loader.num_workers}."
        return (
            f"DataLoader(..., num_workers=2) reads ahead, if {type(loader.dataset).__name__} gives each worker its "
            "part (torch.utils.data.get_worker_info)."
        )
    ways = []
    if speed.num_workers is None:
        ways.append(
            f"Trainer(num_workers='auto') finds how many worker processes pay (now {loader.num_workers})"
        )
    if not speed.resident:
        ways.append(
            "Trainer(resident='auto') holds data in memory that fits there and is the same in each epoch"
        )
    return (
        "; ".join(ways) + "."
        if ways
        else "Make the samples cheaper: smaller files, decoded once, or stored decoded."
    )
