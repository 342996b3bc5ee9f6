"""A trial: train, evaluate or predict a few steps on the user's own module and data, and leave everything as it was."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.batch_size import batch_size_of
from hasten._lib.errors import MisconfigurationException
from hasten._lib.out_of_memory import is_out_of_memory
from hasten._lib.watched import WatchedList
from hasten.logged_values import LoggedValues
from hasten.loggers.base import DummyLogger
from hasten.loops.evaluate import evaluate
from hasten.loops.fit import train_epoch
from hasten.loops.predict import predict
from hasten.loops.prepare import take_optimizers
from hasten.loops.progress import Progress
from hasten.loops.run import Run, Stopped
from hasten.loops.run_data import Source
from hasten.loops.states import RunningStage, TrainerState, TrainerStatus
from hasten.machine.signals import StopRequests
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.profilers.base import PassThroughProfiler
from hasten.seed import collect_rng_state, restore_rng_state
from hasten.tuner.restore import Memory

if TYPE_CHECKING:
    from hasten.strategies.base import Strategy
    from hasten.trainer import Trainer

# Which data a call reads, by the name it has in a run.
STAGE_OF = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}
_SOURCES = {"train": "train", "validate": "validation", "test": "test", "predict": "predict"}


@contextmanager
def nothing_changes(trainer: Trainer, module: LightningModule, datamodule: Any) -> Iterator[Memory]:
    """Give Trainer, module, data and random generators back the state they have now, also after an error.

    What else may change is told to the memory that this yields.
    """
    books = dict(trainer.__dict__)
    model = trainer.strategy.model
    random = collect_rng_state()
    memory = Memory()
    memory.keep(module)
    memory.keep(datamodule, values=False)
    if trainer._runtime.scaler is not None:
        memory.keep(trainer._runtime.scaler)
        memory.keep(trainer._runtime._unscaled)
    try:
        yield memory
    finally:
        memory.restore()
        trainer.__dict__.clear()
        trainer.__dict__.update(books)
        trainer.strategy.model = model
        restore_rng_state(random)


def quietly(trainer: Trainer) -> None:
    """Take callbacks and loggers off, and count on copies; ``nothing_changes`` puts them back."""
    trainer.__dict__.update(
        _arguments=dataclasses.replace(
            trainer._arguments,
            enable_autolog_hparams=False,
            num_sanity_val_steps=0,
            max_epochs_assumed=False,
        ),
        _callbacks=WatchedList([], lambda: None),
        # There is a logger where the program expects one.
        _loggers=[DummyLogger() for _ in trainer._loggers],
        _logged=LoggedValues(trainer._runtime),
        _progress=copy.copy(trainer._progress),
        # Evaluation takes over what an earlier run of the same Trainer holds.
        _run=None,
        profiler=PassThroughProfiler(),
        state=TrainerState(TrainerStatus.RUNNING, trainer.state.fn, trainer.state.stage),
    )


class Trial:
    """Runs a few steps at a time inside a prepared run, with its weights, optimizers and epoch.

    Args:
        trainer: whose run it is.
        run: the run; its data is read anew by each trial.

    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self.module: LightningModule = run.module
        self.datamodule: Any = trainer._datamodule
        # Why memory ran out the last time, in this process.
        self.error: BaseException | None = None

    def given(self, stage: str) -> Any:
        """Return the loaders that were passed to the call, or None."""
        return getattr(self.run, _SOURCES[stage]).given

    def source_in(self, run: Run, method: str) -> Source:
        """Return the data that ``method`` reads in a run."""
        source: Source = getattr(run, _SOURCES[STAGE_OF[method]])
        return source

    @contextmanager
    def steps(
        self,
        method: str,
        count: int,
        *,
        callbacks: Iterable[Callback] = (),
        alone: bool = False,
        keeps_limit: bool = False,
    ) -> Iterator[Run]:
        """Yield a run of ``method`` over ``count`` steps, ready to go; afterwards all is as before.

        Args:
            method: "fit", "validate", "test" or "predict".
            count: optimizer steps, or batches of an evaluation.
            callbacks: what watches the steps.
            alone: exchange no gradients between processes: one that fails leaves the others waiting for nothing.
            keeps_limit: read as many batches of an epoch as ``limit_train_batches`` says.

        """
        trainer, module, outer = self.trainer, self.module, self.run
        with nothing_changes(trainer, module, self.datamodule) as memory:
            quietly(trainer)
            trainer._callbacks.extend(callbacks)
            at = trainer._progress
            # The epoch is the one in hand: programs ask for it in their steps.
            trainer._progress = Progress(
                epoch=at.current_epoch,
                total_batches=at.total_batches,
                global_step=at.global_step,
                updates=at.updates,
            )
            batches = count * trainer._accumulate_grad_batches
            theirs, limit = trainer._arguments, count if method != "fit" else batches
            trainer._arguments = dataclasses.replace(
                theirs,
                # Each epoch has a batch, unless the program skips it.
                max_epochs=at.current_epoch + batches,
                max_steps=at.global_step + count,
                min_epochs=None,
                min_steps=None,
                fast_dev_run=0,
                limit_train_batches=theirs.limit_train_batches if keeps_limit else None,
                limit_val_batches=0 if theirs.limit_val_batches == 0 and method == "fit" else limit,
                limit_test_batches=limit,
                limit_predict_batches=limit,
            )
            several = outer.runtime.world_size > 1
            # Several processes look for a signal at steps they agree on, and these are not steps of the run.
            stop = StopRequests(outer.runtime.all_reduce) if several else outer.stop
            run = trainer._make_run(module, {stage: self.given(stage) for stage in _SOURCES}, stop)
            # What programs read of the Trainer is what they gave it.
            trainer._arguments, trainer._run = theirs, run
            for child in module.modules():
                if isinstance(child, LightningModule):
                    child.__dict__["_logged"] = trainer._logged
            try:
                for source in self._read_by(run, method):
                    memory.keep(source.streams(), values=False)
                if method == "fit":
                    self._train_with_the_optimizers_in_use(run, memory, alone)
                yield run
            finally:
                for source in (run.train, run.validation, run.test, run.predict):
                    source.close()

    def _read_by(self, run: Run, method: str) -> list[Source]:
        sources = [run.train, run.validation] if method == "fit" else [self.source_in(run, method)]
        return [source for source in sources if not source.is_off()]

    def _train_with_the_optimizers_in_use(self, run: Run, memory: Memory, alone: bool) -> None:
        outer = self.run
        schedulers = outer.schedulers
        memory.keep(outer.optimizers)
        memory.keep([config.scheduler for config in schedulers])
        if run.module.automatic_optimization:
            # They are there for who asks them for the rate, and never step.
            schedulers = [dataclasses.replace(config, frequency=sys.maxsize) for config in schedulers]
        if alone and run.runtime.syncs_gradients:
            run.runtime = copy.copy(run.runtime)
            run.runtime.syncs_gradients = False
        else:
            run.wrapped = outer.wrapped
        take_optimizers(run, outer.optimizers, schedulers)
        run.averages.resume_with(None)

    def try_out(
        self, method: str, count: int, *, check: Callable[[list[Any]], None] = lambda loaders: None
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
        watch = _Watch(count * self.trainer._accumulate_grad_batches)
        try:
            with self.steps(method, count, callbacks=[watch], alone=True) as run:
                check(self.source_in(run, method).streams())
                for source in self._read_by(run, method):
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


def train(run: Run) -> None:
    """Train until the steps of a trial are done; it ends in silence, and does not validate in between."""
    validation, run.validation = run.validation, copy.copy(run.validation)
    run.validation.switch_off()
    run.enter(RunningStage.TRAINING)
    run.logged.start_epoch("train")
    run.hooks.on_train_start()
    with torch.enable_grad():
        while not run.finished():
            train_epoch(run)
    run.hooks.on_train_end()
    run.validation = validation


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
