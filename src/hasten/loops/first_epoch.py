"""Warn of mistakes that show in the first epoch of a fit."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn, warn_once
from hasten._lib.tree import call_own_train, is_sharded, left_in_eval_mode, parameters_of
from hasten.extend.origin import comes_from, mentions, module_of, names_in
from hasten.hooks import overrides
from hasten.loops.schedule import longer_plan
from hasten.module import LightningModule

if TYPE_CHECKING:
    from hasten.logged_value import LoggedValue
    from hasten.loops.run import Run


# Names listed in a message.
_NAMED = 3


def _version_of(parameter: nn.Parameter, module: LightningModule) -> int:
    if parameter.is_inference():
        raise MisconfigurationException(
            f"{type(module).__name__} was made in torch.inference_mode(): its parameters cannot be trained.",
            fix="Make it outside, and call fit outside. Where validate has made those of lazy layers, call fit first.",
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


def _warn_of_added_parameters(run: Run, known: set[int]) -> None:
    """Warn of layers that the first epoch has made, and that got gradients which no optimizer uses."""
    parameters = parameters_of(*run.optimizers)
    if any(map(is_sharded, parameters)) or not run.module.automatic_optimization:
        return  # In manual optimization, the program may train them with its own optimizer.
    known = known | set(map(id, parameters))
    new = [name for name, each in run.module.named_parameters() if each.grad is not None and id(each) not in known]
    if new:
        rank_zero_warn(
            f"{type(run.module).__name__}: layers were made after configure_optimizers(), and are not trained "
            f"({', '.join(new[:_NAMED])}): no optimizer has them.",
            fix="Make them in __init__, configure_model or setup; an nn.LazyLinear finds its input size by itself.",
        )


class FirstEpoch:
    """Checks for mistakes in the first epoch of a fit, before its first batch and after its last."""

    def __init__(self) -> None:
        self._begun = self._ended = self._resumed = False
        self._in_eval_mode: set[nn.Module] = set()
        self._broadcast: dict[tuple[str, str, int], re.Match[str]] = {}
        # The parameters of the module when its optimizers were made, by id.
        self._known: Mapping[int, nn.Parameter] = {}
        # The ids of these and of the trained ones, and whether those of the first batches are still compared with them.
        self._own: set[int] = set()
        self.compares_parts = False
        # Before the epoch: the steps so far, and how often torch had changed each trained parameter in place.
        self._steps = 0
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._has_lazy = False
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
        self._has_lazy = len(self._versions) < len(trained)
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
        self._own = known.keys() | trained.keys()
        self.compares_parts = True
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
            smallest, _ = min(self._versions, key=lambda each: each[0].numel())
            self._still = smallest, smallest.detach().clone()
        automatic = run.schedulers and module.automatic_optimization
        if automatic and not overrides(module, LightningModule, "lr_scheduler_step"):
            _warn_of_short_plans(run)
            self._stepped = [
                (config, torch_private.steps_of_scheduler(config.scheduler))
                for config in run.schedulers
                if config.frequency == 1 and comes_from(type(config.scheduler), "torch.optim")
            ]

    def _compare(self, run: Run) -> None:
        """Warn of a rate of 0 or of before lr_find, of eval mode and of schedulers that the program steps too."""
        if (lr_find := sys.modules.get("hasten.tuner.lr_find")) is not None and not self._resumed:
            lr_find.warn_of_fixed_rate(run)
        steps, epochs = run.progress.global_step - self._steps, run.limits.max_epochs
        if self._still is not None and steps > 1:
            _warn_of_no_rate(run, *self._still)
        if self._training and not run.module.training:
            _warn_of_eval_mode(run)
        for config, before in self._stepped:
            made = torch_private.steps_of_scheduler(config.scheduler) - before
            due = steps if config.interval == "step" else 1
            # One made for the epochs rises again after so many steps, and one made for the steps hardly falls.
            other, length = ("epoch", epochs) if config.interval == "step" else ("step", epochs * steps)
            if steps > 1 and vars(config.scheduler).get("T_max") == length:
                rank_zero_warn(
                    f"{type(config.scheduler).__name__}(T_max={length}) is made for the {length} {other}s of this fit, "
                    f"and steps once per {config.interval}.",
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

    def find_added(self, run: Run) -> None:
        """Warn of parameters that the module did not have before the epoch, if they should be trained."""
        self.compares_parts = False
        parts: list[nn.Module | None] = [run.module]
        walked: set[nn.Module] = set()
        now: set[int] = set()
        # Without calls in Python: this runs in every fit. Parts that follow are added while it goes on.
        for part in parts:
            if part is not None and part not in walked:
                walked.add(part)
                now.update(map(id, part._parameters.values()))
                parts.extend(part._modules.values())
        if now - self._own - {id(None)}:
            _warn_of_added_parameters(run, self._own)

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
        if self._ended:
            return
        self._ended = True
        _warn_of_broadcast_losses(run.module, self._broadcast)
        _warn_of_untrained(run, self._versions, run.progress.global_step - self._steps, lazy=self._has_lazy)
        self._compare(run)
        if self.compares_parts:
            self.find_added(run)
        self._versions, self._still, self._stepped = [], None, []
        every, steps = run.arguments.log_every_n_steps, run.progress.logged_step
        by_hand = run.optimizers and not (run.module.automatic_optimization or run.arguments.fast_dev_run)
        if by_hand and not run.progress.global_step and run.progress.total_batches:
            rank_zero_warn(
                f"{type(run.module).__name__}.training_step has not called step() of self.optimizers() in "
                f"{run.progress.total_batches} batches, so global_step stays 0.",
                PossibleUserWarning,
                fix="With manual optimization, call self.optimizers().step() after self.manual_backward(loss).",
            )
        # The first part of a resumed run has warned already, and under Lightning's names the interval has been compared
        # before the epoch.
        told = self._resumed or run.conventions.warns_of_settings
        silent = told or run.arguments.fast_dev_run or not run.logged.loggers
        if not silent and 0 < steps < every and (values := run.logged.logged_on_steps()):
            _warn_of_long_intervals(values, every, steps)


def _warn_of_long_intervals(values: list[LoggedValue], every: int, steps: int) -> None:
    names = ", ".join([value.base_name for value in values[:_NAMED]])
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


def _warn_of_untrained(run: Run, versions: list[tuple[nn.Parameter, int]], steps: int, *, lazy: bool) -> None:
    """Warn of weights that the first epoch should have changed: of all, or of layers made after the optimizer.

    With lazy layers, it is not known how often their weights have changed.

    """
    # A graph of the device changes weights without counting it, and processes may have parts of them.
    counted = run.compiled is None and not run.runtime.several_processes
    if not counted or not run.module.automatic_optimization or run.conventions.warns_of_settings:
        return
    name, made_steps = type(run.module).__name__, steps > 0 and run.observers.guard is None and _counts_changes(run)
    if lazy:
        versions = []
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


def _warn_of_short_plans(run: Run) -> None:
    """Warn of a scheduler that raises an error in this fit, because its own number of steps is smaller."""
    for config in run.schedulers:
        total = vars(config.scheduler).get("total_steps")
        if not isinstance(total, int) or config.frequency != 1 or not comes_from(type(config.scheduler), "torch.optim"):
            continue
        due = run.limits.max_epochs if config.interval == "epoch" else run.module.trainer.estimated_stepping_batches
        if total < due < math.inf:
            rank_zero_warn(
                f"{type(config.scheduler).__name__}(total_steps={total}) is shorter than this fit, which has "
                f"{int(due)} {config.interval}s: a step beyond its last one is an error.",
                PossibleUserWarning,
                fix=longer_plan(run),
            )


def _has_no_rate(run: Run) -> bool:
    # Loops, which make no calls: this runs in every fit.
    for optimizer in run.optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            rate = group.get("lr")
            if rate or not isinstance(rate, (int, float)):
                return False
    return bool(run.optimizers)


def _warn_of_no_rate(run: Run, parameter: nn.Parameter, before: Tensor) -> None:
    # A program that raises the rate itself, or by a scheduler of steps, has 0 in the first step.
    by_epoch = run.schedulers and all(config.interval == "epoch" for config in run.schedulers)
    if not (by_epoch or _has_no_rate(run)) or not torch.equal(parameter, before):
        return
    fix = "Use a rate above 0 in configure_optimizers, such as lr=1e-3."
    if run.schedulers:
        kind = type(run.schedulers[0].scheduler).__name__
        fix = f"Let {kind} begin above 0; a warm-up of steps needs 'interval': 'step' in configure_optimizers."
    rank_zero_warn(
        f"{type(run.module).__name__}: the learning rate of {type(run.optimizers[0]).__name__} is 0, and the "
        "steps of the first epoch have changed no weight.",
        fix=fix,
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
