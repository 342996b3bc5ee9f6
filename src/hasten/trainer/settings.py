"""The arguments of a Trainer as attributes: read at any time, and assigned between two calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from hasten import arguments as table
from hasten._lib.durations import Period
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import warn_once
from hasten.extend.origin import is_builtin
from hasten.types import Duration

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run

T = TypeVar("T")


class Setting(Generic[T]):
    """An argument as an attribute of a Trainer or a view of it; assigned values are checked as in ``Trainer(...)``.

    ``convert`` makes the value that is shown of the value in use.
    """

    def __init__(self, doc: str, *, settable: bool = True, convert: Callable[[Any], T] | None = None) -> None:
        self.__doc__ = doc
        self._settable = settable
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = getattr(instance._arguments, self._name)
        return value if self._convert is None else self._convert(value)

    def __set__(self, instance: Any, value: Any) -> None:
        if not self._settable:
            what = f"{type(instance).__name__}.{self._name} cannot be assigned."
            raise make_error(AttributeError, what, fix=f"Give it to Trainer({self._name}=...).")
        if hasattr(instance, "_arguments"):  # Not in a subclass that sets it before ``super().__init__()`` does.
            instance._change(self._name, value)


def _one_if_none(value: float | None) -> int | float:
    return 1.0 if value is None else value


class TrainerSettings:
    """The arguments as attributes; assigned values are checked as in ``Trainer(...)``.

    During fit an assignment takes effect at the next batch; only the amount of data (``limit_..._batches``,
    ``overfit_batches``, ``num_sanity_val_steps``, ``fast_dev_run``) is fixed when a call begins.
    """

    _arguments: Arguments
    _given: dict[str, Any]
    _run: Run | None
    _accumulate_grad_batches: int
    # A program's own rule for when validation is due.
    _validation_decided_by: Callable[[], bool] | None = None

    max_epochs = Setting[int]("Epochs to train; -1 for no limit.", settable=False)
    min_epochs = Setting[int | None]("Epochs to train before a callback may stop the run.", settable=False)
    max_steps = Setting[int]("Optimizer steps to train; -1 for no limit.", settable=False)
    min_steps = Setting[int | None]("Optimizer steps to train before a callback may stop the run.", settable=False)
    fast_dev_run = Setting[int](
        "Batches of a quick check; True for one, False when off.",
        convert=lambda count: count if count > 1 else bool(count),
    )
    log_every_n_steps = Setting[int]("Optimizer steps between two rows of the loggers.")
    val_check_interval = Setting[int | float | Duration](
        "Batches, share of an epoch, optimizer steps or time between validations.",
        convert=lambda each: each.time if isinstance(each, Period) and each.time is not None else each,
    )
    check_val_every_n_epoch = Setting[int | None]("Epochs between validations.")
    num_sanity_val_steps = Setting[int | float](
        "Validation batches run before training; infinite for all.",
        convert=lambda steps: math.inf if steps == -1 else steps,
    )
    limit_train_batches = Setting(
        "Batches (int) or share (float) of the training data in an epoch.", convert=_one_if_none
    )
    limit_val_batches = Setting("Batches or share of the validation data.", convert=_one_if_none)
    limit_test_batches = Setting("Batches or share of the test data.", convert=_one_if_none)
    limit_predict_batches = Setting("Batches or share of the prediction data.", convert=_one_if_none)
    overfit_batches = Setting[int | float]("Batches or share to overfit on.")
    gradient_clip_val = Setting[float | None]("The largest gradient norm or value; None for no clipping.")
    gradient_clip_algorithm = Setting[str | None]('"norm" or "value"; None means "norm".')
    reload_dataloaders_every_n_epochs = Setting[int]("Epochs after which loaders are requested again; 0 for never.")
    barebones = Setting[bool]("Whether everything except training is off.", settable=False)
    default_root_dir = Setting[str]("Where logs and checkpoints go.", settable=False)
    enable_autolog_hparams = Setting[bool]("Whether hyper-parameters are passed to the loggers.", settable=False)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches whose gradients are summed before each optimizer step."""
        return self._accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self._change("accumulate_grad_batches", batches)
        self._accumulate_grad_batches = self._arguments.accumulate_grad_batches
        if self._run is not None:
            self._run.window.accumulate_grad_batches = self._accumulate_grad_batches

    @property
    def val_check_batch(self) -> float:
        """Batches between two validations; infinite if the interval is not in batches."""
        run = self._run
        if run is None or not run.data.train.loaded:
            return math.inf
        return run.data.validation_schedule.batches_between(run.data.train.limit)

    def _warn_of_near_names(self) -> None:
        """Warn of attributes that are nearly those that a Trainer reads, such as ``shoud_stop``."""
        # Subclasses that programs define have attributes of their own.
        for name, value in vars(self).items() if is_builtin(type(self)) else ():
            if name in self._given and not hasattr(type(self), name) and name != "profiler":
                instead = f"Trainer({name}=...)"
            elif name[0] == "_" or not isinstance(value, (int, float)):
                continue
            elif value is True and (name == "stop_training" or get_close_matches(name, ["should_stop"], 1, 0.85)):
                instead = "trainer.should_stop = True"
            elif near := get_close_matches(name, [key for key in vars(TrainerSettings) if key[0] != "_"], 1, 0.9):
                instead = f"Trainer({near[0]}={value!r})"
            else:
                continue
            warn_once(f"assigned {name}", f"trainer.{name} was set, which nothing reads.", fix=f"Write {instead}.")

    def _decide_validation(self, decide: Callable[[], bool] | None) -> None:
        """Ask ``decide`` after each batch whether validation is due; None asks the arguments again."""
        self._validation_decided_by = decide
        if self._run is not None:
            self._run.data.validation_schedule.decided_by = decide
            self._run.changed = True

    def _change(self, name: str, value: Any) -> None:
        self._arguments = table.changed(self._arguments, name, value)
        self._given = {**self._given, name: value}
        if self._run is not None:
            self._run.change_arguments(self._arguments)
