"""WeightAveraging, EMAWeightAveraging and StochasticWeightAveraging: averages of the weights of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hasten._lib import check, torch_private
from hasten._lib.device import as_device
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean, without_unknown
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten._lib.tree import by_kind, is_absent
from hasten.checkpoint.snapshots import showing
from hasten.elsewhere import conventions
from hasten.hooks import STEPS
from hasten.logged_value import LoggingContext
from hasten.loops.run_data import make_transfer
from hasten.loops.user_code import with_batch_idx_if_taken
from hasten.module.callback import Callback
from hasten.optim import LRSchedulerConfig
from hasten.seed import isolate_rng
from hasten.strategies.sharded import as_shard, local_part
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.types import Batch, StepOutput

AverageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class WeightAveraging(Callback):
    """Keep an average of the weights; validate with it, and leave it in the module when training ends.

    The average is updated whenever ``should_update`` returns True: after each optimizer step unless you override it.
    During validation the module holds the average, also in the module's own hooks, and afterwards its own weights
    again, also if validation fails. A checkpoint's ``state_dict`` is the average, so that whoever loads it gets what
    was validated; the training weights are stored in another entry, and a resumed run continues with them bit for bit,
    also from a checkpoint saved after training ended.

    Before the first update, validation, checkpoints and the end of training use the weights themselves. Buffers that
    are not floating-point are copied, and ``trainer.validate`` uses the weights it is given.

    Args:
        device: where the average is kept; by default on the device of the module.
        use_buffers: average the buffers too (the statistics of batch normalization, for instance) instead of copying
            them.
        kwargs: ``avg_fn(averaged, current, num_averaged)``, which returns the new average of a parameter, or
            ``multi_avg_fn(averaged, current, num_averaged)``, which changes lists of them in place; the mean over all
            updates by default.

    Raises:
        TypeError: an unknown argument.
        MisconfigurationException: an argument is out of range.

    Example::

        >>> class FromStep100(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 100
        >>> FromStep100().should_update(step_idx=99)
        False

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018;
    `torch.optim.swa_utils <https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema>`_.

    """

    # When a validation or an epoch ends, the module's own hooks still see the average, and all changes are done.
    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        **kwargs: Callable[..., Any] | None,
    ) -> None:
        check.declared(WeightAveraging.__init__, locals())
        owner, error, known = type(self).__name__, MisconfigurationException, ["avg_fn", "multi_avg_fn"]
        for name in kwargs.keys() - known:
            what = f"{owner}({name}=...): unknown argument."
            fix = f"{did_you_mean(name, known)} Besides device and use_buffers, it takes {known}."
            raise make_error(TypeError, what, fix=fix, argument=name)
        allowed = "a function of (averaged, current, num_averaged)"
        self._avg_fn, self._multi_avg_fn = (
            check.callable_(owner, name, kwargs.get(name), allowed=allowed, allow_none=True, error=error)
            for name in known
        )
        if self._avg_fn is not None and self._multi_avg_fn is not None:
            raise make_error(
                error, f"{owner}: avg_fn and multi_avg_fn both define the average.", fix="Give one of them."
            )
        self._device = as_device(owner, device)
        self._use_buffers = use_buffers
        self._average_model: ModelAverage | None = None
        # Whether the module holds the average for the time of a validation.
        self._swapped = False
        self._loaded: Any = None
        # The training weights, once the module holds the average for good: tensors by name.
        self._trained: dict[str, Tensor] | None = None
        self._restarting = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1
        self._steps_before = 0
        # The optimizer steps about which should_update was asked.
        self._asked_step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now; override it to choose.

        Args:
            step_idx: index (from 0) of the optimizer step just done; None at the end of an epoch.
            epoch_idx: index (from 0) of the epoch just done; None after a step.

        """
        return step_idx is not None

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._steps_before = trainer.global_step
            trainer.strategy.engine.require_own_parameters(
                type(self).__name__,
                "the engine steps copies of the weights that it keeps itself.",
                "Use strategy='ddp_sharded' or 'fsdp'.",
            )
            self._average_model, self._loaded, self._trained, self._swapped = None, None, None, False
            self._restarting = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the average, a clone of each tensor: the module is complete and on its device now."""
        self._average_model = average = ModelAverage(type(self).__name__, pl_module, self._device)
        if self._loaded is not None:
            weights, others = self._loaded
            self._loaded = None
            # Loaded through the module, which knows how its weights are loaded; the average then holds its training
            # weights.
            strict = pl_module.strict_loading is not False
            trainer.strategy.state.load_state_dict(
                pl_module, weights, strict=strict, source="the average in the checkpoint"
            )
            average.exchange()
            average.n_averaged.copy_(others["n_averaged"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the updates that were still due when another callback saved the checkpoint."""
        if not self._restarting:
            self._latest_update_step = self._asked_step = trainer.global_step
            self._latest_update_epoch = trainer.progress.epochs_done - 1
        if (guard := trainer.current_run.observers.guard) is not None:
            # Weights that on_bad_loss="rewind" leaves must not stay in the average.
            guard.add(self._averages)
        self._catch_up(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the parameters and buffers again: they may have changed."""
        if self._average_model is not None:
            self._average_model.find()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # In manual optimization, a batch may have several steps.
        new = range(min(self._asked_step, step - 1), step)
        self._asked_step = step
        if step > self._latest_update_step and any(self.should_update(step_idx=index) for index in new):
            self._update(pl_module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.progress.epoch
        is_new = trainer.progress.last_batch and epoch > self._latest_update_epoch
        if is_new and self.should_update(epoch_idx=epoch):
            self._update(pl_module)
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._swap_models(trainer, pl_module)

    on_validation_epoch_end = on_validation_epoch_start  # back again

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the training weights back if a validation failed: a checkpoint saved now must be right."""
        if self._swapped:
            self._swap_models(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module for good; keep the training weights for checkpoints."""
        if self._has_average and self._trained is None:
            trainer.strategy.sharding.reshard()
            self._trained = _copies(pl_module)
            self._copy_average_to_current(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same if a resumed run had nothing left to train."""
        if self._restarting and self._trained is None:
            self._catch_up(trainer, pl_module)
        WeightAveraging.on_train_end(self, trainer, pl_module)
        steps = trainer.global_step - self._steps_before
        if not self._has_average and steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"{type(self).__name__} has averaged nothing in {steps} steps: the weights are those of the last one.",
                fix="Begin to average earlier.",
            )

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return when the average was last updated; the average itself is the checkpoint's ``state_dict``."""
        step, epoch = self._latest_update_step, self._latest_update_epoch
        return {"latest_update_step": step, "latest_update_epoch": epoch, "asked_step": self._asked_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restarting = True
        self._latest_update_step = state_dict["latest_update_step"]
        self._asked_step = state_dict.get("asked_step", self._latest_update_step)
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make the average the checkpoint's ``state_dict``, and store the training weights in another entry."""
        average = self._average_model
        if average is None or not self._has_average:
            return
        # The module holds the training weights, the average for a validation, or the average for good.
        current = checkpoint["state_dict"]
        with average.shown() if self._trained is None else _shown(pl_module, self._trained):
            averaged = trainer.strategy.state.state_dict(pl_module)
        if self._swapped or self._trained is not None:
            current, averaged = averaged, current
        checkpoint["state_dict"] = averaged
        if "optimizer_states" in checkpoint:
            checkpoint["current_model_state"] = current
            checkpoint["averaging_state"] = {"n_averaged": average.n_averaged}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue training with the training weights; the average is loaded once it has been made."""
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        if "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            self._loaded = checkpoint["state_dict"], checkpoint["averaging_state"]
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        else:
            rank_zero_warn(
                f"The checkpoint was not created with WeightAveraging: {type(self).__name__} starts a new average of "
                "the weights here."
            )

    # -- internal functions

    def _averages(self) -> list[Tensor]:
        return [] if self._average_model is None else self._average_model.tensors()

    def _catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The hooks of a subclass are not called: no batch and no epoch ends here.
        WeightAveraging.on_train_batch_end(self, trainer, pl_module, None, None, 0)
        if trainer.progress.epoch_ended:
            WeightAveraging.on_train_epoch_end(self, trainer, pl_module)

    @property
    def _has_average(self) -> bool:
        return self._average_model is not None and bool(self._average_model.n_averaged)

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        count = self._average_model.n_averaged
        is_first = not count
        pairs: list[tuple[Tensor, Tensor]] = []
        for current, averaged in self._average_model.pairs():
            is_averaged = isinstance(current, nn.Parameter) or self._use_buffers
            part = local_part(current)
            if is_first or not (is_averaged and (part.is_floating_point() or part.is_complex())):
                averaged.copy_(part)
            else:
                pairs.append((averaged, part.to(averaged.device)))
        multi_avg_fn = self._multi_avg_fn or get_swa_multi_avg_fn()
        for group in by_kind(pairs, lambda pair: pair[0]):
            all_averaged, all_current = map(list, zip(*group, strict=True))
            if self._avg_fn is None:
                multi_avg_fn(all_averaged, all_current, count)
            else:
                for averaged, current in group:
                    averaged.copy_(self._avg_fn(averaged, current, count))
        count += 1

    def _swap_models(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_average:
            assert self._average_model is not None
            trainer.strategy.sharding.reshard()
            self._average_model.exchange()
            self._swapped = not self._swapped

    @torch.no_grad()
    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        for current, averaged in self._average_model.pairs():
            local_part(current).copy_(averaged)


class ModelAverage:
    """The averages of a module's parameters and buffers: a clone of each, or of the part that this process holds.

    It lives on ``device``, by default where the module does; messages name its owner.
    """

    def __init__(self, owner: str, module: nn.Module, device: torch.device | None) -> None:
        # On the host, where reading it does not wait for the device.
        self.n_averaged = torch.tensor(0)
        self._owner, self._module, self._device = owner, module, device
        self._averages: dict[str, Tensor] = {}
        self._names = {path: list(part._parameters) for path, part in module.named_modules()}
        # (parameters or buffers of a part of the module, name there, name in the module)
        self._slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        self.find()
        self.pairs()

    def find(self) -> None:
        """List the tensors: walking through the modules in each step would cost more than averaging.

        They are looked up by name in each update, since programs assign new ones to their buffers.
        """
        self._slots, seen = [], set()
        for path, part in self._module.named_modules():
            before = self._names.get(path)
            if before is not None and part._parameters.keys() != set(before):
                raise make_error(
                    RuntimeError,
                    f"{self._owner}: {type(part).__name__} has the parameters {list(part._parameters)}, and had "
                    f"{before} when the average was made.",
                    fix="Make all parameters before training; pruning and averaging cannot be combined.",
                )
        for path, tensors, name, tensor in _entries(self._module):
            if id(tensor) not in seen:
                if tensor is not None:
                    seen.add(id(tensor))
                self._slots.append((tensors, name, path))

    @torch.no_grad()
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return (tensor of the module, average of the part of it that this process holds), to use without grad."""
        pairs = []
        for tensors, name, path in self._slots:
            current = tensors.get(name)
            if current is None:
                continue
            part, averaged = local_part(current), self._averages.get(path)
            if averaged is None or averaged.shape != part.shape:
                # Also a buffer that was made or grown in a batch, such as a table of positions.
                averaged = self._averages[path] = part.detach().to(self._device or part.device, copy=True)
            pairs.append((current, averaged))
        return pairs

    def tensors(self) -> list[Tensor]:
        """Return the averages, and how many weights are in them."""
        return [self.n_averaged, *self._averages.values()]

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of the module and the average."""
        for current, averaged in self.pairs():
            # One tensor at a time: a second copy of the whole model may not fit.
            part = local_part(current)
            kept = averaged.clone()
            averaged.copy_(part)
            part.copy_(kept)

    def shown(self) -> AbstractContextManager[None]:
        """Return a context in which the module holds the average, for its ``state_dict()``; see ``_shown``."""
        return _shown(self._module, self._averages)


def _shown(module: nn.Module, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which ``module`` holds other tensors, by their names in it, for its ``state_dict()``.

    Nothing is copied, and the module's own tensors do not change.
    """
    # Keyed by the tensor: several parts may share one.
    stand_ins: dict[int, Tensor] = {}
    entries: list[tuple[dict[str, Any], str, Tensor]] = []
    for path, tensors, name, tensor in _entries(module):
        value = values.get(path)
        if tensor is not None and value is not None and id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = as_shard(value, tensor)
        if id(tensor) in stand_ins:
            entries.append((tensors, name, stand_ins[id(tensor)]))
    return showing(entries)


def _entries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor | None]]:
    """Yield (name in the module, parameters or buffers of a part, name there, tensor)."""
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                yield f"{path}.{name}".lstrip("."), tensors, name, tensor


@torch.no_grad()
def _copies(module: nn.Module) -> dict[str, Tensor]:
    """Return copies in main memory of the tensors of a module, or of the parts of them that this process holds."""
    named = {path: tensor for path, _, _, tensor in _entries(module) if tensor is not None}
    once = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: local_part(named[name]).detach().to("cpu", copy=True) for name in once.values()}


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    See ``WeightAveraging`` for validation, checkpoints and resuming. The first update copies the weights. The two
    starts are independent: ``update_starting_at_step`` applies to the updates after steps, and
    ``update_starting_at_epoch`` adds one update at the end of each epoch from then on. Use ``update_every_n_steps=0``
    for those alone.

    Args:
        device: where the average is kept; by default on the device of the module.
        use_buffers: average the buffers too instead of copying them.
        decay: share of the average that an update keeps, from 0 to 1.
        update_every_n_steps: update after the optimizer steps whose index (from 0) is a multiple of this; 0 for none.
            In manual optimization, update after a batch with such a step.
        update_starting_at_step: index of the first optimizer step that may update.
        update_starting_at_epoch: index of the first epoch with an update at its end; None for none.
        kwargs: none: ``avg_fn`` and ``multi_avg_fn`` cannot be chosen.

    Raises:
        TypeError: an unknown argument.
        MisconfigurationException: an argument is out of range.

    Example::

        >>> ema = EMAWeightAveraging(decay=0.99, update_every_n_steps=2, update_starting_at_step=10)
        >>> [step for step in range(15) if ema.should_update(step_idx=step)]
        [10, 12, 14]

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.

    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: object,
    ) -> None:
        name = type(self).__name__
        for fixed in {"avg_fn", "multi_avg_fn"}.intersection(kwargs):
            what = f"{name}({fixed}=...): it averages exponentially."
            raise make_error(TypeError, what, fix=f"Use WeightAveraging({fixed}=...).", argument=fixed)
        error = MisconfigurationException
        check.number(name, "decay", decay, at_least=0, at_most=1, error=error)
        check.whole(name, "update_every_n_steps", update_every_n_steps, at_least=0, error=error)
        for argument, value in (
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            check.whole(name, argument, value, at_least=0, allow_none=True, error=error)
        # Without functions inside functions, so that it can be sent to other processes.
        average = functools.partial(_average_exponentially, decay)
        super().__init__(device, use_buffers, **kwargs, multi_avg_fn=average)  # type: ignore[arg-type]
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average after this step or epoch."""
        every, first_step = self.update_every_n_steps, self.update_starting_at_step or 0
        if step_idx is not None and every and step_idx >= first_step and step_idx % every == 0:
            return True
        first_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and first_epoch is not None and epoch_idx >= first_epoch


def _average_exponentially(decay: float, averaged: list[Tensor], current: list[Tensor], count: Tensor) -> None:
    get_ema_multi_avg_fn(decay)(averaged, current, count)


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights over the last epochs, and leave the average in the module when training ends.

    From the epoch ``swa_epoch_start`` on, the learning rate goes to ``swa_lrs`` (replacing the scheduler, if any) and
    the weights at the end of each complete epoch are averaged: the recipe of PyTorch. If the module has batch
    normalization, its statistics are recomputed for the averaged weights: ``training_step`` runs once more over
    the training data, without backward, and what it logs is dropped. Average, learning rate and the final training
    weights are part of checkpoints; a resumed run ends with the same average, bit for bit.

    A run that is stopped early gets the average of the epochs done; validation within fit uses the current weights.

    Args:
        swa_lrs: the learning rate to go to, or a list with one for each parameter group.
        swa_epoch_start: the first epoch averaged, counted from 1 (int), or a share of ``max_epochs`` (float).
        annealing_epochs: epochs in which the learning rate gets there; 0 for at once.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: takes (average, weights, number averaged so far), returns the new average; the mean by default.
        device: where the average is kept; None for the device of the module.

    Raises:
        MisconfigurationException: an argument is out of range; when fit begins, if the run has several optimizers or
            schedulers, or ends before the averaging starts.

    Example::

        >>> StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=8).swa_start
        7

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018;
    `torch.optim.swa_utils <https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema>`_.

    """

    runs_last: ClassVar[bool] = False
    # The averages of the parameters in ``_named``, or of the parts of them that this process holds.
    _average_model: nn.ParameterList | None  # type: ignore[assignment]

    @without_unknown
    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFunction | None = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008 - a constant
    ) -> None:
        super().__init__(device, avg_fn=self.avg_fn if avg_fn is None else avg_fn)
        name, error = type(self).__name__, MisconfigurationException
        allowed = "a positive float, or a list of positive floats with one for each parameter group"
        for rate in swa_lrs if isinstance(swa_lrs, list) and swa_lrs else [swa_lrs]:
            if isinstance(rate, bool) or not isinstance(rate, float) or rate <= 0:
                raise check.wrong(name, "swa_lrs", swa_lrs, allowed, error=error)
        least, most = (0, 1) if isinstance(swa_epoch_start, float) else (1, math.inf)
        allowed = "an epoch counted from 1 (int), or a share of max_epochs from 0.0 to 1.0 (float)"
        check.number(
            name, "swa_epoch_start", swa_epoch_start, at_least=least, at_most=most, allowed=allowed, error=error
        )
        check.whole(name, "annealing_epochs", annealing_epochs, at_least=0, error=error)
        check.one_of(name, "annealing_strategy", annealing_strategy, ("cos", "linear"), error=error)
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._max_epochs: int | None = None
        self._named: dict[str, nn.Parameter] = {}
        self._initialized = False
        self.n_averaged = torch.tensor(0)
        self.momenta: dict[nn.Module, float | None] = {}

    @property
    def swa_start(self) -> int:
        """Index (from 0) of the first epoch averaged."""
        start = self._swa_epoch_start
        if isinstance(start, float):
            assert self._max_epochs is not None, "known when fit has begun"
            start = int(self._max_epochs * start)
        return max(start - 1, 0)

    @property
    def swa_end(self) -> float:
        """Index (from 0) of the last epoch averaged; infinite without a limit."""
        return math.inf if self._max_epochs in (-1, None) else self._max_epochs - 1

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: nn.Module) -> bool:
        """Return whether a module has batch normalization."""
        return any(isinstance(module, torch_private.BatchNorm) for module in pl_module.modules())

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average the weights after this epoch."""
        is_active = self._average_model is not None and epoch_idx is not None
        return is_active and self.swa_start <= epoch_idx <= self.swa_end  # type: ignore[operator]

    # -- during a run

    # The average is updated once an epoch, and validation uses the current weights.
    on_train_batch_end = Callback.on_train_batch_end
    on_validation_epoch_start = Callback.on_validation_epoch_start
    on_validation_epoch_end = Callback.on_validation_epoch_end
    on_exception = Callback.on_exception

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._initialized, self._latest_update_epoch = False, -1
            self.n_averaged = torch.tensor(0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the run; restore the average of a resumed one before its schedulers are restored."""
        self._max_epochs = trainer.max_epochs
        self._check(trainer, pl_module)
        self._named = dict(pl_module.named_parameters())
        if self._initialized:
            self._begin(trainer, pl_module)
        if self._average_model is not None and self._loaded is not None:
            with torch.no_grad():
                for (name, parameter), average in zip(self._named.items(), self._average_model, strict=True):
                    average.copy_(local_part(trainer.strategy.sharding.from_checkpoint(self._loaded[name], parameter)))
            self._loaded = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._initialized and self.swa_start <= trainer.current_epoch <= self.swa_end:
            self._begin(trainer, pl_module)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its progress; the learning rate is stored with the schedulers."""
        averages = self._average_model
        return {
            "initialized": self._initialized,
            "n_averaged": int(self.n_averaged),
            "latest_update_epoch": self._latest_update_epoch,
            "average_model_state": None
            if averages is None
            else {
                name: as_shard(average.detach(), parameter)
                for (name, parameter), average in zip(self._named.items(), averages, strict=True)
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restarting = True
        self.n_averaged = torch.tensor(state_dict["n_averaged"])
        self._latest_update_epoch = state_dict["latest_update_epoch"]
        self._initialized = state_dict.get("initialized", state_dict["n_averaged"] > 0)
        self._loaded = state_dict["average_model_state"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """After training, store the training weights in addition to the average, which the module holds by then."""
        if self._trained is not None and "optimizer_states" in checkpoint:
            with _shown(pl_module, self._trained):
                checkpoint["current_model_state"] = trainer.strategy.state.state_dict(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue training with the training weights."""
        if trainer.state.fn is TrainerFn.FITTING and "averaging_state" not in checkpoint:
            checkpoint["state_dict"] = checkpoint.get("current_model_state", checkpoint["state_dict"])

    # -- the arithmetic, as programs call and override it

    @staticmethod
    def avg_fn(averaged_model_parameter: Tensor, model_parameter: Tensor, num_averaged: Tensor) -> Tensor:
        """Return the mean of ``num_averaged`` parameters and one more."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    @staticmethod
    @torch.no_grad()
    def update_parameters(
        average_model: nn.Module, model: nn.Module, n_averaged: Tensor, avg_fn: AverageFunction
    ) -> None:
        """Average the parameters of ``model`` into ``average_model``, and count that in ``n_averaged``."""
        for average, parameter in zip(average_model.parameters(), model.parameters(), strict=True):
            current = local_part(parameter).detach().to(average.device)
            average.copy_(avg_fn(average.detach(), current, n_averaged) if n_averaged else current)
        n_averaged += 1

    @staticmethod
    @torch.no_grad()
    def transfer_weights(src_pl_module: nn.Module, dst_pl_module: nn.Module) -> None:
        """Copy all parameters from one module to another."""
        for source, target in zip(src_pl_module.parameters(), dst_pl_module.parameters(), strict=True):
            local_part(target).copy_(local_part(source))

    def reset_batch_norm_and_save_state(self, pl_module: nn.Module) -> None:
        """Reset the statistics of the batch normalization that trains, and let it average over all batches."""
        self.momenta = {}
        for module in pl_module.modules():
            if isinstance(module, torch_private.BatchNorm) and module.training and module.running_mean is not None:
                module.reset_running_stats()
                self.momenta[module] = module.momentum
                module.momentum = None

    def reset_momenta(self) -> None:
        """Restore the momentum of batch normalization."""
        for module, momentum in self.momenta.items():
            module.momentum = momentum  # type: ignore[assignment]
        self.momenta = {}

    # -- internal functions

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start, rates, last = self._swa_epoch_start, self._swa_lrs, self._max_epochs
        optimizers, schedulers, kind = (trainer.optimizers, trainer.lr_scheduler_configs, type(pl_module).__name__)
        problem, fix = "", ""
        if len(schedulers) > 1:
            given = f"{kind}.configure_optimizers() gives {len(schedulers)}"
            problem = f": SWA is currently not supported for more than 1 `lr_scheduler`, and {given}."
        elif len(optimizers) != 1:
            given = f"{kind}.configure_optimizers() gives {len(optimizers)}"
            problem = f": SWA currently works with 1 `optimizer`, and {given}."
        elif isinstance(start, float) and last == -1:
            problem = f": `swa_epoch_start` as a float ({start}) is not supported when `max_epochs=-1`."
            fix = "Use an epoch (int) instead."
        elif self.swa_start > self.swa_end and not trainer.fast_dev_run:
            problem = f"(swa_epoch_start={start}): training ends after max_epochs={last}."
            fix = "Use an earlier epoch."
            if conventions.current().mistakes_are_warnings:
                rank_zero_warn(type(self).__name__ + problem, fix=fix)
                return
        elif isinstance(rates, list) and len(rates) != (groups := len(optimizers[0].param_groups)):
            problem = (
                f"(swa_lrs={rates}): {len(rates)} learning rates, and the optimizer has {groups} parameter groups."
            )
            fix = "Give one for each, or a single number."
        elif not pl_module.automatic_optimization and self.pl_module_contains_batch_norm(pl_module):
            problem = (
                f": batch normalization needs training_step to run once more without training, and that of {kind} "
                "steps the optimizer itself."
            )
            fix = "Use automatic optimization or WeightAveraging."
        elif any(map(is_absent, pl_module.parameters())):
            problem = ": with MeshStrategy(pipeline=...), no process has the average of all layers."
            fix = "Use WeightAveraging or EMAWeightAveraging."
        if problem:
            raise MisconfigurationException(type(self).__name__ + problem, fix=fix)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._initialized = True
        parts = [local_part(parameter).detach() for parameter in pl_module.parameters()]
        self._average_model = nn.ParameterList(
            nn.Parameter(part.to(self._device or part.device, copy=True), requires_grad=False) for part in parts
        )
        configs = trainer.lr_scheduler_configs
        rates: Any = self._swa_lrs
        schedule = SWALR(trainer.optimizers[0], rates, self._annealing_epochs, self._annealing_strategy)
        groups = trainer.optimizers[0].param_groups
        for group, rate in zip(groups, rates if isinstance(rates, list) else [rates] * len(groups), strict=True):
            # Where the schedule goes, for programs that read it, as under Lightning.
            group["initial_lr"] = rate
        if configs:
            if configs[0].interval != "epoch" or configs[0].frequency != 1:
                rank_zero_warn(
                    f"SWA is currently only supported every epoch: from here on the learning rate changes once an "
                    f"epoch, and no longer every {configs[0].frequency} {configs[0].interval}s."
                )
            rank_zero_info(
                f"Swapping scheduler `{type(configs[0].scheduler).__name__}` for `SWALR`: the learning rate goes to "
                f"{self._swa_lrs} from here on."
            )
        configs[:] = [LRSchedulerConfig(schedule, name=configs[0].name if configs else None)]

    def _averages(self) -> list[Tensor]:
        return [self.n_averaged, *(self._average_model or ())]

    @property
    def _has_average(self) -> bool:
        return self._average_model is not None and bool(self.n_averaged)

    def _update(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        assert self._avg_fn is not None
        self.update_parameters(self._average_model, pl_module, self.n_averaged, self._avg_fn)

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        self.transfer_weights(self._average_model, pl_module)
        self.reset_batch_norm_and_save_state(pl_module)
        if not self.momenta:
            return
        trainer, modules = pl_module.trainer, list(self.momenta)
        try:
            _run_once_more(trainer.current_run)
        finally:
            self.reset_momenta()
        if trainer.runtime.several_processes:
            for module in modules:
                for statistic in (module.running_mean, module.running_var):
                    assert isinstance(statistic, Tensor)
                    statistic.copy_(trainer.strategy.reduce(statistic, reduce_op="mean"))


def _run_once_more(run: Run) -> None:
    """Run ``training_step`` over the batches of an epoch; only what modules gather themselves remains."""
    step = run.runtime.bind(with_batch_idx_if_taken(run.module.training_step), module=run.module)
    transfer, logged = make_transfer(run, run.data.train), run.logged
    position = run.data.train.stream.state_dict(run.progress.batch)
    before = logged.context, logged.batch, logged.batch_size
    # A loader without an end gives as many batches as the epoch had.
    count = None if math.isfinite(run.data.train.limit) else run.progress.batch
    with isolate_rng():
        # Resumed with nothing left to train: the batches come in the order of the uninterrupted run.
        run.resume.restore_random()
        batches = run.data.train.start_epoch()
        # What is logged goes to a context that is never published.
        logged.context = LoggingContext(STEPS["training_step"])
        try:
            for batch_idx, (batch, _) in enumerate(islice(batches, count)):
                batch = batch if transfer is None else transfer(batch)
                logged.batch, logged.batch_size = batch, 0
                step(batch, batch_idx)
        finally:
            batches.close()
            logged.context, logged.batch, logged.batch_size = before
    run.data.train.stream.load_state_dict(position)
