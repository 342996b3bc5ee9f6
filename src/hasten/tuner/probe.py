"""Run a few steps on the user's model and data, for both searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import MisconfigurationException
from hasten.logged_value import batch_size_of
from hasten.loops.evaluate import evaluate, predict
from hasten.loops.fit import train
from hasten.loops.run import Run
from hasten.loops.run_data import StageData
from hasten.loops.schedule import Stopped
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.tuner.tuned_value import TunedValue

if TYPE_CHECKING:
    from hasten.strategies.base import Strategy
    from hasten.trainer import Trainer
    from hasten.trainer.limited_runs import Stage
    from hasten.types import Batch, StepOutput


class ProbeRun:
    """Runs a few steps at a time inside a prepared run, with its weights, optimizers and epoch.

    Each probe reads the data from the beginning.

    Attributes:
        batch_size: samples of a batch in each probe; None for the loaders' own size.
        error: the latest out-of-memory error of this process.

    """

    def __init__(self, run: Run) -> None:
        self.run, self.module = run, run.module
        # Spawned processes have another Trainer than the one that was called.
        self.trainer: Trainer = run.module.trainer
        self.batch_size: int | None = None
        self.error: BaseException | None = None

    def value(self, name: str) -> TunedValue:
        """Return the tuned value ``name`` of the module and the datamodule."""
        return TunedValue(self.module, self.trainer.datamodule, name)

    def largest_batch(
        self, method: Stage, steps: int, *, check: Callable[[list[Any]], None] = lambda loaders: None
    ) -> int | None:
        """Run ``steps`` steps of ``method``, or batches of each loader; return the size of the largest batch.

        Training validates as well, if there is something to validate. ``check`` is called with the loaders first. The
        size is 0 if it cannot be read from the batches; None if memory ran out on any process.
        """
        strategy = self.run.runtime.strategy
        counter = _BatchCounter(steps * self.run.window.accumulate_grad_batches)
        options: dict[str, Any] = {"exchange_gradients": False, "batch_size": self.batch_size}
        try:
            with self.trainer.limited_run(method, steps, callbacks=[counter], **options) as run:
                check(run.data.of(method)[0].streams())
                for source in run.data.of(method):
                    if not source.is_off() and run.runtime.several_processes:
                        _agree_after_each_loader(source, strategy)
                if method == "fit":
                    train(run)
                elif method == "predict":
                    predict(run, return_predictions=False)
                else:
                    evaluate(run, run.data.test if method == "test" else run.data.validation)
                if not counter.batches:
                    raise MisconfigurationException(
                        "The tuner ran no batch: there is no data, or the module skips every batch."
                    )
                if method == "fit" and not run.data.validation.is_off():
                    evaluate(run, run.data.validation)
        except _FailedElsewhere:
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.error = error.with_traceback(None)
            # The frames of its context hold tensors, too.
            error.__context__ = None
            strategy.reduce_boolean_decision(True, all=False)
            return None
        if strategy.reduce_boolean_decision(False, all=False):
            return None
        self.leave_if_stopped()
        return self.maximum(counter.largest)

    def maximum(self, number: int) -> int:
        """Return the largest ``number`` of all processes, so that all continue alike."""
        runtime = self.run.runtime
        return int(runtime.all_reduce(torch.tensor(number), op="max"))

    def leave_if_stopped(self) -> None:
        """Raise ``Stopped`` if Ctrl-C or SIGTERM arrived at any process; all of them must call it."""
        number = self.maximum(self.run.limits.stop.signal or 0)
        if number:
            raise Stopped(number)


class _FailedElsewhere(Exception):
    """Memory ran out on another process."""


def _agree_after_each_loader(source: StageData, strategy: Strategy) -> None:
    """End an evaluation after a loader if memory ran out on another process.

    Not after each batch: processes may have different numbers of them.
    """
    batches = source.batches

    def agreed(loader_idx: int) -> Iterator[tuple[Batch, bool]]:
        yield from batches(loader_idx)
        if strategy.reduce_boolean_decision(False, all=False):
            raise _FailedElsewhere

    source.__dict__["batches"] = agreed


class _BatchCounter(Callback):
    """Counts batches and their largest size; ends training if memory ran out on another process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.batches = self.largest = 0

    def _count(self, batch: Batch) -> None:
        self.batches += 1
        size, is_certain = batch_size_of(batch)
        if is_certain:
            self.largest = max(self.largest, size)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        self._count(batch)
        if self.batches >= self._most:
            # Manual optimization may step less than once a batch, or never.
            trainer.should_stop = True
        if trainer.strategy.reduce_boolean_decision(False, all=False):
            raise _FailedElsewhere

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            self._count(batch)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
