"""The inside of a trial: a fresh process in which a program trains a few steps at a time, as it is told to.

The parent writes one order a line to a pipe, the trial answers on another, both as JSON. Between two orders the
trial does nothing at all, its loader workers included, so that others can be measured. When the parent is gone,
however it ended, the trial ends too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hasten._lib.batch_size import batch_size_of
from hasten.arguments import SPEED_NAMES
from hasten.module.callback import Callback
from hasten.profilers.simple import SimpleProfiler
from hasten.seed import seed_everything
from hasten.speed import look
from hasten.speed.apart import some_numbers, why_not_apart, without_draws
from hasten.speed.levers import change_at

# How often a trial looks whether its parent is still there.
_SECONDS_BETWEEN_LOOKS = 1.0
# What a user's mistake or a missing part of the machine raises: the lever refuses. Anything else is a failure.
_REFUSALS = ("ValueError", "TypeError", "ModuleNotFoundError", "NotImplementedError")
_LIMITS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
# Numbers of the gradients of a step that are compared, and the steps in which they are.
_NUMBERS = 4096
_STEPS_WITH_GRADIENTS = 3
# Batches kept to look at their samples.
_BATCHES = 2
# Arguments of which the advisor must know whether the program sets them already.
_TOLD = (*SPEED_NAMES, "precision", "plugins")


@dataclasses.dataclass
class Orders:
    """What a trial is to do, beside the program itself.

    Args:
        arguments: Trainer arguments of the levers that are on.
        changes: places of the functions that levers call, see ``Lever.place``.
        seed: set when the training begins.
        warm_up: steps before the clock.
        looks: profile the steps, and examine model and data.
        compares: compute the first batch once without dropout, to be compared.
        preload: the allocator that this process was started with; see ``Lever.preload``.
        scratch: a folder that is removed afterwards, for whatever the program writes where it is told to.

    """

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    changes: list[str] = dataclasses.field(default_factory=list)
    seed: int = 0
    warm_up: int = 3
    looks: bool = False
    compares: bool = False
    preload: str | None = None
    scratch: str = ""


class Channel:
    """Orders in, answers out.

    Args:
        read_fd: where orders come from.
        write_fd: where answers go.

    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._orders = os.fdopen(read_fd, "r", encoding="utf-8")
        self._answers = os.fdopen(write_fd, "w", encoding="utf-8")
        self.scratch = ""

    def receive(self) -> dict[str, Any]:
        """Return the next order; end this process if there will be none."""
        line = self._orders.readline()
        if not line:
            leave(self.scratch)
        order: dict[str, Any] = json.loads(line)
        if order["do"] == "stop":
            leave()
        return order

    def send(self, event: str, **values: Any) -> None:
        """Answer; end this process if nobody listens."""
        try:
            self._answers.write(json.dumps({"event": event, **values}) + "\n")
            self._answers.flush()
        except OSError:
            leave(self.scratch)

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong, and end this process."""
        names = [kind.__name__ for kind in type(error).__mro__]
        refused = any(name in _REFUSALS for name in names)
        text = str(error) if refused else f"{names[0]}: {error}"
        self.send("error", refused=refused, text=text)
        leave()


def leave(scratch: str = "") -> NoReturn:
    """End this process and its workers at once; nothing of the program runs any more.

    Args:
        scratch: a folder to remove, when the one who made it cannot.

    """
    for child in multiprocessing.active_children():
        child.kill()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_with_parent(scratch: str) -> None:
    """End this process when the one that started it is gone, also in the middle of a long step."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        leave(scratch)

    threading.Thread(target=watch, name="hasten-trial", daemon=True).start()


class Trial:
    """Makes the Trainers of this process train under orders.

    Args:
        channel: to the parent.
        orders: what is on.
        trainer_class: ``hasten.Trainer``.

    """

    def __init__(self, channel: Channel, orders: Orders, trainer_class: Any) -> None:
        self.channel, self.orders, self._class = channel, orders, trainer_class
        channel.scratch = orders.scratch
        self.profiler = _Profiler() if orders.looks else None

    def install(self) -> None:
        """Measure the first ``Trainer.fit`` or ``Trainer.advise`` of this process, which never returns."""
        trial, make, fit = self, self._class.__init__, self._class.fit

        # Command lines read the arguments of the Trainer from its signature.
        @functools.wraps(make)
        def __init__(trainer: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            try:
                make(trainer, *args, **trial.overridden(given))
            except Exception as error:
                trial.channel.fail(error)
            trainer.__dict__["_given"] = given

        @functools.wraps(fit)
        def fit_under_orders(trainer: Any, model: Any, *args: Any, **given: Any) -> NoReturn:
            trial.fit(trainer, model, lambda: fit(trainer, model, *args, **given))

        def advise(
            trainer: Any, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **given: Any
        ) -> NoReturn:
            data = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
            trial.fit(trainer, model, lambda: fit(trainer, model, **data))

        self._class.__init__, self._class.fit, self._class.advise = __init__, fit_under_orders, advise

    def overridden(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Trainer's arguments with the levers on, on one device, writing and showing nothing."""
        new = {**given, "speed": None}
        new.update(
            fast_dev_run=False,
            callbacks=_harmless(given.get("callbacks")),
            profiler=self.profiler,
            max_time=None,
            default_root_dir=self.orders.scratch or None,
            num_sanity_val_steps=0,
            # Programs that evaluate before they train shall come to the point.
            **{name: 0 if given.get(name) == 0 else 1 for name in _LIMITS},
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **_on_one_device(given),
        )
        new.pop("speed")
        if given.get("batch_size") == "auto":
            # Levers are compared with the loader's own batches: the search would be part of each trial.
            new["batch_size"] = None
        if given.get("barebones"):
            # It allows none of these to be asked for.
            new.update(barebones=False, logger=False)
        elif given.get("logger") is not False:
            from hasten.loggers.base import DummyLogger

            # Code that writes to its logger runs through.
            new["logger"] = DummyLogger()
        return {**new, **self.orders.arguments}

    def fit(self, trainer: Any, model: Any, fit: Callable[[], None]) -> NoReturn:
        """Train under orders until told to stop."""
        channel, orders = self.channel, self.orders
        given = trainer.__dict__.get("_given", {})
        told = {name: repr(given[name]) for name in _TOLD if given.get(name) not in (None, False)}
        channel.send("at_fit", given=told)
        channel.receive()
        began = time.perf_counter()
        try:
            seed_everything(orders.seed, verbose=False)
            for place in orders.changes:
                change_at(place)(trainer, model)
            # Last, so that what other callbacks do at the end of a step is part of it.
            trainer.callbacks.append(_Measure(self, began))
            fit()
        except Exception as error:
            import traceback

            traceback.print_exc()
            channel.fail(error)
        except BaseException:
            leave()
        channel.send("ended")
        leave()


class _Profiler(SimpleProfiler):
    """Tells its figures to the advisor only."""

    def describe(self) -> None:
        """Print nothing."""


class _Measure(Callback):
    """Counts, times and stops at the end of each turn until the next order."""

    def __init__(self, trial: Trial, began: float) -> None:
        self._trial, self._channel = trial, trial.channel
        self._began = began
        self._due = max(1, trial.orders.warm_up)
        self._prepared = False
        self._times: list[float] = []
        self._losses: list[Tensor | None] = []
        self._tokens: list[Tensor] = []
        self._slots = 0
        self._samples, self._certain = 0, True
        self._faults = 0
        self._examined = look.Examined() if trial.orders.looks else None
        self._steps_planned: float | None = None
        self._device = torch.device("cpu")
        self._gradients: list[list[float]] = []
        self._steps_looked_at = 0
        self._without_draws: list[float] = []
        self._recent: deque[Any] = deque(maxlen=_BATCHES)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take limits and validation off: the parent says when it is enough."""
        run = trainer._run
        self._device = run.runtime.device
        try:
            self._steps_planned = float(trainer.estimated_stepping_batches)
        except Exception:
            # Only to be told when a lever pays back, and some data does not know its length.
            self._steps_planned = None
        run.arguments = dataclasses.replace(
            run.arguments, max_epochs=-1, max_steps=-1, min_epochs=None, min_steps=None
        )
        run.validation.switch_off()
        for config in run.schedulers:
            if config.reduce_on_plateau:
                # What it watches is not computed here.
                config.frequency = sys.maxsize
            else:
                _step_to_the_end_only(config.scheduler)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count operations, in the one step that is for that."""
        if self._trial.orders.compares and not self._prepared and not self._times:
            try:
                self._without_draws = without_draws(pl_module, batch)
            except Exception as error:
                # A step may need more around it than a batch: then it is not compared.
                print(f"the first batch was not computed without dropout: {error!r}")
        if self._examined is not None:
            self._examined.before(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note some numbers of the gradients of the first steps, before the clock runs."""
        if not self._prepared and self._steps_looked_at < _STEPS_WITH_GRADIENTS:
            self._steps_looked_at += 1
            self._gradients.append(_some_gradients(pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step; at the end of a turn answer, and wait for the next order."""
        self._recent.append(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # A copy: where a graph is replayed the next step writes to the same memory.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) and loss.numel() == 1 else None)
        samples, certain = batch_size_of(batch)
        self._samples += samples
        mask = look.mask_of(batch)
        if mask is not None:
            # Not read before the end of the turn: a device need not be waited for.
            self._tokens.append(mask.count_nonzero())
            self._slots += mask.numel()
        self._certain = self._certain and (certain or isinstance(batch, Mapping))
        if self._examined is not None:
            self._examined.after(batch)
        self._times.append(time.perf_counter())
        if len(self._times) >= self._due:
            self._answer(trainer, pl_module)

    def _answer(self, trainer: Any, module: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = self._began
        profiler = self._trial.profiler
        values = {
            "seconds": now - began,
            "step_seconds": [b - a for a, b in zip([began, *self._times], self._times, strict=False)],
            "losses": [None if loss is None else float(loss) for loss in self._losses],
            "samples": self._samples if self._certain else None,
            "tokens": int(sum(self._tokens)) if len(self._tokens) == len(self._times) else None,
            "slots": self._slots or None,
            "faults": faults - self._faults,
            "memory_bytes": look.peak_memory_bytes(self._device),
            "steps_planned": self._steps_planned,
            "parts": dict(profiler._seconds) if profiler is not None else {},
            "gradients": self._gradients,
            "without_draws": self._without_draws,
        }
        self._prepared = True
        _signal_workers(signal.SIGSTOP)
        self._channel.send("turn", **values)
        while True:
            order = self._channel.receive()
            if order["do"] == "apart":
                coarse = look.is_coarse(trainer._run.runtime, module)
                self._channel.send("apart", why=self._why_not_apart(module, coarse))
                continue
            if order["do"] == "examine" and self._examined is not None:
                if not self._examined.counted:
                    self._examined.count_next = True
                    self._due = 1
                    break
                found = look.facts(self._examined, trainer, module)
                self._channel.send("facts", **found, not_apart=self._why_not_apart(module, found["coarse"]))
                continue
            self._due = max(1, int(order["steps"]))
            break
        _signal_workers(signal.SIGCONT)
        self._times, self._losses, self._tokens, self._gradients = [], [], [], []
        self._samples, self._slots, self._certain = 0, 0, True
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if profiler is not None:
            # The time spent waiting for the order is nobody's; what is open began now.
            profiler._seconds = dict.fromkeys(profiler._seconds, 0.0)
            profiler._last = time.perf_counter()
        self._began = time.perf_counter()

    def _why_not_apart(self, module: Any, coarse: bool) -> str | None:
        try:
            return why_not_apart(module, list(self._recent), coarse=coarse)
        except Exception as error:
            # A step may need more around it than a batch: then it is not known.
            print(f"the samples of a batch were not looked at one by one: {error!r}")
            return None


def _some_gradients(module: Any) -> list[float]:
    """Return some numbers of all gradients there are, spread evenly; empty where there is none."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    count = max(8, _NUMBERS // max(1, len(parameters)))
    # What has no gradient counts as zeros, so that the places stay.
    some = [
        some_numbers(p.detach() if p.grad is None else p.grad, count) * float(p.grad is not None)
        for p in parameters
    ]
    return torch.cat(some).tolist() if some and any(p.grad is not None for p in parameters) else []


def _signal_workers(number: int) -> None:
    """Stop the loader's workers, or let them go on: a batch made while another trial has its turn would be free."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            try:
                os.kill(child.pid, number)
            except ProcessLookupError:
                continue


def _harmless(callbacks: Any) -> list[Any]:
    """Return the callbacks that take part in training, without those that write, show, search or stop."""
    from hasten.callbacks.batch_size_finder import BatchSizeFinder
    from hasten.callbacks.checkpoint import Checkpoint
    from hasten.callbacks.early_stopping import EarlyStopping
    from hasten.callbacks.lr_finder import LearningRateFinder
    from hasten.callbacks.model_summary import ModelSummary
    from hasten.callbacks.prediction_writer import BasePredictionWriter
    from hasten.callbacks.progress import ProgressBar
    from hasten.callbacks.timer import Timer

    left_out = (
        BasePredictionWriter,
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        LearningRateFinder,
        ModelSummary,
        ProgressBar,
        Timer,
    )
    given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    return [callback for callback in given if not isinstance(callback, left_out)]


def _on_one_device(given: Mapping[str, Any]) -> dict[str, Any]:
    devices, strategy = given.get("devices", "auto"), given.get("strategy", "auto")
    one: Any = devices[:1] if isinstance(devices, (list, tuple)) else 1
    alone = strategy if strategy in ("auto", "single_device") else "auto"
    return {"devices": one, "num_nodes": 1, "strategy": alone}


def _step_to_the_end_only(scheduler: Any) -> None:
    """Let a scheduler stay at its last rate when a trial takes more steps than the training would."""
    step = scheduler.step

    def careful(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except ValueError:
            return None

    scheduler.step = careful
