"""How long training waits for its data: measured over the first seconds of a run, and said only where it is long."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hasten._lib.rank_zero import rank_zero_warn
from hasten.data.resident_loader import is_resident

if TYPE_CHECKING:
    from hasten.loops.run import Run

# Shorter runs are not worth a warning, and their figures are those of a warm-up.
_SECONDS = 5.0
_WARM_UP = 3
# With fewer, a validation among them would be taken for a step.
_STEPS = 10
# Less is what any loader costs.
_SHARE = 1 / 3


class Waiting:
    """The times of a run's first batches: waited for, and computed on."""

    def __init__(self) -> None:
        self.done = False
        self._number = 0
        self._waited: list[float] = []
        self._computed: list[float] = []
        self._idle = 0
        self._end = 0.0

    def watched(self, run: Run, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the same batches; once enough is known, nothing stands between them and the loop."""
        if self.done:
            return batches
        iterator = iter(batches)
        return itertools.chain(self._timed(run, iterator), iterator)

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
            f"({1000 * waited:.3g} of {1000 * (waited + computed):.3g} ms a step). {_advice(run, loader)}"
        )


def _advice(run: Run, loader: Any) -> str:
    speed = run.arguments.speed
    if not isinstance(loader, DataLoader):
        return (
            f"Make what {type(loader).__name__} does for a batch cheaper, or do it ahead in another thread."
        )
    if is_resident(loader):
        return "The data is in memory already: what is left is the collate function and the sampler."
    ways = []
    if speed.num_workers is None:
        ways.append(
            f"Trainer(num_workers='auto') finds how many worker processes pay (now {loader.num_workers})"
        )
    if not speed.resident:
        ways.append("Trainer(resident='auto') holds data in memory that fits there")
    return (
        "; ".join(ways) + "."
        if ways
        else "Make the samples cheaper: smaller files, decoded once, or stored decoded."
    )
