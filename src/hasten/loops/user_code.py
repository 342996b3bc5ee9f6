"""Check the user's methods and model: before a run, in its first epoch, and when a step fails."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from difflib import get_close_matches
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hasten._lib import torch_private
from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import (
    MisconfigurationException,
    MisconfigurationRuntimeError,
    NotPartOfLightning2,
    Parts,
    add_note,
    make_error,
)
from hasten._lib.explain import describe_batch, explain, explain_graph
from hasten._lib.names import defined_by_program, did_you_mean, has_parameter, nearest
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn, warn_once
from hasten._lib.tree import call_own_train, is_sharded, left_in_eval_mode, parameters_of, whole
from hasten.arguments import Arguments, require_callback
from hasten.elsewhere import conventions
from hasten.extend.origin import comes_from, is_builtin, mentions, module_of, names_in, source_file
from hasten.hooks import nothing, overridden, overrides
from hasten.loops.schedule import on_host
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import DataHooks, LightningDataModule
from hasten.module.hook_defaults import CheckpointHooks, ModelHooks
from hasten.optim import check_accumulation, no_accumulation
from hasten.optim.backward import InBackward
from hasten.optim.fast_step import is_watched
from hasten.strategies.parallel import PIPELINE_IN_FABRIC, is_of_pipeline

if TYPE_CHECKING:
    from hasten.logged_value import LoggedValue
    from hasten.loops.run import Run
    from hasten.loops.run_data import StageData


class DataloaderIndexError(MisconfigurationException, RuntimeError):
    """Raised where a hook takes ``dataloader_idx`` and is not given it, or the reverse."""


# Hooks that Lightning removed, by call: code in them would silently not run.
_REMOVED_HOOKS = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}
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


# -- a call and its arguments


def check_call(arguments: Arguments, call: str, module: object, datamodule: object, *given: object) -> None:
    """Check the arguments of a call before anything starts."""
    if not isinstance(module, LightningModule):
        hint = ""
        if isinstance(module, type) and issubclass(module, LightningModule):
            hint = f" That is the class: write {module.__name__}()."
        elif any(isinstance(one, LightningModule) for one in given):
            hint = f" The module comes first: Trainer.{call}(module, ...)."
        elif isinstance(module, nn.Module):
            hint = " Wrap it in a LightningModule with a training_step, or use hasten.Fabric."
        elif isinstance(module, (str, os.PathLike)):
            hint = " Load it first: model = Net.load_from_checkpoint(path)."
        elif is_of_pipeline(module):
            hint = f" {PIPELINE_IN_FABRIC}."
        what = f"Trainer.{call}(model=...): it must be a `LightningModule`, got {_name(module)}."
        raise make_error(TypeError, what, fix=hint, argument="model")
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        hint = f" Make one: {datamodule.__name__}()." if isinstance(datamodule, type) else ""
        if isinstance(datamodule, (str, os.PathLike)):
            hint = f" Write ckpt_path={os.fspath(datamodule)!r} for a checkpoint."
        fix = f"use a LightningDataModule, not {_name(datamodule)}.{hint}"
        raise make_error(TypeError, f"Trainer.{call}(datamodule=...):", fix=fix, argument="datamodule")
    if datamodule is not None and any(one is not None for one in given):
        raise MisconfigurationException(
            f"Trainer.{call}(): data was given twice, as loaders and as a datamodule.", fix="Pass one of them."
        )
    _refuse_removed_hooks(call, module)
    problem = _problem_of_methods(call, module)
    if problem is not None:
        raise MisconfigurationException(f"Trainer.{call}(): {problem.what}", fix=problem.fix)
    if call == "fit" and (problem := _problem_of_arguments(arguments, module)) is not None:
        raise MisconfigurationException(f"Trainer({problem.what}", fix=problem.fix, argument=problem.argument)


def check_pipeline(call: str, module: LightningModule) -> None:
    """Refuse a module that holds a pipeline of torch's, whose schedule runs forward and backward by itself."""
    if "torch.distributed.pipelining" not in sys.modules:
        return
    for name, value in vars(module).items():
        if is_of_pipeline(value):
            raise MisconfigurationException(
                f"Trainer.{call}(): {type(module).__name__}.{name} is a {type(value).__name__}.",
                fix=f"{PIPELINE_IN_FABRIC}.",
            )


def _refuse_removed_hooks(call: str, module: LightningModule) -> None:
    for name in _REMOVED_HOOKS.get(call, ()):
        if callable(getattr(module, name, None)):
            instead = f"on_{name.replace('training', 'train')}"
            raise NotPartOfLightning2(
                f"Trainer.{call}(): {type(module).__name__}.{name}() would never be called.",
                fix=f"Rename it to {instead}(self), and keep what you need of the outputs in an attribute.",
            )


def _problem_of_methods(call: str, module: LightningModule) -> Parts | None:
    owner = type(module).__name__
    if call == "predict" and getattr(module, "predict_step", None) is None:
        return Parts(f"{owner}.predict_step is None.", "Define it, or leave it to the one that calls forward().")
    step = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(call)
    if step is not None and not overrides(module, LightningModule, step):
        return Parts(f"{owner} has no {step}().", f"Define it{_near_method(module, step)}.")
    if call == "predict" and not any(overrides(module, LightningModule, name) for name in ("predict_step", "forward")):
        return Parts(f"{owner} has neither predict_step() nor forward().", "Define one.")
    if call == "fit" and not overrides(module, LightningModule, "configure_optimizers"):
        return Parts(
            f"{owner} has no configure_optimizers(){_near_method(module, 'configure_optimizers')}.",
            "Define it, for instance: def configure_optimizers(self): return torch.optim.Adam(self.parameters(), "
            "lr=1e-3)",
        )
    return None


def _problem_of_arguments(arguments: Arguments, module: LightningModule) -> Parts | None:
    bad_loss, batches = arguments.on_bad_loss, arguments.accumulate_grad_batches
    skips, manual = bad_loss in ("skip", "rewind"), not module.automatic_optimization
    problems = (
        (
            skips and arguments.detect_anomaly,
            f"detect_anomaly=True, on_bad_loss={bad_loss!r}): detect_anomaly ends the run at the first gradient that "
            "is nan, before its step could be left out.",
            "Leave out one of them.",
        ),
        (
            skips and manual,
            f"on_bad_loss={bad_loss!r}): with manual optimization your training_step decides what a step is.",
            "Test the loss there before self.manual_backward(loss), or use on_bad_loss='stop'.",
        ),
        (
            manual and arguments.gradient_clip_val,
            f"gradient_clip_val={arguments.gradient_clip_val}) does nothing with manual optimization.",
            "Call self.clip_gradients(optimizer, gradient_clip_val=...) in training_step.",
        ),
        (
            manual and batches != 1,
            f"accumulate_grad_batches={batches}) does nothing with manual optimization.",
            "Step every so many batches in training_step instead.",
        ),
    )
    return next((Parts(what, fix, what.partition("=")[0]) for holds, what, fix in problems if holds), None)


def check_fit(run: Run) -> None:
    """Check what can only be checked once loaders and optimizers exist."""
    if not run.data.train.is_off() and not run.data.validation.is_switched_off:
        length = run.data.train.limit
        run.data.validation_schedule.check(length)
        if run.arguments.check_val_every_n_epoch != 1:
            _warn_of_no_validation(run, length)
    for optimizer in run.optimizers:
        run.runtime.engine.require_parameters(optimizer)
        if run.module.automatic_optimization:
            batches = run.window.accumulate_grad_batches
            check_accumulation(optimizer, batches, f"Trainer(accumulate_grad_batches={batches})")
            if batches > 1 and "zero_grad" in names_in(type(run.module).training_step):
                warn_once(
                    f"zero_grad {type(run.module)}",
                    f"{type(run.module).__name__}.training_step calls zero_grad(), which drops the gradients that "
                    f"accumulate_grad_batches={batches} sums.",
                    PossibleUserWarning,
                    fix="Leave it out: the Trainer calls it after each step.",
                )
    if not run.optimizers and run.arguments.on_bad_loss in ("skip", "rewind"):
        raise MisconfigurationException(
            f"Trainer(on_bad_loss={run.arguments.on_bad_loss!r}): configure_optimizers() returned no optimizer, so "
            "there is no step to leave out.",
            fix="Use on_bad_loss='stop' or 'warn'.",
            argument="on_bad_loss",
        )


def _warn_of_no_validation(run: Run, length: float) -> None:
    first, epochs = run.progress.epoch, run.limits.max_epochs
    why = run.data.validation_schedule.never_due(first, epochs, length) if epochs > first else ""
    if why and not run.conventions.warns_of_settings and not run.data.validation.is_off():
        rank_zero_warn(
            f"Trainer({why}): no validation is due in {epochs} epochs"
            + ("." if math.isinf(length) else f" of {length} batches."),
            fix="Validate more often, or write limit_val_batches=0.",
        )


def check_evaluation(run: Run) -> None:
    """Check the validation of a fit before training, so that errors show at once."""
    if not run.data.validation.is_off():
        check_takes_loader(run, "validation", len(run.data.validation.load()))


def check_parameters(run: Run, optimizers: Iterable[Any]) -> None:
    """Check that the optimizers train parameters of the module."""
    module, owner = run.module, type(run.module).__name__
    own = {id(parameter): parameter for parameter in module.parameters()}
    run.observers.first_epoch.expect(own)
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        outside = [parameter for parameter in parameters if id(parameter) not in own]
        if not outside:
            continue
        kind = type(optimizer).__name__
        problem = (
            f"{owner}.configure_optimizers(): {len(outside)} of the {len(parameters)} parameters of {kind} are not "
            f"among those of {owner}"
        )
        instead = (
            f"Write {kind}(self.parameters(), ...), or keep their modules in attributes of {owner}, an nn.ModuleList "
            "or nn.ModuleDict."
        )
        # Programs whose optimizers have copies of the weights, in 32 bits for instance, override these.
        copies = not comes_from(type(optimizer), "torch.optim", "hasten.optim") or any(
            overrides(module, LightningModule, name)
            for name in ("optimizer_step", "on_before_optimizer_step", "on_after_backward")
        )
        if module.automatic_optimization and not copies:
            advice = instead + run.runtime.strategy.sharding.advice_on_optimizers()
            run.runtime.engine.refuse_outside(problem, advice)
            nothing_trained = len(outside) == len(parameters) and _held_by(module).isdisjoint(map(id, outside))
            if nothing_trained and any(parameter.requires_grad for parameter in own.values()):
                raise MisconfigurationException(f"{problem}: it would not be trained.", fix=instead)
        rank_zero_warn(f"{problem}: they are neither moved to its device nor saved with it.", fix=instead)
    _warn_of_layers_in_lists(module, own, optimizers)


# What every module has.
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))
# How many members of a list or dict are looked at: it may be a dataset.
_LOOKED_AT = 32


def _warn_of_layers_in_lists(module: LightningModule, own: Mapping[int, Any], optimizers: Iterable[Any]) -> None:
    """Warn of trainable layers that are in a list, tuple or dict, and which no optimizer trains for that reason."""
    waiting: list[tuple[str, nn.Module]] = [("", module)]
    seen = {id(module)}
    # Without a Python call for each module: this runs in every fit.
    for place, part in waiting:
        for name, value in vars(part).items():
            if type(value) not in (list, tuple, dict) or name in _ATTRIBUTES_OF_MODULES:
                continue
            for member in islice(value.values() if type(value) is dict else value, _LOOKED_AT):
                if isinstance(member, nn.Module) and _is_left_out(member, own, optimizers):
                    kind = type(value).__name__
                    instead = "nn.ModuleDict" if kind == "dict" else "nn.ModuleList"
                    rank_zero_warn(
                        f"{type(module).__name__}: {place}{name} is a {kind} with layers ({type(member).__name__}). "
                        "torch does not find them there: no optimizer has their parameters, and they are neither "
                        "moved to the device nor saved.",
                        fix=(
                            f"Write self.{name} = {instead}(...), or requires_grad_(False) for layers that are not to "
                            "be trained."
                        ),
                    )
                    break
        for name, child in (vars(part).get("_modules") or {}).items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{place}{name}.", child))


def _is_left_out(layers: nn.Module, own: Mapping[int, Any], optimizers: Iterable[Any]) -> bool:
    """Return whether layers have trainable parameters that neither the module nor an optimizer has."""
    trained = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    return bool(trained) and any(
        parameter.requires_grad and id(parameter) not in own and id(parameter) not in trained
        for parameter in layers.parameters()
    )


def _held_by(module: nn.Module) -> set[int]:
    """Return the ids of the tensors that a module holds in lists, dicts and objects, where torch does not find them."""
    found: set[int] = set()
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth < 0:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.add(id(thing))
        elif isinstance(thing, nn.Module):
            found.update(map(id, thing.parameters()))
            for child in thing.modules():
                visit(vars(child), depth - 1)
        elif not isinstance(thing, (type, torch.optim.Optimizer)):
            if not isinstance(thing, (list, tuple, set)):
                held = thing if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})
                thing = [value for key, value in held.items() if key not in ("_trainer", "_fabric")]
            for value in thing:
                visit(value, depth - 1)

    visit(module, 4)
    return found


def _near_method(module: object, name: str) -> str:
    own = [key for key, value in vars(type(module)).items() if inspect.isfunction(value)]
    near = nearest(name, [key for key in own if not hasattr(LightningModule, key)])
    return f" (is {near!r} misspelt?)" if near else ""


def _name(thing: Any) -> str:
    return f"the class `{thing.__name__}`" if isinstance(thing, type) else f"`{type(thing).__qualname__}`"


# -- the names and arguments of overridden methods


def check_signatures(
    module: LightningModule, datamodule: LightningDataModule | None, callbacks: Iterable[Callback]
) -> None:
    """Check every hook and step that is overridden."""
    # With manual optimization, backward gets what the program gives to manual_backward.
    called = ["backward"] if module.automatic_optimization else []
    callbacks = list(callbacks)
    for callback in callbacks:
        require_callback("Trainer.callbacks", callback)
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
    function = _plain_function(method)
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


def _plain_function(method: Any) -> FunctionType | None:
    """Return the function of a method without wrappers; None for anything else."""
    function = getattr(method, "__func__", None)
    return function if type(function) is FunctionType and not vars(function) else None


def _check_arguments(owner: object, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(owner, name)
    if not callable(method):
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name} is a {type(method).__name__}; it must be a method.",
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


def check_takes_loader(run: Run, stage: str, loaders: int) -> None:
    """Check that "validation", "test" or "predict" hooks take ``dataloader_idx`` if, and only if, it is given.

    Raises:
        DataloaderIndexError: a hook does not take it and there are several loaders, or needs it and there is one.

    """
    batch = ("batch", "batch_idx", "dataloader_idx")
    first = ("trainer", "pl_module")
    others = [each for each in run.hooks.owners() if isinstance(each, Callback)] if loaders > 1 else []
    for name, arguments in (
        (f"{stage}_step", batch),
        (f"on_{stage}_batch_start", batch),
        (f"on_{stage}_batch_end", ("outputs", *batch)),
    ):
        for owner in others if name.startswith("on_") else ():
            if overrides(owner, Callback, name):
                _check_takes_loader(owner, name, (*first, *arguments), stage, loaders)
        if overrides(run.module, LightningModule, name):
            _check_takes_loader(run.module, name, arguments, stage, loaders)


def _check_takes_loader(owner: object, name: str, arguments: tuple[str, ...], stage: str, loaders: int) -> None:
    method, hook = getattr(owner, name), f"`{type(owner).__name__}.{name}()`"
    instead = f"Write: def {name}(self, {', '.join(arguments[:-1])}, dataloader_idx=0)."
    # A step that fetches its batches itself does not get this argument.
    if loaders > 1 and not takes_iterator(method) and not _accepts(method, arguments):
        raise DataloaderIndexError(
            f"There are {loaders} {stage} loaders, and there is no `dataloader_idx` argument in {hook}.", fix=instead
        )
    if loaders > 1 or not has_parameter(method, "dataloader_idx"):
        return
    parameter = inspect.signature(method).parameters["dataloader_idx"]
    if parameter.default is parameter.empty:
        raise DataloaderIndexError(
            f"There is a single {stage} loader, and you have included `dataloader_idx` in {hook}, which is only "
            "given where there are several.",
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
            given: tuple[str, ...] = ("self", "trainer", "pl_module") if base is Callback else ("self",)
            given += ("outputs",) * name.endswith("_step_end")
            hook = _OLD_HOOKS[name] if _accepts(method, given) else None
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


# -- oversights

# Names listed in a message.
_NAMED = 3


def warn_about_missing_parts(validation: StageData, module: LightningModule, *, wanted: bool) -> None:
    """Warn where only one of validation data and step is there; of missing data only if it is ``wanted``."""
    has_step = overrides(module, LightningModule, "validation_step")
    if validation.has_data() and not has_step:
        rank_zero_warn(
            f"There is validation data but {type(module).__name__} has no validation_step(): no validation runs.",
            fix=f"Define it{_near_method(module, 'validation_step')}, or leave the data out.",
        )
    elif wanted and has_step and not validation.has_data():
        # A cross-validation or a search fits the same class again and again, and validates after it.
        warn_once(
            f"no validation data {type(module)}",
            f"{type(module).__name__} has a validation_step() but there is no validation data: no validation runs.",
            PossibleUserWarning,
            fix=(
                "Write trainer.fit(model, train_dataloaders, val_dataloaders) or define val_dataloader(); "
                "Trainer(limit_val_batches=0) switches validation off, in trainer.validate() as well."
            ),
        )


def _version_of(parameter: nn.Parameter, module: LightningModule) -> int:
    if parameter.is_inference():
        raise MisconfigurationException(
            f"{type(module).__name__} was made in torch.inference_mode(): its parameters cannot be trained.",
            fix="Make it outside, and call fit outside.",
        )
    return parameter._version


def _warn_of_new_parameters(module: nn.Module, known: Mapping[int, Any], trained: Mapping[int, Any]) -> None:
    """Warn of layers that have taken the place of trained ones since the optimizers were made."""
    if any(map(is_sharded, trained.values())):
        return  # While a forward has the whole ones, those of the optimizers are not in the module.
    new = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known and id(parameter) not in trained
    ]
    if new:
        rank_zero_warn(
            f"{type(module).__name__}: a hook has replaced layers after configure_optimizers(), and the new ones are "
            f"not trained ({', '.join(new[:_NAMED])}).",
            fix="Replace layers in __init__, configure_model or setup.",
        )


class FirstEpoch:
    """Checks for mistakes in the first epoch of a fit, before its first batch and after its last."""

    def __init__(self) -> None:
        self._begun = self._ended = self._resumed = False
        self._in_eval_mode: set[nn.Module] = set()
        self._broadcast: dict[tuple[str, str, int], re.Match[str]] = {}
        # The parameters of the module when its optimizers were made, by id.
        self._known: Mapping[int, nn.Parameter] = {}
        # Before the epoch: the steps so far, and how often torch had changed each trained parameter in place.
        self._steps = 0
        self._versions: list[tuple[nn.Parameter, int]] = []
        # Whether the module was in train mode then, and a copy of a parameter where the learning rate was 0.
        self._training = True
        self._still: tuple[nn.Parameter, Tensor] | None = None
        # Schedulers and how often they had been stepped.
        self._stepped: list[tuple[Any, int]] = []

    def expect(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Note the parameters of the module, by id, when its optimizers were made."""
        if not self._begun:
            self._known = parameters

    def before_start(self, run: Run) -> None:
        """Record the parts in eval mode before training; parts that hooks or their own train() switch are intended."""
        self._in_eval_mode = {part for part in run.module.modules() if not part.training}
        self._broadcast = _broadcast_losses(run.module)
        if run.conventions.warns_of_settings and self._in_eval_mode and not self._begun:
            # Under Lightning's names, also for modules that nothing trains.
            rank_zero_warn(
                f"Found {len(self._in_eval_mode)} module(s) in eval mode at the start of training: dropout is off "
                "there, and batch norm keeps its statistics.",
                PossibleUserWarning,
                fix="Write model.train() before fit, unless that is meant.",
            )
            self._in_eval_mode = set()
        call_own_train(run.module)

    def at_start(self, run: Run) -> None:
        """Warn about layers that would train in eval mode; all hooks that could switch them have run by now."""
        if self._begun:
            return
        self._begun, self._resumed = True, run.progress.logged_step > 0
        if run.conventions.warns_of_settings:
            self._warn_of_interval(run)
        module, before, self._in_eval_mode = run.module, self._in_eval_mode, set()
        # By id: the hash of a tensor is a Python call.
        trained = {id(parameter): parameter for parameter in parameters_of(*run.optimizers) if parameter.requires_grad}
        known, self._known = self._known, {}
        self._steps = run.progress.global_step
        self._versions = [
            (parameter, _version_of(parameter, module))
            for parameter in trained.values()
            # Those of lazy layers are made by the first batch.
            if type(parameter) is not UninitializedParameter
        ]
        self._note(run)
        _warn_of_near_flags(module, trained)
        found: list[str] = []
        own: set[int] = set()
        for name, part in module.named_modules():
            own.update(map(id, part._parameters.values()))
            if "requires_grad" in vars(part):
                _warn_of_flag(module, name, part, trained)
            # Normalization layers may keep their statistics on purpose.
            idle = part in before and not part.training and not isinstance(part, torch_private.NormBase)
            if idle and not trained.keys().isdisjoint(map(id, part.parameters(recurse=False))):
                found.append(name)
        if (trained.keys() - own) & known.keys():
            _warn_of_new_parameters(module, known, trained)
        if found:
            # Parts that the model's own train() keeps in eval mode are intended.
            kept = left_in_eval_mode(module)
            found = [name for name in found if module.get_submodule(name) not in kept]
        if found:
            rank_zero_warn(
                f"{type(module).__name__} trains {len(found)} layers in eval mode ({', '.join(found[:_NAMED])}): "
                "dropout is off there, as in what from_pretrained() returns.",
                PossibleUserWarning,
                fix="Write model.train() before fit; layers with requires_grad=False may stay in eval mode.",
            )

    def _note(self, run: Run) -> None:
        """Note what the end of the epoch is compared with: rates, modes and schedulers."""
        module = run.module
        self._training = module.training
        if self._versions and _has_no_rate(run):
            self._still = self._versions[0][0], self._versions[0][0].detach().clone()
        automatic = run.schedulers and module.automatic_optimization
        if automatic and not overrides(module, LightningModule, "lr_scheduler_step"):
            self._stepped = [
                (config, torch_private.steps_of_scheduler(config.scheduler))
                for config in run.schedulers
                if config.frequency == 1 and comes_from(type(config.scheduler), "torch.optim")
            ]

    def _compare(self, run: Run) -> None:
        """Warn of a rate of 0 or of before lr_find, of eval mode and of schedulers that the program steps too."""
        if (lr_find := sys.modules.get("hasten.tuner.lr_find")) is not None and not self._resumed:
            lr_find.warn_of_fixed_rate(run)
        # A program that raises the rate itself has 0 in the first step.
        if self._still is not None and run.progress.global_step > self._steps + 1 and _has_no_rate(run):
            _warn_of_no_rate(run, *self._still)
        if self._training and not run.module.training:
            _warn_of_eval_mode(run)
        for config, before in self._stepped:
            steps, epochs = run.progress.global_step - self._steps, run.limits.max_epochs
            made = torch_private.steps_of_scheduler(config.scheduler) - before
            due = steps if config.interval == "step" else 1
            # One made for the epochs rises again after so many steps, and one made for the steps hardly falls.
            other, length = ("epoch", epochs) if config.interval == "step" else ("step", epochs * steps)
            if steps > 1 and vars(config.scheduler).get("T_max") == length:
                rank_zero_warn(
                    f"{type(config.scheduler).__name__}(T_max={length}) is as long as the {other}s of this fit, and "
                    f"steps once per {config.interval}.",
                    PossibleUserWarning,
                    fix=f"Return {{'scheduler': scheduler, 'interval': '{other}'}}.",
                )
            if made > due:
                rank_zero_warn(
                    f"{type(config.scheduler).__name__} made {made} steps in the first epoch, and at most {due} are "
                    f"due: the Trainer steps it, and {type(run.module).__name__} too.",
                    PossibleUserWarning,
                    fix="Leave scheduler.step() out, or set automatic_optimization = False.",
                )

    def _warn_of_interval(self, run: Run) -> None:
        """Warn as Lightning does, whatever is logged."""
        every, batches = run.arguments.log_every_n_steps, run.data.train.limit
        if run.logged.loggers and batches < every and not run.arguments.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({batches}) is smaller than the logging interval "
                f"Trainer(log_every_n_steps={every}).",
                PossibleUserWarning,
                fix="Use a shorter one to see values of steps in the loggers.",
            )

    def at_end(self, run: Run) -> None:
        """Explain torch's warnings about losses, and warn about step values that no logger has received."""
        if not self._ended:
            _warn_of_broadcast_losses(run.module, self._broadcast)
            _warn_of_untrained(run, self._versions, run.progress.global_step - self._steps)
            self._compare(run)
        self._versions, self._still, self._stepped = [], None, []
        every, steps = run.arguments.log_every_n_steps, run.progress.logged_step
        # The first part of a resumed run has warned already.
        by_hand = run.optimizers and not (run.module.automatic_optimization or run.arguments.fast_dev_run)
        if by_hand and not run.progress.global_step and not self._ended and run.progress.total_batches:
            rank_zero_warn(
                f"{type(run.module).__name__}.training_step has not called step() of self.optimizers() in "
                f"{run.progress.total_batches} batches, so global_step stays 0.",
                PossibleUserWarning,
                fix="With manual optimization, call self.optimizers().step() after self.manual_backward(loss).",
            )
        # Under Lightning's names, the interval has been compared before the epoch.
        told = self._ended or self._resumed or run.conventions.warns_of_settings
        silent = told or run.arguments.fast_dev_run or not run.logged.loggers
        self._ended = True
        if not silent and 0 < steps < every and (values := run.logged.logged_on_steps()):
            _warn_of_long_intervals(values, every, steps)


def _warn_of_long_intervals(values: list[LoggedValue], every: int, steps: int) -> None:
    names = ", ".join(value.base_name for value in values[:_NAMED])
    mean = "" if all(value.on_epoch for value in values) else ", or self.log(..., on_epoch=True) for the mean"
    rank_zero_warn(
        f"Values logged on steps ({names}) go to the loggers every {every} steps, and the first epoch had {steps}: "
        "none of them got there.",
        fix=f"Write Trainer(log_every_n_steps={max(1, steps // 10)}){mean}.",
    )


# What hooks between the loss and the step must do.
_BETWEEN = {
    "optimizer_step": "must call optimizer.step(closure=optimizer_closure)",
    "backward": "must call loss.backward()",
    "on_after_backward": "must leave the gradients there",
    "on_before_optimizer_step": "must leave the gradients there",
    "configure_gradient_clipping": "must leave the gradients there",
}


def _warn_of_untrained(run: Run, versions: list[tuple[nn.Parameter, int]], steps: int) -> None:
    """Warn of weights that the first epoch should have changed: of all, or of layers made after the optimizer."""
    # A graph of the device changes weights without counting it, and processes may have parts of them.
    counted = run.compiled is None and not run.runtime.several_processes
    if not counted or not run.module.automatic_optimization or run.conventions.warns_of_settings:
        return
    name, made_steps = type(run.module).__name__, steps > 0 and run.observers.guard is None and _counts_changes(run)
    if made_steps and versions and all(one.grad is None and one._version == before for one, before in versions):
        rank_zero_warn(
            f"{name}: {steps} steps have changed no weight of the optimizer: none has a gradient at their end.",
            fix=_how_to_train(run.module),
        )
    elif later := _behind_optimizer(run):
        shown = ", ".join(later[:_NAMED]) + (", ..." if len(later) > _NAMED else "")
        rank_zero_warn(
            f"{name}: {len(later)} parameters ({shown}) are not trained. No optimizer has them, and the one that "
            "__init__ makes has parameters of the layers before them.",
            fix="Make it in configure_optimizers, or after all layers; requires_grad_(False) where that is meant.",
        )


def _has_no_rate(run: Run) -> bool:
    # Loops, which make no calls: this runs in every fit.
    for optimizer in run.optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            rate = group.get("lr")
            if rate or not isinstance(rate, (int, float)):
                return False
    return bool(run.optimizers) and not run.schedulers


def _warn_of_no_rate(run: Run, parameter: nn.Parameter, before: Tensor) -> None:
    if torch.equal(parameter, before):
        rank_zero_warn(
            f"{type(run.module).__name__}: the learning rate of {type(run.optimizers[0]).__name__} is 0, and the "
            "steps of the first epoch have changed no weight.",
            fix="Use a rate above 0 in configure_optimizers, such as lr=1e-3.",
        )


def _warn_of_eval_mode(run: Run) -> None:
    """Warn of a step or hook that has left the whole module in eval mode, where that changes what layers do."""
    module, kinds = run.module, (nn.Dropout, nn.Dropout2d, torch_private.NormBase)
    changes = any(isinstance(part, kinds) and not part.training for part in module.modules())
    # A program that calls train() before each step may call eval() after it.
    if changes and not mentions("train", module, *module.trainer.callbacks):
        rank_zero_warn(
            f"{type(module).__name__} is in eval mode after the first epoch, and was in train mode before: dropout is "
            "off, and batch norm keeps its statistics.",
            PossibleUserWarning,
            fix="Write self.train() after self.eval(); if it is meant, call self.eval() in on_train_start.",
        )


def _warn_of_near_flags(module: nn.Module, trained: Mapping[int, nn.Parameter]) -> None:
    """Warn of an attribute of parameters that is nearly ``requires_grad``: it freezes nothing."""
    for parameter in trained.values():
        if not vars(parameter):
            continue
        for key in get_close_matches("requires_grad", vars(parameter), cutoff=0.9):
            if vars(parameter)[key] is False:
                warn_once(
                    f"flag {key} {type(module)}",
                    f"{type(module).__name__}: a parameter has the attribute {key} = False, which torch does not read: "
                    "the parameter is trained.",
                    fix="Write requires_grad = False.",
                )


def _warn_of_flag(module: nn.Module, name: str, part: nn.Module, trained: Mapping[int, nn.Parameter]) -> None:
    """Warn of ``layer.requires_grad = False``, which is an attribute of the layer and freezes nothing."""
    # A class that sets the attribute itself reads it.
    own = "requires_grad" in names_in(type(part).__init__)
    if vars(part)["requires_grad"] is False and not own and not trained.keys().isdisjoint(map(id, part.parameters())):
        owner = ".".join(filter(None, (type(module).__name__, name)))
        rank_zero_warn(
            f"{owner}.requires_grad = False sets an attribute of the module, and its parameters are trained.",
            fix=f"Write {'.'.join(filter(None, ('self', name)))}.requires_grad_(False).",
        )


def _how_to_train(module: LightningModule) -> str:
    for hook, must in _BETWEEN.items():
        if overrides(module, LightningModule, hook):
            return f"{type(module).__name__}.{hook}() {must}."
    return (
        "Compute the loss from the model's output, without argmax(), .item(), .detach() or torch.tensor(...) in "
        "between."
    )


def _counts_changes(run: Run) -> bool:
    """Return whether each step of the optimizers counts as a change of the weights: fused ones do not count it."""
    return comes_from(type(run.runtime.engine), "hasten.strategies") and all(
        comes_from(type(each), "torch.optim") and not any(group.get("fused") for group in each.param_groups)
        for each in run.optimizers
    )


def _behind_optimizer(run: Run) -> list[str]:
    """Return the parameters with gradients that no optimizer has, behind those of one that ``__init__`` has made."""
    values = vars(run.module).values()
    if set(map(id, values)).isdisjoint(map(id, run.optimizers)):
        return []
    made = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    trained = set(map(id, parameters_of(*run.optimizers, *made)))
    names = [(name, each) for name, each in run.module.named_parameters() if each.requires_grad]
    last = max((place for place, (_, each) in enumerate(names) if id(each) in trained), default=len(names))
    return [name for name, each in names[last + 1 :] if each.grad is not None]


def _broadcast_losses(module: LightningModule) -> dict[tuple[str, str, int], re.Match[str]]:
    """Return torch's warnings about losses of two shapes, by (module, text, line), with the shapes.

    Python records shown warnings in the module whose line they name, so no step has to be watched.
    """
    found = {}
    # A loss that is a layer is called by a line of torch.
    for name in {**{module_of(kind): None for kind in type(module).__mro__}, "torch.nn.modules.loss": None}:
        for shown in vars(sys.modules.get(name, sys)).get("__warningregistry__", ()):
            if isinstance(shown, tuple) and (shapes := _OF_TWO_SHAPES.match(str(shown[0]))):
                found[name, str(shown[0]), shown[2]] = shapes
    return found


def _warn_of_broadcast_losses(module: LightningModule, before: Iterable[tuple[str, str, int]]) -> None:
    """Say how to fix a loss of two shapes, if torch has warned about one in this fit."""
    for (name, text, line), shapes in _broadcast_losses(module).items():
        if (name, text, line) in before:
            continue
        file = getattr(sys.modules[name], "__file__", None)
        place = f" ({file}, line {line})" if file and not name.startswith("torch.") else ""
        target, values = (f"({sizes}{',' * (',' not in sizes)})" for sizes in shapes.groups())
        rank_zero_warn(
            f"{type(module).__name__}: a loss{place} gets predictions of shape {values} and targets of shape "
            f"{target}. It compares every prediction with every target, and the model learns their mean.",
            fix=f"Give both one shape: {_one_shape(shapes[2], shapes[1])}.",
        )


# What torch says of mse_loss, l1_loss, smooth_l1_loss and huber_loss.
_OF_TWO_SHAPES = re.compile(
    r"Using a target size \(torch\.Size\(\[(.*?)\]\)\) that is different to the input size \(torch\.Size\(\[(.*?)\]\)\)"
)


def _one_shape(values: str, target: str) -> str:
    """Return how to give a loss predictions and targets of one shape."""
    shape = values.split(", ")
    if target == ", ".join(shape[:-1]) and shape[-1] == "1":
        return "write y.unsqueeze(-1) for the targets y, or squeeze(-1) for the predictions"
    other = target.split(", ")
    if values == ", ".join(other[:-1]) and other[-1] == "1":
        return "write y.squeeze(-1) for the targets y, or unsqueeze(-1) for the predictions"
    return "write y.view_as(predictions) for the targets y, or change the last layer"


# -- what a step returned

_MEMORY_FIX = (
    "Trainer(micro_batch='auto') computes fewer samples at once and leaves the batch as it is; memory='auto' keeps "
    "fewer activations."
)
MEMORY_NOTE = f"Memory ran out. {_MEMORY_FIX}"
_WRONG_KEYWORD = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def loss_of(output: object, run: Run) -> Tensor | None:
    """Return the loss in what ``training_step`` returned; None skips the batch."""
    step = f"{type(run.module).__name__}.training_step"
    loss = output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise MisconfigurationException(
                f"{step} returned a dict without the key 'loss' (it has {list(output)}).",
                fix="Return {'loss': loss, ...}, or the loss itself.",
            )
        loss = output["loss"]
        if not isinstance(loss, Tensor):
            raise MisconfigurationException(
                f"{step} returned {{'loss': {_describe(loss)}}}; the loss must be a tensor computed from the "
                "parameters.",
                fix="Do not convert it with .item() or float().",
            )
    if isinstance(loss, Tensor):
        # With ``loss_parallel`` it is a DTensor.
        return whole(loss)
    if loss is not None:
        number = " Do not convert it with .item() or float()." if isinstance(loss, float) else ""
        raise MisconfigurationException(
            f"{step} returned {_describe(loss)}.",
            fix=f"Return the loss (a tensor), a dict with the key 'loss', or None to skip the batch.{number}",
        )
    if run.window.skipped_batches == 0 and run.logged.batch is not None:
        rank_zero_warn(
            f"{step} returned None: the batch is skipped.",
            fix="If that is not on purpose, end training_step with `return loss`.",
        )
    run.window.skipped_batches += 1
    return None


def check_weight(weight: object, run: Run) -> None:
    """Check what ``training_step`` returned as ``loss_weight``, without waiting for a device."""
    shown = repr(weight)
    if isinstance(weight, Tensor):
        if weight.numel() == 1 and (not weight.is_cpu or 0 <= weight < math.inf):
            return
        shown = f"a tensor of shape {tuple(weight.shape)}" if weight.dim() else shown
    elif isinstance(weight, SupportsFloat) and 0 <= float(weight) < math.inf:
        return
    raise MisconfigurationException(
        f"{type(run.module).__name__}.training_step returned {{'loss_weight': {shown}}}.",
        fix=(
            "Use how many samples or tokens the loss is the mean of: a number of at least 0, or a tensor of one "
            "element."
        ),
    )


def weights_are_missing(run: Run) -> MisconfigurationException:
    """Return the error for an accumulation of which some batches have a ``loss_weight`` and some have none."""
    return MisconfigurationException(
        f"{type(run.module).__name__}.training_step returned 'loss_weight' for some batches of an accumulation and "
        "not for others, so there is no mean over them.",
        fix="Return it for every batch, or for none.",
    )


def loss_is_missing(run: Run) -> RuntimeError:
    """Return the error for a batch without a loss under a strategy whose processes wait for each other."""
    return make_error(
        RuntimeError,
        f"training_step returned None in batch {run.progress.batch} with strategy={run.runtime.strategy.name!r}: "
        "every process takes part in the backward of the others.",
        fix="Return 0 * loss instead.",
    )


def weighed(run: Run, output: Any, loss: Tensor) -> Tensor:
    """Return a loss scaled so that the accumulated gradient is the gradient of the mean over all batches."""
    weight = output.get("loss_weight") if isinstance(output, dict) else None
    if run.window.is_start:
        run.window.weight, run.window.is_unweighed = None, False
    if weight is None:
        if run.window.weight is not None:
            raise weights_are_missing(run)
        run.window.is_unweighed = True
        return loss / run.window.size if run.window.size != 1 else loss
    if run.window.is_unweighed:
        raise weights_are_missing(run)
    check_weight(weight, run)
    run.window.weight = weight if run.window.weight is None else run.window.weight + weight
    part: Tensor = loss * weight
    return part


def counts_for_nothing(output: Any) -> bool:
    """Return whether the batch has a ``loss_weight`` of 0 that is known here: no device is waited for."""
    weight = output.get("loss_weight") if isinstance(output, dict) else None
    return weight is not None and on_host(weight) and not weight


def check_some_loss(run: Run) -> None:
    """Raise if a whole epoch passed in which every batch was skipped."""
    # Lightning warns at the first of them and continues.
    skipped_all = run.window.skipped_batches and run.window.skipped_batches >= run.progress.total_batches
    if not run.optimizers or not skipped_all or run.conventions.mistakes_are_warnings:
        return
    count = run.window.skipped_batches
    if run.logged.batch is None:
        raise MisconfigurationException(
            f"Each of the {count} batches so far was None or gave no loss, so nothing was trained.",
            fix="End the collate_fn, the hooks that change or move a batch, and training_step with `return`.",
        )
    raise MisconfigurationException(
        f"{type(run.module).__name__}.training_step returned None for each of the {count} batches so far, so nothing "
        "was trained.",
        fix="End training_step with `return loss`.",
    )


# -- the optimizer and the arguments, which may change while a run trains


def check_in_backward(run: Run, optimizer: InBackward) -> None:
    """Apply the arguments for clipping to optimizers that step in backward; refuse what needs gradients afterwards."""
    arguments, speed, batches = run.arguments, run.arguments.speed, run.window.accumulate_grad_batches
    name, owner = optimizer.optimizer_class.__name__, type(run.module).__name__
    instead = f"use torch.optim.{name} as it is."
    clip_value = arguments.gradient_clip_val
    by_norm = bool(clip_value) and arguments.gradient_clip_algorithm != "value"
    own_clipping = overrides(run.module, LightningModule, "configure_gradient_clipping")
    for holds, what, remedy in (
        (batches > 1, f"Trainer(accumulate_grad_batches={batches})", "Use larger batches"),
        (speed.micro_batch is not None, f"Trainer(micro_batch={speed.micro_batch!r})", "Leave it out"),
        (arguments.on_bad_loss != "warn", f"Trainer(on_bad_loss={arguments.on_bad_loss!r})", "Use 'warn'"),
        (speed.memory == "auto", "Trainer(memory='auto')", "Use 'selective' or 'full'"),
        (by_norm, f"Trainer(gradient_clip_val={clip_value})", "Use gradient_clip_algorithm='value'"),
        (own_clipping, f"{owner}.configure_gradient_clipping()", "Leave it out"),
    ):
        if holds:
            raise MisconfigurationException(
                f"in_backward({name}) and {what}: each parameter steps in backward, so the gradients never exist all "
                "at once.",
                fix=f"{remedy}, or {instead}",
            )
    run.runtime.engine.check_in_backward("Trainer", name)
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        if overrides(run.module, LightningModule, hook):
            warn_once(
                f"in_backward {hook} {owner}",
                f"in_backward({name}): each parameter has stepped before {owner}.{hook}() runs, and its gradient is "
                "None there.",
                fix=f"If that hook reads or changes gradients, {instead}",
            )
    optimizer.clip_value = float(clip_value) if clip_value else None


def follow_arguments(run: Run) -> None:
    """Have the optimizer do what the arguments say now; refuse what it cannot do."""
    optimizer, batches = run.optimizers[0], run.window.accumulate_grad_batches
    if isinstance(optimizer, InBackward):
        check_in_backward(run, optimizer)
    check_accumulation(optimizer, batches, f"Trainer(accumulate_grad_batches={batches})")


def computed_again(run: Run) -> MisconfigurationException:
    """Return the error for an optimizer that computes the loss again in a step of several batches."""
    return no_accumulation(run.optimizers[0], f"Trainer(accumulate_grad_batches={run.window.accumulate_grad_batches})")


# -- steps


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Return whether a step fetches its batches itself, from an argument called ``dataloader_iter``."""
    return has_parameter(step, "dataloader_iter")


# Methods of Lightning's precision plugins that a program may override, by step.
_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


def _within(make_context: Callable[[], AbstractContextManager[Any]], step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` run in a new context each time."""

    @functools.wraps(step)
    def step_within(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return step(*args, **kwargs)

    return step_within


def step_of(run: Run, name: str) -> Callable[..., Any]:
    """Return a step of the module, for instance ``"training_step"``, or what a program's strategy puts in its place."""
    step: Callable[..., Any] = getattr(run.module, name)
    strategy = run.runtime.strategy
    if defined_by_program(strategy, name):
        # With the signature of the module's step, which shows whether it takes the index of a batch.
        step = functools.wraps(step)(functools.partial(getattr(strategy, name)))
    if defined_by_program(precision := run.runtime.precision, context := _CONTEXTS[name]):
        step = _within(getattr(precision, context), step)
    return strategy.sharding.on_own_part(step, trains=name == "training_step", weighing=run.logged.weighed)


def compiled_step(run: Run, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` compiled where the run compiles steps; else ``step`` itself, which costs nothing."""
    return step if run.compiled is None else run.compiled.step(name, step, run.module)


# What runs between the calls of a step.
_WITHIN_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_PARTS_OF_STEP = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip


def why_not_whole_step(run: Run) -> Parts | None:
    """Return why forward, backward and the optimizer's step of a run cannot be one graph; None if they can."""
    # Only where it is asked for: it imports what compiles steps.
    from hasten.compile.whole_step import why_not_in_graph

    module, arguments, runtime, engine = run.module, run.arguments, run.runtime, run.runtime.engine
    owner, speed, in_parts = type(module).__name__, run.arguments.speed, "Use compile=True."
    own = [name for name in _PARTS_OF_STEP if overrides(module, LightningModule, name)]
    own += [name for name in _WITHIN_STEP if getattr(run.hooks, name) is not nothing and not own]
    step = step_of(run, "training_step")
    bound = runtime.bind(step, module=module, wrapped=run.wrapped, training=True)
    by_program = engine.steps_by_program or engine.clips_by_program
    problems = (
        (not module.automatic_optimization, f"{owner} optimizes manually.", in_parts),
        (len(run.optimizers) != 1, f"{owner}.configure_optimizers() returned no optimizer.", in_parts),
        (bool(own), f"{', '.join(own)}() runs within a step.", f"Use compile=True, or leave {', '.join(own)} out."),
        (
            by_program or runtime.several_processes or run.wrapped is not module,
            f"strategy={runtime.strategy.name!r} takes part in a step.",
            in_parts,
        ),
        (
            bound is not step or runtime.precision.precision != "32-true" or engine.scaler is not None,
            f"precision={runtime.precision.precision!r} takes part in a step.",
            "Use precision='32-true', or compile=True.",
        ),
        (
            run.window.accumulate_grad_batches > 1,
            f"accumulate_grad_batches={run.window.accumulate_grad_batches} has batches without a step.",
            in_parts,
        ),
        (bool(speed.micro_batch), f"micro_batch={speed.micro_batch!r} computes parts of a batch.", in_parts),
        (speed.memory == "auto", "memory='auto' repeats a step.", "Use memory='selective', or compile=True."),
        (bool(speed.packed), f"packed={speed.packed!r} compiles parts of the model.", in_parts),
        (
            arguments.on_bad_loss != "warn",
            f"on_bad_loss={arguments.on_bad_loss!r} looks at the gradients of a step.",
            "Use on_bad_loss='warn', or compile=True.",
        ),
        (arguments.detect_anomaly, "detect_anomaly=True looks at each backward.", "Leave one of them out."),
    )
    found = next((Parts(what, fix) for holds, what, fix in problems if holds), None)
    return why_not_in_graph(run.optimizers[0]) if found is None else found


def whole_step(run: Run, in_parts: Callable[[Any, int], Any]) -> Callable[[Any, int], tuple[Any, bool]] | None:
    """Return what trains on a batch by one graph, as ``WholeStep.train`` does; None where the run has no such graph."""
    compiled = run.compiled
    if compiled is None or not compiled.settings.step or why_not_whole_step(run) is not None:
        return None
    from hasten.compile.whole_step import Clipping, Update

    hooks, window, arguments, optimizer = run.hooks, run.window, run.arguments, run.optimizers[0]
    clipping = Clipping(arguments.gradient_clip_val or 0.0, by_value=arguments.gradient_clip_algorithm == "value")
    training_step = with_batch_idx_if_taken(step_of(run, "training_step"))
    train = compiled.whole_step(training_step, run.module, type(optimizer), clipping).train
    update = Update(optimizer, records=compiled.settings.cuda_graphs)

    def train_whole(batch: Any, batch_idx: int) -> tuple[Any, bool]:
        # A checkpoint may have left an accumulation open, and a callback may have brought a hook.
        within = not (
            hooks.on_before_zero_grad
            is hooks.on_before_backward
            is hooks.on_after_backward
            is hooks.on_before_optimizer_step
            is nothing
        )
        if within or batch is None or not (window.is_start and window.is_end) or is_watched(optimizer):
            update.has_gradients = True
            return in_parts(batch, batch_idx), False
        return train(update, in_parts, batch, batch_idx)

    return train_whole


def with_batch_idx_if_taken(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` callable as ``step(batch, batch_idx)``, also if it takes the batch alone."""
    return step if takes(step, "batch_idx", at=2) else lambda batch, batch_idx: step(batch)


def takes(step: Callable[..., Any], name: str, *, at: int) -> bool:
    """Return whether ``step`` takes an argument ``name``, or at least ``at`` positional ones."""
    function = _plain_function(step)
    if function is not None:
        code = function.__code__
        named = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        return name in named or bool(code.co_flags & inspect.CO_VARARGS) or code.co_argcount - 1 >= at
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    positional = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    positional += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return name in parameters or inspect.Parameter.VAR_POSITIONAL in kinds or positional >= at


def annotate(error: BaseException, step: str, module: nn.Module, batch: object, batch_idx: int) -> None:
    """Add to an error of the user's step where it happened, with which inputs, and the usual fix."""
    if getattr(error, "_hasten_place", False):
        return
    error.add_note(f"in {type(module).__name__}.{step}, batch {batch_idx}: {describe_batch(batch)}")
    # The place comes first, even if the fix is already known.
    error.__notes__.insert(0, error.__notes__.pop())
    explain(error, batch)
    explain_graph(error, module, getattr(module, step))
    text = str(error)
    if is_out_of_memory(error):
        add_note(error, "Memory ran out.", fix=_MEMORY_FIX)
    elif isinstance(error, TypeError) and f"{step}()" in text and "positional argument" in text:
        what = (
            f"{step} is called with (batch, batch_idx), and with dataloader_idx as well where there are several "
            "loaders:"
        )
        fix = (
            f"def {step}(self, batch, batch_idx, dataloader_idx=0). Several optimizers need manual optimization, not "
            "an optimizer_idx."
        )
        add_note(error, what, fix=fix)
    elif isinstance(error, TypeError) and (wrong := _WRONG_KEYWORD.search(text)):
        function = getattr(module, wrong[1], None)
        known = list(inspect.signature(function).parameters) if callable(function) else []
        if known:
            add_note(error, f"self.{wrong[1]} takes: {', '.join(known)}.", fix=did_you_mean(wrong[2], known))
    with suppress(AttributeError):
        error._hasten_place = True  # type: ignore[attr-defined]


def _describe(thing: Any) -> str:
    if isinstance(thing, tuple | list | Mapping):
        return f"a {describe_batch(thing)}"
    if isinstance(thing, BuiltinMethodType | MethodType):
        return f"the method {thing.__name__} (call it: {thing.__name__}())"
    shown = repr(thing)
    return f"the {type(thing).__name__} {shown[:60]}{'...' * (len(shown) > 60)}" if thing is not None else "None"
