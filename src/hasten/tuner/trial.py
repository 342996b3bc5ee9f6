"""A trial: train, evaluate or predict a few steps on the user's own module and data, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from hasten._lib.batch_size import batch_size_of
from hasten._lib.errors import MisconfigurationException
from hasten._lib.out_of_memory import is_out_of_memory
from hasten.loops.evaluate import evaluate
from hasten.loops.fit import train
from hasten.loops.predict import predict
from hasten.loops.run import Run, Stopped
from hasten.loops.run_data import Source
from hasten.module import LightningModule
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.strategies.base import Strategy
    from hasten.trainer import Trainer

Stage = Literal["fit", "validate", "test", "predict"]

# Which data a call reads, by the name it has in a run.
STAGE_OF = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


class Trial:
    """Runs a few steps at a time inside a prepared run, with its weights, optimizers and epoch.

    Args:
        trainer: whose run it is.
        run: the run; its data is read anew by each trial.

    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self.module: LightningModule = run.module
        self.datamodule: Any = trainer.datamodule
        # Samples of a batch in each trial; None for those of the loaders.
        self.batch_size: int | None = None
        # Why memory ran out the last time, in this process.
        self.error: BaseException | None = None

    def given(self, stage: str) -> Any:
        """Return the loaders that were passed to the call, or None."""
        return next(source.given for source in self.run.sources() if source.stage == stage)

    def try_out(
        self, method: Stage, count: int, *, check: Callable[[list[Any]], None] = lambda loaders: None
    ) -> int | None:
        """Run ``count`` steps of ``method``; training validates as well, if there is something to validate.

        Args:
            method: "fit", "validate", "test" or "predict".
            count: optimizer steps, or batches of each loader of an evaluation.
            check: looks at the loaders first.

        Returns:
            the size of the largest batch; 0 where batches do not tell it; None where memory ran out, on any process.

        """
        strategy = self.run.runtime.strategy
        watch = _Watch(count * self.run.accumulate_grad_batches)
        try:
            with self.trainer.limited_run(
                method, count, callbacks=[watch], exchange_gradients=False, batch_size=self.batch_size
            ) as run:
                check(run.sources_of(method)[0].streams())
                for source in [one for one in run.sources_of(method) if not one.is_off()]:
                    _agree_at_the_end(source, strategy)
                if method == "fit":
                    train(run)
                elif method == "predict":
                    predict(run, return_predictions=False)
                else:
                    evaluate(run, run.test if method == "test" else run.validation)
                if not watch.batches:
                    raise MisconfigurationException(
                        "The tuner ran no batch: there is no data, or the module skips every batch."
                    )
                if method == "fit" and not run.validation.is_off():
                    evaluate(run, run.validation)
        except _FailedElsewhere:
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.error = error.with_traceback(None)
            # The frames of what it was raised from hold tensors, too.
            error.__context__ = None
            strategy.reduce_boolean_decision(True, all=False)
            return None
        if strategy.reduce_boolean_decision(False, all=False):
            return None
        self.leave_if_stopped()
        return self.largest(watch.largest)

    def largest(self, number: int) -> int:
        """Return the largest ``number`` of all processes, so that all go on alike."""
        runtime = self.run.runtime
        return number if runtime.world_size == 1 else int(runtime.all_reduce(torch.tensor(number), op="max"))

    def leave_if_stopped(self) -> None:
        """Leave the run if Ctrl-C or SIGTERM arrived at any process; all of them call it.

        Raises:
            Stopped: a signal arrived.

        """
        number = self.largest(self.run.stop.signal or 0)
        if number:
            raise Stopped(number)


class _FailedElsewhere(Exception):
    """Memory ran out on another process."""


def _agree_at_the_end(source: Source, strategy: Strategy) -> None:
    """Have an evaluation end after each loader if memory ran out on another process.

    Not after each batch: processes may have different numbers of them.
    """
    batches = source.batches

    def agreed(loader_idx: int) -> Iterator[tuple[Any, bool]]:
        yield from batches(loader_idx)
        if strategy.reduce_boolean_decision(False, all=False):
            raise _FailedElsewhere

    if strategy.world_size > 1:
        source.__dict__["batches"] = agreed


class _Watch(Callback):
    """Counts batches and notes how large they are; ends training where memory ran out on another process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.batches = 0
        self.largest = 0

    def _after(self, batch: Any) -> None:
        self.batches += 1
        size, is_certain = batch_size_of(batch)
        if is_certain:
            self.largest = max(self.largest, size)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._after(batch)
        if self.batches >= self._most:
            # Manual optimisation may step less than once a batch, or never.
            trainer.should_stop = True
        if trainer.strategy.reduce_boolean_decision(False, all=False):
            raise _FailedElsewhere

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            self._after(batch)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._after(batch)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._after(batch)
