"""A trial: train, evaluate or predict a few steps on the user's own module and data, and leave everything as it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.checkpoint import contents
from hasten.data.sources import generators_of
from hasten.hooks import Callbacks
from hasten.loops.evaluate import evaluate
from hasten.loops.fit import fit
from hasten.loops.predict import predict
from hasten.loops.prepare import configure_optimizers
from hasten.loops.progress import Progress
from hasten.loops.run import Run
from hasten.loops.states import TrainerState, TrainerStatus
from hasten.meters import Meters
from hasten.module import LightningModule
from hasten.profilers.base import PassThroughProfiler
from hasten.seed import collect_rng_state, generator_state, restore_rng_state, set_generator_state

if TYPE_CHECKING:
    from hasten.trainer import Trainer

_STAGES = ("train", "validate", "test", "predict")
_SOURCES = {"train": "train", "validate": "validation", "test": "test", "predict": "predict"}


@contextmanager
def nothing_changes(trainer: Trainer, module: LightningModule, datamodule: Any) -> Iterator[None]:
    """Give Trainer, module, data and random generators back the state they have now, also after an error."""
    books = dict(trainer.__dict__)
    weights = _Weights(module)
    owners = [owner for owner in (*module.modules(), datamodule) if owner is not None]
    attributes = [_Attributes(owner) for owner in owners]
    ties = [(owner, {name: vars(owner)[name] for name in _TIES if name in vars(owner)}) for owner in owners]
    metrics = contents.metric_states(module, leave_out=set())
    model = trainer.strategy.model
    random = collect_rng_state()
    try:
        yield
    finally:
        trainer.__dict__.clear()
        trainer.__dict__.update(books)
        trainer.strategy.model = model
        weights.restore()
        for each in attributes:
            each.restore()
        for owner, tied in ties:
            for name in _TIES:
                owner.__dict__.pop(name, None)
            owner.__dict__.update(tied)
        contents.reset_metrics(module)
        contents.load_metric_states(module, metrics)
        restore_rng_state(random)


def quietly(trainer: Trainer) -> None:
    """Take callbacks and loggers off, and count from zero; ``nothing_changes`` puts them back."""
    trainer.__dict__.update(
        _arguments=dataclasses.replace(
            trainer._arguments,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_autolog_hparams=False,
            num_sanity_val_steps=0,
            log_every_n_steps=0,
            max_time=None,
            min_epochs=None,
            min_steps=None,
        ),
        _callbacks=Callbacks([], lambda: None),
        _loggers=[],
        _meters=Meters(trainer._runtime),
        _progress=Progress(),
        profiler=PassThroughProfiler(),
        state=TrainerState(TrainerStatus.RUNNING, trainer.state.fn, trainer.state.stage),
    )


class Trial:
    """Runs a few steps at a time inside a prepared run.

    Args:
        trainer: whose run it is.
        run: the run; its data is read anew by each trial.

    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self.module: LightningModule = run.module
        self.datamodule: Any = trainer.datamodule

    def given(self, stage: str) -> Any:
        """Return the loaders that were passed to the call, or None."""
        return getattr(self.run, _SOURCES[stage]).given

    @contextmanager
    def steps(
        self, method: str, count: int, *, validates: bool = False, ends_at: int | None = None
    ) -> Iterator[Run]:
        """Yield a run of ``method`` over ``count`` steps, ready to go; afterwards all is as before."""
        trainer, module = self.trainer, self.module
        with nothing_changes(trainer, module, self.datamodule):
            quietly(trainer)
            trainer._arguments = dataclasses.replace(
                trainer._arguments,
                max_epochs=-1,
                max_steps=count,
                fast_dev_run=0,
                limit_train_batches=None,
                limit_val_batches=count if validates or method != "fit" else 0,
                limit_test_batches=count,
                limit_predict_batches=count,
            )
            run = trainer._make_run(module, {stage: self.given(stage) for stage in _STAGES}, self.run.stop)
            run.state = trainer.state
            trainer._run = run
            _log_into(module, trainer._meters)
            generators = _generators(run, method)
            try:
                if method == "fit":
                    configure_optimizers(run)
                    run.wrapped = run.runtime.wrap(module)
                yield run
            finally:
                for source in (run.train, run.validation, run.test, run.predict):
                    source.close()
                for generator, state in generators:
                    set_generator_state(generator, state)

    def try_out(self, method: str, count: int) -> None:
        """Run ``count`` steps of ``method``; training validates as well, if there is something to validate."""
        with self.steps(method, count, validates=True) as run:
            if method == "fit":
                # Once, after training: not where the steps happen to end an epoch.
                validation, run.validation = run.validation, _off(run)
                fit(run)
                run.validation = validation
                if not validation.is_off():
                    evaluate(run, validation)
            elif method == "predict":
                predict(run, return_predictions=False)
            else:
                evaluate(run, run.test if method == "test" else run.validation)

    def fails_anywhere(self, failed: bool) -> bool:
        """Say whether a trial failed on any process, so that all go on alike."""
        return bool(self.run.runtime.strategy.reduce_boolean_decision(failed, all=False))


def _off(run: Run) -> Any:
    """Return the validation data of a run that is switched off."""
    source = copy.copy(run.validation)
    source.switch_off()
    return source


def _generators(run: Run, method: str) -> list[tuple[torch.Generator, bytes]]:
    """Return the generators of the user's loaders with their states."""
    sources = [run.train, run.validation] if method == "fit" else [getattr(run, _SOURCES[method])]
    found = []
    for source in sources:
        if not source.is_off():
            for loader in source.streams():
                found += [(generator, generator_state(generator)) for generator in generators_of(loader)]
    return found


class _Weights:
    """Parameters and buffers with everything that training changes of them."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [
            (p, p.detach().clone(), None if p.grad is None else p.grad.clone(), p.requires_grad)
            for p in module.parameters()
            if not isinstance(p, nn.parameter.UninitializedParameter)
        ]
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._modes = [(child, child.training) for child in module.modules()]

    def restore(self) -> None:
        for parameter, value, gradient, required in self._parameters:
            parameter.data = value
            parameter.grad = gradient
            parameter.requires_grad = required
        with torch.no_grad():
            for owner, name, buffer, value in self._buffers:
                owner._buffers[name] = buffer
                buffer.data = value
        for child, training in self._modes:
            child.training = training


_PLAIN = (int, float, str, bytes, bool, type(None), list, dict, tuple, set)
# What ties a module or datamodule to a run.
_TIES = ("_trainer", "trainer", "_meters")
_OTHERS = (*_TIES, "_parameters", "_buffers", "_modules", "training")


class _Attributes:
    """The attributes of an object that are plain data, such as counters and lists of losses."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = set(vars(owner))
        self._values: dict[str, tuple[Any, Any]] = {}
        for name, value in vars(owner).items():
            if name in _OTHERS or name.endswith("_hooks") or not isinstance(value, _PLAIN):
                continue
            with contextlib.suppress(Exception):  # what cannot be copied is no data
                self._values[name] = value, copy.deepcopy(value)

    def restore(self) -> None:
        here = self._owner.__dict__
        for name in [name for name in here if name not in self._names and isinstance(here[name], _PLAIN)]:
            if name not in _OTHERS:
                del here[name]
        for name, (value, before) in self._values.items():
            # In place: others may hold the same list.
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(before)
            here[name] = value


def _log_into(module: LightningModule, meters: Meters | None) -> None:
    for child in module.modules():
        if isinstance(child, LightningModule):
            child.__dict__["_meters"] = meters
