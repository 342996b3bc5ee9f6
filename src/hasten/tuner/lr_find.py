"""Search for a learning rate: increase it while training, and find where the loss falls fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hasten._lib import check, torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import log, rank_zero_info, rank_zero_warn
from hasten.elsewhere import conventions
from hasten.loops.fit import train
from hasten.module.callback import Callback
from hasten.tuner.probe import ProbeRun
from hasten.tuner.tuned_value import TunedValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.types import Batch, StepOutput

_SMOOTHING = 0.98


class LRFinder:
    """The result of a sweep of learning rates.

    Args:
        mode: "exponential" or "linear".
        lr_min: the rate of the first step.
        lr_max: the rate of the last step.
        num_training: the number of steps planned.

    Attributes:
        results: ``{"lr": [...], "loss": [...]}``: the rate of each step and the smoothed loss after it.

    Example::

        >>> found = LRFinder("exponential", 1e-4, 1.0, 5)
        >>> found.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [3.0, 2.9, 2.0, 1.9, 8.0]}
        >>> found.suggestion(skip_begin=0)
        0.001

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017.

    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None
        self._total_batch_idx = 0

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step == 0:
            return self.lr_min
        share = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss fell fastest; None if there are too few losses.

        Args:
            skip_begin: steps to ignore at the beginning.
            skip_end: steps to ignore at the end.

        """
        kept = slice(skip_begin, len(self.results["loss"]) - skip_end)
        # Lightning computes in float32, and divides by the difference of the rates, not of their logarithms.
        over_rates = conventions.current().lr_find_in_single_precision
        dtype = torch.float32 if over_rates else torch.float64
        losses = torch.tensor(self.results["loss"][kept], dtype=dtype)
        rates = self.results["lr"][kept]
        finite = torch.isfinite(losses)
        if int(finite.sum()) < 2:
            log.error(
                "Failed to compute suggestion for learning rate because there are not enough points. Increase the loop "
                f"iteration limits or the size of your dataset/dataloader. {int(finite.sum())} of "
                f"{len(self.results['loss'])} losses can be compared: use a larger num_training."
            )
            self._optimal_idx = None
            return None
        spacing: Any = [torch.tensor(rates, dtype=dtype)[finite]] if over_rates else 1
        steepest = int(finite.nonzero()[torch.gradient(losses[finite], spacing=spacing)[0].argmin()])
        self._optimal_idx = steepest + skip_begin
        return rates[steepest]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Figure | SubFigure:
        """Draw the loss over the learning rate; return the figure.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: draw into these axes.

        Raises:
            ModuleNotFoundError: matplotlib is missing.

        """
        pyplot = need("matplotlib.pyplot", purpose="the plot of lr_find")
        ax = ax or pyplot.subplots()[1]
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        if suggest:
            self.suggestion()
            if self._optimal_idx is not None:
                rate, loss = (self.results[name][self._optimal_idx] for name in ("lr", "loss"))
                ax.plot(rate, loss, "o", color="red")
        if show:
            pyplot.show()
        return ax.figure


@dataclass
class SweepOptions:
    """The options of a sweep, see ``Tuner.lr_find``; ``owner`` is named in errors.

    Raises:
        ValueError: one of them is out of range.

    """

    owner: str
    mode: str
    min_lr: float
    max_lr: float
    num_training: int
    early_stop_threshold: float | None

    def __post_init__(self) -> None:
        owner, error = self.owner, MisconfigurationException
        modes = ("exponential", "linear")
        self.mode = check.one_of(owner, "mode", str(self.mode).lower(), modes, error=error)
        for name in ("min_lr", "max_lr"):
            check.number(owner, name, getattr(self, name), error=error)
        in_order = 0 < self.min_lr < self.max_lr < math.inf
        goes_down = 0 < self.max_lr <= self.min_lr < math.inf
        if not in_order and not (goes_down and conventions.current().mistakes_are_warnings):
            given = f"min_lr={self.min_lr!r}, max_lr={self.max_lr!r}"
            raise make_error(
                error, f"{owner}({given}):", fix="use 0 < min_lr < max_lr, for instance 1e-8 and 1.", argument="min_lr"
            )
        name = "num_training_steps" if owner == "LearningRateFinder" else "num_training"
        check.whole(owner, name, self.num_training, at_least=1, error=error)
        name, allowed = "early_stop_threshold", "a number above 1 (times the best loss), or None"
        threshold = self.early_stop_threshold
        check.number(owner, name, threshold, above=1, allow_none=True, allowed=allowed, error=error)


def rate_of(
    module: LightningModule, datamodule: LightningDataModule | None, name: str, update: bool
) -> TunedValue | None:
    """Return the attribute that holds the learning rate; None if there is none and it is not needed."""
    if name:
        value = TunedValue(module, datamodule, name)
        try:
            value.get()
        except MisconfigurationException as error:
            raise LearningRateNotFound(error.what, fix=error.fix) from None
        return value
    values = (TunedValue(module, datamodule, each) for each in ("lr", "learning_rate"))
    found = next((value for value in values if value.holders()), None)
    if found is None and update:
        raise LearningRateNotFound(
            "When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
            f"['lr', 'learning_rate']. {type(module).__name__} has neither.",
            fix="Set one and use it in configure_optimizers(), name another with attr_name, or use update_attr=False.",
        )
    return found


class LearningRateNotFound(MisconfigurationException, AttributeError):
    """Neither the module nor the datamodule has an attribute with the learning rate."""


def sweep(run: Run, options: SweepOptions, callback: LRSweep | None = None) -> LRFinder:
    """Train with a growing learning rate in a run; afterwards everything is restored.

    The callback watches the steps.
    """
    probe, optimizers = ProbeRun(run), run.optimizers
    if not run.module.automatic_optimization:
        raise MisconfigurationException("lr_find: manual optimization sets the learning rate itself.")
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"lr_find: `model.configure_optimizers()` returned {len(optimizers)} optimizers, and a sweep "
            "only works with single optimizers."
        )
    found = LRFinder(options.mode, options.min_lr, options.max_lr, options.num_training)
    callback = callback or LRSweep(options)
    callback.begin(found, optimizers[0])
    with probe.trainer.limited_run("fit", options.num_training, callbacks=[callback], keep_limit=True) as few:
        train(few)
        found._total_batch_idx = few.progress.total_batches - 1
    probe.leave_if_stopped()
    if not found.results["lr"]:
        raise MisconfigurationException(
            "lr_find: no step was trained: limit_train_batches is 0, or the module skips every batch."
        )
    rank_zero_info(f"lr_find: tried {len(found.results['lr'])} learning rates.")
    return found


def result_of(run: Run) -> LRFinder:
    """Return what the ``LRSweep`` of a run has found."""
    found = next(each.found for each in run.module.trainer.callbacks if isinstance(each, LRSweep))
    assert found is not None
    return found


# What Tuner.lr_find has set, by module: the attribute, its value, and the rates of the optimizer before.
TUNED: WeakKeyDictionary[LightningModule, tuple[str, float, list[float]]] = WeakKeyDictionary()


def rates(run: Run) -> list[float]:
    """Return the learning rates of all groups."""
    return [float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups]


def warn_of_fixed_rate(run: Run) -> None:
    """Warn if the optimizer has, after an epoch, the rates that it had before ``lr_find`` set another one."""
    name, found, before = TUNED.pop(run.module, ("", 0.0, []))
    if any(before) and found not in before and rates(run) == before:
        owner = type(run.module).__name__
        rank_zero_warn(
            f"Tuner.lr_find() has set {name} of {owner} to {found:.3g}, and the optimizer still has lr={before[0]:g}.",
            fix=f"Write lr=self.{name} in configure_optimizers, or update_attr=False in lr_find.",
        )


def set_rate(run: Run, rate: float) -> None:
    """Continue a run, and its schedulers, with ``rate``.

    At the beginning of a run it is the initial rate of the schedulers, as if the optimizer had been made with it.
    Later it is the current rate. Schedulers with their own rates, such as OneCycleLR, keep those.
    """
    started = run.progress.global_step > 0
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            initial = float(group.get("initial_lr", group["lr"]))
            ratio = float(group["lr"]) / initial if initial else 1.0
            _write(group, "lr", rate if started else rate * ratio)
            if "initial_lr" in group:
                _write(group, "initial_lr", rate / ratio if started and ratio else rate)
    for config in run.schedulers:
        _rebase(config.scheduler)


def _write(group: dict[str, Any], name: str, rate: float) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(rate)
    else:
        group[name] = rate


def _rebase(scheduler: Any) -> None:
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
    torch_private.set_last_rates(scheduler, [group["lr"] for group in groups])
    for inner in torch_private.chained_schedulers(scheduler):
        _rebase(inner)


class LRSweep(Callback):
    """Sets the learning rate of each optimizer step, and records its loss.

    In a run that begins it sweeps by itself, before the loaders are made: the loaders of the sweep are the first ones.
    Programs find it among the callbacks, and know that they are in a sweep.
    """

    found: LRFinder | None = None

    def __init__(self, options: SweepOptions) -> None:
        self._options, self._threshold = options, options.early_stop_threshold
        self.num_training = options.num_training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found = sweep(trainer.current_run, self._options, self)

    def begin(self, found: LRFinder, optimizer: torch.optim.Optimizer) -> None:
        """Watch the steps of a sweep from here on."""
        self._found, self._optimizer = found, optimizer
        self._rates, self._losses = found.results["lr"], found.results["loss"]
        self._first_step = 0
        # Of the batches of a step: the sum of their losses, and of their weights if they have some.
        self._loss: Any = None
        self._weight: Any = None
        self._average, self._averaged, self._best = 0.0, 0, math.inf
        # Lightning divides the first mean by the weight of two losses, and of an accumulation it reads the last one.
        self._halves_first = conventions.current().lr_find_in_single_precision

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        for group in self._optimizer.param_groups:
            _write(group, "lr", self._found.lr_at(len(self._rates)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and "loss" in outputs:
            # Losses of an accumulation are divided by their number: the sum is the mean.
            loss, weight = outputs["loss"], outputs.get("loss_weight")
            self._loss = loss if self._loss is None or self._halves_first else self._loss + loss
            if weight is not None:
                self._weight = weight if self._weight is None else self._weight + weight
        step = len(self._rates)
        if trainer.global_step - self._first_step <= step:
            return
        value = self._mean(trainer)
        self._loss = self._weight = None
        smoothed = self._smoothed(value, step)
        self._rates.append(self._found.lr_at(step))
        self._losses.append(smoothed)
        if self._threshold is not None and self._averaged > 1 and value is not None:
            # A negative loss may also grow by three times its size, with a threshold of 4.
            most = self._best + (self._threshold - 1) * abs(self._best)
            trainer.should_stop = trainer.should_stop or not smoothed <= most
        self._best = min(self._best, smoothed)

    def _mean(self, trainer: Trainer) -> float | None:
        """Return the mean loss of all processes; None if the step was skipped."""
        loss = self._loss if self._loss is None or self._weight is None else self._loss / self._weight
        if trainer.runtime.several_processes:
            # All of them take part, also one that skipped its batch.
            local = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0], dtype=torch.float64)
            total, number = trainer.strategy.all_reduce(local, reduce_op="sum").tolist()
            return total / number if number else None
        # A sweep reads each loss: it takes a few hundred steps.
        return None if loss is None else float(loss)

    def _smoothed(self, value: float | None, step: int) -> float:
        if value is None:
            return math.nan
        self._averaged += 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * value
        return self._average / (1 - _SMOOTHING ** (step + 2 if self._halves_first else self._averaged))
