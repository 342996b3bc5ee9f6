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

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.loops.states import TrainerFn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

Parameters = Sequence[tuple[nn.Module, str]]
Amount = int | float | Callable[[int], int | float]
Decision = bool | Callable[[int], bool]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ln_structured": prune.ln_structured,
    "l1_unstructured": prune.l1_unstructured,
    "random_structured": prune.random_structured,
    "random_unstructured": prune.random_unstructured,
}
_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


class ModelPruning(Callback):
    """Set the least important weights to zero, each epoch another share of those that are left.

    It uses ``torch.nn.utils.prune``. Checkpoints hold plain weights with the zeros in them, so they load into a model
    that knows nothing of pruning; masks and what they hide are in the callback's state, so that a resumed run goes on
    bit for bit. When training ends, the masks become part of the weights.

    Where it differs from Lightning: masks, and the first weights that the lottery ticket goes back to, survive a
    resume; parameters keep their order in the module; an epoch prunes when it is complete.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, or a
            subclass of ``torch.nn.utils.prune.BasePruningMethod`` (the class, not an instance).
        parameters_to_prune: pairs of module and parameter name; all weights and biases by default.
        parameter_names: of these, only those called so: ``["weight"]``, ``["bias"]`` or both.
        use_global_unstructured: compare all parameters with one another, not each in itself.
        amount: how many: a share of what is left (float), a number (int), or a function of the epoch that returns one.
        apply_pruning: whether to prune in an epoch: a bool, or a function of the epoch.
        make_pruning_permanent: let the masks become part of the weights, in checkpoints and when training ends.
        use_lottery_ticket_hypothesis: after pruning, put what is left back to its value at the beginning: a bool, or a
            function of the epoch.
        resample_parameters: for that, draw new first values in place of the old ones.
        pruning_dim: the dimension whose slices structured pruning removes.
        pruning_norm: the norm by which ``"ln_structured"`` compares them.
        verbose: say nothing (0), how much is pruned (1), or that of each parameter (2).
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
        parameters_to_prune: Parameters = (),
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
        for name in parameter_names or ():
            if name not in self.PARAMETER_NAMES:
                raise MisconfigurationException(
                    f"ModelPruning(parameter_names={parameter_names}): {name!r} is none of "
                    f"{list(self.PARAMETER_NAMES)}." + did_you_mean(str(name), self.PARAMETER_NAMES)
                )
        if isinstance(amount, bool) or not (isinstance(amount, (int, float)) or callable(amount)):
            raise MisconfigurationException(
                f"ModelPruning(amount={amount!r}): use a share from 0.0 to 1.0, a number of weights, or a function of "
                "the epoch that returns one."
            )
        if not callable(amount) and (amount < 0 or (isinstance(amount, float) and amount > 1)):
            raise MisconfigurationException(
                f"ModelPruning(amount={amount!r}): use a share from 0.0 to 1.0 (float), or a number of weights (int)."
            )
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"ModelPruning(verbose={verbose!r}): use 0, 1 or 2.")
        self._use_global_unstructured = use_global_unstructured
        self._options: dict[str, Any] = {}
        self.pruning_fn = self._find_pruning_fn(pruning_fn, pruning_dim, pruning_norm)
        self._given = parameters_to_prune
        self._parameters_to_prune = parameters_to_prune
        self._parameter_names = parameter_names or list(self.PARAMETER_NAMES)
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._paths: list[str] = []
        self._first_values: list[Tensor] = []
        # Copies of layers, to draw new first values in.
        self._templates: dict[int, nn.Module] = {}
        self._loaded: dict[str, Any] | None = None

    def _find_pruning_fn(self, given: Any, dim: int | None, norm: int | None) -> Callable[..., Any]:
        name = given.lower() if isinstance(given, str) else None
        if name is None:
            if not (inspect.isclass(given) and issubclass(given, prune.BasePruningMethod)):
                raise MisconfigurationException(
                    f"ModelPruning(pruning_fn={given!r}): use one of {list(_FUNCTIONS)}, or a subclass of torch's "
                    "BasePruningMethod: the class, not an instance."
                )
            if not self._use_global_unstructured:
                raise MisconfigurationException(
                    f"ModelPruning(pruning_fn={given.__name__}): a class needs use_global_unstructured=True."
                )
            method: Any = given
        else:
            if name not in _FUNCTIONS:
                raise MisconfigurationException(
                    f"ModelPruning(pruning_fn={given!r}): use one of {list(_FUNCTIONS)}."
                    + did_you_mean(name, list(_FUNCTIONS))
                )
            if name.endswith("_structured"):
                if dim is None:
                    raise MisconfigurationException(
                        f"ModelPruning(pruning_fn={given!r}): say in which dimension with pruning_dim=..., "
                        "for instance 0."
                    )
                self._options["dim"] = dim
            if name == "ln_structured":
                if norm is None:
                    raise MisconfigurationException(
                        f"ModelPruning(pruning_fn={given!r}): say by which norm with pruning_norm=..., for instance 2."
                    )
                self._options["n"] = norm
            method = _METHODS[name]
        if self._use_global_unstructured and method.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(
                f"ModelPruning(pruning_fn={given!r}): structured pruning looks at one parameter at a time. Use "
                "use_global_unstructured=False."
            )
        if self._use_global_unstructured:
            self._pruning_method_name = method.__name__
            return method  # type: ignore[no-any-return]
        assert name is not None
        self._pruning_method_name = name
        return partial(_FUNCTIONS[name], **self._options)

    # -- to override and to call

    def filter_parameters_to_prune(self, parameters_to_prune: Parameters = ()) -> Parameters:
        """Return the parameters to prune of those found; override it to choose."""
        return parameters_to_prune

    def apply_pruning(self, amount: int | float) -> None:
        """Prune ``amount`` of what is left."""
        before = [self._pruned(module, name) for module, name in self._parameters_to_prune]
        with _order_kept(module for module, _ in self._parameters_to_prune):
            if self._use_global_unstructured:
                prune.global_unstructured(
                    self._parameters_to_prune, pruning_method=self.pruning_fn, **self._options, amount=amount
                )
            else:
                for module, name in self._parameters_to_prune:
                    self.pruning_fn(module, name=name, amount=amount)
        if self._verbose:
            self._say(before, amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Put the weights back to their values at the beginning, or to new first ones; masks stay."""
        for template in self._templates.values():
            template.reset_parameters()  # type: ignore[operator]
        for (module, name), first in zip(self._parameters_to_prune, self._first_values, strict=True):
            layer = self._templates.get(id(module))
            value = first if layer is None else getattr(layer, name)
            _original(module, name).data.copy_(value)
            _refresh(module, name)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Make the masks of ``module`` and all in it part of the weights."""
        with _order_kept(module.modules()):
            for inner in module.modules():
                for hook in list(inner._forward_pre_hooks.values()):
                    if isinstance(hook, prune.BasePruningMethod):
                        prune.remove(inner, hook._tensor_name)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Parameters = (), parameter_names: Sequence[str] = ()
    ) -> Parameters:
        """Return the pairs given, or all parameters of the module's layers called ``parameter_names``.

        Raises:
            MisconfigurationException: a pair has another form, or its module or parameter is not there.

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
        is_list = isinstance(parameters_to_prune, (list, tuple))
        for pair in parameters_to_prune if is_list else [parameters_to_prune]:
            if not (
                isinstance(pair, (list, tuple))
                and len(pair) == 2
                and isinstance(pair[0], nn.Module)
                and isinstance(pair[1], str)
            ):
                raise MisconfigurationException(
                    f"ModelPruning(parameters_to_prune=...): {pair!r} is not a pair of a module and a "
                    'parameter\'s name; write [(model.layer, "weight"), ...].'
                )
            module, name = pair
            if not any(module is inner for inner in pl_module.modules()):
                raise MisconfigurationException(
                    f"ModelPruning(parameters_to_prune=...): the {type(module).__name__} with {name!r} is not part of "
                    f"{type(pl_module).__name__}. Take it from the model that is trained."
                )
            if not isinstance(_original(module, name), Tensor):
                known = [key.removesuffix("_orig") for key in module._parameters]
                raise MisconfigurationException(
                    f"ModelPruning(parameters_to_prune=...): {type(module).__name__} has no parameter {name!r}; it has "
                    f"{known}.{did_you_mean(name, known)}"
                )
        return parameters_to_prune

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the parameters, and remember what they are at the beginning."""
        if stage != "fit":
            return
        found = self.sanitize_parameters_to_prune(pl_module, self._given, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(found)
        if not self._parameters_to_prune:
            raise MisconfigurationException(
                f"ModelPruning: {type(pl_module).__name__} has no parameters called {self._parameter_names} to prune."
            )
        paths = {id(module): path for path, module in pl_module.named_modules()}
        self._paths = [f"{paths[id(module)]}.{name}" for module, name in self._parameters_to_prune]
        self._first_values = []
        if self._use_lottery_ticket_hypothesis:
            self._first_values = [
                _original(module, name).detach().clone() for module, name in self._parameters_to_prune
            ]
        self._templates = {}
        if self._use_lottery_ticket_hypothesis and self._resample_parameters:
            self._templates = {
                id(module): copy.deepcopy(module)
                for module, _ in self._parameters_to_prune
                if callable(getattr(module, "reset_parameters", None))
            }
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the masks of a resumed run in place, and what they hide."""
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        for index, ((module, name), path) in enumerate(
            zip(self._parameters_to_prune, self._paths, strict=True)
        ):
            if path in loaded["first_values"] and self._first_values:
                self._first_values[index] = loaded["first_values"][path]
            if path not in loaded["masks"]:
                continue
            original = _original(module, name)
            mask = loaded["masks"][path].to(original.device)
            with torch.no_grad():
                original[~mask] = loaded["hidden"][path].to(original)
            with _order_kept([module]):
                prune.custom_from_mask(module, name, mask.to(original.dtype))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune after a complete epoch."""
        if self._prune_on_train_epoch_end and trainer._progress.last_batch:
            self._run_pruning(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune after a validation within fit."""
        if self._prune_on_train_epoch_end or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        # What is made in inference mode cannot be trained.
        with torch.inference_mode(False), torch.no_grad():
            self._run_pruning(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the masks part of the weights."""
        if self._make_pruning_permanent:
            self.make_pruning_permanent(pl_module)

    def _run_pruning(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        applies = self._apply_pruning(epoch) if callable(self._apply_pruning) else self._apply_pruning
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not applies or not amount:
            return
        self.apply_pruning(amount)
        lottery = self._use_lottery_ticket_hypothesis
        if lottery(epoch) if callable(lottery) else lottery:
            self.apply_lottery_ticket_hypothesis()
        if trainer.world_size > 1:
            self._agree(trainer)

    @torch.no_grad()
    def _agree(self, trainer: Trainer) -> None:
        """Take over what the first process drew: each has random numbers of its own."""
        for module, name in self._parameters_to_prune:
            for tensor in (getattr(module, name + "_mask"), _original(module, name)):
                tensor.copy_(trainer.strategy.broadcast(tensor))
            _refresh(module, name)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return masks, what they hide, and the first values."""
        masks, hidden = {}, {}
        for (module, name), path in zip(self._parameters_to_prune, self._paths, strict=False):
            mask = module._buffers.get(name + "_mask")
            if mask is not None:
                masks[path] = mask.bool()
                hidden[path] = _original(module, name).detach()[~masks[path]]
        return {
            "masks": masks,
            "hidden": hidden,
            "first_values": dict(zip(self._paths, self._first_values, strict=False)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._loaded = state_dict

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store plain weights with the zeros in them."""
        if self._make_pruning_permanent:
            checkpoint["state_dict"] = _plain(checkpoint["state_dict"])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load plain weights into a plain model; masks come on top of them."""
        self.make_pruning_permanent(pl_module)
        checkpoint["state_dict"] = _plain(checkpoint["state_dict"])

    # -- inside

    @staticmethod
    def _pruned(module: nn.Module, name: str) -> tuple[int, int]:
        """Return (number pruned, number in all) of a parameter."""
        mask = module._buffers.get(name + "_mask")
        total = _original(module, name).numel()
        return (0 if mask is None else total - int(mask.sum()), total)

    def _say(self, before: list[tuple[int, int]], amount: int | float) -> None:
        after = [self._pruned(module, name) for module, name in self._parameters_to_prune]
        total = sum(count for _, count in after)
        was, now = (sum(zeros for zeros, _ in stats) for stats in (before, after))
        rank_zero_info(
            f"{self._pruning_method_name}, amount={amount}: {was}/{total} ({was / total:.2%}) -> "
            f"{now}/{total} ({now / total:.2%}) pruned"
        )
        if self._verbose == 2:
            for path, (was, _), (now, total) in zip(self._paths, before, after, strict=True):
                rank_zero_info(f"  {path}: {was}/{total} -> {now}/{total} ({now / total:.2%})")


def _original(module: nn.Module, name: str) -> Any:
    """Return the parameter itself, pruned or not."""
    return module._parameters.get(name + "_orig", module._parameters.get(name))


def _refresh(module: nn.Module, name: str) -> None:
    """Let ``module.name`` be what the mask leaves of the parameter, as the next forward would."""
    mask = module._buffers.get(name + "_mask")
    if mask is not None:
        setattr(module, name, mask.to(_original(module, name).dtype) * _original(module, name))


@contextmanager
def _order_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave parameters where they were in their modules, also under another name: optimizers go by the order."""
    orders = [(module, [_stem(key) for key in module._parameters]) for module in modules]
    yield
    for module, order in orders:
        items = sorted(module._parameters.items(), key=lambda item: order.index(_stem(item[0])))
        module._parameters.clear()
        module._parameters.update(items)


def _stem(name: str) -> str:
    return name.removesuffix("_orig")


def _plain(weights: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the masks multiplied in, in the order there was."""
    plain = {}
    for key, value in weights.items():
        name = key.removesuffix("_orig")
        if key != name and name + "_mask" in weights:
            plain[name] = value * weights[name + "_mask"].to(value.dtype)
        elif not (key.endswith("_mask") and key.removesuffix("_mask") + "_orig" in weights):
            plain[key] = value
    return plain
