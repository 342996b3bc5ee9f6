"""Runs of a few steps that do not change Trainer, module and data: for tools that try something out."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hasten._lib.errors import make_error
from hasten._lib.observers import WatchedList
from hasten.elsewhere import conventions
from hasten.logged_values import LoggedValues
from hasten.loggers.base import DummyLogger
from hasten.loops.prepare import set_optimizers
from hasten.loops.run import Progress, Run
from hasten.loops.saved_state import SavedObjects
from hasten.loops.user_code import check_call
from hasten.machine.signals import StopRequests
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.log_methods import log_into
from hasten.profilers.base import PassThroughProfiler
from hasten.seed import collect_rng_state, restore_rng_state
from hasten.types import TrainerFn, TrainerState, TrainerStatus

if TYPE_CHECKING:
    from hasten import LightningDataModule, Trainer
    from hasten.arguments import Arguments

Result = TypeVar("Result")

Stage = Literal["fit", "validate", "test", "predict"]


def prepared_run(
    self: Trainer,
    stage: Stage,
    model: LightningModule,
    data: Mapping[str, Any],
    datamodule: LightningDataModule | None,
    body: Callable[[Run], Result],
    *,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Set up a run like ``stage`` without the Trainer's callbacks and loggers, and return ``body(run)``.

    Afterwards module, datamodule, optimizers, loaders, counters and random numbers are restored, also after an error.

    The loaders by stage ("train", "validate", "test", "predict") are as passed to a call. ``body`` is called in each
    process; ``limited_run`` works inside it.
    """
    trainer = self
    check_call(trainer._arguments, stage, model, datamodule, *data.values())
    with _restored_afterwards(trainer, model, datamodule or trainer._datamodule):
        trainer._callbacks.extend(callbacks)
        speed = trainer._arguments.speed
        if speed.resident in (True, "auto"):
            # Holding all data in memory does not pay for a few steps.
            speed = dataclasses.replace(speed, resident=False)
            trainer._arguments = dataclasses.replace(trainer._arguments, speed=speed)
        return trainer._call(TrainerFn(stage), model, datamodule, dict(data), None, None, body)


@contextmanager
def limited_run(
    self: Trainer,
    stage: Stage,
    steps: int,
    *,
    callbacks: Iterable[Callback] = (),
    exchange_gradients: bool = True,
    keep_limit: bool = False,
    batch_size: int | None = None,
) -> Iterator[Run]:
    """Return a context with a run of a few steps inside the present run; afterwards everything is restored.

    The steps use the module, optimizers, epoch and data of the present run, without its callbacks and loggers.

    Args:
        stage: what to run.
        steps: optimizer steps, or batches of each loader of an evaluation.
        callbacks: what watches the steps.
        exchange_gradients: False to train each process alone, so that no process waits for one that fails.
        keep_limit: read as many batches of an epoch as ``limit_train_batches`` says; all of them by default. Under
            Lightning's names also as many epochs as ``max_epochs`` says.
        batch_size: samples of a batch; by default as in the present run.

    Raises:
        RuntimeError: called outside of a run.

    """
    trainer = self
    outer, fits = trainer._run, stage == "fit"
    if outer is None:
        raise make_error(
            RuntimeError, "Trainer.limited_run() outside of a run:", fix="call it within one, or use prepared_run()."
        )
    module = outer.module
    outer.runtime.engine.require_own_parameters(
        "A search for a learning rate or batch size",
        "it trains some steps and takes them back, which the engine cannot.",
        "Search with strategy='ddp', and write the value.",
    )
    with _restored_afterwards(trainer, module, trainer._datamodule) as saved:
        trainer._callbacks.extend(callbacks)
        arguments, now = trainer._arguments, trainer._progress
        if batch_size is not None:
            speed = dataclasses.replace(arguments.speed, batch_size=batch_size)
            arguments = dataclasses.replace(arguments, speed=speed)
        # Programs read the epoch in their steps: it is the current one.
        trainer._progress = Progress(
            epoch=now.current_epoch, total_batches=now.total_batches, global_step=now.global_step,
            logged_step=now.logged_step,
        )  # fmt: skip
        batches = steps * trainer._accumulate_grad_batches
        limited = _limited_to(arguments, limit=batches if fits else steps, fits=fits, keep_limit=keep_limit)
        ends_early = keep_limit and conventions.current().lr_find_in_single_precision
        trainer._arguments = dataclasses.replace(
            limited,
            # Each epoch has at least one batch, unless the program skips it.
            max_epochs=arguments.max_epochs if ends_early else now.current_epoch + batches,
            max_steps=now.global_step + steps,
        )
        several = outer.runtime.several_processes
        # Several processes check for signals at steps that they agree on, and these are not steps of the outer run.
        stop = StopRequests(outer.runtime.all_reduce) if several else outer.limits.stop
        data = {source.stage: source.given for source in outer.data.all()}
        run = trainer._make_run(module, data, stop)
        # Programs see the arguments that they passed.
        trainer._arguments, trainer._run = arguments, run
        log_into(module, trainer._logged)
        try:
            for source in run.data.of(stage):
                if not source.is_off():
                    saved.save(source.streams(), values=False)
            if fits:
                _use_optimizers_of(outer, run, saved, exchange_gradients)
            with nullcontext() if exchange_gradients else run.runtime.engine.without_communication():
                yield run
        finally:
            for source in run.data.all():
                source.close()


def _limited_to(arguments: Arguments, *, limit: int, fits: bool, keep_limit: bool) -> Arguments:
    """Return the arguments of a run of few steps."""
    return dataclasses.replace(
        arguments,
        min_epochs=None,
        min_steps=None,
        fast_dev_run=0,
        limit_train_batches=arguments.limit_train_batches if keep_limit else None,
        limit_val_batches=0 if arguments.limit_val_batches == 0 and fits else limit,
        limit_test_batches=limit,
        limit_predict_batches=limit,
    )


def _use_optimizers_of(outer: Run, run: Run, saved: SavedObjects, exchange_gradients: bool) -> None:
    schedulers = outer.schedulers
    saved.save(outer.optimizers)
    saved.save([config.scheduler for config in schedulers])
    if run.module.automatic_optimization:
        # Schedulers exist for programs that read the learning rate, and never step.
        schedulers = [dataclasses.replace(config, frequency=sys.maxsize) for config in schedulers]
    if exchange_gradients or not run.runtime.several_processes:
        run.wrapped = outer.wrapped
    set_optimizers(run, outer.optimizers, schedulers)
    run.averages.resume_with(None)


def show_run(self: Trainer, stage: Stage, run: Run, datamodule: LightningDataModule | None) -> None:
    """Show module, data and optimizers of a prepared run that is over, as after the call that it was like."""
    trainer = self
    trainer.__dict__.update(
        _module=run.module, _datamodule=datamodule or trainer._datamodule, _reads_datamodule=datamodule is not None,
        _run=run, state=TrainerState(TrainerStatus.FINISHED, TrainerFn(stage), None),
    )  # fmt: skip
    run.state, run.progress, run.logged = trainer.state, trainer._progress, trainer._logged
    run.arguments = trainer._arguments
    run.limits.should_stop = run.limits.stop_agreed = False


def redirect_fit(self: Trainer, take: Callable[[Run], None], body: Callable[[Run], None]) -> None:
    """Make the calls of ``fit`` of this Trainer run ``body`` instead of the loop, without a checkpoint.

    ``take`` is called with the run before it is prepared, ``body`` when it is.
    """
    own: Any = self
    call, make_run = self._call, self._make_run

    def call_with_body(fn: Any, module: Any, datamodule: Any, given: Any, *_: Any) -> None:
        call(fn, module, datamodule, given, None, None, body)

    def make_and_take(*args: Any, **kwargs: Any) -> Run:
        run = make_run(*args, **kwargs)
        take(run)
        return run

    own._call, own._make_run = call_with_body, make_and_take


@contextmanager
def _restored_afterwards(trainer: Trainer, module: LightningModule, datamodule: Any) -> Iterator[SavedObjects]:
    """Detach callbacks and loggers, and restore Trainer, module, data and random numbers afterwards.

    Yields what is restored, to which more can be added.
    """
    attributes = dict(trainer.__dict__)
    wrapped = trainer.strategy.model
    random = collect_rng_state()
    saved = SavedObjects()
    saved.save(module)
    saved.save(datamodule, values=False)
    if trainer._runtime.scaler is not None:
        saved.save(trainer._runtime.scaler)
        saved.save(trainer._runtime.engine.unscaled)
        saved.save(trainer._runtime.engine.stepped)
    trainer.__dict__.update(
        _arguments=dataclasses.replace(
            trainer._arguments, enable_autolog_hparams=False, num_sanity_val_steps=0, max_epochs_assumed=False
        ),
        _callbacks=WatchedList([], lambda: None),
        _logged=LoggedValues(trainer._runtime),
        # If the program expects a logger, there is one.
        _loggers=[DummyLogger() for _ in trainer._loggers],
        _progress=copy.copy(trainer._progress),
        # An evaluation would continue with the optimizers and data of an earlier run.
        _run=None,
        profiler=PassThroughProfiler(),
        state=TrainerState(TrainerStatus.RUNNING, trainer.state.fn, trainer.state.stage),
    )
    try:
        yield saved
    finally:
        saved.restore()
        trainer.__dict__.clear()
        trainer.__dict__.update(attributes)
        trainer.strategy.model = wrapped
        restore_rng_state(random)
