"""A trial of ``Trainer.fit``: the program's Trainer trains with levers on, in turns that the parent orders."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hasten._lib.tree import batch_size_of
from hasten.arguments import SPEED_NAMES
from hasten.module.callback import Callback
from hasten.profilers.simple import SimpleProfiler
from hasten.seed import seed_everything
from hasten.speed.checks import some_numbers, why_not_apart, without_draws
from hasten.speed.inspect_run import Observed, facts, is_coarse, mask_of
from hasten.speed.trial import Session, function_at, leave

_LIMITS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
# Numbers of the gradients of a step that are compared, and the steps in which they are.
_NUMBERS = 4096
_STEPS_WITH_GRADIENTS = 3
# Arguments of which the advisor must know whether the program sets them already.
_REPORTED = (*SPEED_NAMES, "precision", "plugins")


@dataclasses.dataclass(frozen=True)
class Orders:
    """How a trial trains.

    Args:
        arguments: Trainer arguments of the levers that are on.
        changes: places of the functions that levers call, see ``Lever.place``.
        seed: set when the training begins.
        inspects: profile the steps, and examine model and data.
        compares: compute the first batch once without dropout.
        allocator: the allocator that the process is started with, see ``Lever.preload``.

    """

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()
    seed: int = 0
    inspects: bool = False
    compares: bool = False
    allocator: str | None = None


class FitTrial:
    """Makes the Trainers of this process train under a session.

    Args:
        session: gives the orders.
        orders: how to train.
        trainer_class: ``hasten.Trainer``.

    """

    def __init__(self, session: Session, orders: Orders, trainer_class: Any) -> None:
        self.session, self.orders, self._class = session, orders, trainer_class
        self.profiler = _QuietProfiler() if orders.inspects else None
        self.given: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Measure the first ``Trainer.fit`` or ``Trainer.advise`` of this process, which never returns."""
        trial, make, fit = self, self._class.__init__, self._class.fit

        # Command lines read the arguments of the Trainer from its signature.
        @functools.wraps(make)
        def __init__(trainer: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            try:
                make(trainer, *args, **trial.changed(given))
            except Exception as error:
                trial.session.fail(error)
            trial.given[trainer] = given

        @functools.wraps(fit)
        def fit_in_turns(trainer: Any, model: Any, *args: Any, **given: Any) -> NoReturn:
            trial.fit(trainer, model, lambda: fit(trainer, model, *args, **given))

        def advise(
            trainer: Any, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **given: Any
        ) -> NoReturn:
            data = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
            trial.fit(trainer, model, lambda: fit(trainer, model, **data))

        self._class.__init__, self._class.fit, self._class.advise = __init__, fit_in_turns, advise

    def changed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Trainer's arguments with the levers on, on one device, writing and showing nothing."""
        devices, strategy = given.get("devices", "auto"), given.get("strategy", "auto")
        new = {
            **given,
            "speed": None,
            "fast_dev_run": False,
            "callbacks": _measured_callbacks(given.get("callbacks")),
            "profiler": self.profiler,
            "max_time": None,
            "default_root_dir": self.session.scratch or None,
            "num_sanity_val_steps": 0,
            # Programs that evaluate before they train must not take long about it.
            **{name: 0 if given.get(name) == 0 else 1 for name in _LIMITS},
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "devices": devices[:1] if isinstance(devices, (list, tuple)) else 1,
            "num_nodes": 1,
            "strategy": strategy if strategy in ("auto", "single_device") else "auto",
        }
        if given.get("batch_size") == "auto":
            # Levers are compared with the loader's own batches: the search would be part of each trial.
            new["batch_size"] = None
        if given.get("barebones"):
            new.update(barebones=False, logger=False)
        elif given.get("logger") is not False:
            from hasten.loggers.base import DummyLogger

            # Code that writes to its logger runs through.
            new["logger"] = DummyLogger()
        return {**new, **self.orders.arguments}

    def fit(self, trainer: Any, model: Any, fit: Callable[[], None]) -> NoReturn:
        """Train in turns until the parent ends this process."""
        given = self.given.get(trainer, {})
        shown = {name: repr(given[name]) for name in _REPORTED if given.get(name) not in (None, False)}
        self.session.device = trainer.strategy.root_device
        self.session.ready(given=shown)
        try:
            seed_everything(self.orders.seed, verbose=False)
            for place in self.orders.changes:
                function_at(place)(trainer, model)
            # Last, so that what other callbacks do at the end of a step is part of it.
            trainer.callbacks.append(_Measured(self, given))
            fit()
        except Exception as error:
            import traceback

            traceback.print_exc()
            self.session.fail(error)
        except BaseException:
            leave()
        self.session.end()


class _QuietProfiler(SimpleProfiler):
    """Reports to the advisor only."""

    def describe(self) -> None:
        """Print nothing."""


class _Measured(Callback):
    """Reports steps, and answers what the advisor asks between two turns."""

    def __init__(self, trial: FitTrial, given: Mapping[str, Any]) -> None:
        self._session = trial.session
        self._orders, self._profiler, self._given = trial.orders, trial.profiler, given
        self._observed = Observed() if trial.orders.inspects else None
        self._gradients: list[list[float]] = []
        self._without_draws: list[float] = []
        # Seconds of a step by where they go, in the last turn.
        self._parts: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._steps = 0
        self._batch: Any = None
        self._steps_planned: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take limits and validation off: the parent says when it is enough."""
        self._session.handlers.update(
            first_steps=lambda: {"gradients": self._gradients, "without_draws": self._without_draws},
            apart=lambda: self._why_not_apart(trainer, pl_module),
            parts=lambda: self._parts,
            count=self._count_next,
            inspect=lambda: self._inspect(trainer, pl_module),
        )
        try:
            self._steps_planned = float(trainer.estimated_stepping_batches)
        except Exception:
            # It only says when a lever pays back, and some data does not know its length.
            self._steps_planned = None
        loop = trainer.fit_loop
        loop.max_epochs, loop.min_epochs = -1, None
        loop.epoch_loop.max_steps, loop.epoch_loop.min_steps = -1, None
        trainer.limit_val_batches = 0
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                # The metric that it monitors is not computed here.
                config.frequency = sys.maxsize
            else:
                _keep_last_rate(config.scheduler)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compute the first batch without dropout, or count the operations of this one, where that is ordered."""
        if self._orders.compares and self._batch is None:
            try:
                self._without_draws = without_draws(pl_module, batch)
            except Exception as error:
                # A step may need more around it than a batch: then it is not compared.
                print(f"the first batch was not computed without dropout: {error!r}")
        if self._observed is not None:
            self._observed.before_step()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note some numbers of the gradients of the first steps."""
        if len(self._gradients) < _STEPS_WITH_GRADIENTS:
            self._gradients.append(_some_gradients(pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step; at the end of a turn wait for the next order."""
        self._batch = batch
        if self._observed is not None:
            self._observed.after_step(batch)
        self._steps += 1
        parts = self._profiler.part_seconds if self._profiler is not None else {}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        samples, certain = batch_size_of(batch)
        mask = mask_of(batch)
        has_ended = self._session.after_step(
            loss if isinstance(loss, Tensor) and loss.numel() == 1 else None,
            samples=samples if certain or isinstance(batch, Mapping) else None,
            tokens=None if mask is None else mask.count_nonzero(),
            slots=None if mask is None else mask.numel(),
        )
        if has_ended and self._profiler is not None:
            self._parts = {
                name: (seconds - self._before.get(name, 0.0)) / self._steps
                for name, seconds in parts.items()
                if seconds > self._before.get(name, 0.0)
            }
            # The wait for the order belongs to no part of the next turn.
            self._before, self._steps = self._profiler.part_seconds, 0

    def _count_next(self) -> None:
        assert self._observed is not None
        self._observed.count_next = True

    def _inspect(self, trainer: Any, module: Any) -> dict[str, Any]:
        assert self._observed is not None
        return {
            "facts": facts(self._observed, trainer, module, self._given),
            "steps_planned": self._steps_planned,
        }

    def _why_not_apart(self, trainer: Any, module: Any) -> str | None:
        coarse = is_coarse(trainer.precision, trainer.strategy.root_device, module)
        try:
            return why_not_apart(module, [self._batch], coarse=coarse)
        except Exception as error:
            # A step may need more around it than a batch: then it is not known.
            print(f"the samples of a batch were not looked at one by one: {error!r}")
            return None


def _some_gradients(module: Any) -> list[float]:
    """Return some numbers of all gradients, spread evenly; empty where there is none."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    count = max(8, _NUMBERS // max(1, len(parameters)))
    # What has no gradient counts as zeros, so that the places stay.
    some = [
        some_numbers(p.detach() if p.grad is None else p.grad, count) * float(p.grad is not None)
        for p in parameters
    ]
    return torch.cat(some).tolist() if some and any(p.grad is not None for p in parameters) else []


def _measured_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks that take part in training, without those that write, show, search or stop."""
    from hasten import callbacks as known

    left_out = (
        known.BasePredictionWriter,
        known.BatchSizeFinder,
        known.Checkpoint,
        known.EarlyStopping,
        known.LearningRateFinder,
        known.ModelSummary,
        known.ProgressBar,
        known.Timer,
    )
    given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    return [callback for callback in given if not isinstance(callback, left_out)]


def _keep_last_rate(scheduler: Any) -> None:
    """Have a scheduler stay at its last rate when a trial takes more steps than the training would."""
    step = scheduler.step

    def careful(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except ValueError:
            return None

    scheduler.step = careful
