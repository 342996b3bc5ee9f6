"""Every hook in one table: the stage it belongs to, the order of its listeners, and the defaults of ``self.log``."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten._lib.observers import follow
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule

if TYPE_CHECKING:
    from hasten.logged_values import LoggedValues

Call = Callable[..., Any]


@dataclass(frozen=True)
class Logging:
    """The defaults of ``self.log`` inside a hook, and whether it may log steps."""

    on_step: bool
    on_epoch: bool
    step_allowed: bool = True


STEP = Logging(on_step=True, on_epoch=False)
EVALUATION = Logging(on_step=False, on_epoch=True)
EPOCH_ONLY = Logging(on_step=False, on_epoch=True, step_allowed=False)


@dataclass(frozen=True)
class Hook:
    """One row of the table."""

    name: str
    stage: str | None = None
    log: Logging | None = None
    runs_last: bool = False


HOOKS: tuple[Hook, ...] = (
    Hook("setup"),
    Hook("teardown"),
    Hook("prepare_data"),
    Hook("configure_model"),
    Hook("on_exception"),
    Hook("on_save_checkpoint"),
    Hook("on_load_checkpoint"),
    Hook("on_fit_start"),
    Hook("on_fit_end"),
    Hook("on_sanity_check_start"),
    Hook("on_sanity_check_end"),
    Hook("on_train_start", "train", EPOCH_ONLY),
    Hook("on_train_end"),
    Hook("on_train_epoch_start", "train", EPOCH_ONLY),
    Hook("on_train_epoch_end", "train", EPOCH_ONLY, runs_last=True),
    Hook("on_train_batch_start", "train", STEP),
    Hook("on_train_batch_end", "train", STEP, runs_last=True),
    Hook("on_before_zero_grad", "train", STEP),
    Hook("on_before_backward", "train", STEP),
    Hook("on_after_backward", "train", STEP),
    Hook("on_before_optimizer_step", "train", STEP),
    Hook("on_validation_model_zero_grad"),
    Hook("on_validation_model_eval"),
    Hook("on_validation_model_train"),
    Hook("on_validation_start", "validate", EPOCH_ONLY),
    Hook("on_validation_end", runs_last=True),
    Hook("on_validation_epoch_start", "validate", EPOCH_ONLY),
    Hook("on_validation_epoch_end", "validate", EPOCH_ONLY, runs_last=True),
    Hook("on_validation_batch_start", "validate", EVALUATION),
    Hook("on_validation_batch_end", "validate", EVALUATION),
    Hook("on_test_model_eval"),
    Hook("on_test_model_train"),
    Hook("on_test_start", "test", EPOCH_ONLY),
    Hook("on_test_end"),
    Hook("on_test_epoch_start", "test", EPOCH_ONLY),
    Hook("on_test_epoch_end", "test", EPOCH_ONLY),
    Hook("on_test_batch_start", "test", EVALUATION),
    Hook("on_test_batch_end", "test", EVALUATION),
    Hook("on_predict_model_eval"),
    Hook("on_predict_start"),
    Hook("on_predict_end"),
    Hook("on_predict_epoch_start"),
    Hook("on_predict_epoch_end"),
    Hook("on_predict_batch_start"),
    Hook("on_predict_batch_end"),
)

# The loops call the user's steps directly; they are here for the defaults of ``self.log``.
STEPS: dict[str, Hook] = {
    "training_step": Hook("training_step", "train", STEP),
    "validation_step": Hook("validation_step", "validate", EVALUATION),
    "test_step": Hook("test_step", "test", EVALUATION),
    "predict_step": Hook("predict_step"),
}

HOOK_NAMES = frozenset(row.name for row in HOOKS) | frozenset(STEPS)

# Hooks with another order than datamodule, callbacks, module; and hooks that a datamodule does not have.
_DATAMODULE_LAST = frozenset({"on_exception", "on_save_checkpoint", "on_load_checkpoint"})
_NOT_FOR_DATAMODULE = frozenset({"on_save_checkpoint", "on_load_checkpoint"})
_MODULE_FIRST = frozenset({"on_load_checkpoint"})


def nothing(*_: object) -> None:
    """Do nothing: the function of a hook that nobody overrides."""


class Hooks:
    """One attribute per hook: a function that calls those who override it, or ``nothing``.

    Overrides are found once, and again when a callback is added or removed, or a hook is assigned on the module, a
    callback or the datamodule.
    """

    setup: Call
    teardown: Call
    prepare_data: Call
    configure_model: Call
    on_exception: Call
    on_save_checkpoint: Call
    on_load_checkpoint: Call
    on_fit_start: Call
    on_fit_end: Call
    on_sanity_check_start: Call
    on_sanity_check_end: Call
    on_train_start: Call
    on_train_end: Call
    on_train_epoch_start: Call
    on_train_epoch_end: Call
    on_train_epoch_end_last: Call
    on_train_batch_start: Call
    on_train_batch_end: Call
    on_train_batch_end_last: Call
    on_before_zero_grad: Call
    on_before_backward: Call
    on_after_backward: Call
    on_before_optimizer_step: Call
    on_validation_model_zero_grad: Call
    on_validation_model_eval: Call
    on_validation_model_train: Call
    on_validation_start: Call
    on_validation_end: Call
    on_validation_end_last: Call
    on_validation_epoch_start: Call
    on_validation_epoch_end: Call
    on_validation_epoch_end_last: Call
    on_validation_batch_start: Call
    on_validation_batch_end: Call
    on_test_model_eval: Call
    on_test_model_train: Call
    on_test_start: Call
    on_test_end: Call
    on_test_epoch_start: Call
    on_test_epoch_end: Call
    on_test_batch_start: Call
    on_test_batch_end: Call
    on_predict_model_eval: Call
    on_predict_start: Call
    on_predict_end: Call
    on_predict_epoch_start: Call
    on_predict_epoch_end: Call
    on_predict_batch_start: Call
    on_predict_batch_end: Call

    def __init__(
        self,
        trainer: object,
        module: LightningModule,
        callbacks: Iterable[Callback],
        datamodule: LightningDataModule | None,
        logged: LoggedValues,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._callbacks = callbacks
        self._datamodule = datamodule
        self._logged = logged
        # Wraps each listener, for profilers; set before ``find``.
        self.watch: Callable[[str, Call], Call] | None = None
        self.find()
        follow(self)

    def find(self) -> None:
        """Find all overrides again."""
        everyone: list[Callback] = list(self._callbacks)
        for row in HOOKS:
            if row.runs_last:
                early = [callback for callback in everyone if not callback.runs_last]
                late = [callback for callback in everyone if callback.runs_last]
                setattr(self, row.name, self._caller(row, early, self._module))
                setattr(self, row.name + "_last", self._caller(row, late, None))
            else:
                setattr(self, row.name, self._caller(row, everyone, self._module))

    def owners(self) -> list[object]:
        """Return the objects that may have hooks: callbacks, module and datamodule."""
        everyone = (*self._callbacks, self._module, self._datamodule)
        return [owner for owner in everyone if owner is not None]

    def replaced(self, owner: object) -> None:
        """Find all overrides again if a hook was assigned on one of these owners."""
        if any(owner is one for one in self.owners()):
            self.find()

    def _caller(self, row: Hook, callbacks: list[Callback], module: LightningModule | None) -> Call:
        name = row.name
        listeners: list[Call] = [
            self._watched(
                f"[Callback]{callback.state_key}.{name}",
                functools.partial(getattr(callback, name), self._trainer, self._module),
            )
            for callback in callbacks
            if overrides(callback, Callback, name)
        ]
        if module is not None and overrides(module, LightningModule, name):
            hook = self._watched(f"[LightningModule]{type(module).__name__}.{name}", getattr(module, name))
            listeners.insert(0 if name in _MODULE_FIRST else len(listeners), hook)
        datamodule = self._datamodule
        if (
            module is not None
            and datamodule is not None
            and name not in _NOT_FOR_DATAMODULE
            and overrides(datamodule, LightningDataModule, name)
        ):
            at = len(listeners) if name in _DATAMODULE_LAST else 0
            label = f"[LightningDataModule]{type(datamodule).__name__}.{name}"
            listeners.insert(at, self._watched(label, getattr(datamodule, name)))
        if not listeners:
            return nothing
        return self._logged.inside(row, listeners)

    def _watched(self, action: str, listener: Call) -> Call:
        return listener if self.watch is None else self.watch(action, listener)


def overrides(owner: object, base: type, name: str) -> bool:
    """Return whether ``name`` is overridden: in the class of ``owner``, on the instance, or on ``base`` itself."""
    own = getattr(owner, name, None)
    if own is None:
        return False
    base_function = getattr(base, name, None)
    if base_function is None:
        return True
    function = getattr(own, "__func__", own)
    if function is not base_function:
        return True
    code = getattr(function, "__code__", None)
    # A program may have assigned a function to the base class itself.
    return code is None or not code.co_filename.startswith(_PACKAGE)


def use_hooks(callback: Callback, owner: type[Callback], used: bool, *names: str) -> None:
    """Let the loop call hooks of ``callback`` only if its configuration uses them.

    Unused ones are replaced by those of ``Callback``, which are not called. A subclass of ``owner`` that overrides a
    hook keeps it.
    """
    for name in names:
        default = getattr(Callback, name)
        if not used and getattr(type(callback), name) is getattr(owner, name):
            setattr(callback, name, types.MethodType(default, callback))
        elif used and getattr(vars(callback).get(name), "__func__", None) is default:
            delattr(callback, name)


_PACKAGE = os.path.dirname(overrides.__code__.co_filename)
