"""A trial of ``Trainer.fit``: the program's Trainer trains with speed-ups on, in turns that the parent orders."""

from __future__ import annotations

import dataclasses
import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hasten.arguments import SPEED_NAMES
from hasten.logged_value import batch_size_of
from hasten.module.callback import Callback
from hasten.profilers.simple import SimpleProfiler
from hasten.seed import seed_everything
from hasten_tools.speed.changes import processes_here, use_threads_of
from hasten_tools.speed.checks import NUMBERS, some_numbers, why_not_apart, without_draws
from hasten_tools.speed.inspect_run import Observed, facts, is_coarse, mask_of
from hasten_tools.speed.trial import Session, function_at, leave

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.types import Batch, StepOutput

# Steps whose gradients are compared.
_STEPS_WITH_GRADIENTS = 3
# Arguments whose values in the program the advisor must know.
_REPORTED = (*SPEED_NAMES, "precision", "plugins")


@dataclasses.dataclass(frozen=True)
class Orders:
    """How a trial trains."""

    # Of the speed-ups that are on: Trainer arguments, and places of functions (``Lever.place``).
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()
    seed: int = 0
    # Profile the steps, and examine model and data.
    inspects: bool = False
    # Compute the first batch once without dropout.
    compares: bool = False
    # The process is started with it (``Lever.preload``).
    allocator: str | None = None


class FitTrial:
    """Lets the Trainers of this process train under a session."""

    def __init__(self, session: Session, orders: Orders, trainer_class: type[Trainer]) -> None:
        self.session, self.orders = session, orders
        self.profiler = _SilentProfiler() if orders.inspects else None
        self._class: Any = trainer_class
        self._given: weakref.WeakKeyDictionary[Trainer, dict[str, Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Measure the first ``Trainer.fit`` or ``Trainer.advise`` of this process, which never returns."""
        trial, make, fit = self, self._class.__init__, self._class.fit

        # Command lines read the arguments of the Trainer from its signature.
        @functools.wraps(make)
        def __init__(trainer: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            try:
                make(trainer, *args, **trial.changed(given))
                # The processes of the run share the cores, and this is one of them.
                use_threads_of(processes_here(trainer, given.get("devices")))
            except Exception as error:
                trial.session.fail(error)
            trial._given[trainer] = given

        @functools.wraps(fit)
        def fit_in_turns(trainer: Any, model: Any, *args: Any, **given: Any) -> NoReturn:
            trial.fit(trainer, model, functools.partial(fit, trainer, model, *args, **given))

        def advise(
            trainer: Any, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **given: Any
        ) -> NoReturn:
            fit_in_turns(trainer, model, train_dataloaders, datamodule=datamodule)

        self._class.__init__, self._class.fit, self._class.advise = __init__, fit_in_turns, advise

    def changed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Trainer's arguments with the speed-ups on, on one device, writing and showing nothing."""
        devices, strategy = given.get("devices", "auto"), given.get("strategy", "auto")
        limits = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
        new = {
            **given,
            "speed": None,
            "fast_dev_run": False,
            "callbacks": _training_callbacks(given.get("callbacks")),
            "profiler": self.profiler,
            "max_time": None,
            "default_root_dir": self.session.scratch or None,
            "num_sanity_val_steps": 0,
            # Programs that evaluate before they train must not take long about it.
            **{name: 0 if given.get(name) == 0 else 1 for name in limits},
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "devices": devices[:1] if isinstance(devices, (list, tuple)) else 1,
            "num_nodes": 1,
            "strategy": strategy if strategy in ("auto", "single_device") else "auto",
        }
        if given.get("batch_size") == "auto":
            # Speed-ups are compared with the loader's own batches: the search would be part of each trial.
            new["batch_size"] = None
        if given.get("barebones"):
            new.update(barebones=False, logger=False)
        elif given.get("logger") is not False:
            from hasten.loggers.base import DummyLogger

            # The program may write to its logger.
            new["logger"] = DummyLogger()
        return {**new, **self.orders.arguments}

    def fit(self, trainer: Trainer, model: LightningModule, fit: Callable[[], None]) -> NoReturn:
        """Train in turns until the parent ends this process."""
        given = self._given.get(trainer, {})
        shown = {name: repr(given[name]) for name in _REPORTED if given.get(name) not in (None, False)}
        self.session.device = trainer.strategy.root_device
        self.session.ready(given=shown)
        try:
            seed_everything(self.orders.seed, verbose=False)
            for place in self.orders.changes:
                function_at(place)(trainer, model)
            # The last one, so that the work of other callbacks at the end of a step is part of it.
            trainer.callbacks.append(_Measured(self, given))
            fit()
        except Exception as error:
            traceback.print_exc()
            self.session.fail(error)
        except BaseException:
            leave()
        self.session.end()


class _SilentProfiler(SimpleProfiler):
    """Reports to the advisor only."""

    def describe(self) -> None:
        pass


class _Measured(Callback):
    """Reports steps, and answers the advisor between two turns."""

    def __init__(self, trial: FitTrial, given: Mapping[str, Any]) -> None:
        self._session, self._orders, self._profiler = trial.session, trial.orders, trial.profiler
        self._given, self._observed = given, Observed()
        self._first_steps: dict[str, list[Any]] = {"gradients": [], "without_draws": []}
        # Seconds by where they went: until the last step, and until the turn began.
        self._parts: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._steps = 0
        self._batch: Batch = None
        self._steps_planned: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove limits and validation: the parent decides when it is enough."""
        self._session.handlers.update(
            first_steps=lambda: self._first_steps,
            apart=lambda: self._why_not_apart(trainer, pl_module),
            parts=self._parts_of_a_step,
            count=self._observed.count_next,
            inspect=lambda: {
                "facts": facts(self._observed, trainer, pl_module, self._given),
                "steps_planned": self._steps_planned,
            },
        )
        try:
            self._steps_planned = float(trainer.estimated_stepping_batches)
        except Exception:
            # It only shows when a speed-up pays back, and some data has no length.
            self._steps_planned = None
        trainer.limit_val_batches = 0
        _lift_limits(trainer.current_run)
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                # The metric that it monitors is not computed here.
                config.frequency = sys.maxsize
            else:
                _keep_last_rate(config.scheduler)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove limits again, if a callback has assigned an argument of the Trainer, which has them still."""
        _lift_limits(trainer.current_run)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Compute the first batch without dropout, or count the operations of this one, if that is ordered."""
        if self._orders.compares and self._batch is None:
            try:
                self._first_steps["without_draws"] = without_draws(pl_module, batch)
            except Exception as error:
                # A step may need more around it than a batch: then it is not compared.
                print(f"the first batch was not computed without dropout: {error!r}")
        if self._orders.inspects:
            self._observed.before_step()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note some numbers of the gradients of the first steps."""
        if len(self._first_steps["gradients"]) < _STEPS_WITH_GRADIENTS:
            self._first_steps["gradients"].append(_some_gradients(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Report the step; at the end of a turn wait for the next order."""
        self._batch = batch
        if self._orders.inspects:
            self._observed.after_step(batch)
        self._steps += 1
        if self._profiler is not None:
            self._parts = self._profiler.part_seconds
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
            # The wait for the order belongs to no part of the next turn.
            self._before, self._steps = self._profiler.part_seconds, 0

    def _parts_of_a_step(self) -> dict[str, float]:
        """Return the seconds of a step by where they went, in the turn that has just ended."""
        growth = {name: seconds - self._before.get(name, 0.0) for name, seconds in self._parts.items()}
        return {name: seconds / self._steps for name, seconds in growth.items() if seconds > 0}

    def _why_not_apart(self, trainer: Trainer, module: LightningModule) -> str | None:
        coarse = is_coarse(trainer.precision, trainer.strategy.root_device, module)
        try:
            return why_not_apart(module, [self._batch], coarse=coarse)
        except Exception as error:
            # A step may need more around it than a batch: then it is not known.
            print(f"the samples of a batch were not computed one by one: {error!r}")
            return None


def _lift_limits(run: Run) -> None:
    """Let a run train until it is stopped."""
    endless = dataclasses.replace(run.arguments, max_epochs=-1, min_epochs=None, max_steps=-1, min_steps=None)
    if endless != run.arguments:
        run.change_arguments(endless)


def _some_gradients(module: nn.Module) -> list[float]:
    """Return some numbers of all gradients, spread evenly; empty if no parameter has one."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if all(parameter.grad is None for parameter in parameters):
        return []
    count = max(8, NUMBERS // len(parameters))
    # A missing gradient counts as zeros, so that all numbers keep their places.
    some = [
        some_numbers(p.detach() if p.grad is None else p.grad, count) * float(p.grad is not None) for p in parameters
    ]
    found: list[float] = torch.cat(some).tolist()
    return found


def _training_callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks that take part in training, without those that write, show, search or stop."""
    from hasten import callbacks as known

    left_out = (
        *(known.BasePredictionWriter, known.BatchSizeFinder, known.Checkpoint, known.EarlyStopping),
        *(known.LearningRateFinder, known.ModelSummary, known.ProgressBar, known.Timer),
    )
    given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else callbacks
    return [callback for callback in given if not isinstance(callback, left_out)]


def _keep_last_rate(scheduler: Any) -> None:
    """Keep the last rate of a scheduler if a trial takes more steps than the training would."""
    step = scheduler.step

    def careful(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except ValueError:
            return None

    scheduler.step = careful
