"""ModelPruning: set the least important weights of a model to zero, a share each epoch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hasten._lib import check, torch_private
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.trainer import Trainer

Parameters = Sequence[tuple[nn.Module, str]]
Amount = int | float | Callable[[int], int | float]
Decision = bool | Callable[[int], bool]

# By the names of torch's functions.
_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


class ModelPruning(Callback):
    """Set the least important weights to zero, each epoch another share of the remaining ones.

    It uses ``torch.nn.utils.prune``. Checkpoints hold plain weights with the zeros in them, so they load into a model
    without pruning; masks and the weights they hide are in the callback's state, so that a resumed run continues
    bit for bit. When training ends, the masks are applied to the weights permanently.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, or a
            subclass of ``torch.nn.utils.prune.BasePruningMethod`` (the class, not an instance).
        parameters_to_prune: pairs of module and parameter name; all weights and biases by default.
        parameter_names: of these, only those with this name: ``["weight"]``, ``["bias"]`` or both.
        use_global_unstructured: rank the values of all parameters together, not of each alone.
        amount: a share of the remaining values (float), a number (int), or a function of the epoch that returns one.
        apply_pruning: whether to prune in an epoch: a bool, or a function of the epoch.
        make_pruning_permanent: apply the masks to the weights, in checkpoints and when training ends.
        use_lottery_ticket_hypothesis: after pruning, reset the remaining weights to their initial values: a bool, or a
            function of the epoch.
        resample_parameters: for that, draw new initial values.
        pruning_dim: the dimension whose slices structured pruning removes.
        pruning_norm: the norm by which ``"ln_structured"`` ranks them.
        verbose: report nothing (0), how much is pruned (1), or how much of each parameter (2).
        prune_on_train_epoch_end: prune when a training epoch ends, not when a validation does.

    Raises:
        MisconfigurationException: an argument is out of range, two contradict each other, or a parameter does not
            exist.

    Example::

        >>> pruning = ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])
        >>> pruning.pruning_fn.__name__
        'L1Unstructured'

    Source: Frankle and Carbin, The Lottery Ticket Hypothesis, 2019;
    `torch.nn.utils.prune <https://docs.pytorch.org/docs/stable/nn.html#utilities>`_.

    """

    PARAMETER_NAMES: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Parameters | None = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: Amount = 0.5,
        apply_pruning: Decision = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: Decision = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        check.declared(ModelPruning.__init__, locals())
        owner, error = "ModelPruning", MisconfigurationException
        for name, decision in (
            ("apply_pruning", apply_pruning),
            ("use_lottery_ticket_hypothesis", use_lottery_ticket_hypothesis),
        ):
            allowed = "True, False or a function of the epoch"
            if not isinstance(decision, bool):
                check.callable_(owner, name, decision, allowed=allowed, error=error)
        for name, number in (("pruning_dim", pruning_dim), ("pruning_norm", pruning_norm)):
            check.whole(owner, name, number, allow_none=True, error=error)
        allowed, kinds = "a list of (module, name)", (Iterable, nn.Module)
        requested: Parameters = () if parameters_to_prune is None else parameters_to_prune
        given: Any = requested
        if isinstance(given, (str, bytes)) or not isinstance(given, kinds):
            raise check.wrong_type(owner, "parameters_to_prune", given, allowed, error=error)
        for name in parameter_names or ():
            check.one_of(owner, "parameter_names", name, self.PARAMETER_NAMES, error=error)
        if not callable(amount):
            most = 1 if isinstance(amount, float) else None
            allowed = "a share from 0.0 to 1.0 (float), a number of weights (int), or a function of the epoch"
            check.number(owner, "amount", amount, at_least=0, at_most=most, allowed=allowed, error=error)
        check.one_of(owner, "verbose", verbose, (0, 1, 2), error=error)
        self._use_global_unstructured = use_global_unstructured
        self._global_kwargs: dict[str, Any] = {}
        self.pruning_fn = self._find_pruning_fn(pruning_fn, pruning_dim, pruning_norm)
        self._requested = requested
        self._parameters_to_prune = requested
        self._parameter_names = parameter_names or list(self.PARAMETER_NAMES)
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._paths: list[str] = []
        # By the id of a layer: a copy of it before training ("data"), and (position, name) of its parameters ("names").
        self._original_layers: dict[int, dict[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None
        # The batch after which it has pruned: a resumed run calls the hooks in which its checkpoint was saved again.
        self._pruned_at, self._trains = 0, False

    def _find_pruning_fn(
        self, pruning_fn: Callable[..., Any] | str, dim: int | None, norm: int | None
    ) -> Callable[..., Any]:
        is_global, name, method = self._use_global_unstructured, None, pruning_fn
        what, fix = f"ModelPruning(pruning_fn={pruning_fn!r}):", ""
        if isinstance(pruning_fn, str):
            name = pruning_fn.lower()
            check.one_of("ModelPruning", "pruning_fn", name, _METHODS, error=MisconfigurationException)
            method = _METHODS[name]
            if name.endswith("_structured"):
                self._global_kwargs["dim"] = dim
            if name == "ln_structured":
                self._global_kwargs["n"] = norm
        elif not (inspect.isclass(pruning_fn) and issubclass(pruning_fn, prune.BasePruningMethod)):
            allowed = f"one of {list(_METHODS)}, or a subclass of torch's BasePruningMethod: the class, not an instance"
            raise check.wrong("ModelPruning", "pruning_fn", pruning_fn, allowed, error=MisconfigurationException)
        assert isinstance(method, type)
        if name is None and not is_global:
            what += " PyTorch `BasePruningMethod` is currently only supported with `use_global_unstructured=True`."
            fix = "Leave use_global_unstructured out."
        elif self._global_kwargs.get("dim", 0) is None:
            what += " When requesting `structured` pruning, the `pruning_dim` should be provided."
            fix = "Choose the dimension with pruning_dim=..., for instance 0."
        elif self._global_kwargs.get("n", 0) is None:
            what += " When requesting `ln_structured` pruning, the `pruning_norm` should be provided."
            fix = "Choose the norm with pruning_norm=..., for instance 2."
        elif is_global and method.PRUNING_TYPE != "unstructured":  # type: ignore[attr-defined]
            what += ' Only the "unstructured" PRUNING_TYPE is supported with `use_global_unstructured=True`.'
            fix = "Use use_global_unstructured=False."
        if fix:
            raise MisconfigurationException(what, fix=fix, argument="pruning_fn")
        self._pruning_method_name = method.__name__ if name is None or is_global else name
        return method if is_global else partial(getattr(prune, self._pruning_method_name), **self._global_kwargs)

    # -- to override and to call

    def filter_parameters_to_prune(self, parameters_to_prune: Parameters = ()) -> Parameters:
        """Return which of the parameters found to prune; override it to choose."""
        return parameters_to_prune

    def apply_pruning(self, amount: int | float) -> None:
        """Prune ``amount`` of the remaining values."""
        before = [self._get_pruned_stats(module, name) for module, name in self._parameters_to_prune]
        with _keep_order(module for module, _ in self._parameters_to_prune):
            (self._apply_global_pruning if self._use_global_unstructured else self._apply_local_pruning)(amount)
        if self._verbose:
            after = [self._get_pruned_stats(module, name) for module, name in self._parameters_to_prune]
            self._log_sparsity_stats(before, after, amount=amount)

    def _apply_global_pruning(self, amount: int | float) -> None:
        options = {**self._global_kwargs, "amount": amount}
        prune.global_unstructured(self._parameters_to_prune, pruning_method=self.pruning_fn, **options)

    def _apply_local_pruning(self, amount: int | float) -> None:
        for module, name in self._parameters_to_prune:
            self.pruning_fn(module, name=name, amount=amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the weights to their initial values, or to new ones; masks stay."""
        for layer in (self._original_layers or {}).values():
            values = layer["data"]
            if self._resample_parameters and callable(getattr(values, "reset_parameters", None)):
                values = copy.deepcopy(values)
                values.reset_parameters()
            for position, name in layer["names"]:
                module = self._parameters_to_prune[position][0]
                self._copy_param(module, values, name)
                _refresh(module, name)

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        target, value = _original(new, name), _original(old, name)
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            target.data.copy_(value.data)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Apply the masks of ``module`` and its submodules to the weights permanently."""
        with _keep_order(module.modules()):
            for inner in module.modules():
                for hook in torch_private.forward_pre_hooks(inner):
                    if isinstance(hook, prune.BasePruningMethod):
                        prune.remove(inner, hook._tensor_name)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Parameters = (), parameter_names: Sequence[str] = ()
    ) -> Parameters:
        """Return the pairs given, or all parameters of the module's layers called ``parameter_names``.

        Raises:
            MisconfigurationException: a pair has another form, or its module or parameter does not exist.

        """
        names = parameter_names or ModelPruning.PARAMETER_NAMES
        if not parameters_to_prune:
            return [
                (module, name)
                for name in names
                for module in pl_module.modules()
                if module is not pl_module
                and (name in module._parameters or name + "_orig" in module._parameters)
                and _original(module, name) is not None
            ]
        inner_modules = {id(inner) for inner in pl_module.modules()}
        for pair in parameters_to_prune if isinstance(parameters_to_prune, (list, tuple)) else [parameters_to_prune]:
            module, name = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
            if not isinstance(module, nn.Module) or not isinstance(name, str):
                what = f"{pair!r} is not a pair of a module and a parameter's name;"
                fix = 'write [(model.layer, "weight"), ...].'
            elif id(module) not in inner_modules:
                what = f"the {type(module).__name__} with {name!r} is not part of {type(pl_module).__name__}."
                fix = "Take it from the model that is trained."
            elif not isinstance(_original(module, name), Tensor):
                known = [key.removesuffix("_orig") for key in module._parameters]
                what = f"{type(module).__name__} has no parameter {name!r}; it has {known}."
                fix = did_you_mean(name, known)
            else:
                continue
            what = f"ModelPruning(parameters_to_prune=...): {what}"
            raise MisconfigurationException(what, fix=fix, argument="parameters_to_prune")
        return parameters_to_prune

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        trainer.strategy.sharding.require_whole(
            "ModelPruning", "what to prune depends on all of it.", "Use strategy='ddp'."
        )
        found = self.sanitize_parameters_to_prune(pl_module, self._requested, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(found)
        if not self._parameters_to_prune:
            raise MisconfigurationException(
                f"ModelPruning: {type(pl_module).__name__} has no parameters called {self._parameter_names} to prune."
            )
        paths = {id(module): path for path, module in pl_module.named_modules()}
        self._paths = [f"{paths[id(module)]}.{name}" for module, name in self._parameters_to_prune]
        for (module, _), path in zip(self._parameters_to_prune, self._paths, strict=True):
            # Masks are applied where torch calls a module, before its forward: else the second backward would fail.
            steps_only = module is pl_module and not overrides(module, LightningModule, "forward")
            if steps_only or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                what = "the module itself, which has no forward()"
                if not steps_only:
                    what = "an nn.MultiheadAttention, which does not call its out_proj as a layer"
                raise MisconfigurationException(
                    f"ModelPruning: {path!r} is of {what}: torch's masks have no effect there.",
                    fix="Name the layers to prune: parameters_to_prune=[(model.layer, 'weight'), ...].",
                    argument="parameters_to_prune",
                )
        self._original_layers, self._loaded, self._pruned_at = None, None, 0
        if not self._use_lottery_ticket_hypothesis:
            return
        self._original_layers = {}
        for position, (module, name) in enumerate(self._parameters_to_prune):
            # The product of a parameter and its mask cannot be copied.
            masked = {id(value): value.detach() for value in vars(module).values() if isinstance(value, Tensor)}
            layer = self._original_layers.get(id(module)) or {"data": copy.deepcopy(module, masked), "names": []}
            layer["names"].append((position, name))
            self._original_layers[id(module)] = layer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the masks of a resumed run, and the weights they hide."""
        self._trains = False
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        self._pruned_at = loaded.get("pruned_at", 0)
        for (module, name), path in zip(self._parameters_to_prune, self._paths, strict=True):
            if path in loaded["first_values"] and self._original_layers:
                _original(self._original_layers[id(module)]["data"], name).data.copy_(loaded["first_values"][path])
            if path not in loaded["masks"]:
                continue
            original = _original(module, name)
            mask = loaded["masks"][path].to(original.device)
            with torch.no_grad():
                original[~mask] = loaded["hidden"][path].to(original)
            with _keep_order([module]):
                prune.custom_from_mask(module, name, mask.to(original.dtype))
            if path in loaded.get("used", ()):
                getattr(module, name).data[mask] = loaded["used"][path].to(original)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prune_on_train_epoch_end and trainer.progress.last_batch:
            self._prune(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prune_on_train_epoch_end or trainer.sanity_checking or trainer.state.fn is not TrainerFn.FITTING:
            return
        # Tensors made in inference mode cannot be trained.
        with torch.inference_mode(False), torch.no_grad():
            self._prune(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._make_pruning_permanent:
            self.make_pruning_permanent(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same if a resumed run had nothing left to train."""
        if not self._trains:
            self.on_train_end(trainer, pl_module)

    def _prune(self, trainer: Trainer) -> None:
        batch = trainer.progress.total_batches
        if batch != self._pruned_at:
            self._pruned_at = batch
            self._run_pruning(trainer.current_epoch)
            if trainer.runtime.several_processes is True:  # A Mock has nothing to agree on.
                self._broadcast(trainer)

    def _run_pruning(self, current_epoch: int) -> None:
        applies = self._apply_pruning(current_epoch) if callable(self._apply_pruning) else self._apply_pruning
        amount = self.amount(current_epoch) if callable(self.amount) else self.amount
        if not applies or not amount:
            return
        self.apply_pruning(amount)
        lottery = self._use_lottery_ticket_hypothesis
        if lottery(current_epoch) if callable(lottery) else lottery:
            self.apply_lottery_ticket_hypothesis()

    @torch.no_grad()
    def _broadcast(self, trainer: Trainer) -> None:
        """Use the masks and values of the first process: random numbers differ between processes."""
        for module, name in self._parameters_to_prune:
            if hasattr(module, name + "_mask"):
                for tensor in (getattr(module, name + "_mask"), _original(module, name)):
                    tensor.copy_(trainer.strategy.broadcast(tensor))
                _refresh(module, name)

    # -- checkpoints

    # Its position among the callbacks of a Trainer that would have the same key.
    state_number = 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(number=self.state_number) if self.state_number else super().state_key

    def state_dict(self) -> dict[str, Any]:
        """Return masks, the weights they hide, and the initial values."""
        masks, hidden, used = {}, {}, {}
        for (module, name), path in zip(self._parameters_to_prune, self._paths, strict=False):
            mask = module._buffers.get(name + "_mask")
            if mask is not None:
                masks[path] = mask.bool()
                hidden[path] = _original(module, name).detach()[~masks[path]]
                # Of the last forward: torch ranks these, also where an optimizer has stepped since.
                used[path] = getattr(module, name).detach()[masks[path]]
        layers = (self._original_layers or {}).values()
        names = [(layer["data"], name, self._paths[i]) for layer in layers for i, name in layer["names"]]
        first = {path: _original(copied, name).detach() for copied, name, path in names}
        return {"masks": masks, "hidden": hidden, "used": used, "first_values": first, "pruned_at": self._pruned_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the masks until the parameters exist."""
        self._loaded = state_dict

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store plain weights with the zeros in them."""
        if self._make_pruning_permanent:
            checkpoint["state_dict"] = _plain(checkpoint["state_dict"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load plain weights into a plain model; masks are applied afterwards."""
        self.make_pruning_permanent(pl_module)
        checkpoint["state_dict"] = _plain(checkpoint["state_dict"])

    # -- internal functions

    @staticmethod
    def _get_pruned_stats(module: nn.Module, name: str) -> tuple[int, int]:
        """Return (number pruned, total number) of a parameter's values."""
        mask = module._buffers.get(name + "_mask")
        total = _original(module, name).numel()
        return (0 if mask is None else total - int(mask.sum()), total)

    def _log_sparsity_stats(
        self, prev: list[tuple[int, int]], curr: list[tuple[int, int]], amount: int | float = 0
    ) -> None:
        total = sum(count for _, count in curr)
        old, new = (sum(zeros for zeros, _ in stats) for stats in (prev, curr))
        applied = f"Applied `{self._pruning_method_name}`"
        rank_zero_info(f"{applied}. Pruned: {old}/{total} ({old / total:.2%}) -> {new}/{total} ({new / total:.2%})")
        if self._verbose == 2:
            for (module, name), (old, _), (new, total) in zip(self._parameters_to_prune, prev, curr, strict=True):
                shares = f"{old} ({old / total:.2%}) -> {new} ({new / total:.2%})"
                rank_zero_info(f"{applied} to `{module!r}.{name}` with amount={amount}. Pruned: {shares}")


def _original(module: nn.Module, name: str) -> Any:
    """Return the parameter itself, pruned or not."""
    return module._parameters.get(name + "_orig", module._parameters.get(name))


def _refresh(module: nn.Module, name: str) -> None:
    """Set ``module.name`` to the masked parameter, as the next forward would."""
    mask = module._buffers.get(name + "_mask")
    if mask is not None:
        setattr(module, name, mask.to(_original(module, name).dtype) * _original(module, name))


@contextmanager
def _keep_order(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the order of parameters in their modules, also under another name: optimizers rely on it."""
    orders = [(module, [_stem(key) for key in module._parameters]) for module in modules]
    yield
    for module, order in orders:
        items = sorted(module._parameters.items(), key=lambda item: order.index(_stem(item[0])))
        module._parameters.clear()
        module._parameters.update(items)


def _stem(name: str) -> str:
    return name.removesuffix("_orig")


def _plain(weights: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the masks multiplied in, in the same order."""
    plain = {}
    for key, value in weights.items():
        name = key.removesuffix("_orig")
        if key != name and name + "_mask" in weights:
            plain[name] = value * weights[name + "_mask"].to(value.dtype)
        elif not (key.endswith("_mask") and key.removesuffix("_mask") + "_orig" in weights):
            plain[key] = value
    return torch_private.with_versions(plain, weights)
