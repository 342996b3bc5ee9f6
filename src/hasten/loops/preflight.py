"""What a call needs, checked before it starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import nearest
from hasten._lib.rank_zero import rank_zero_warn
from hasten.arguments import Arguments
from hasten.hooks import overrides
from hasten.loops.run import Run
from hasten.loops.signatures import check_takes_loader
from hasten.module import LightningModule
from hasten.module.datamodule import LightningDataModule
from hasten.optim import check_accumulation

# Hooks of older versions of the field: code in them would silently not run.
_REMOVED_HOOKS = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "on_train_batch_end",
    "validation_step_end": "on_validation_batch_end",
    "test_step_end": "on_test_batch_end",
}


def check_call(arguments: Arguments, call: str, module: Any, datamodule: Any, *given: Any) -> None:
    """Check what a call was given, before anything starts.

    Raises:
        TypeError: the model or datamodule is something else.
        MisconfigurationException: a step, configure_optimizers or data is missing or given twice.

    """
    if not isinstance(module, LightningModule):
        hint = ""
        if isinstance(module, type) and issubclass(module, LightningModule):
            hint = f" That is the class: write {module.__name__}()."
        elif isinstance(module, torch.nn.Module):
            hint = " Wrap it in a LightningModule with a training_step, or use hasten.Fabric."
        raise TypeError(
            f"Trainer.{call}(model=...): it must be a `LightningModule`, got {_name(module)}.{hint}"
        )
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        raise TypeError(
            f"Trainer.{call}(datamodule=...): use a LightningDataModule, not {_name(datamodule)}."
        )
    if datamodule is not None and any(one is not None for one in given):
        raise MisconfigurationException(
            f"Trainer.{call}(): data was given twice, as loaders and as a datamodule. Pass one of them."
        )
    for name, instead in _REMOVED_HOOKS.items():
        if hasattr(module, name):
            raise MisconfigurationException(
                f"Trainer.{call}(): {type(module).__name__}.{name}() would never be called. Rename it to "
                f"{instead}(self), and keep what you need of the outputs in an attribute."
            )
    step = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(call)
    if step is not None and not overrides(module, LightningModule, step):
        near = _near_method(module, step)
        raise MisconfigurationException(
            f"Trainer.{call}(): {type(module).__name__} has no {step}(). Define it{near}."
        )
    if call == "predict" and not (
        overrides(module, LightningModule, "predict_step") or overrides(module, LightningModule, "forward")
    ):
        raise MisconfigurationException(
            f"Trainer.predict(): {type(module).__name__} has neither predict_step() nor forward(). Define one."
        )
    if call == "fit" and not overrides(module, LightningModule, "configure_optimizers"):
        raise MisconfigurationException(
            f"Trainer.fit(): {type(module).__name__} has no configure_optimizers()"
            f"{_near_method(module, 'configure_optimizers')}. Define it, for instance: "
            "def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=1e-3)"
        )
    if call == "fit" and arguments.detect_anomaly and arguments.on_bad_loss in ("skip", "rewind"):
        raise MisconfigurationException(
            f"Trainer(detect_anomaly=True, on_bad_loss={arguments.on_bad_loss!r}): detect_anomaly ends the run at the "
            "first gradient that is nan, before its step could be left out. Leave out one of them."
        )
    if call == "fit" and not module.automatic_optimization:
        if arguments.on_bad_loss in ("skip", "rewind"):
            raise MisconfigurationException(
                f"Trainer(on_bad_loss={arguments.on_bad_loss!r}): with manual optimisation your training_step decides "
                "what a step is. Test the loss there before self.manual_backward(loss), or use on_bad_loss='stop'."
            )
        if arguments.gradient_clip_val:
            raise MisconfigurationException(
                f"Trainer(gradient_clip_val={arguments.gradient_clip_val}) does nothing with manual "
                "optimisation. Call self.clip_gradients(optimizer, gradient_clip_val=...) in training_step."
            )
        if arguments.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={arguments.accumulate_grad_batches}) does nothing with manual "
                "optimisation. Step every so many batches in training_step instead."
            )


def check_fit(run: Run) -> None:
    """Check what can only be checked with loaders and optimizers there.

    Raises:
        ValueError: they do not fit the arguments.

    """
    if not run.train.is_off():
        run.checks.batches_between(run.train.limit)
    for optimizer in run.optimizers:
        if not any(group["params"] for group in optimizer.param_groups):
            raise MisconfigurationException(f"The {type(optimizer).__name__} has no parameters to train.")
        if run.module.automatic_optimization:
            batches = run.accumulate_grad_batches
            check_accumulation(optimizer, batches, f"Trainer(accumulate_grad_batches={batches})")
    if not run.optimizers and run.arguments.on_bad_loss in ("skip", "rewind"):
        raise MisconfigurationException(
            f"Trainer(on_bad_loss={run.arguments.on_bad_loss!r}): configure_optimizers() returned no optimizer, so "
            "there is no step to leave out. Use on_bad_loss='stop' or 'warn'."
        )
    if not run.validation.is_off():
        run.validation.load()
        check_takes_loader(run.module, "validation", len(run.validation.loaders))


def check_parameters(run: Run, optimizers: Iterable[Any]) -> None:
    """Check that the optimizers train parameters of the module.

    Raises:
        MisconfigurationException: an optimizer would leave the module as it is, or its gradients would not be averaged
            over the processes.

    """
    module, owner = run.module, type(run.module).__name__
    own = {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        outside = [p for p in parameters if id(p) not in own]
        if not outside:
            continue
        kind = type(optimizer).__name__
        said = (
            f"{owner}.configure_optimizers(): {len(outside)} of the {len(parameters)} parameters of {kind} are not "
            f"among those of {owner}, which has {len(own)}"
        )
        held = _tensors_held(module)
        if all(id(p) in held for p in outside):
            instead = (
                "Keep their modules in attributes, an nn.ModuleList or nn.ModuleDict, and tensors in nn.Parameter or "
                "nn.ParameterList."
            )
        else:
            instead = (
                f"Write {kind}(self.parameters(), ...), or keep their module in an attribute of {owner}."
            )
        # An optimizer with copies of the weights, in 32 bits for instance, is the business of who wrote it.
        copies = not type(optimizer).__module__.startswith(("torch.optim", "hasten.optim")) or any(
            overrides(module, LightningModule, name)
            for name in ("optimizer_step", "on_before_optimizer_step", "on_after_backward")
        )
        if module.automatic_optimization and not copies:
            if run.runtime.syncs_gradients:
                raise MisconfigurationException(
                    f"{said}, so their gradients would not be averaged over the processes. {instead}"
                )
            nothing_trained = len(outside) == len(parameters) and not any(id(p) in held for p in outside)
            if nothing_trained and any(p.requires_grad for p in own.values()):
                raise MisconfigurationException(f"{said}: it would not be trained. {instead}")
        rank_zero_warn(f"{said}: they are neither moved to its device nor saved with it. {instead}")


def _tensors_held(module: torch.nn.Module) -> set[int]:
    """Return the ids of the tensors that a module has in lists and objects, where torch does not find them."""
    found: set[int] = set()
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.add(id(thing))
        elif isinstance(thing, torch.nn.Module):
            found.update(id(parameter) for parameter in thing.parameters())
            for child in thing.modules():
                look(vars(child), depth)
        elif depth == 0 or isinstance(thing, (type, torch.optim.Optimizer)):
            return
        elif isinstance(thing, Mapping):
            for key, value in list(thing.items()):
                if key not in ("_trainer", "_fabric"):
                    look(value, depth - 1)
        elif isinstance(thing, (list, tuple, set)):
            for value in thing:
                look(value, depth - 1)
        elif isinstance(inside := getattr(thing, "__dict__", None), dict):
            look(inside, depth - 1)

    look(module, 4)
    return found


def _near_method(module: object, name: str) -> str:
    own = [key for key, value in vars(type(module)).items() if inspect.isfunction(value)]
    near = nearest(name, [key for key in own if not hasattr(LightningModule, key)])
    return f" (is {near!r} misspelt?)" if near else ""


def _name(thing: Any) -> str:
    return f"the class `{thing.__name__}`" if isinstance(thing, type) else f"`{type(thing).__qualname__}`"
