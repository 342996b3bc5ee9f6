"""What a program probably forgot, said once in a fit, with the line to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn
from torch.nn.parameter import is_lazy

from hasten._lib.rank_zero import rank_zero_warn
from hasten.hooks import overrides
from hasten.module import LightningModule

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.loops.run_data import Source

# Parts named in a message; the others are counted.
_NAMED = 3

# A cross-validation or a search fits the same class again and again, and validates after it.
_said_without_data: WeakSet[type] = WeakSet()


def warn_about_missing_parts(validation: Source, module: LightningModule, *, wanted: bool) -> None:
    """Warn where only one of validation data and ``validation_step`` is there.

    Args:
        validation: where the validation data comes from.
        module: the module.
        wanted: False where ``limit_val_batches=0`` has switched validation off.

    """
    has_step = overrides(module, LightningModule, "validation_step")
    if validation.has_data() and not has_step:
        rank_zero_warn(
            f"There is validation data but {type(module).__name__} has no validation_step(): no validation runs. "
            "Define it, or leave the data out."
        )
    elif wanted and has_step and not validation.has_data() and type(module) not in _said_without_data:
        _said_without_data.add(type(module))
        rank_zero_warn(
            f"{type(module).__name__} has a validation_step() but there is no validation data: no validation runs. "
            "Write trainer.fit(model, train_dataloaders, val_dataloaders) or define val_dataloader(); "
            "Trainer(limit_val_batches=0) switches it off, in trainer.validate() as well."
        )


class FirstEpoch:
    """Looks at the first epoch of a fit, before its first batch and after its last."""

    def __init__(self) -> None:
        self._begun = self._ended = self._resumed = False
        self._in_eval_mode: set[nn.Module] = set()

    def is_ahead(self, run: Run) -> None:
        """Take the parts in eval mode before the hooks of training: what those switch to it is meant so."""
        self._in_eval_mode = {part for part in run.module.modules() if not part.training}

    def begins(self, run: Run) -> None:
        """Warn of parts that would train in eval mode; by now every hook has had its chance to switch them."""
        if self._begun:
            return
        self._begun = True
        self._resumed = run.progress.updates > 0
        module, before = run.module, self._in_eval_mode
        self._in_eval_mode = set()
        if not before:
            return
        trained = {p for one in run.optimizers for group in one.param_groups for p in group["params"]}
        found = [name for name, part in _trained_in_eval_mode(module, trained) if part in before]
        if not found:
            return
        if found == [""]:
            what, lines = "is", ["model.train()"]
        else:
            named = found[:_NAMED]
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            what = f"has parts ({', '.join(named)}{more}) that are"
            lines = [f"{_attribute(name)}.train()" for name in named] if not more else ["model.train()"]
        rank_zero_warn(
            f"{type(module).__name__} {what} in eval mode while training: dropout is off there, and running statistics "
            f"stay as they are. from_pretrained() returns models so. Write {', '.join(lines)} before fit; what is "
            "frozen, with requires_grad=False, may stay in eval mode."
        )

    def ends(self, run: Run) -> None:
        """Warn of values logged on steps that no logger has got: the epoch was shorter than the interval."""
        if self._ended:
            return
        self._ended = True
        every, steps = run.arguments.log_every_n_steps, run.progress.updates
        # The first part of a resumed run has said it.
        if self._resumed or run.arguments.fast_dev_run or not run.logged.loggers or not 0 < steps < every:
            return
        names = run.logged.logged_on_steps()
        if names:
            listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            rank_zero_warn(
                f"Values logged on steps ({listed}) go to the loggers every {every} steps, and the first epoch had "
                f"{steps}: none of them got there. Write Trainer(log_every_n_steps={max(1, steps // 10)}), or "
                "self.log(..., on_epoch=True) for the mean of an epoch."
            )


def _trained_in_eval_mode(
    module: nn.Module, trained: set[nn.Parameter], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts in eval mode that have parameters of an optimizer."""
    if type(module).train is not nn.Module.train:
        return  # Decides itself which of its parts are in which mode.
    if not module.training:
        # One layer of torch by itself, such as a BatchNorm that keeps its statistics, was set so by the program.
        single = type(module).__module__.startswith("torch.nn.") and not any(module.children())
        if not single and any(
            p.requires_grad and p in trained and not is_lazy(p) for p in module.parameters()
        ):
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _trained_in_eval_mode(child, trained, f"{name}.{child_name}" if name else child_name)


def _attribute(name: str) -> str:
    """Return the expression for a part of the model: ``layers.0`` is ``model.layers[0]``."""
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
