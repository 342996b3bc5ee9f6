"""Check the names and arguments of the methods that a program overrides."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from difflib import get_close_matches
from types import CodeType
from typing import Any

from hasten._lib.errors import MisconfigurationException, MisconfigurationRuntimeError, with_article
from hasten._lib.names import has_parameter, plain_function
from hasten._lib.rank_zero import rank_zero_warn
from hasten.elsewhere import conventions
from hasten.extend.origin import is_builtin, source_file
from hasten.hooks import Hooks, overridden, overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import DataHooks, LightningDataModule
from hasten.module.hook_defaults import CheckpointHooks, ModelHooks


class DataloaderIndexError(MisconfigurationException, RuntimeError):
    """Raised where a hook takes ``dataloader_idx`` and is not given it, or the reverse."""


# Hooks that Lightning renamed.
_OLD_HOOKS = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_epoch_begin": "on_train_epoch_start",
    "on_batch_begin": "on_train_batch_start",
    "on_train_begin": "on_train_start",
    "on_validation_begin": "on_validation_start",
    "on_keyboard_interrupt": "on_exception",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "on_hpc_load": "on_load_checkpoint",
    "on_hpc_save": "on_save_checkpoint",
    "on_init_end": "setup",
    "on_init_start": "setup",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "training_step_end": "on_train_batch_end",
    "validation_step_end": "on_validation_batch_end",
    "test_step_end": "on_test_batch_end",
}
# The steps, and other methods whose base class accepts any arguments.
_STEPS = {
    "training_step": ("batch", "batch_idx"),
    "validation_step": ("batch", "batch_idx", "dataloader_idx"),
    "test_step": ("batch", "batch_idx", "dataloader_idx"),
    "predict_step": ("batch", "batch_idx", "dataloader_idx"),
}
_MODULE_METHODS = (
    "configure_optimizers", "configure_callbacks", "configure_model", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping",
)  # fmt: skip


def check_signatures(
    module: LightningModule, datamodule: LightningDataModule | None, callbacks: Iterable[Callback]
) -> None:
    """Check every hook and step that is overridden."""
    # With manual optimization, backward gets what the program gives to manual_backward.
    called = ["backward"] if module.automatic_optimization else []
    for owner, base, names in (
        (
            module,
            LightningModule,
            [*_names(CheckpointHooks), *_names(ModelHooks), *_names(DataHooks), *_MODULE_METHODS, *called],
        ),
        (datamodule, LightningDataModule, _names(DataHooks)),
        *((callback, Callback, _names(Callback)) for callback in callbacks),
    ):
        if owner is None:
            continue
        # hasten's own classes are correct; methods that a program has set on an instance may not be.
        ours = is_builtin(type(owner))
        checked = [name for name in names if name in vars(owner)] if ours else names
        for name in overridden(owner, base, checked):
            _check_arguments(owner, name, _arguments(base, name))
        if not ours:
            _check_spelling(owner, base, [*names, *_STEPS] if base is LightningModule else names)
    for name, arguments in _STEPS.items():
        if overrides(module, LightningModule, name):
            _check_step(module, name, arguments)
    if datamodule is not None:
        _warn_of_two_transfers(module, datamodule)


def _warn_of_two_transfers(module: LightningModule, datamodule: LightningDataModule) -> None:
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        if overrides(module, LightningModule, name) and overrides(datamodule, LightningDataModule, name):
            rank_zero_warn(
                f"{name}() is overridden in both {type(module).__name__} and {type(datamodule).__name__}: that of the "
                "datamodule is called.",
                fix="Define it in one of them.",
            )


@functools.cache
def _names(base: type) -> list[str]:
    kept = ("on_", "setup", "teardown", "prepare_data", "transfer_", "state_dict", "load_state_dict")
    functions = [name for name, value in vars(base).items() if inspect.isfunction(value)]
    return [name for name in functions if name.startswith(kept) or name.endswith("_dataloader")]


# Arguments that are always passed, by name, and have a default in the base class.
_BY_NAME = ("gradient_clip_val", "gradient_clip_algorithm")


@functools.cache
def _arguments(base: type, name: str) -> tuple[str, ...]:
    """Return the arguments that are always passed: those without a default in the base class, and a few others."""
    parameters = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
    always = ("optimizer_closure", *(_BY_NAME if name == "configure_gradient_clipping" else ()))
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in named if p.default is p.empty or p.name in always)


def _accepts(method: Any, arguments: tuple[str, ...]) -> bool:
    by_name = {name: None for name in arguments if name in _BY_NAME}
    function = plain_function(method)
    if function is not None and not by_name:
        # The same as below, but faster than making a signature.
        code, count = function.__code__, len(arguments) + 1
        required = code.co_argcount - len(function.__defaults__ or ())
        at_most = math.inf if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        return required <= count <= at_most and code.co_kwonlyargcount == len(function.__kwdefaults__ or ())
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # Written in C, or a mock: its signature is not known.
    try:
        signature.bind(*(name for name in arguments if name not in by_name), **by_name)
    except TypeError:
        return False
    return True


def _check_arguments(owner: object, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(owner, name)
    if not callable(method):
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name} is {with_article(type(method))}; it must be a method.",
            fix="Rename what you keep there.",
        )
    _check_runs(owner, name, method, arguments)
    # The number of loaders is not known yet: see check_takes_loader.
    evaluates = name.endswith(("_batch_start", "_batch_end")) and not name.startswith("on_train_")
    of_loader = evaluates and _accepts(method, (*arguments, "dataloader_idx"))
    if not of_loader and not _accepts(method, arguments) and not _accepts_stage(method, arguments):
        _refuse_signature(
            f"{type(owner).__name__}.{name}{inspect.signature(method)} cannot be called: it is given "
            f"({', '.join(arguments)}).",
            f"Write: def {name}({', '.join(('self', *arguments))}).",
        )


def _check_runs(owner: object, name: str, method: Any, arguments: tuple[str, ...]) -> None:
    """Check that a call of a hook runs its code, and that its arguments are in the order in which they are given."""
    code = getattr(method, "__code__", None)
    if not isinstance(code, CodeType) or (
        not code.co_flags & _RUNS_LATER and code.co_varnames[1 : code.co_argcount] == arguments
    ):
        return
    hook = f"{type(owner).__name__}.{name}()"
    if code.co_flags & _RUNS_LATER and not name.endswith("_dataloader"):
        word = "yield" if code.co_flags & inspect.CO_GENERATOR else "async"
        _refuse_signature(
            f"{hook} has `{word}`, so a call does not run it.", f"Write {name} as a function without `{word}`."
        )
    taken = [each for each in code.co_varnames[: code.co_argcount] if each in arguments and each not in _BY_NAME]
    given = [each for each in arguments if each in taken]
    if taken != given:
        _refuse_signature(
            f"{hook} takes ({', '.join(taken)}), and is given ({', '.join(given)}) in this order.",
            f"Write: def {name}({', '.join(('self', *arguments))}).",
        )


_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _accepts_stage(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*arguments[:-1], **{arguments[-1]: ""})
    except (TypeError, IndexError):
        return False
    return arguments[-1] == "stage" and conventions.current().stage_is_given_by_name


def _refuse_signature(what: str, fix: str) -> None:
    if not conventions.current().mistakes_are_warnings:
        raise MisconfigurationException(what, fix=fix)
    # In Lightning, such a hook raises a TypeError when it is called, which may never happen.
    rank_zero_warn(what, fix=fix)


def _check_step(module: LightningModule, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(module, name)
    _check_runs(module, name, method, arguments)
    # Evaluation steps get dataloader_idx only if there are several loaders.
    if any(_accepts(method, arguments[:count]) for count in range(1, len(arguments) + 1)):
        return
    signature = str(inspect.signature(method))
    what = f"{type(module).__name__}.{name}{signature} cannot be called: it is given (batch, batch_idx)."
    fix = f"Write: def {name}(self, batch, batch_idx)."
    if "optimizer_idx" in signature:
        fix += " Several optimizers need manual optimization (automatic_optimization = False), not an optimizer_idx."
        raise MisconfigurationRuntimeError(what, fix=fix)
    _refuse_signature(what, fix)


def check_takes_loader(module: LightningModule, hooks: Hooks, stage: str, loaders: int) -> None:
    """Check that "validation", "test" or "predict" hooks take ``dataloader_idx`` if, and only if, it is given.

    Raises:
        DataloaderIndexError: a hook does not take it and there are several loaders, or needs it and there is one.

    """
    batch = ("batch", "batch_idx", "dataloader_idx")
    first = ("trainer", "pl_module")
    others = [each for each in hooks.owners() if isinstance(each, Callback)] if loaders > 1 else []
    for name, arguments in (
        (f"{stage}_step", batch),
        (f"on_{stage}_batch_start", batch),
        (f"on_{stage}_batch_end", ("outputs", *batch)),
    ):
        for owner in others if name.startswith("on_") else ():
            if overrides(owner, Callback, name):
                _check_takes_loader(owner, name, (*first, *arguments), stage, loaders)
        if overrides(module, LightningModule, name):
            _check_takes_loader(module, name, arguments, stage, loaders)


def _check_takes_loader(owner: object, name: str, arguments: tuple[str, ...], stage: str, loaders: int) -> None:
    method, hook = getattr(owner, name), f"`{type(owner).__name__}.{name}()`"
    loader = f"`{'val' if stage == 'validation' else stage}_dataloader`"
    instead = f"Write: def {name}(self, {', '.join(arguments[:-1])}, dataloader_idx=0)."
    # A step that fetches its batches itself does not get this argument.
    if loaders > 1 and not has_parameter(method, "dataloader_iter") and not _accepts(method, arguments):
        raise DataloaderIndexError(
            f"You provided multiple {loader}, but no `dataloader_idx` argument in {hook}: there are {loaders} loaders.",
            fix=instead,
        )
    if loaders > 1 or not has_parameter(method, "dataloader_idx"):
        return
    parameter = inspect.signature(method).parameters["dataloader_idx"]
    if parameter.default is parameter.empty:
        raise DataloaderIndexError(
            f"You provided only a single {loader}, but have included `dataloader_idx` in {hook}, which is "
            "only given where there are several.",
            fix=instead,
        )


# Words that stand for one another in names of hooks.
_SAME = {"val": "validation", "valid": "validation", "training": "train", "testing": "test", "begin": "start"}


def _words_of(name: str) -> tuple[str, ...]:
    return tuple(sorted(_SAME.get(word, word) for word in name.lower().split("_")))


def _of_other_words(name: str, hooks: list[str]) -> str | None:
    # A step or a loader of other words may be the program's own.
    words = _words_of(name) if name.startswith("on_") else ()
    return next((hook for hook in hooks if words and _words_of(hook) == words), None)


def _given_then(name: str, base: type) -> tuple[str, ...]:
    """Return the arguments that Lightning 1 gave one of its hooks, with ``self``."""
    if name.startswith("on_init_"):
        return ("self", "trainer")
    given = ("self", "trainer", "pl_module") if base is Callback else ("self",)
    if name.startswith("on_hpc_"):
        return (*given, "checkpoint")
    return (*given, "outputs") if name.endswith("_step_end") else given


def _check_spelling(owner: object, base: type, hooks: list[str]) -> None:
    """Warn of methods that the trainer does not call and that look like hooks: misspelt, or renamed by Lightning."""
    kind = type(owner)
    for name in dir(kind):
        # Users disable hooks by appending a number or "_" to their names.
        if hasattr(base, name) or name.startswith("_") or name.rstrip("_0123456789") in hooks:
            continue
        method = inspect.getattr_static(kind, name)
        # Methods of installed packages are not the user's to rename.
        if not inspect.isfunction(method) or "site-packages" in source_file(method):
            continue
        if name in _OLD_HOOKS:
            # With other arguments it has another purpose: callbacks of other libraries use such names.
            hook = _OLD_HOOKS[name] if _accepts(method, _given_then(name, base)) else None
        else:
            # A cutoff of 0.9: one or two letters of twenty differ.
            hook = next(iter(get_close_matches(name, hooks, n=1, cutoff=0.9)), None) or _of_other_words(name, hooks)
        # If the hook itself is defined too, the method is a helper.
        if hook in hooks and not overrides(owner, base, hook):
            arguments = ", ".join(
                ("self", *_STEPS[hook]) if hook in _STEPS else inspect.signature(getattr(base, hook)).parameters
            )
            rank_zero_warn(
                f"{kind.__name__}.{name}() looks like the hook {hook}({arguments}), and the trainer does not call it.",
                fix=f"Rename it to {hook}; if it is a method for your own code, give it another name.",
            )
