"""StochasticWeightAveraging: the mean of the weights after each of the last epochs, trained at a high learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_info
from hasten.callbacks.weight_averaging import WeightAveraging
from hasten.hooks import STEPS
from hasten.logged_value import LoggingContext
from hasten.loops.progress import TrainerFn
from hasten.loops.run_data import make_transfer
from hasten.loops.user_code import with_batch_idx_if_taken
from hasten.module.callback import Callback
from hasten.optim import LRSchedulerConfig
from hasten.seed import isolate_rng

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

AverageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights over the last epochs, and leave the average in the module when training ends.

    From the epoch ``swa_epoch_start`` on, the learning rate goes to ``swa_lrs`` (replacing the scheduler, if any) and
    the weights at the end of each complete epoch are averaged: the recipe of PyTorch. If the module has batch
    normalisation, its statistics are recomputed for the averaged weights: ``training_step`` runs once more over
    the training data, without gradients, and what it logs is dropped. Average, learning rate and the final training
    weights are part of checkpoints; a resumed run ends with the same average, bit for bit.

    Differences from Lightning: the weights after the last epoch are in the average (there, those at the start of
    each epoch are averaged); batch normalisation needs no further epoch, so epochs, steps, hooks and loggers do not
    see it; a run that is stopped early gets the average of the epochs done; validation within fit uses the current
    weights, in both.

    Args:
        swa_lrs: the learning rate to go to, or a list with one for each parameter group.
        swa_epoch_start: the first epoch averaged, counted from 1 (int), or a share of ``max_epochs`` (float).
        annealing_epochs: epochs in which the learning rate gets there; 0 for at once.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: takes (average, weights, number averaged so far), returns the new average; the mean by default.
        device: where the average lives; None for where the module does.

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
    # The averages of all parameters, whose names are in ``_names``.
    _average_model: nn.ParameterList | None  # type: ignore[assignment]

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFunction | None = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008 - a constant
    ) -> None:
        super().__init__(device, avg_fn=avg_fn or self.avg_fn)
        name = type(self).__name__
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(_is_number(rate) and rate > 0 for rate in rates):
            raise MisconfigurationException(
                f"{name}(swa_lrs={swa_lrs!r}): use a number above 0, or a list with one for each parameter group."
            )
        is_share = isinstance(swa_epoch_start, float)
        if not _is_number(swa_epoch_start) or not (
            0 <= swa_epoch_start <= 1 if is_share else swa_epoch_start >= 1
        ):
            raise MisconfigurationException(
                f"{name}(swa_epoch_start={swa_epoch_start!r}): use an epoch counted from 1 (int), or a share of "
                "max_epochs from 0.0 to 1.0 (float)."
            )
        error = MisconfigurationException
        self._annealing_epochs = check.whole(
            name, "annealing_epochs", annealing_epochs, at_least=0, error=error
        )
        self._annealing_strategy = check.one_of(
            name, "annealing_strategy", annealing_strategy, ("cos", "linear"), error=error
        )
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._max_epochs: int | None = None
        self._names: list[str] = []
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
        """Return whether a module has batch normalisation."""
        return any(isinstance(module, _BatchNorm) for module in pl_module.modules())

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
        """Forget the previous fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._initialized, self._latest_update_epoch = False, -1
            self.n_averaged = torch.tensor(0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the run; restore the average of a resumed one before its schedulers are restored."""
        self._max_epochs = trainer.max_epochs
        self._check(trainer, pl_module)
        self._names = [name for name, _ in pl_module.named_parameters()]
        if self._initialized:
            self._begin(trainer, pl_module)
        if self._average_model is not None and self._loaded is not None:
            with torch.no_grad():
                for name, average in zip(self._names, self._average_model, strict=True):
                    average.copy_(self._loaded[name])
            self._loaded = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging when it is time."""
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
            else {name: each.detach() for name, each in zip(self._names, averages, strict=True)},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average and its progress."""
        self._restarting = True
        self.n_averaged = torch.tensor(state_dict["n_averaged"])
        self._latest_update_epoch = state_dict["latest_update_epoch"]
        self._initialized = state_dict.get("initialized", state_dict["n_averaged"] > 0)
        self._loaded = state_dict["average_model_state"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """After training, store the training weights beside the average that the module holds by then."""
        if self._trained is not None and "optimizer_states" in checkpoint:
            checkpoint["current_model_state"] = self._trained

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue training with the training weights."""
        if trainer.state.fn == TrainerFn.FITTING and "averaging_state" not in checkpoint:
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
            current = parameter.detach().to(average.device)
            average.copy_(avg_fn(average.detach(), current, n_averaged) if n_averaged else current)
        n_averaged += 1

    @staticmethod
    @torch.no_grad()
    def transfer_weights(src_pl_module: nn.Module, dst_pl_module: nn.Module) -> None:
        """Copy all parameters from one module to another."""
        for source, target in zip(src_pl_module.parameters(), dst_pl_module.parameters(), strict=True):
            target.copy_(source)

    def reset_batch_norm_and_save_state(self, pl_module: nn.Module) -> None:
        """Reset the statistics of the batch normalisation that trains, and let it average over all batches."""
        self.momenta = {}
        for module in pl_module.modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                module.reset_running_stats()
                self.momenta[module] = module.momentum
                module.momentum = None

    def reset_momenta(self) -> None:
        """Restore the momentum of batch normalisation."""
        for module, momentum in self.momenta.items():
            module.momentum = momentum  # type: ignore[assignment]
        self.momenta = {}

    # -- inside

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, start = type(self).__name__, self._swa_epoch_start
        optimizers, schedulers = trainer.optimizers, trainer.lr_scheduler_configs
        problem = None
        if len(optimizers) != 1 or len(schedulers) > 1:
            found = (
                f"{len(schedulers)} schedulers" if len(schedulers) > 1 else f"{len(optimizers)} optimizers"
            )
            method = f"{type(pl_module).__name__}.configure_optimizers()"
            problem = f": {method} gives {found}; it works with one."
        elif isinstance(start, float) and self._max_epochs == -1:
            problem = f"(swa_epoch_start={start}): a share needs Trainer(max_epochs=...). Use an epoch (int) instead."
        elif self.swa_start > self.swa_end and not trainer.fast_dev_run:
            problem = (
                f"(swa_epoch_start={start}): training ends after max_epochs={self._max_epochs}, so nothing would be "
                "averaged. Use an earlier epoch."
            )
        elif isinstance(self._swa_lrs, list) and len(self._swa_lrs) != len(optimizers[0].param_groups):
            problem = (
                f"(swa_lrs={self._swa_lrs}): {len(self._swa_lrs)} learning rates, and the optimizer has "
                f"{len(optimizers[0].param_groups)} parameter groups. Give one for each, or a single number."
            )
        elif not pl_module.automatic_optimization and self.pl_module_contains_batch_norm(pl_module):
            problem = (
                ": batch normalisation needs training_step to run once more without training, and that of "
                f"{type(pl_module).__name__} steps the optimizer itself. Use automatic optimization or WeightAveraging."
            )
        if problem:
            raise MisconfigurationException(name + problem)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the average, and replace the scheduler."""
        self._initialized = True
        self._average_model = nn.ParameterList(
            nn.Parameter(
                parameter.detach().to(self._device or parameter.device, copy=True), requires_grad=False
            )
            for parameter in pl_module.parameters()
        )
        configs = trainer.lr_scheduler_configs
        schedule = SWALR(
            trainer.optimizers[0],
            self._swa_lrs,  # type: ignore[arg-type]
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,
        )
        if configs:
            rank_zero_info(
                f"{type(self).__name__}: the learning rate goes to {self._swa_lrs} from here on; this replaces "
                f"{type(configs[0].scheduler).__name__}."
            )
        configs[:] = [LRSchedulerConfig(schedule, name=configs[0].name if configs else None)]

    @property
    def _has_average(self) -> bool:
        return self._average_model is not None and bool(self.n_averaged)

    def _update(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        assert self._avg_fn is not None
        self.update_parameters(self._average_model, pl_module, self.n_averaged, self._avg_fn)

    def _load_average(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        self.transfer_weights(self._average_model, pl_module)
        self.reset_batch_norm_and_save_state(pl_module)
        if not self.momenta:
            return
        try:
            _run_once_more(trainer.current_run)
        finally:
            modules = list(self.momenta)
            self.reset_momenta()
        if trainer.world_size > 1:
            for module in modules:
                for statistic in (module.running_mean, module.running_var):
                    assert isinstance(statistic, Tensor)
                    statistic.copy_(trainer.strategy.reduce(statistic, reduce_op="mean"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _run_once_more(run: Run) -> None:
    """Run ``training_step`` over the batches of an epoch; only what modules gather themselves remains."""
    step = run.runtime.bind(with_batch_idx_if_taken(run.module.training_step), module=run.module)
    transfer = make_transfer(run, run.train)
    position = run.train.stream.state_dict(run.progress.batch)
    # A loader without an end gives as many batches as the epoch had.
    count = None if math.isfinite(run.train.limit) else run.progress.batch
    with isolate_rng(), _nothing_logged(run):
        # Resumed with nothing left to train: the batches come in the order of the uninterrupted run.
        run.restore_random()
        batches = run.train.start_epoch()
        try:
            for batch_idx, (batch, _) in enumerate(islice(batches, count)):
                batch = batch if transfer is None else transfer(batch)
                run.logged.batch, run.logged.batch_size = batch, 0
                step(batch, batch_idx)
        finally:
            batches.close()  # type: ignore[attr-defined]
    run.train.stream.load_state_dict(position)


@contextmanager
def _nothing_logged(run: Run) -> Iterator[None]:
    logged = run.logged
    before = logged.context, logged.batch, logged.batch_size
    # One that nobody publishes.
    logged.context = LoggingContext(STEPS["training_step"])
    try:
        yield
    finally:
        logged.context, logged.batch, logged.batch_size = before
