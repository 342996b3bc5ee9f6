"""BaseFinetuning and BackboneFinetuning: freeze parts of a model, and train them from a later epoch on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hasten._lib import check, torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean, without_unknown
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.callbacks.early_stopping import ends_before
from hasten.checkpoint.files import is_plain
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from hasten import LightningModule, Trainer

Groups = list[dict[str, Any]]  # of an optimizer

# A module, or modules nested in lists, tuples, dict values or generators.
Modules = nn.Module | Iterable["Modules"] | Mapping[Any, "Modules"]

# Options of a parameter group that some schedulers keep in proportion to its learning rate, or unchanged.
_PROPORTIONAL = ("max_lr", "min_lr", "swa_lr")
_UNCHANGED = ("max_momentum", "base_momentum")


def multiplicative(epoch: int) -> float:
    """Return 2: the learning rate doubles each epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base of callbacks that freeze parts of a model before training and unfreeze them later.

    Override ``freeze_before_training``, which runs before ``configure_optimizers``, and ``finetune_function``, which
    runs at the start of each training epoch. Give the optimizer only what trains at first:
    ``filter(lambda p: p.requires_grad, self.parameters())``.

    What is frozen, the parameter groups of the optimizer, and the state of the groups added later are part of
    checkpoints: a resumed run continues with exactly the parameters that trained. On several processes, gradients
    of parameters unfrozen later are exchanged like all others. Learning-rate schedulers scale a group added later in
    proportion to the first group. Only ``fit`` freezes; ``validate``, ``test`` and ``predict`` change nothing.

    Example::

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> BaseFinetuning.freeze(model[:2])
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias', '2.weight', '2.bias']
        >>> optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
        >>> BaseFinetuning.unfreeze_and_add_param_group(model[0], optimizer)
        >>> [round(group["lr"], 3) for group in optimizer.param_groups]
        [0.1, 0.01]

    """

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        # The names of trainable parameters, and whether each batch normalization tracks its statistics.
        self._trainable: list[str] | None = None
        self._tracks_stats: dict[str, bool] = {}
        self._restarting = False

    # -- to override

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze what does not train at first."""
        raise NotImplementedError(f"{type(self).__name__} does not define freeze_before_training(pl_module).")

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what trains from this epoch on; called once for each optimizer."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define finetune_function(pl_module, epoch, optimizer)."
        )

    # -- tools

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the inner modules that have direct parameters or no children, each once."""
        found: dict[int, nn.Module] = {}
        for module in _each(modules):
            for inner in module.modules():
                if inner._parameters or not list(inner.children()):
                    found.setdefault(id(inner), inner)
        return list(found.values())

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the direct parameters of each inner module.

        Args:
            modules: a module, or modules nested in lists, tuples and dicts.
            train_bn: include batch normalization.
            requires_grad: yield the parameters that train (True) or those that are frozen (False).

        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, torch_private.BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad:
                        yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Make all parameters of a module, or of nested collections of modules, trainable."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of this one module, without its children."""
        _set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters.

        Args:
            modules: a module, or modules nested in lists, tuples and dicts.
            train_bn: leave batch normalization trainable.

        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, train_bn and isinstance(module, torch_private.BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that ``optimizer`` does not have yet; warn about the others."""
        present, params = _ids(optimizer), list(params)
        new = [parameter for parameter in params if id(parameter) not in present]
        if len(new) < len(params):
            rank_zero_warn(
                f"{len(params) - len(new)} of the parameters to unfreeze already exist within another group of this "
                f"optimizer ({type(optimizer).__name__}), and keep its learning rate.",
                fix=(
                    "In configure_optimizers, give the optimizer only filter(lambda p: p.requires_grad, "
                    "self.parameters())."
                ),
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze a module, or a nest of them, and give its parameters to the optimizer as a new group.

        Args:
            modules: what to unfreeze.
            optimizer: gets a new group, unless it has all the parameters already.
            lr: learning rate of the group; by default the first group's divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: train the parameters of batch normalization too; its running statistics follow in any case.

        """
        wanted: list[nn.Parameter] = []
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, torch_private.BatchNorm) and _is_trained_by(optimizer, module):
                continue
            _set_trainable(module, True)
            if train_bn or not isinstance(module, torch_private.BatchNorm):
                wanted += module.parameters(recurse=False)
        new = BaseFinetuning.filter_on_optimizer(optimizer, wanted)
        if new:
            rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": new, "lr": rate})

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trainer.strategy.engine.require_own_parameters(
                type(self).__name__,
                "the engine steps the parameters that train when it is made.",
                "Freeze them for the whole run, or use strategy='ddp' or 'fsdp'.",
            )
            self._restarting = False
            self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what trains in a resumed run, before the optimizer gets its state."""
        if not self._restarting:
            self._internal_optimizer_metadata, self._trainable, self._tracks_stats = {}, None, {}
            return
        self._restarting = False
        before = _trainable(pl_module)
        trainable = set(self._trainable or ())
        if self._trainable is None:
            # A checkpoint of Lightning stores groups alone: what is in a group trains.
            groups = [group for each in self._internal_optimizer_metadata.values() for group in each]
            trainable = {*before, *(name for group in groups for name in group["params"])}
        if trainable:
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad = name in trainable
            for name, module in pl_module.named_modules():
                if name in self._tracks_stats and isinstance(module, torch_private.BatchNorm):
                    module.track_running_stats = self._tracks_stats[name]
        for index, optimizer in enumerate(trainer.optimizers):
            if index in self._internal_optimizer_metadata:
                groups = self._internal_optimizer_metadata[index]
                _restore_groups(pl_module, optimizer, groups, type(self).__name__)
        self._use_new_groups(trainer, pl_module, before)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call ``finetune_function``, and record what trains now."""
        before = _trainable(pl_module)
        for index, optimizer in enumerate(trainer.optimizers):
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            groups = _named_groups(pl_module, optimizer)
            if groups is not None:
                self._internal_optimizer_metadata[index] = groups
        self._trainable = _trainable(pl_module)
        norms = [pair for pair in pl_module.named_modules() if isinstance(pair[1], torch_private.BatchNorm)]
        self._tracks_stats = {name: bool(norm.track_running_stats) for name, norm in norms}
        self._use_new_groups(trainer, pl_module, before)

    def _store(
        self, pl_module: LightningModule, opt_idx: int, num_param_groups: int, current_param_groups: Groups
    ) -> None:
        """Record the groups of an optimizer, for callbacks that override ``on_train_epoch_start``."""
        before = self._trainable or []
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        first = num_param_groups if opt_idx in self._internal_optimizer_metadata else 0
        new = self._apply_mapping_to_param_groups(current_param_groups[first:], names)
        self._internal_optimizer_metadata.setdefault(opt_idx, []).extend(new)
        self._trainable = _trainable(pl_module)
        self._use_new_groups(pl_module.trainer, pl_module, before)

    @staticmethod
    def _apply_mapping_to_param_groups(param_groups: Groups, mapping: Mapping[Any, Any]) -> Groups:
        """Return groups in which each parameter is what ``mapping`` has for it."""
        return [{**group, "params": [mapping[each] for each in group["params"]]} for group in param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {
            "internal_optimizer_metadata": self._internal_optimizer_metadata,
            "trains": self._trainable,
            "tracks": self._tracks_stats,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restarting = True
        # Lightning before 1.6 stored the groups alone.
        self._internal_optimizer_metadata = dict(state_dict.get("internal_optimizer_metadata", state_dict))
        self._trainable = state_dict.get("trains")
        self._tracks_stats = dict(state_dict.get("tracks", {}))

    def _use_new_groups(self, trainer: Trainer, pl_module: LightningModule, before: list[str]) -> None:
        """Let schedulers drive groups added later, and DDP exchange the gradients of parameters that train now."""
        for optimizer in trainer.optimizers:
            for config in trainer.lr_scheduler_configs:
                schedule_new_groups(config.scheduler, optimizer)
        if trainer.runtime.several_processes and _trainable(pl_module) != before:
            run = trainer.current_run
            run.wrapped = run.runtime.wrap(pl_module)


class BackboneFinetuning(BaseFinetuning):
    """Train the rest of a model first, and its ``backbone`` too from a given epoch on.

    The backbone's learning rate starts low and is multiplied each epoch by ``lambda_func``; with ``should_align`` it
    does not exceed the first group's. The module needs an attribute ``backbone``.

    Args:
        unfreeze_backbone_at_epoch: the first epoch (from 0) in which the backbone trains.
        lambda_func: takes the epoch, counted from 1, and returns the factor; doubles by default.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a share of the first group's.
        backbone_initial_lr: the backbone's first learning rate itself, instead of the share.
        should_align: do not exceed the first group's learning rate.
        initial_denom_lr: passed to ``unfreeze_and_add_param_group``, for subclasses.
        train_bn: train the backbone's batch normalization, also before it is unfrozen; False freezes it from the start.
        verbose: report the learning rates each epoch.
        rounding: digits after the point in the report.

    Raises:
        MisconfigurationException: an argument is out of range; when fit begins, if there is no ``backbone``.

    Example::

        >>> BackboneFinetuning(unfreeze_backbone_at_epoch=3, lambda_func=lambda epoch: 1.5).train_bn
        True

    """

    @without_unknown
    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        check.declared(BackboneFinetuning.__init__, locals())
        super().__init__()
        owner, error = "BackboneFinetuning", MisconfigurationException
        self.unfreeze_backbone_at_epoch = check.whole(
            owner, "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, at_least=0, error=error
        )
        allowed = "a function that takes the epoch and returns a factor, for instance lambda epoch: 1.5"
        self.lambda_func = check.callable_(owner, "lambda_func", lambda_func, allowed=allowed, error=error)
        self.backbone_initial_ratio_lr = check.number(
            owner, "backbone_initial_ratio_lr", backbone_initial_ratio_lr, above=0, error=error
        )
        self.backbone_initial_lr = check.number(
            owner, "backbone_initial_lr", backbone_initial_lr, above=0, allow_none=True, error=error
        )
        self.should_align = should_align
        self.initial_denom_lr = check.number(owner, "initial_denom_lr", initial_denom_lr, above=0, error=error)
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = check.whole(owner, "rounding", rounding, at_least=0, error=error)
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is a backbone, and freeze it when fit begins."""
        if stage == "fit":
            if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
                parts = [name for name, _ in pl_module.named_children()]
                raise MisconfigurationException(
                    f"BackboneFinetuning: {type(pl_module).__name__} has no module 'backbone'; its modules are "
                    f"{parts}.",
                    fix=f"{did_you_mean('backbone', parts)} Assign the module to finetune to self.backbone.",
                )
            self.previous_backbone_lr = None
            if ends_before(trainer, self.unfreeze_backbone_at_epoch):
                rank_zero_warn(
                    f"BackboneFinetuning(unfreeze_backbone_at_epoch={self.unfreeze_backbone_at_epoch}): epochs count "
                    f"from 0, and with Trainer(max_epochs={trainer.max_epochs}) the backbone stays frozen.",
                    fix="Unfreeze it earlier, or train for more epochs.",
                )
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze the backbone."""
        self.freeze(pl_module.get_submodule("backbone"), train_bn=self.train_bn)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone at its epoch; raise its learning rate afterwards."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        backbone = pl_module.get_submodule("backbone")
        head_lr = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            first = self.backbone_initial_lr
            rate = head_lr * self.backbone_initial_ratio_lr if first is None else float(first)
            self.unfreeze_and_add_param_group(
                backbone, optimizer, rate, train_bn=self.train_bn, initial_denom_lr=self.initial_denom_lr
            )
        else:
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align:
                rate = min(rate, head_lr)
            own = {*map(id, backbone.parameters())}
            # No group was added for what the optimizer had already: the last one may be that of the head.
            if own.issuperset(map(id, optimizer.param_groups[-1]["params"])):
                optimizer.param_groups[-1]["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            rank_zero_info(
                f"Epoch {epoch + 1}: Current lr: {round(head_lr, self.rounding)}, "
                f"Backbone lr: {round(rate, self.rounding)}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _each(modules: Modules) -> Iterator[nn.Module]:
    if isinstance(modules, nn.Module):
        yield modules
    else:
        for inner in modules.values() if isinstance(modules, Mapping) else modules:
            yield from _each(inner)


def _set_trainable(module: nn.Module, trainable: bool) -> None:
    if isinstance(module, torch_private.BatchNorm):
        # The statistics are frozen with the parameters.
        module.track_running_stats = trainable
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trainable


def _is_trained_by(optimizer: Optimizer, module: nn.Module) -> bool:
    """Return whether a module was never frozen and is in the optimizer."""
    parameters = list(module.parameters(recurse=False))
    return any(p.requires_grad for p in parameters) and {*map(id, parameters)} <= _ids(optimizer)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


# -- parameter groups


def _named_groups(module: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Return the groups of ``optimizer`` with names instead of parameters; None if one is not the module's."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        params = [names.get(id(parameter)) for parameter in group["params"]]
        if None in params:
            return None
        options = {key: value for key, value in group.items() if key != "params" and is_plain(value)}
        groups.append({**options, "params": params})
    return groups


def _restore_groups(module: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], owner: str) -> None:
    """Give ``optimizer`` the groups that ``_named_groups`` returned."""
    parameters = dict(module.named_parameters())
    for name in (name for group in groups for name in group["params"]):
        if name not in parameters:
            raise make_error(
                ValueError,
                f"{owner}: the checkpoint has the parameter {name!r} in a group of the optimizer, and "
                f"{type(module).__name__} does not have it.",
                fix=f"{did_you_mean(name, list(parameters))} Resume with the model the run was started with.",
            )
    optimizer.param_groups[:] = [
        {**optimizer.defaults, **group, "params": [parameters[name] for name in group["params"]]} for group in groups
    ]


def schedule_new_groups(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Let a scheduler scale groups added after it was made in proportion to the first group.

    torch's schedulers only know the groups there were at their creation, and raise at the next step otherwise.
    """
    for inner in torch_private.chained_schedulers(scheduler):
        schedule_new_groups(inner, optimizer)
    base_lrs = getattr(scheduler, "base_lrs", None)
    if getattr(scheduler, "optimizer", None) is not optimizer or not base_lrs:
        return
    groups: list[dict[str, Any]] = optimizer.param_groups
    first, first_lr = groups[0], float(groups[0]["lr"])
    for group in groups[len(base_lrs) :]:
        ratio = float(group["lr"]) / first_lr if first_lr else 1.0
        base_lrs.append(base_lrs[0] * ratio)
        group.setdefault("initial_lr", base_lrs[-1])
        scaled = {key: first[key] * ratio for key in _PROPORTIONAL if key in first}
        same = {key: first[key] for key in _UNCHANGED if key in first}
        for key, value in (scaled | same).items():
            group.setdefault(key, value)
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas:
        lambdas.extend([lambdas[0]] * (len(groups) - len(lambdas)))
