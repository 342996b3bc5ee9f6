"""LearningRateMonitor: log what the schedulers do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_warn
from hasten.callbacks.unused_hooks import disable_hooks
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hasten.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log the learning rates of all optimizers.

    They are named ``lr-<Optimizer>``, or by the ``name`` of the scheduler's dict; with several parameter groups
    ``/pg1``, ``/pg2`` or the group's own ``name`` follows, with several optimizers of one class ``-1``, ``-2``.
    Learning rates are numbers on the host, so the device never waits for this.

    Args:
        logging_interval: "step" or "epoch"; None for the interval each scheduler steps at.
        log_momentum: also log the momentum (for Adam and its kin the first beta) as ``<name>-momentum``.
        log_weight_decay: also log the weight decay as ``<name>-weight_decay``.

    Raises:
        MisconfigurationException: ``logging_interval`` is something else, or the Trainer has no logger.

    Example::

        >>> LearningRateMonitor(logging_interval="step").lrs
        {}

    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        name, error = "logging_interval", MisconfigurationException
        check.one_of(
            "LearningRateMonitor", name, logging_interval, ("step", "epoch"), allow_none=True, error=error
        )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_at = -1
        if logging_interval == "epoch":
            disable_hooks(self, LearningRateMonitor, "on_train_batch_start")

    def on_train_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Find names for all learning rates."""
        if not trainer.loggers:
            raise MisconfigurationException(
                "LearningRateMonitor: the Trainer has no logger. Leave it out, or do not pass logger=False."
            )
        self._logged_at = -1
        found = self._named_optimizers(trainer)
        names = [name for _, names, _ in found for name in names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        without = {
            type(optimizer).__name__
            for optimizer, _, _ in found
            if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults
        }
        if self.log_momentum and without:
            rank_zero_warn(
                f"LearningRateMonitor(log_momentum=True): {', '.join(sorted(without))} has no momentum; 0 is logged "
                "for it.",
                RuntimeWarning,
            )

    def on_train_batch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Log before a step whose values are logged too."""
        if self.logging_interval == "epoch":
            return
        step = _updates(trainer)
        # Batches of an accumulation share a step: one row is enough.
        if (step + 1) % trainer.log_every_n_steps or step == self._logged_at:
            return
        self._logged_at = step
        self._log(trainer, "step" if self.logging_interval is None else None, step)

    def on_train_epoch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Log at the beginning of an epoch."""
        if self.logging_interval != "step":
            self._log(trainer, "epoch" if self.logging_interval is None else None, _updates(trainer))

    def _log(self, trainer: Trainer, interval: str | None, step: int) -> None:
        stats: dict[str, float] = {}
        for optimizer, names, when in self._named_optimizers(trainer):
            # An optimizer without a scheduler has no interval: it is logged at both.
            if interval is None or when is None or when == interval:
                stats |= self._stats(optimizer, names)
        if not stats:
            return
        # Other callbacks may name a learning rate, for instance in a checkpoint's file name.
        trainer.current_run.logged.callback_values.update(stats)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(stats), step=step)

    def _stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        stats: dict[str, float] = {}
        for group, name in zip(optimizer.param_groups, names, strict=True):
            stats[name] = _number(group["lr"])
            self.lrs.setdefault(name, []).append(stats[name])
            if self.log_momentum:
                value = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                stats[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = _number(value)
            if self.log_weight_decay:
                value = group.get("weight_decay", 0)
                stats[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = (
                    _number(value)
                )
        return stats

    def _named_optimizers(self, trainer: Trainer) -> list[tuple[Optimizer, list[str], str | None]]:
        """Return each optimizer with a name for every parameter group and its scheduler's interval."""
        seen: list[Any] = []
        kinds: Counter[type] = Counter()
        found: list[tuple[Optimizer, list[str], str | None]] = []
        for config in trainer.lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            seen.append(optimizer)
            found.append((optimizer, _names(optimizer, config.name, kinds), config.interval))
        for wrapped in trainer.optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            if not any(optimizer is other for other in seen):
                seen.append(optimizer)
                found.append((optimizer, _names(optimizer, None, kinds), None))
        return found


def _names(optimizer: Optimizer, given: str | None, kinds: Counter[type]) -> list[str]:
    """Return a name for each parameter group of an optimizer."""
    kind = type(optimizer)
    name = given
    if name is None:
        kinds[kind] += 1
        name = f"lr-{kind.__name__}" + (f"-{kinds[kind] - 1}" if kinds[kind] > 1 else "")
    given_labels = [group.get("name") for group in optimizer.param_groups]
    labels = [label or f"pg{i}" for i, label in enumerate(given_labels, start=1)]
    for label, count in Counter(labels).items():
        if count > 1:
            raise MisconfigurationException(
                f"LearningRateMonitor: {kind.__name__} has several parameter groups named {label!r}. "
                "Give each group its own name, or none."
            )
    if len(labels) == 1 and not given_labels[0]:
        return [name]
    return [f"{name}/{label}" for label in labels]


def _number(value: Any) -> float:
    # A learning rate may be a tensor on the device (capturable optimizers); it is read once a logging interval.
    return float(value.item()) if isinstance(value, Tensor) else value


def _updates(trainer: Trainer) -> int:
    """Return the number of batches after which an optimizer stepped: the x axis of loggers."""
    module = trainer.lightning_module
    if module is not None and not module.automatic_optimization:
        return trainer.total_batch_idx + 1
    return trainer.global_step
