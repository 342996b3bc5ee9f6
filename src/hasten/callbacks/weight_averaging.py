"""WeightAveraging and EMAWeightAveraging: an average of the weights, which validation and checkpoints use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten._lib.tree import by_kind
from hasten.loops.progress import TrainerFn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.types import Batch, StepOutput

# (parameters or buffers of a part of the module, those of its average, name)
Slot = tuple[dict[str, Tensor | None], dict[str, Tensor | None], str]


class WeightAveraging(Callback):
    """Keep an average of the weights; validate with it, and leave it in the module when training ends.

    The average is updated whenever ``should_update`` returns True: after each optimizer step unless you override it.
    During validation the module holds the average, also in the module's own hooks, and afterwards its own weights
    again, also if validation fails. A checkpoint's ``state_dict`` is the average, so that whoever loads it gets what
    was validated; the training weights are stored beside it, and a resumed run continues with them bit for bit,
    also from a checkpoint saved after training ended.

    Differences from Lightning: before the first update there is no average, so validation, checkpoints and the
    end of training use the weights themselves, not the initial ones; buffers that are not floating-point
    (counts, for instance) are copied, not averaged; ``trainer.validate`` uses the weights it is given; an
    epoch counts for ``should_update(epoch_idx=...)`` when it is complete.

    Args:
        device: where the average lives; by default where the module does.
        use_buffers: average the buffers too (the statistics of batch normalisation, for instance) instead of copying
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
        self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any
    ) -> None:
        owner, known = type(self).__name__, ["avg_fn", "multi_avg_fn"]
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(
                    f"{owner}({name}=...): there is no such argument.{did_you_mean(name, known)} "
                    f"Besides device and use_buffers it takes {known}."
                )
            check.callable_(
                owner,
                name,
                value,
                allowed="a function of (averaged, current, num_averaged)",
                allow_none=True,
                error=MisconfigurationException,
            )
        self._avg_fn, self._multi_avg_fn = kwargs.get("avg_fn"), kwargs.get("multi_avg_fn")
        if self._avg_fn is not None and self._multi_avg_fn is not None:
            raise MisconfigurationException(
                f"{owner}: avg_fn and multi_avg_fn both define the average. Give one of them."
            )
        self._device = _check_device(owner, device)
        self._use_buffers = use_buffers
        self._average_model: AveragedModel | None = None
        self._slots: list[Slot] = []
        # Whether the module holds the average for the time of a validation.
        self._swapped = False
        self._loaded: Any = None
        # The training weights, once the module holds the average for good.
        self._trained: dict[str, Any] | None = None
        self._restarting = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now; override it to choose.

        Args:
            step_idx: index (from 0) of the optimizer step just done; None at the end of an epoch.
            epoch_idx: index (from 0) of the epoch just done; None after a step.

        """
        return step_idx is not None

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the previous fit."""
        if stage == "fit":
            self._average_model, self._loaded, self._trained, self._swapped = None, None, None, False
            self._restarting = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the average, a copy of the module: the module is complete and on its device now."""
        # The count of updates stays on the host, where reading it does not wait for the device.
        self._average_model = average = AveragedModel(pl_module)
        if self._device is not None:
            average.module.to(self._device)
        if self._loaded is not None:
            weights, others = self._loaded
            average.module.load_state_dict(weights, strict=pl_module.strict_loading)
            average.n_averaged.copy_(others["n_averaged"])
            self._loaded = None
        self._find_slots(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the updates that were still due when another callback saved the checkpoint."""
        if not self._restarting:
            self._latest_update_step = trainer.global_step
            self._latest_update_epoch = trainer.progress.epochs_done - 1
        self._catch_up(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the parameters and buffers again: they may have changed."""
        self._find_slots(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Update the average if the optimizer stepped and it is time."""
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(pl_module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the average if the epoch is complete and it is time."""
        epoch = trainer.progress.epoch
        is_new = trainer.progress.last_batch and epoch > self._latest_update_epoch
        if is_new and self.should_update(epoch_idx=epoch):
            self._update(pl_module)
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap_models(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the training weights back into the module."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap_models(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the training weights back if a validation failed: a checkpoint saved now must be right."""
        if self._swapped:
            self._swap_models(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        self._finish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do so too if a resumed run had nothing left to train."""
        if self._restarting and self._trained is None:
            self._catch_up(trainer, pl_module)
        self._finish(trainer, pl_module)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return when the average was last updated; the average itself is the checkpoint's ``state_dict``."""
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore when the average was last updated."""
        self._restarting = True
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make the average the checkpoint's ``state_dict``, with the training weights beside it."""
        average = self._average_model
        if average is None or not self._has_average:
            return
        # The module holds the training weights, the average for a validation, or the average for good.
        current, averaged = checkpoint["state_dict"], average.module.state_dict()
        if self._swapped:
            current, averaged = averaged, current
        elif self._trained is not None:
            current, averaged = self._trained, current
        checkpoint["state_dict"] = averaged
        if "optimizer_states" in checkpoint:
            checkpoint["current_model_state"] = current
            checkpoint["averaging_state"] = {"n_averaged": average.n_averaged}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue training with the training weights; the average is loaded once it has been made."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            self._loaded = checkpoint["state_dict"], checkpoint["averaging_state"]
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        else:
            rank_zero_info(
                f"{type(self).__name__}: the checkpoint has no average of the weights; a new one starts here."
            )

    # -- inside

    def _catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not the hooks of a subclass: no batch and no epoch ends here.
        WeightAveraging.on_train_batch_end(self, trainer, pl_module, None, None, 0)
        if trainer.progress.epoch_ended:
            WeightAveraging.on_train_epoch_end(self, trainer, pl_module)

    @property
    def _has_average(self) -> bool:
        return self._average_model is not None and bool(self._average_model.n_averaged)

    def _find_slots(self, pl_module: nn.Module) -> None:
        """List which tensors belong together: walking through the modules each step would cost more than averaging.

        Tensors are looked up by name in each update, since programs assign new ones to their buffers.
        """
        assert self._average_model is not None
        self._slots, seen = [], set()
        for module, average in zip(pl_module.modules(), self._average_model.module.modules(), strict=False):
            if module._parameters.keys() != average._parameters.keys():
                raise RuntimeError(
                    f"{type(self).__name__}: {type(module).__name__} has the parameters {list(module._parameters)}, "
                    f"and had {list(average._parameters)} when the average was made. Make all parameters before "
                    "training; pruning and averaging cannot be combined."
                )
            for current, averaged in (
                (module._parameters, average._parameters),
                (module._buffers, average._buffers),
            ):
                for name, tensor in current.items():
                    if id(tensor) not in seen:
                        if tensor is not None:
                            seen.add(id(tensor))
                        self._slots.append((current, averaged, name))  # type: ignore[arg-type]

    def _pairs(self) -> list[tuple[Tensor, Tensor, bool]]:
        """Return (tensor of the module, its average, whether to average instead of copy), to use without grad."""
        pairs = []
        for tensors, averages, name in self._slots:
            current, averaged = tensors.get(name), averages.get(name)
            if current is None:
                continue
            if averaged is None or averaged.shape != current.shape:
                # A buffer made or grown in a batch, as tables of positions are.
                averaged = averages[name] = current.detach().clone()
            is_averaged = isinstance(current, nn.Parameter) or self._use_buffers
            is_averaged = is_averaged and (current.is_floating_point() or current.is_complex())
            pairs.append((current, averaged, is_averaged))
        return pairs

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        assert self._average_model is not None
        count = self._average_model.n_averaged
        is_first = not count
        pairs: list[tuple[Tensor, Tensor]] = []
        for current, averaged, is_averaged in self._pairs():
            if is_first or not is_averaged:
                averaged.copy_(current)
            else:
                pairs.append((averaged, current.to(averaged.device)))
        multi_avg_fn = self._multi_avg_fn or get_swa_multi_avg_fn()
        for group in by_kind(pairs, lambda pair: pair[0]):
            all_averaged, all_current = map(list, zip(*group, strict=True))
            if self._avg_fn is None:
                multi_avg_fn(all_averaged, all_current, count)
            else:
                for averaged, current in group:
                    averaged.copy_(self._avg_fn(averaged, current, count))
        count += 1

    @torch.no_grad()
    def _swap_models(self, pl_module: nn.Module) -> None:
        """Exchange the weights of the module and the average."""
        if not self._has_average:
            return
        for current, averaged, _ in self._pairs():
            # One tensor at a time: a second copy of the whole model may not fit.
            kept = averaged.clone()
            averaged.copy_(current)
            current.copy_(kept)
        self._swapped = not self._swapped

    @torch.no_grad()
    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module for good; keep the training weights for checkpoints."""
        if not self._has_average or self._trained is not None:
            return
        self._trained = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in pl_module.state_dict().items()
        }
        self._load_average(trainer, pl_module)

    def _load_average(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._copy_average_to_current(pl_module)

    @torch.no_grad()
    def _copy_average_to_current(self, pl_module: nn.Module) -> None:
        for current, averaged, _ in self._pairs():
            current.copy_(averaged)


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    See ``WeightAveraging`` for validation, checkpoints and resuming. The first update copies the weights. The two
    starts are independent: ``update_starting_at_step`` applies to the updates after steps, and
    ``update_starting_at_epoch`` adds one update at the end of each epoch from then on. Use ``update_every_n_steps=0``
    for those alone.

    Args:
        device: where the average lives; by default where the module does.
        use_buffers: average the buffers too instead of copying them.
        decay: share of the average that an update keeps, from 0 to 1.
        update_every_n_steps: update after the optimizer steps whose index (from 0) is a multiple of this; 0 for none.
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
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        for fixed in {"avg_fn", "multi_avg_fn"}.intersection(kwargs):
            raise TypeError(
                f"{name}({fixed}=...): it averages exponentially. Use WeightAveraging({fixed}=...)."
            )
        check.share(name, "decay", decay, error=MisconfigurationException)
        for argument, value in (
            ("update_every_n_steps", update_every_n_steps),
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            optional = argument != "update_every_n_steps"
            check.whole(
                name, argument, value, at_least=0, allow_none=optional, error=MisconfigurationException
            )
        super().__init__(device, use_buffers, **kwargs, multi_avg_fn=get_ema_multi_avg_fn(decay))
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


def _check_device(owner: str, device: torch.device | str | int | None) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is not a device")
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MisconfigurationException(
            f"{owner}(device={device!r}): use a device such as 'cpu' or 'cuda:0', or None."
        ) from error
