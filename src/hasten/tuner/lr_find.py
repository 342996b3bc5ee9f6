"""A learning rate that learns: train while it grows, and look where the loss falls fastest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.loops.fit import train
from hasten.module.callback import Callback
from hasten.tuner import attributes
from hasten.tuner.trial import Trial

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.trainer import Trainer

MODES = ("exponential", "linear")
NAMES = ("lr", "learning_rate")
_SMOOTHING = 0.98


class LRFinder:
    """What a sweep of learning rates found.

    Args:
        mode: "exponential" or "linear".
        lr_min: the rate of the first step.
        lr_max: the rate after the last one.
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
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step == 0:
            return self.lr_min
        share = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss fell fastest; None if too few steps are left to tell.

        Args:
            skip_begin: steps at the beginning that do not count.
            skip_end: steps at the end that do not count.

        """
        kept_losses = self.results["loss"][skip_begin : len(self.results["loss"]) - skip_end]
        losses = torch.tensor(kept_losses, dtype=torch.float64)
        rates = self.results["lr"][skip_begin : len(self.results["lr"]) - skip_end]
        finite = torch.isfinite(losses)
        if int(finite.sum()) < 2:
            rank_zero_warn(
                f"lr_find: {int(finite.sum())} of {len(self.results['loss'])} losses can be compared, which is too few "
                "to suggest a learning rate. Sweep over more steps (num_training), or check the model and its data."
            )
            self._optimal_idx = None
            return None
        kept = [index for index, is_finite in enumerate(finite.tolist()) if is_finite]
        steepest = kept[int(torch.gradient(losses[finite])[0].argmin())]
        self._optimal_idx = steepest + skip_begin
        return rates[steepest]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss over the learning rate; return the figure.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: draw into these axes.

        Raises:
            ModuleNotFoundError: matplotlib is missing.

        """
        pyplot = need("matplotlib.pyplot", purpose="the plot of lr_find")
        if ax is None:
            figure, ax = pyplot.subplots()
        else:
            figure = ax.figure
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        if suggest:
            self.suggestion()
            if self._optimal_idx is not None:
                place = self._optimal_idx
                ax.plot(self.results["lr"][place], self.results["loss"][place], "o", color="red")
        if show:
            pyplot.show()
        return figure


def check_options(
    mode: str, min_lr: float, max_lr: float, num_training: int, early_stop_threshold: float | None, owner: str
) -> str:
    """Check the options of a sweep; return the mode as it is called here.

    Raises:
        ValueError: one of them is out of range.

    """
    if str(mode).lower() not in MODES:
        raise MisconfigurationException(
            f"{owner}(mode={mode!r}): `mode` should be one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}"
        )
    if not 0 < min_lr < max_lr or not math.isfinite(max_lr):
        raise MisconfigurationException(
            f"{owner}(min_lr={min_lr!r}, max_lr={max_lr!r}): use 0 < min_lr < max_lr, for instance 1e-8 and 1."
        )
    if isinstance(num_training, bool) or not isinstance(num_training, int) or num_training < 2:
        raise MisconfigurationException(
            f"{owner}(num_training={num_training!r}): use a whole number of at least 2, for instance 100."
        )
    if early_stop_threshold is not None and not early_stop_threshold > 1:
        raise MisconfigurationException(
            f"{owner}(early_stop_threshold={early_stop_threshold!r}): use a number above 1 (times the "
            "best loss), or None."
        )
    return mode.lower()


def attribute_of(module: Any, datamodule: Any, name: str, update: bool) -> str | None:
    """Return the attribute that holds the learning rate; None if there is none and none is asked for.

    Raises:
        MisconfigurationException: it cannot be found.

    """
    if name:
        attributes.get(module, datamodule, name)
        return name
    found = attributes.first_of(module, datamodule, NAMES)
    if found is None and update:
        raise MisconfigurationException(
            f"lr_find: {type(module).__name__} has neither self.lr nor self.learning_rate to be set. Make one of them "
            "and use it in configure_optimizers(), name it by attr_name, or use update_attr=False."
        )
    return found


def sweep(
    trial: Trial,
    *,
    min_lr: float,
    max_lr: float,
    num_training: int,
    mode: str,
    early_stop_threshold: float | None,
) -> LRFinder:
    """Train with a growing learning rate; afterwards everything is as before.

    Raises:
        MisconfigurationException: the module optimises by hand, or has not exactly one optimizer.

    """
    if not trial.module.automatic_optimization:
        raise MisconfigurationException(
            "lr_find: with manual optimisation the learning rate is in your own hands. Sweep in training_step."
        )
    optimizers = trial.run.optimizers
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"lr_find: `model.configure_optimizers()` returned {len(optimizers)} optimizers, and one is needed."
        )
    found = LRFinder(mode, min_lr, max_lr, num_training)
    watch = _Sweep(found, optimizers[0], early_stop_threshold)
    with trial.trainer.limited_run("fit", num_training, callbacks=[watch], keep_limit=True) as run:
        train(run)
    trial.leave_if_stopped()
    if not found.results["lr"]:
        raise MisconfigurationException(
            "lr_find: no step was trained: limit_train_batches is 0, or the module skips every batch."
        )
    rank_zero_info(f"lr_find: tried {len(found.results['lr'])} learning rates.")
    return found


def set_rate(run: Run, rate: float) -> None:
    """Have a run go on with ``rate``, and its schedulers from there.

    At the beginning of a run it is the rate that the schedulers start from, as if the optimizer had been made with it.
    Later it is the rate of now. Schedulers with rates of their own, such as OneCycleLR, keep those.
    """
    begun = run.progress.global_step > 0
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            initial = float(group.get("initial_lr", group["lr"]))
            share = float(group["lr"]) / initial if initial else 1.0
            _write(group, "lr", rate if begun else rate * share)
            if "initial_lr" in group:
                _write(group, "initial_lr", rate / share if begun and share else rate)
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
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in groups]
    for inner in getattr(scheduler, "_schedulers", ()):
        _rebase(inner)


class _Sweep(Callback):
    """Sets the learning rate of each optimizer step, and notes the loss before it."""

    def __init__(self, found: LRFinder, optimizer: Any, threshold: float | None) -> None:
        self._found, self._optimizer, self._threshold = found, optimizer, threshold
        self._first_step = 0
        self._loss: Any = None
        self._weight: Any = None
        self._average = 0.0
        self._averaged = 0
        self._best = math.inf

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note where the counters are."""
        self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the rate of the coming step."""
        rate = self._found.lr_at(len(self._found.results["lr"]))
        for group in self._optimizer.param_groups:
            _write(group, "lr", rate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss, and stop where it has grown too far."""
        if outputs:
            # Each is divided by their number already: the sum over an accumulation is its mean.
            loss, weight = outputs["loss"], outputs.get("loss_weight")
            self._loss = loss if self._loss is None else self._loss + loss
            if weight is not None:
                self._weight = weight if self._weight is None else self._weight + weight
        step = len(self._found.results["lr"])
        if trainer.global_step - self._first_step <= step:
            return
        value = self._mean(trainer)
        self._found.results["lr"].append(self._found.lr_at(step))
        self._found.results["loss"].append(self._smoothed(value))
        self._loss = self._weight = None
        if self._threshold is not None and self._averaged > 1 and value is not None:
            smoothed = self._found.results["loss"][-1]
            # Of a loss below zero, too, it says how far it may grow: three times its size, with a threshold of 4.
            if not smoothed <= self._best + (self._threshold - 1) * abs(self._best):
                trainer.should_stop = True
        self._best = min(self._best, self._found.results["loss"][-1])

    def _mean(self, trainer: Trainer) -> float | None:
        """Return the loss over all processes; None where a step was skipped."""
        loss = self._loss
        if loss is not None and self._weight is not None:
            loss = loss / self._weight
        if trainer.world_size > 1:
            # All of them ask, also one that skipped its batch, and decide alike.
            mine = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0], dtype=torch.float64)
            total, number = trainer.strategy.all_reduce(mine, reduce_op="sum").tolist()
            return total / number if number else None
        # A sweep reads each loss: it is over after some hundred steps.
        return None if loss is None else float(loss)

    def _smoothed(self, value: float | None) -> float:
        if value is None:
            return math.nan
        self._averaged += 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * value
        return self._average / (1 - _SMOOTHING**self._averaged)
