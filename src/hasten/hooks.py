"""Every hook in one table: the stage it belongs to, the order of its listeners, and the defaults of ``self.log``."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hasten._lib.names import defined_by_program
from hasten._lib.observers import follow
from hasten._lib.rank_zero import rank_zero_warn
from hasten.elsewhere import conventions
from hasten.extend.origin import FOLDERS
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
    # Whether some callbacks are called after the module, by the function ``<name>_last``.
    runs_last: bool = False


def _row(stage: str | None = None, log: Logging | None = None, *, runs_last: bool = False) -> Any:
    return Hook("", stage, log, runs_last)


# Hooks with another order than datamodule, callbacks, module; and hooks that a datamodule does not have.
_DATAMODULE_LAST = frozenset({"on_exception", "on_save_checkpoint", "on_load_checkpoint"})
_NOT_FOR_DATAMODULE = frozenset({"on_save_checkpoint", "on_load_checkpoint"})
_MODULE_FIRST = frozenset({"on_load_checkpoint"})
# Hooks to which Lightning passes the argument by name.
_BY_NAME = frozenset({"setup", "teardown"})
# Hooks that strategies of programs may define.
_FOR_STRATEGY = (
    "on_train_start", "on_train_batch_start", "on_train_end", "on_validation_start", "on_validation_end",
    "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
)  # fmt: skip
# Hooks whose default is not called, not even through a wrapper.
_ONLY_REDEFINED = frozenset({"prepare_data", "configure_model"})


def nothing(*_: object, **__: object) -> None:
    """Do nothing: the function of a hook that nothing overrides."""


class Hooks:
    """One attribute per hook: a function that calls all overrides of it, or ``nothing``.

    Overrides are found once, and again when a callback is added or removed. When a hook is assigned on the module, a
    callback or the datamodule, the overrides of this hook are found again.
    """

    # The table; each instance has a function in place of a row.
    setup: Call = _row()
    teardown: Call = _row()
    prepare_data: Call = _row()
    configure_model: Call = _row()
    on_exception: Call = _row()
    on_save_checkpoint: Call = _row()
    on_load_checkpoint: Call = _row()
    on_fit_start: Call = _row()
    on_fit_end: Call = _row()
    on_sanity_check_start: Call = _row()
    on_sanity_check_end: Call = _row()
    on_train_start: Call = _row("train", EPOCH_ONLY)
    on_train_end: Call = _row()
    on_train_epoch_start: Call = _row("train", EPOCH_ONLY)
    on_train_epoch_end: Call = _row("train", EPOCH_ONLY, runs_last=True)
    on_train_batch_start: Call = _row("train", STEP)
    on_train_batch_end: Call = _row("train", STEP, runs_last=True)
    on_before_zero_grad: Call = _row("train", STEP)
    on_before_backward: Call = _row("train", STEP)
    on_after_backward: Call = _row("train", STEP)
    on_before_optimizer_step: Call = _row("train", STEP)
    on_validation_model_zero_grad: Call = _row()
    on_validation_model_eval: Call = _row()
    on_validation_model_train: Call = _row()
    on_validation_start: Call = _row("validate", EPOCH_ONLY)
    on_validation_end: Call = _row(runs_last=True)
    on_validation_epoch_start: Call = _row("validate", EPOCH_ONLY)
    on_validation_epoch_end: Call = _row("validate", EPOCH_ONLY, runs_last=True)
    on_validation_batch_start: Call = _row("validate", EVALUATION)
    on_validation_batch_end: Call = _row("validate", EVALUATION)
    on_test_model_eval: Call = _row()
    on_test_model_train: Call = _row()
    on_test_start: Call = _row("test", EPOCH_ONLY)
    on_test_end: Call = _row()
    on_test_epoch_start: Call = _row("test", EPOCH_ONLY)
    on_test_epoch_end: Call = _row("test", EPOCH_ONLY)
    on_test_batch_start: Call = _row("test", EVALUATION)
    on_test_batch_end: Call = _row("test", EVALUATION)
    on_predict_model_eval: Call = _row()
    on_predict_start: Call = _row()
    on_predict_end: Call = _row()
    on_predict_epoch_start: Call = _row()
    on_predict_epoch_end: Call = _row()
    on_predict_batch_start: Call = _row()
    on_predict_batch_end: Call = _row()
    # The same for rows with ``runs_last``: callbacks that save or stop, after everything else.
    on_train_epoch_end_last: Call
    on_train_batch_end_last: Call
    on_validation_end_last: Call
    on_validation_epoch_end_last: Call

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
        # Hooks that a program has defined in its strategy.
        strategy, self._of_strategy = getattr(trainer, "strategy", None), dict[str, list[Call]]()
        if own := defined_by_program(strategy, *_FOR_STRATEGY):
            self._of_strategy = {name: [getattr(strategy, name)] for name in own}
        # Wraps each listener, for profilers; set before ``find``.
        self.watch: Callable[[str, Call], Call] | None = None
        self.find()
        follow(self)

    def find(self) -> None:
        """Find all overrides again."""
        self._of_classes = self._read_classes()
        self._find(HOOKS)

    def _find(self, rows: Iterable[Hook]) -> None:
        """Find the overrides of these hooks again."""
        everyone = list(self._callbacks)
        found = self._overridden([row.name for row in rows])
        names = set(self._of_strategy).union(*found.values())
        for row in rows:
            if row.name not in names:
                setattr(self, row.name, nothing)
                if row.runs_last:
                    setattr(self, row.name + "_last", nothing)
                continue
            early = [callback for callback in everyone if not callback.runs_last] if row.runs_last else everyone
            setattr(self, row.name, self._caller(row, early, self._module, found))
            if row.runs_last:
                late = [callback for callback in everyone if callback.runs_last]
                setattr(self, row.name + "_last", self._caller(row, late, None, found))

    def _overridden(self, names: list[str]) -> dict[int, list[str]]:
        """Return which of these hooks each owner overrides, by its ``id``."""
        owners: list[tuple[Any, type]] = [(callback, Callback) for callback in self._callbacks]
        owners += [(self._module, LightningModule), (self._datamodule, LightningDataModule)]
        found: dict[int, list[str]] = {}
        for owner, base in owners:
            if owner is not None:
                own = overridden(owner, base, [name for name in names if name in _DEFAULTS[base]])
                for name in _ONLY_REDEFINED.intersection(own):
                    if not redefines(owner, base, name):
                        own.remove(name)
                found[id(owner)] = own
        return found

    def _read_classes(self) -> list[tuple[object, ...]]:
        """Return the hooks of the classes of all owners, with one call for each."""
        # Also of a Mock of one, and of a Mock alone.
        found = [_READ[Callback](one.__class__ if isinstance(one, Callback) else one) for one in self._callbacks]
        found.append(_READ[LightningModule](type(self._module)))
        if self._datamodule is not None:
            found.append(_READ[LightningDataModule](type(self._datamodule)))
        return found

    def set_up(self, callbacks: list[Callback], stage: str) -> None:
        """Call ``setup`` of these callbacks alone."""
        self._caller(_ROWS["setup"], callbacks, None, self._overridden(["setup"]))(stage)

    def owners(self) -> list[object]:
        """Return the objects that may have hooks: callbacks, module and datamodule."""
        everyone = (*self._callbacks, self._module, self._datamodule)
        return [owner for owner in everyone if owner is not None]

    def replaced(self, owner: object, name: str) -> None:
        """Find the overrides of a hook again if it was assigned on one of these owners; of all, if classes changed."""
        if name in _ROWS and any(owner is one for one in self.owners()):
            if self._read_classes() == self._of_classes:
                self._find([_ROWS[name]])
            else:
                self.find()

    def _caller(
        self, row: Hook, callbacks: list[Callback], module: LightningModule | None, found: dict[int, list[str]]
    ) -> Call:
        """Return a function that calls the overrides of callbacks, and with ``module`` of module and datamodule."""
        name, datamodule = row.name, self._datamodule
        listeners = self._of_callbacks(name, callbacks, found)
        at = 0 if name in _MODULE_FIRST else len(listeners)
        listeners[at:at] = self._of_module(row, module, found, after=listeners)
        of_datamodule = module is not None and name not in _NOT_FOR_DATAMODULE
        if of_datamodule and name in found.get(id(datamodule), ()):
            label = f"[LightningDataModule]{type(datamodule).__name__}.{name}"
            at = len(listeners) if name in _DATAMODULE_LAST else 0
            listeners.insert(at, self._watched(label, getattr(datamodule, name)))
        if module is not None and name in self._of_strategy:
            self._add_strategy(name, listeners)
        if name in _BY_NAME and conventions.current().stage_is_given_by_name:
            listeners = [functools.partial(_given_stage, listener) for listener in listeners]
        if name == "on_exception":
            listeners = [functools.partial(_hear_all, listeners)]
        return self._logged.inside(row, listeners) if listeners else nothing

    def _add_strategy(self, name: str, listeners: list[Call]) -> None:
        """Call the hook of the strategy after all others; the result stays that of the module."""
        for own in self._of_strategy[name]:
            last = listeners.pop() if listeners else nothing
            listeners.append(functools.partial(_then, last, self._watched(f"[Strategy].{name}", own)))

    def _of_callbacks(self, name: str, callbacks: list[Callback], found: dict[int, list[str]]) -> list[Call]:
        """Return the overrides of a hook in these callbacks."""
        hooks: list[Call] = []
        for callback in callbacks:
            if name in found[id(callback)]:
                hook: Call = functools.partial(getattr(callback, name), self._trainer, self._module)
                if self.watch is not None:
                    hook = self.watch(f"[Callback]{callback.state_key}.{name}", hook)
                hooks.append(hook)
        return hooks

    def _of_module(
        self, row: Hook, module: LightningModule | None, found: dict[int, list[str]], *, after: list[Call]
    ) -> list[Call]:
        """Return the override of a hook in the module, if there is one."""
        if module is not None and row.name in found[id(module)]:
            label = f"[LightningModule]{type(module).__name__}.{row.name}"
            return [self._watched(label, getattr(module, row.name))]
        # Only what a module returns ends the epoch, and not what callbacks do.
        return [nothing] if after and row.name == "on_train_batch_start" else []

    def _watched(self, action: str, listener: Call) -> Call:
        return listener if self.watch is None else self.watch(action, listener)


HOOKS = tuple(replace(row, name=name) for name, row in vars(Hooks).items() if isinstance(row, Hook))

_ROWS = {row.name: row for row in HOOKS}

# The methods of the base classes as this package defines them; a program may assign others.
_DEFAULTS: dict[type, dict[str, Any]] = {
    base: dict(inspect.getmembers_static(base, inspect.isfunction))
    for base in (Callback, LightningModule, LightningDataModule)
}

# Read the hooks of a class that is derived from one of the base classes.
_READ = {base: operator.attrgetter(*_ROWS.keys() & defaults.keys()) for base, defaults in _DEFAULTS.items()}

# The loops call the user's steps directly; they are here for the defaults of ``self.log``.
STEPS: dict[str, Hook] = {
    "training_step": Hook("training_step", "train", STEP),
    "validation_step": Hook("validation_step", "validate", EVALUATION),
    "test_step": Hook("test_step", "test", EVALUATION),
    "predict_step": Hook("predict_step"),
}

HOOK_NAMES = frozenset(row.name for row in HOOKS) | frozenset(STEPS)


def overrides(owner: object, base: type, name: str) -> bool:
    """Return whether ``name`` is overridden: in the class of ``owner``, on the instance, or on ``base`` itself."""
    method = getattr(owner, name, None)
    if method is None:
        return False
    base_function = getattr(base, name, None)
    if base_function is None:
        return True
    function = getattr(method, "__func__", method)
    if function is not base_function:
        return True
    code = getattr(function, "__code__", None)
    # A program may have assigned a function to the base class itself.
    return code is None or not code.co_filename.startswith(FOLDERS)


def overridden(owner: Callback | LightningModule | LightningDataModule, base: type, names: Iterable[str]) -> list[str]:
    """Return which of ``names`` are overridden; ``overrides`` is asked only about what is not the default."""
    defaults = _DEFAULTS[base]
    return [
        name
        for name in names
        if getattr(getattr(owner, name, None), "__func__", None) is not defaults.get(name, _ABSENT)
        and overrides(owner, base, name)
    ]


def _then(listener: Call, after: Call, *arguments: object) -> object:
    result = listener(*arguments)
    after(*arguments)
    return result


def _hear_all(listeners: list[Call], exception: BaseException) -> None:
    """Call all hooks for an exception; an error of one does not replace it, unless it was raised from it."""
    translated: Exception | None = None
    for listener in listeners:
        try:
            listener(exception)
        except Exception as error:
            if error.__cause__ is exception:
                translated = error
            else:
                ended = f"{type(exception).__name__} ended the run"
                rank_zero_warn(f"{ended}, and a hook on_exception raised {type(error).__name__}: {error}")
    if translated is not None:
        raise translated


def _given_stage(listener: Call, stage: str) -> object:
    return listener(stage=stage)


def _inner(function: Any) -> Any:
    """Return the function that a decorator or a partial has wrapped; None for others."""
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        return wrapped
    # Of partials only: any attribute of a Mock is another Mock, without end.
    return function.func if isinstance(function, functools.partial) else None


def redefines(owner: object, base: type, name: str) -> bool:
    """Return whether ``name`` is overridden; a wrapper around the default hook of the instance does not count.

    Tools wrap every method of a module to watch its calls. Hooks that do something else when they are overridden, or
    are only called then, look through such wrappers.
    """
    function = getattr(owner, "__dict__", {}).get(name, _ABSENT)
    if function is _ABSENT:
        return overrides(owner, base, name)
    while inner := _inner(function):
        function = inner
    return function is not None and getattr(function, "__func__", function) is not getattr(base, name, None)


def use_hooks(callback: Callback, owner: type[Callback], used: bool, *names: str) -> None:
    """Let the loop call hooks of ``callback`` only if its configuration uses them.

    Unused hooks are replaced by the hooks of ``Callback``, which are not called. A subclass of ``owner`` that overrides
    a hook keeps it.
    """
    for name in names:
        default = getattr(Callback, name)
        if not used and getattr(type(callback), name) is getattr(owner, name):
            setattr(callback, name, types.MethodType(default, callback))
        elif used and getattr(vars(callback).get(name), "__func__", None) is default:
            delattr(callback, name)


_ABSENT = object()
