"""WeightAveraging and EMAWeightAveraging: an average of the weights, which validation and checkpoints use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hasten._lib.errors import MisconfigurationException
from hasten._lib.kinds import by_kind
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.loops.states import TrainerFn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

# (parameters or buffers of the module, those of its average, name)
Slot = tuple[dict[str, Tensor | None], dict[str, Tensor | None], str]


class WeightAveraging(Callback):
    """Keep an average of the weights; validate with it, and leave it in the module when training ends.

    The average takes in the weights whenever ``should_update`` says so, after each optimizer step unless you override
    it. During validation the module holds the average, also in the module's own hooks, and afterwards its own weights
    again, also if validation fails. A checkpoint's ``state_dict`` is the average, so that whoever loads it gets what
    was validated; the weights training goes on with are beside it, and a resumed run goes on with them bit for bit,
    also from a checkpoint saved after training ended.

    Where it differs from Lightning: before the first update there is no average, so validation, checkpoints and the
    end of training use the weights themselves, not those the model began with; buffers that are no floating-point
    numbers (counts, for instance) are copied, not averaged; ``trainer.validate`` uses the weights it is given; an
    epoch counts for ``should_update(epoch_idx=...)`` when it is complete.

    Args:
        device: where the average lives; by default where the module does.
        use_buffers: average the buffers too (the statistics of batch normalisation, for instance); otherwise they are
            copied.
        kwargs: ``avg_fn(averaged, current, num_averaged)``, which returns the new average of a parameter, or
            ``multi_avg_fn(averaged, current, num_averaged)``, which changes lists of them in place; the mean over all
            updates by default.

    Raises:
        TypeError: there is no such argument.
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

    # Where a validation or an epoch ends, the module's own hooks still see the average, and all changes are done.
    runs_last: ClassVar[bool] = True

    def __init__(
        self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any
    ) -> None:
        known = ["avg_fn", "multi_avg_fn"]
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(
                    f"{type(self).__name__}({name}=...): there is no such argument.{did_you_mean(name, known)} "
                    f"Beside device and use_buffers it takes {known}."
                )
            if value is not None and not callable(value):
                raise MisconfigurationException(
                    f"{type(self).__name__}({name}={value!r}): use a function of (averaged, current, num_averaged)."
                )
        self._avg_fn, self._multi_avg_fn = kwargs.get("avg_fn"), kwargs.get("multi_avg_fn")
        if self._avg_fn is not None and self._multi_avg_fn is not None:
            raise MisconfigurationException(
                f"{type(self).__name__}: avg_fn and multi_avg_fn say the same thing twice. Give one of them."
            )
        self._device = check_device(type(self).__name__, device)
        self._use_buffers = use_buffers
        self._average_model: AveragedModel | None = None
        self._slots: list[Slot] = []
        self._swapped = False
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None
        # What training ended with, once the module holds the average for good.
        self._trained: dict[str, Any] | None = None
        self._restarting = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the average takes in the weights now; override it to choose.

        Args:
            step_idx: index (from 0) of the optimizer step just done; None at the end of an epoch.
            epoch_idx: index (from 0) of the epoch just done; None after a step.

        """
        return step_idx is not None

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew when fit begins."""
        if stage == "fit":
            self._average_model, self._loaded, self._trained, self._swapped = None, None, None, False
            self._restarting = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the average, which is a copy of the module: it is complete and on its device now."""
        # The count of updates stays on the host, where reading it does not wait for the device.
        self._average_model = average = AveragedModel(pl_module)
        if self._device is not None:
            average.module.to(self._device)
        if self._loaded is not None:
            weights, others = self._loaded
            average.module.load_state_dict(weights, strict=pl_module.strict_loading)
            average.n_averaged.copy_(others["n_averaged"])
            self._loaded = None
        self._pair_up(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for updates that were due when the checkpoint was taken: by a callback that came before this one."""
        if not self._restarting:
            self._latest_update_step = trainer.global_step
            self._latest_update_epoch = trainer._progress.epochs_done - 1
        self._catch_up(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look again which parameters and buffers there are."""
        self._pair_up(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take in the weights if the optimizer stepped and it is time."""
        self._after_step(trainer)

    def _after_step(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update()
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take in the weights if the epoch is complete and it is time."""
        if trainer._progress.last_batch:
            self._after_epoch(trainer)

    def _after_epoch(self, trainer: Trainer) -> None:
        epoch = trainer._progress.epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update()
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module."""
        if self._average_model is not None and trainer.state.fn == TrainerFn.FITTING:
            self._swap_models(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights of training back into the module."""
        if self._average_model is not None and trainer.state.fn == TrainerFn.FITTING:
            self._swap_models(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights of training back if a validation broke off: what is saved now must be right."""
        if self._swapped:
            self._swap_models(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        if self._average_model is not None:
            self._copy_average_to_current(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do so too where a resumed run had nothing left to train."""
        if self._average_model is not None and self._trained is None:
            if self._restarting:
                self._catch_up(trainer)
            self._copy_average_to_current(pl_module)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return when the average was last updated; the average itself is the checkpoint's ``state_dict``."""
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._restarting = True
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make the average the checkpoint's ``state_dict``, with the weights of training beside it."""
        average = self._average_model
        if average is None or not self._has_average:
            return
        # Whether the module holds its own weights, those of the average for a while, or for good.
        own, averaged = checkpoint["state_dict"], average.module.state_dict()
        if self._swapped:
            own, averaged = averaged, own
        elif self._trained is not None:
            own, averaged = self._trained, own
        checkpoint["state_dict"] = averaged
        if "optimizer_states" in checkpoint:
            checkpoint["current_model_state"] = own
            checkpoint["averaging_state"] = {"n_averaged": average.n_averaged}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have training go on with its own weights; the average is taken back when it has been made."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            self._loaded = checkpoint["state_dict"], checkpoint["averaging_state"]
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        else:
            rank_zero_info(
                f"{type(self).__name__}: the checkpoint has no average of the weights; it begins here."
            )

    # -- inside

    def _catch_up(self, trainer: Trainer) -> None:
        self._after_step(trainer)
        if trainer._progress.epoch_ended:
            self._after_epoch(trainer)

    @property
    def _has_average(self) -> bool:
        return self._average_model is not None and bool(self._average_model.n_averaged)

    def _pair_up(self, pl_module: nn.Module) -> None:
        """Note which tensors belong together: walking through the modules at each step would cost more than averaging.

        Tensors are looked up by name each time, since programs put new ones into their buffers.
        """
        assert self._average_model is not None
        self._slots, seen = [], set()
        for current, averaged in zip(pl_module.modules(), self._average_model.module.modules(), strict=False):
            if current._parameters.keys() != averaged._parameters.keys():
                raise RuntimeError(
                    f"{type(self).__name__}: {type(current).__name__} has the parameters {list(current._parameters)}, "
                    f"and had {list(averaged._parameters)} when the average was made. Make all parameters before "
                    "training begins; pruning and averaging do not go together."
                )
            for mine, its in (
                (current._parameters, averaged._parameters),
                (current._buffers, averaged._buffers),
            ):
                for name, tensor in mine.items():
                    if id(tensor) not in seen:
                        if tensor is not None:
                            seen.add(id(tensor))
                        self._slots.append((mine, its, name))  # type: ignore[arg-type]

    def _pairs(self) -> list[tuple[Tensor, Tensor, bool]]:
        """Return (tensor of the module, its average, whether it is averaged and not copied), to use without grad."""
        pairs = []
        for mine, its, name in self._slots:
            current, averaged = mine.get(name), its.get(name)
            if current is None:
                continue
            if averaged is None or averaged.shape != current.shape:
                # A buffer made or grown in a batch, as tables of positions are.
                averaged = its[name] = current.detach().clone()
            averages = current.is_floating_point() or current.is_complex()
            if isinstance(current, nn.Parameter) or self._use_buffers:
                pairs.append((current, averaged, averages))
            else:
                pairs.append((current, averaged, False))
        return pairs

    @torch.no_grad()
    def _update(self) -> None:
        assert self._average_model is not None
        count = self._average_model.n_averaged
        is_first = not count
        pairs: list[tuple[Tensor, Tensor]] = []
        for current, averaged, averages in self._pairs():
            if is_first or not averages:
                averaged.copy_(current)
                continue
            pairs.append((averaged, current.to(averaged.device)))
        multi_avg_fn = self._multi_avg_fn or get_swa_multi_avg_fn()
        for alike in by_kind(pairs, lambda pair: pair[0]):
            all_averaged, all_current = map(list, zip(*alike, strict=True))
            if self._avg_fn is None:
                multi_avg_fn(all_averaged, all_current, count)
            else:
                for averaged, current in zip(all_averaged, all_current, strict=True):
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
    def _copy_average_to_current(self, pl_module: nn.Module) -> None:
        """Put the average into the module for good; what training ended with is kept for checkpoints."""
        if not self._has_average:
            return
        self._trained = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in pl_module.state_dict().items()
        }
        for current, averaged, _ in self._pairs():
            current.copy_(averaged)


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    See ``WeightAveraging`` for validation, checkpoints and resuming. The first update copies the weights. The two
    starts are separate: the step-wise updates heed ``update_starting_at_step`` only, and ``update_starting_at_epoch``
    adds one update at the end of each epoch from then on. Use ``update_every_n_steps=0`` for those alone.

    Args:
        device: where the average lives; by default where the module does.
        use_buffers: average the buffers too; otherwise they are copied.
        decay: share of the average that an update keeps, from 0 to 1.
        update_every_n_steps: update after the optimizer steps whose index (from 0) is a multiple of this; 0 for none.
        update_starting_at_step: index of the first optimizer step that may update.
        update_starting_at_epoch: index of the first epoch at whose end the average is updated, too; None for none.
        kwargs: nothing: ``avg_fn`` and ``multi_avg_fn`` are settled.

    Raises:
        TypeError: there is no such argument.
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
        for settled in ("avg_fn", "multi_avg_fn"):
            if settled in kwargs:
                raise TypeError(
                    f"{name}({settled}=...): it averages exponentially. Use WeightAveraging({settled}=...)."
                )
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise MisconfigurationException(
                f"{name}(decay={decay!r}): use a number from 0 to 1, for instance 0.999."
            )
        for argument, value in (
            ("update_every_n_steps", update_every_n_steps),
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            optional = argument != "update_every_n_steps"
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MisconfigurationException(
                    f"{name}({argument}={value!r}): use a whole number of at least 0{', or None' if optional else ''}."
                )
        super().__init__(device, use_buffers, **kwargs, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the average takes in the weights after this step or epoch."""
        every = self.update_every_n_steps
        if (
            step_idx is not None
            and every
            and step_idx >= (self.update_starting_at_step or 0)
            and step_idx % every == 0
        ):
            return True
        first_epoch = math.inf if self.update_starting_at_epoch is None else self.update_starting_at_epoch
        return epoch_idx is not None and epoch_idx >= first_epoch


def check_device(owner: str, device: torch.device | str | int | None) -> torch.device | None:
    """Return ``device`` as torch knows it.

    Raises:
        MisconfigurationException: there is no such kind of device.

    """
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
