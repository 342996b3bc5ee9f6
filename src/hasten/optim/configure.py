"""Read and check the return value of ``configure_optimizers``."""

from __future__ import annotations

import functools
import gc
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from hasten._lib import check as guards
from hasten._lib.durations import parse_interval
from hasten._lib.errors import MisconfigurationException, MisconfigurationRuntimeError, WrongType, with_article
from hasten._lib.names import did_you_mean, nearest, warn_of_mode
from hasten._lib.observers import replaced
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.torch_private import chained_schedulers
from hasten.elsewhere import conventions
from hasten.extend.origin import comes_from


@dataclass
class LRSchedulerConfig:
    """One learning-rate scheduler and when it steps.

    Args:
        scheduler: the scheduler.
        name: the name under which ``LearningRateMonitor`` logs it.
        interval: "epoch" or "step"; "2ep" or "500st" set the frequency, too.
        frequency: step it every so many intervals. With "step" it counts batches of the epoch, as Lightning does: with
            ``accumulate_grad_batches`` the scheduler steps after those optimizer steps whose batch it divides.
        reduce_on_plateau: whether it steps on a monitored value.
        monitor: the name of that value.
        strict: whether a missing value is an error (otherwise a warning).

    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        replaced(self, name)


_SCHEDULER_KEYS = [field.name for field in fields(LRSchedulerConfig)]
# The keys that say when, and on which value, automatic optimization steps a scheduler; callbacks read the interval,
# too.
_WHEN_AUTOMATIC = ("frequency", "monitor", "strict", "reduce_on_plateau")
_KEYS = ["optimizer", "lr_scheduler", "monitor"]


# Types of values that are certainly not schedulers.
_PLAIN = (str, int, float, bool, list, tuple, type(None))
_SCHEDULER_OBJECT = "Make one: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10), or another class of there."


def parse(
    configured: object, owner: str, *, automatic: bool = True, steps_schedulers: bool = False
) -> tuple[list[Any], list[LRSchedulerConfig]]:
    """Return the optimizers and schedulers in the return value of ``configure_optimizers``.

    Args:
        configured: its return value.
        owner: the module's class name, for messages.
        automatic: False where the module steps its optimizers and schedulers in ``training_step``.
        steps_schedulers: the module has its own ``lr_scheduler_step``.

    Raises:
        MisconfigurationException: the value has an unsupported form, or a dict has an unknown key.
        TypeError: a scheduler cannot be saved and restored.

    """
    read = functools.partial(_scheduler, automatic=automatic, needs_step=automatic and not steps_schedulers)
    where = f"{owner}.configure_optimizers()"
    if _is_nothing(configured, automatic):
        return [], []
    items: list[Any] = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    if items and all(_is_optimizer(item) for item in items):
        return items, []
    if len(items) == 2 and isinstance(items[0], (list, tuple)):
        optimizers = list(items[0])
        _check_optimizers(optimizers, where)
        schedulers = items[1] if isinstance(items[1], (list, tuple)) else [items[1]]
        return optimizers, [read(entry, where) for entry in schedulers]
    if items and all(isinstance(item, Mapping) for item in items):
        optimizers, schedulers = _from_dicts(items, where)
        return optimizers, [read(entry, where) for entry in schedulers]
    raise MisconfigurationException(f"{where} returned {_describe(configured)}.", fix=_what_to_return(items))


def _what_to_return(items: list[Any]) -> str:
    if len(items) == 2 and _is_optimizer(items[0]) and hasattr(items[1], "get_last_lr"):
        return "Return [optimizer], [scheduler]."
    return (
        'Return an optimizer, a list of optimizers, two lists (optimizers, schedulers), a dict {"optimizer": ..., '
        '"lr_scheduler": ...}, or None.'
    )


def _is_nothing(configured: object, automatic: bool) -> bool:
    """Return whether no optimizer is wanted; an empty list says so where the module makes its own steps."""
    return configured is None or (not automatic and isinstance(configured, (list, tuple)) and not configured)


def _from_dicts(items: list[Mapping[str, Any]], where: str) -> tuple[list[Any], list[Any]]:
    optimizers, schedulers = [], []
    for item in items:
        misplaced = [key for key in item if key in ("interval", "strict", "reduce_on_plateau")]
        if item.get("frequency", 1) != 1:  # Programs for Lightning 1.x say with 1 that optimizers take turns.
            misplaced.append("frequency")
        if misplaced and "lr_scheduler" in item:
            what = f"{where} returned a dict with the key {misplaced[0]!r} beside the scheduler, where it is ignored."
            fix = f'Write "lr_scheduler": {{"scheduler": scheduler, "{misplaced[0]}": {item[misplaced[0]]!r}}}.'
            rank_zero_warn(what, fix=fix, category=RuntimeWarning)
        known = [*_KEYS, *(misplaced if "lr_scheduler" in item else ())]
        unknown = [key for key in item if key not in known and (key, item[key]) != ("frequency", 1)]
        _report_unknown_keys(unknown, _KEYS, f"{where} returned a dict with")
        if "optimizer" not in item:
            raise MisconfigurationException(f'{where} returned a dict without the key "optimizer".')
        _check_optimizers([item["optimizer"]], where)
        optimizers.append(item["optimizer"])
        entry = item.get("lr_scheduler")
        if entry is None:
            continue
        if item.get("monitor") is not None:
            entry = _scheduler_entry(entry, where)
            entry.setdefault("monitor", item["monitor"])
        schedulers.append(entry)
    return optimizers, schedulers


def _report_unknown_keys(unknown: list[str], known: list[str], what: str) -> None:
    """Raise for a key that looks like a known one; warn of others, which programs may keep for their own use."""
    for key in unknown:
        message = f"{what} the key {key!r}; known are {known}."
        if nearest(str(key), known) and not conventions.current().mistakes_are_warnings:
            raise MisconfigurationException(message, fix=did_you_mean(str(key), known))
        rank_zero_warn(f"{message} It is ignored.", category=RuntimeWarning)


def _scheduler(returned: Any, where: str, *, automatic: bool, needs_step: bool) -> LRSchedulerConfig:
    entry = _scheduler_entry(returned, where)
    scheduler = entry["scheduler"]
    if needs_step:
        _check_step(scheduler, where, entry.get("reduce_on_plateau"))
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise WrongType(
            f"{where}: lr_scheduler is {_describe(scheduler)}, which cannot be in a checkpoint.",
            fix="Give it the methods state_dict() and load_state_dict(state).",
        )
    ignored = [] if automatic else [key for key in _WHEN_AUTOMATIC if key in entry]
    if ignored:
        rank_zero_warn(
            f"{where}: the lr_scheduler dict has the keys {ignored}, but the keys will be ignored in manual "
            "optimization.",
            fix="Call scheduler.step() where it is due.",
            category=RuntimeWarning,
        )
    config = returned if isinstance(returned, LRSchedulerConfig) else LRSchedulerConfig(**entry)
    _check_interval(config, where)
    if automatic and isinstance(scheduler, OneCycleLR) and config.interval == "epoch":
        what = f"{where}: OneCycleLR counts steps, but it steps once per epoch here."
        rank_zero_warn(what, fix="Did you mean 'interval': 'step'?", category=RuntimeWarning)
    config.reduce_on_plateau = entry.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    if automatic and config.reduce_on_plateau:
        _check_monitor(config, where)
    return config


def _check_monitor(config: LRSchedulerConfig, where: str) -> None:
    kind = type(config.scheduler).__name__
    if config.monitor is None:
        raise MisconfigurationException(
            f"{where}: it must include a monitor when a `{kind}` scheduler is used.",
            fix='Return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}.',
        )
    if isinstance(config.scheduler, ReduceLROnPlateau):
        warn_of_mode(kind, str(config.monitor), config.scheduler.mode)


def _scheduler_entry(entry: Any, where: str) -> dict[str, Any]:
    """Return a scheduler, or a config or dict with one, as a dict of what is given, with known keys only."""
    if isinstance(entry, LRSchedulerConfig):
        return {each.name: value for each in fields(entry) if (value := getattr(entry, each.name)) != each.default}
    if not isinstance(entry, Mapping):
        entry = {"scheduler": entry}
    unknown = [key for key in entry if key not in _SCHEDULER_KEYS]
    _report_unknown_keys(unknown, _SCHEDULER_KEYS, f"{where}: the lr_scheduler dict has")
    known = {key: value for key, value in entry.items() if key in _SCHEDULER_KEYS}
    if "scheduler" not in known:
        raise MisconfigurationException(f'{where}: the lr scheduler dict must have the key "scheduler".')
    return known


def _check_step(scheduler: Any, where: str, reduce_on_plateau: bool | None) -> None:
    """Raise unless the loop can call ``scheduler.step()``, or ``step(value)`` with ``reduce_on_plateau``."""
    hook = f"{where.partition('.')[0]}.lr_scheduler_step(self, scheduler, metric)"
    if not hasattr(scheduler, "step"):
        raise MisconfigurationException(
            f"{where}: lr_scheduler is {_describe(scheduler)}, which is not a learning-rate scheduler (no step()).",
            fix=_SCHEDULER_OBJECT if type(scheduler) in _PLAIN else f"Step one of your own in {hook}.",
        )
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if is_plateau and reduce_on_plateau is False:
        what = f"{where}: lr_scheduler(reduce_on_plateau=False): {type(scheduler).__name__} steps on a monitored value."
        raise MisconfigurationException(what, fix="Leave it out.", argument="reduce_on_plateau")
    if not (reduce_on_plateau or is_plateau) and (needed := _required(scheduler.step)):
        raise MisconfigurationException(
            f"{where}: lr_scheduler is {_describe(scheduler)}, which doesn't follow PyTorch's LRScheduler: its step() "
            f"needs {needed}.",
            fix=f"Write {scheduler.__name__}(optimizer, ...)."
            if isinstance(scheduler, type)
            else f"Step it in {hook}.",
        )


def _check_interval(config: LRSchedulerConfig, where: str) -> None:
    if isinstance(config.interval, str) and config.interval[:1].isdigit():
        _read_interval(config, f"{where}: lr_scheduler interval")
    owner, refused = f"{where}: lr_scheduler", MisconfigurationException
    guards.one_of(owner, "interval", config.interval, ("epoch", "step"), error=refused)
    guards.whole(owner, "frequency", config.frequency, at_least=1, error=refused)
    guards.instance(owner, "name", config.name, str, "a string", allow_none=True)
    guards.instance(owner, "monitor", config.monitor, str, "the name of a logged value", allow_none=True)
    guards.instance(owner, "strict", config.strict, (bool, int), "True or False")


def _required(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in several]


def _read_interval(config: LRSchedulerConfig, argument: str) -> None:
    interval = parse_interval(config.interval, argument=argument)
    if interval.unit == "time":
        raise MisconfigurationException(
            f"{argument}={config.interval!r}:", fix="use epochs or steps, '2ep' or '500st'.", argument="interval"
        )
    if config.frequency != 1:
        what = f"{argument}={config.interval!r} and frequency={config.frequency}: both set the frequency."
        raise MisconfigurationException(what, fix="Leave out one.", argument="interval")
    config.frequency = interval.epochs or interval.steps or 1
    config.interval = "epoch" if interval.epochs else "step"


def check(optimizers: list[Any], configs: list[LRSchedulerConfig], *, automatic: bool, owner: str) -> None:
    """Check what automatic optimization needs: exactly one optimizer, and schedulers that drive it.

    Raises:
        MisconfigurationException: there are several optimizers, or a scheduler drives another one.

    """
    if automatic:
        _check_single(optimizers, f"{owner}.configure_optimizers() returned", "Return")
    for config in configs:
        driven = getattr(config.scheduler, "optimizer", None)
        if driven is not None and optimizers and not any(driven is optimizer for optimizer in optimizers):
            raise MisconfigurationException(
                f"{owner}.configure_optimizers(): the scheduler {type(config.scheduler).__name__} is attached with "
                "an optimizer that wasn't returned from `configure_optimizers`.",
                fix="Return that optimizer too.",
            )


# What schedulers call the number of their steps.
_COUNTS = ("T_max", "total_iters", "num_training_steps")


def warn_of_schedulers(
    optimizers: list[Any], configs: list[LRSchedulerConfig], *, automatic: bool, owner: str, max_epochs: float
) -> None:
    """Warn of a scheduler that nothing can step, and of one that was made for more steps than there are epochs."""
    for optimizer in optimizers if automatic and not configs else ():
        # torch's schedulers leave a mark in the step of their optimizer.
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False) and not _has_scheduler(optimizer):
            rank_zero_warn(
                f"{owner}.configure_optimizers() makes a scheduler and does not return it: it never steps.",
                fix="Return [optimizer], [scheduler].",
            )
    if configs:
        _warn_of_counts([config.scheduler for config in configs], owner)
    for config in configs if automatic else ():
        if config.interval == "epoch":
            _warn_of_epochs(config.scheduler, f"{owner}.configure_optimizers()", max_epochs)


def _warn_of_epochs(scheduler: Any, where: str, max_epochs: float) -> None:
    """Warn of a scheduler that steps once per epoch and was made for more steps than there are epochs."""
    fix = "Did you mean {'scheduler': scheduler, 'interval': 'step'}?"
    for function in getattr(scheduler, "lr_lambdas", ()):
        steps = getattr(function, "keywords", {}).get("num_training_steps", 0)
        if isinstance(steps, int) and steps > max_epochs:
            rank_zero_warn(f"{where}: the scheduler was made for {steps} steps, and steps per epoch.", fix=fix)
    steps = _warm_up_of(scheduler)
    # A fit of one epoch may be a trial.
    if 1 < max_epochs < steps / 10:
        rank_zero_warn(
            f"{where}: the warm-up of {type(scheduler).__name__} takes {steps} steps, and it steps once per epoch, of "
            f"which there are {max_epochs}.",
            PossibleUserWarning,
            fix=fix,
        )


def _warm_up_of(scheduler: Any) -> int:
    """Return after how many steps the warm-up of a scheduler of torch ends; 0 if it has none."""
    if isinstance(scheduler, SequentialLR):
        first: int = min(vars(scheduler).get("_milestones") or [0])
        return first
    begins_low = (isinstance(scheduler, LinearLR) and scheduler.start_factor < scheduler.end_factor) or (
        isinstance(scheduler, ConstantLR) and scheduler.factor < 1
    )
    return scheduler.total_iters if begins_low else 0


def _warn_of_counts(schedulers: list[Any], owner: str) -> None:
    for scheduler in (inner for each in schedulers for inner in (each, *chained_schedulers(each))):
        # Schedulers of programs may mean something else by -1.
        own = vars(scheduler) if comes_from(type(scheduler), "torch.optim") else {}
        made = [own, *(getattr(each, "keywords", {}) for each in getattr(scheduler, "lr_lambdas", ()))]
        for name, count in ((name, each[name]) for each in made for name in _COUNTS if name in each):
            if isinstance(count, int | float) and not 0 <= count < math.inf:
                rank_zero_warn(
                    f"{owner}.configure_optimizers(): {type(scheduler).__name__} has {name}={count}, which is no "
                    "number of steps. trainer.max_steps is -1 unless it is given.",
                    fix=f"Write {name}=self.trainer.estimated_stepping_batches.",
                )


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Return whether a scheduler of ``optimizer`` exists anywhere in the program."""
    return any(
        isinstance(one, LRScheduler) or (isinstance(one, dict) and "last_epoch" in one)
        for one in gc.get_referrers(optimizer)
    )


def warn_of_none(optimizers: list[Any], owner: str) -> None:
    """Warn if there is no optimizer to train with."""
    if not optimizers:
        rank_zero_warn(
            f"{owner}.configure_optimizers() returned None or an empty list: nothing is trained.",
            fix="Return an optimizer to train.",
        )


def check_assigned(optimizers: list[Any], *, automatic: bool) -> None:
    """Check the optimizers that were assigned to a running Trainer.

    Raises:
        MisconfigurationException: one of them is not an optimizer, or there are several where one is stepped.

    """
    _check_optimizers(optimizers, "trainer.optimizers = [...]: the list", "holds")
    if automatic:
        _check_single(optimizers, "trainer.optimizers = [...]:", "Assign")


def _check_single(optimizers: list[Any], what: str, do: str) -> None:
    if len(optimizers) > 1:
        raise MisconfigurationRuntimeError(
            f"{what} {len(optimizers)} optimizers. Training with multiple optimizers is only supported with manual "
            "optimization.",
            fix=f"{do} one, or set self.automatic_optimization = False in __init__ and step them in training_step.",
        )


def check_accumulation(optimizer: Optimizer, batches: int, argument: str) -> None:
    """Refuse accumulation with LBFGS, which computes the loss several times per step.

    Args:
        optimizer: the optimizer.
        batches: accumulated per step.
        argument: the argument that accumulates, for the message.

    Raises:
        MisconfigurationException: ``batches`` is more than 1; only the last of them could be computed again.

    """
    if batches > 1 and isinstance(optimizer, LBFGS):
        raise no_accumulation(optimizer, argument)


def no_accumulation(optimizer: Optimizer, argument: str) -> MisconfigurationException:
    """Return the error for an optimizer that computes the loss again in a step of several batches."""
    return MisconfigurationException(
        f"{argument} with {type(optimizer).__name__}: its step computes the loss several times, which is only "
        "possible for the last accumulated batch.",
        fix="Use larger batches without accumulation, or another optimizer.",
    )


# What a program has a step do, by Lightning's names.
_AROUND_STEP = ("_on_before_step", "_on_after_step")


class HastenOptimizer:
    """An optimizer for manual optimization: ``step`` counts, and uses the precision of the run.

    All other attributes are read from the wrapped optimizer, ``optimizer``.

    Args:
        optimizer: the optimizer.
        step: steps and counts the optimizer; ``optimizer.step`` by default.
        toggled: the context that ``toggle_model`` enters, given ``sync_grad``.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., Any] | None = None,
        toggled: Callable[[bool], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._step = optimizer.step if step is None else step
        self._toggled = toggled
        # Lightning counts a step in the second; the program's takes its place in the batch in which it is set.
        self.around_step: dict[str, Callable[[], object]] = {}

    @property
    def _optimizer(self) -> Optimizer:
        # Programs for Lightning read it.
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: object) -> object:
        """Step the optimizer and count it in ``trainer.global_step``."""
        if closure is not None and not callable(closure):
            raise WrongType(f"{type(self.optimizer).__name__}.step(closure={closure!r}):", fix="use a function.")
        if not self.around_step:
            return self._step(closure, **kwargs)
        if before := self.around_step.get("_on_before_step"):
            before()
        result = self._step(closure, **kwargs)
        if after := self.around_step.get("_on_after_step"):
            after()
        return result

    def step_through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """Step through ``wrap(step)`` until the function that is returned is called."""
        before = self._step
        self._step = wrap(before)
        return lambda: setattr(self, "_step", before)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which only this optimizer's parameters get gradients.

        Args:
            sync_grad: whether to exchange gradients with the other processes; False while accumulating, since only
                the last backward before a step needs the exchange.

        Example: ``with optimizer.toggle_model(sync_grad=is_last): self.manual_backward(loss)``

        """
        return nullcontext() if self._toggled is None else self._toggled(sync_grad)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Schedulers and programs check isinstance against the wrapped optimizer's class.
        return type(self.__dict__.get("optimizer", self))

    def __repr__(self) -> str:
        return f"{'Lightning' if conventions.current().framework_is_lightning else 'Hasten'}{self.optimizer!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        if name in _AROUND_STEP and name in self.around_step:
            return self.around_step[name]
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A scheduler created with this wrapper replaces this wrapper's step, not the step of the optimizer inside.
        if name in _AROUND_STEP:
            self.around_step[name] = value
        elif name in ("optimizer", "_step", "_toggled", "around_step", "step"):
            object.__setattr__(self, name, value)
            if name == "step":
                replaced(self, name)
        else:
            setattr(self.optimizer, name, value)


def _is_optimizer(thing: Any) -> bool:
    return isinstance(thing, Optimizer) or (
        hasattr(thing, "step") and hasattr(thing, "param_groups") and not isinstance(thing, Mapping)
    )


def _check_optimizers(optimizers: list[Any], where: str, verb: str = "returned") -> None:
    for optimizer in optimizers:
        if not _is_optimizer(optimizer):
            hint = (
                " Optimizers come first: return [optimizer], [scheduler]." if hasattr(optimizer, "get_last_lr") else ""
            )
            raise MisconfigurationException(
                f"{where} {verb} {_describe(optimizer)} where an optimizer is expected.", fix=hint
            )


def _describe(thing: Any) -> str:
    if isinstance(thing, (list, tuple)) and not thing:
        return f"an empty {type(thing).__name__}"
    if isinstance(thing, (list, tuple)):
        return f"{with_article(type(thing))} of " + ", ".join(type(item).__name__ for item in thing)
    if isinstance(thing, type):
        given = "optimizer" if hasattr(thing, "get_last_lr") else "self.parameters()"
        return f"the class {thing.__name__}, not an object of it (write {thing.__name__}({given}, ...))"
    return with_article(type(thing))
