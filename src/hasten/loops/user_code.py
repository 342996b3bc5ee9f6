"""Check what a run gets, choose the functions of its steps, take what they return, and explain their errors."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor, nn

from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import MisconfigurationException, NotPartOfLightning2, Parts, add_note, make_error, with_article
from hasten._lib.explain import describe_batch, explain, explain_graph
from hasten._lib.names import (
    defined_by_program,
    did_you_mean,
    has_parameter,
    instead_of_removed,
    nearest,
    plain_function,
)
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn, warn_once
from hasten._lib.tree import parameters_of, whole
from hasten.arguments import Arguments
from hasten.extend.origin import comes_from, mentions, names_in
from hasten.hooks import nothing, overrides
from hasten.loops.schedule import on_host
from hasten.module import LightningModule
from hasten.module.datamodule import LightningDataModule
from hasten.module.signatures import check_takes_loader
from hasten.optim import check_accumulation, no_accumulation
from hasten.optim.backward import InBackward
from hasten.optim.fast_step import is_watched
from hasten.strategies.parallel import PIPELINE_IN_FABRIC, is_of_pipeline

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.loops.run_data import StageData

# Hooks that Lightning removed, by call: code in them would silently not run.
_REMOVED_HOOKS = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}


# -- a call and its arguments


def check_call(arguments: Arguments, call: str, module: object, datamodule: object, *given: object) -> None:
    """Check the arguments of a call before anything starts."""
    if not isinstance(module, LightningModule):
        what = f"Trainer.{call}(model=...): it must be a `LightningModule`, got {_name(module)}."
        raise make_error(TypeError, what, fix=_to_give_instead(call, module, given), argument="model")
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        hint = f" Make one: {datamodule.__name__}()." if isinstance(datamodule, type) else ""
        if isinstance(datamodule, (str, os.PathLike)):
            hint = f" Write ckpt_path={os.fspath(datamodule)!r} for a checkpoint."
        elif hasattr(datamodule, "__iter__"):
            hint = f" Write trainer.{call}(model, loader) for a loader."
        fix = f"use a LightningDataModule, not {_name(datamodule)}.{hint}"
        raise make_error(TypeError, f"Trainer.{call}(datamodule=...):", fix=fix, argument="datamodule")
    if datamodule is not None and any(one is not None for one in given):
        both = "`train_dataloaders` or `val_dataloaders` to `trainer.fit(datamodule=...)`"
        if call != "fit":
            both = f"both `trainer.{call}(dataloaders=..., datamodule=...)`"
        raise MisconfigurationException(f"You cannot pass {both}: the data is given twice.", fix="Pass one of them.")
    loaders = list(given)
    for several in given:
        if isinstance(several, (list, tuple)):
            loaders += several
    for one in loaders:
        if isinstance(one, LightningDataModule) or (isinstance(one, type) and issubclass(one, LightningDataModule)):
            what = f"Trainer.{call}(): {_name(one)} is a LightningDataModule, and was given in place of loaders."
            raise make_error(
                TypeError, what, fix=f"Write trainer.{call}(model, datamodule=...).", argument="datamodule"
            )
    _refuse_methods(call, module)
    problem = _problem_of_methods(call, module)
    if problem is not None:
        raise MisconfigurationException(problem.what, fix=problem.fix)
    if call == "fit" and (problem := _problem_of_arguments(arguments, module)) is not None:
        raise MisconfigurationException(f"Trainer({problem.what}", fix=problem.fix, argument=problem.argument)


def _to_give_instead(call: str, module: object, given: tuple[object, ...]) -> str:
    """Return what to write when something other than a module was given; "" if nothing better is known."""
    if isinstance(module, type) and issubclass(module, LightningModule):
        return f" That is the class: write {module.__name__}()."
    if any(isinstance(one, LightningModule) for one in given):
        return f" The module comes first: Trainer.{call}(module, ...)."
    if isinstance(module, nn.Module):
        return " Wrap it in a LightningModule with a training_step, or use hasten.Fabric."
    if isinstance(module, (str, os.PathLike)):
        return " Load it first: model = Net.load_from_checkpoint(path)."
    return f" {PIPELINE_IN_FABRIC}." if is_of_pipeline(module) else ""


def check_pipeline(call: str, module: LightningModule) -> None:
    """Refuse a module that holds a pipeline of torch's, whose schedule runs forward and backward by itself."""
    if "torch.distributed.pipelining" not in sys.modules:
        return
    for name, value in vars(module).items():
        if is_of_pipeline(value):
            raise MisconfigurationException(
                f"Trainer.{call}(): {type(module).__name__}.{name} is {with_article(type(value))}.",
                fix=f"{PIPELINE_IN_FABRIC}.",
            )


def _refuse_methods(call: str, module: LightningModule) -> None:
    """Refuse hooks that Lightning removed, and a method in the place of a setting."""
    if call == "fit" and callable(type(module).automatic_optimization):
        raise MisconfigurationException(
            f"Trainer.fit(): {type(module).__name__}.automatic_optimization is a method, which counts as True.",
            fix="Write self.automatic_optimization = False in __init__.",
        )
    for name in _REMOVED_HOOKS.get(call, ()):
        if callable(getattr(module, name, None)):
            instead = f"on_{name.replace('training', 'train')}"
            raise NotPartOfLightning2(
                f"Support for `{name}` has been removed in v2.0.0 of Lightning: {type(module).__name__}.{name}() would "
                "never be called.",
                fix=f"Rename it to {instead}(self), and keep what you need of the outputs in an attribute.",
            )


def _problem_of_methods(call: str, module: LightningModule) -> Parts | None:
    owner = type(module).__name__
    if call == "predict" and getattr(module, "predict_step", None) is None:
        what = f"`predict_step` cannot be None to run `Trainer.predict`, and that of {owner} is."
        return Parts(what, "Define it, or leave it to the one that calls forward().")
    step = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(call)
    if step is not None and not overrides(module, LightningModule, step):
        what = f"No `{step}()` method defined to run `Trainer.{call}`: {owner} has none."
        return Parts(what, f"Define it{_near_method(module, step)}.")
    if call == "predict" and not any(overrides(module, LightningModule, name) for name in ("predict_step", "forward")):
        what = f"`Trainer.predict` requires `forward` method to run, or predict_step(): {owner} has neither."
        return Parts(what, "Define one.")
    if call == "fit" and not overrides(module, LightningModule, "configure_optimizers"):
        return Parts(
            f"No `configure_optimizers()` method defined to run `Trainer.fit`: {owner} has none"
            f"{_near_method(module, 'configure_optimizers')}.",
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
            f"gradient_clip_val={arguments.gradient_clip_val}): Automatic gradient clipping is not supported for "
            "manual optimization.",
            "Call self.clip_gradients(optimizer, gradient_clip_val=...) in training_step.",
        ),
        (
            manual and batches != 1,
            f"accumulate_grad_batches={batches}): Automatic gradient accumulation is not supported for manual "
            "optimization.",
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
    names = names_in(type(run.module).training_step)
    if run.optimizers and not _OF_TRAINER.isdisjoint(names):
        _warn_of_work_done_twice(run, names)
    if not run.optimizers and run.arguments.on_bad_loss in ("skip", "rewind"):
        raise MisconfigurationException(
            f"Trainer(on_bad_loss={run.arguments.on_bad_loss!r}): configure_optimizers() returned no optimizer, so "
            "there is no step to leave out.",
            fix="Use on_bad_loss='stop' or 'warn'.",
            argument="on_bad_loss",
        )


# What the Trainer does after training_step, by the names of its functions.
_CLIPPING = frozenset(("clip_grad_norm_", "clip_grad_value_", "clip_gradients"))
_OF_TRAINER = _CLIPPING | {"backward", "zero_grad", "scale"}


def _warn_of_work_done_twice(run: Run, names: frozenset[str]) -> None:
    """Warn of a training_step whose code uses these names for work that is the Trainer's, and changes its result."""
    batches, micro_batch = run.window.accumulate_grad_batches, run.arguments.speed.micro_batch
    if not run.module.automatic_optimization or "manual_backward" in names:
        return  # A step for both kinds of optimization asks which one it is.
    sums = f"accumulate_grad_batches={batches}" if batches > 1 else f"micro_batch={micro_batch}"
    scalers = [name for name, value in vars(run.module).items() if isinstance(value, torch.amp.GradScaler)]
    found = (
        (
            batches > 1 and "zero_grad" in names and "optimizers" in names,
            f"calls zero_grad(). Between batches whose gradients {sums} sums, it drops them.",
            "Leave it out: the Trainer calls it after each step.",
        ),
        (
            "backward" in names and (batches > 1 or micro_batch is not None),
            f"calls backward(). Its gradients are added to those that {sums} sums.",
            "Leave it out, as the Trainer calls it; for gradients of inputs write torch.autograd.grad(loss, inputs).",
        ),
        (
            not _CLIPPING.isdisjoint(names) and "backward" not in names,
            "clips gradients, but the Trainer computes them after it: those of this batch are not clipped.",
            "Leave it out, and write Trainer(gradient_clip_val=1.0).",
        ),
        (
            "scale" in names and scalers and not mentions("unscale_", run.module),
            f"scales the loss by self.{''.join(scalers[:1])}, and nothing divides the gradients by the scale.",
            "Return the loss as it is. Trainer(precision='16-mixed') scales and unscales it.",
        ),
    )
    for holds, what, fix in found:
        if holds:
            name = type(run.module).__name__
            warn_once(f"{what} {type(run.module)}", f"{name}.training_step {what}", PossibleUserWarning, fix=fix)


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
        check_takes_loader(run.module, run.hooks, "validation", len(run.data.validation.load()))


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


def warn_about_missing_parts(validation: StageData, module: LightningModule, *, wanted: bool) -> None:
    """Warn where only one of validation data and step is there; of missing data only if it is ``wanted``."""
    has_step = overrides(module, LightningModule, "validation_step")
    if validation.has_data() and not has_step:
        rank_zero_warn(
            "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop, which "
            f"{type(module).__name__} cannot run.",
            fix=f"Define it{_near_method(module, 'validation_step')}, or leave the data out.",
        )
    elif wanted and has_step and not validation.has_data():
        # A cross-validation or a search fits the same class again and again, and validates after it.
        warn_once(
            f"no validation data {type(module)}",
            "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop of "
            f"{type(module).__name__}.",
            PossibleUserWarning,
            fix=(
                "Write trainer.fit(model, train_dataloaders, val_dataloaders) or define val_dataloader(); "
                "Trainer(limit_val_batches=0) switches validation off, in trainer.validate() as well."
            ),
        )


def _near_method(module: object, name: str) -> str:
    own = [key for key, value in vars(type(module)).items() if inspect.isfunction(value)]
    near = nearest(name, [key for key in own if not hasattr(LightningModule, key)])
    return f" (is {near!r} misspelt?)" if near else ""


def _name(thing: Any) -> str:
    return f"the class `{thing.__name__}`" if isinstance(thing, type) else f"`{type(thing).__qualname__}`"


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
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present: "
                f"{step} returned one with {list(output)}.",
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
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None: "
            f"{step} returned {_describe(loss)}.",
            fix=f"Return the loss (a tensor), a dict with the key 'loss', or None to skip the batch.{number}",
        )
    if run.window.skipped_batches == 0 and run.logged.batch is not None:
        rank_zero_warn(
            f"`training_step` returned `None`: {step} skips the batch.",
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
            # A profiler wraps the step, and times the graph as a whole.
            step not in (bound, getattr(bound, "__wrapped__", None))
            or runtime.precision.precision != "32-true"
            or engine.scaler is not None,
            f"precision={runtime.precision.precision!r} takes part in a step.",
            "Use precision='32-true' without a precision of the program, or compile=True.",
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


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Return whether a step fetches its batches itself, from an argument called ``dataloader_iter``."""
    return has_parameter(step, "dataloader_iter")


def takes(step: Callable[..., Any], name: str, *, at: int) -> bool:
    """Return whether ``step`` takes an argument ``name``, or at least ``at`` positional ones."""
    function = plain_function(step)
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
            fix = instead_of_removed(wrong[2], f"self.{wrong[1]}") or did_you_mean(wrong[2], known)
            add_note(error, f"self.{wrong[1]} takes: {', '.join(known)}.", fix=fix)
    with suppress(AttributeError):
        error._hasten_place = True  # type: ignore[attr-defined]


def _describe(thing: Any) -> str:
    if isinstance(thing, tuple | list | Mapping):
        return f"a {describe_batch(thing)}"
    if isinstance(thing, BuiltinMethodType | MethodType):
        return f"the method {thing.__name__} (call it: {thing.__name__}())"
    shown = repr(thing)
    return f"the {type(thing).__name__} {shown[:60]}{'...' * (len(shown) > 60)}" if thing is not None else "None"
