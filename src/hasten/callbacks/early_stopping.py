"""EarlyStopping, and where in a run a monitored value is logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean_value, warn_of_mode, without_unknown
from hasten._lib.rank_zero import log, rank_prefixed_message, rank_zero_info, rank_zero_warn
from hasten.module.callback import Callback
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer

_TRAINING_STOPS = " Signaling Trainer to stop."


class EarlyStoppingReason(Enum):
    """Why a training was stopped early."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Stop training when a logged value no longer improves.

    The value is checked when it is new: after the validation that logs it, or when a training epoch ends.
    Its state is part of checkpoints, so a resumed run stops when the uninterrupted one would. Where ``min_epochs`` or
    ``min_steps`` of the Trainer keeps training going, a value that improves meanwhile lets it go on beyond them.

    Args:
        monitor: name of the value, as given to ``self.log``.
        min_delta: smallest change that counts as an improvement, in the value's own unit.
        patience: number of checks in a row without improvement after which training stops.
        verbose: report when the value improves, and why training is to stop at the check that says so. Without it, the
            reason is reported when training has ended.
        mode: "min" when lower is better, "max" when higher is.
        strict: raise an error if the value is absent; otherwise the check is skipped.
        check_finite: stop when the value is NaN or infinite.
        stopping_threshold: stop when the value is better than this.
        divergence_threshold: stop when the value is worse than this.
        check_on_train_epoch_end: check when a training epoch ends (True) or when a validation ends (False);
            by default where the value is new.
        log_rank_zero_only: with ``verbose``, report on the first process only.

    Raises:
        MisconfigurationException: an argument is out of range.
        RuntimeError: with ``strict``, the value was not logged by the time it should be there.

    Example::

        >>> stopper = EarlyStopping("val_loss", patience=2)
        >>> stopper.state_key
        "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"

    Source: L. Prechelt, Early Stopping - But When?, 1998.

    """

    runs_last: ClassVar[bool] = True
    mode_dict: ClassVar[dict[str, Callable[..., Tensor]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    @without_unknown
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        check.declared(EarlyStopping.__init__, locals())
        super().__init__()
        self.monitor = check_monitor("EarlyStopping", monitor)
        owner, numbers, error = "EarlyStopping", (int, float, Tensor), MisconfigurationException
        self.mode = check.one_of(owner, "mode", mode, ("min", "max"), error=error)
        warn_of_mode(owner, monitor, mode)
        self.patience = check.whole(owner, "patience", patience, at_least=0, unit="checks", error=error)
        check.number(owner, "min_delta", min_delta, error=error)
        given: dict[str, Any] = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        for name, threshold in given.items():
            check.instance(owner, name, threshold, numbers, "a number", allow_none=True, error=error)
            if isinstance(threshold, Tensor) and threshold.numel() != 1:
                raise check.wrong(owner, name, threshold, "a number", error=error)
        # Has the sign of the comparison: value - min_delta must be better than the best score.
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._begin()
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._source = MetricSource(self.monitor)
        self._checked_validations = 0
        # Whether the checkpoint was saved after a validation and before the check of its value.
        self._resumes_unchecked = False
        # Whether it has asked the fit that runs to stop; a message in a checkpoint is about another fit.
        self._has_stopped_fit = False
        # The number of its request among all requests to stop this fit.
        self._stop_request = 0

    def _begin(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint; two of them differ in ``monitor`` or ``mode``."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """The comparison for "better": ``torch.lt`` or ``torch.gt``."""
        return self.mode_dict[self.mode]

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
            "origin": self._source.stage,
            "unchecked": self._resumes_unchecked or self._source.validations != self._checked_validations,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = torch.as_tensor(state_dict["best_score"])
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._source.stage = state_dict.get("origin")
        self._resumes_unchecked = state_dict.get("unchecked", False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._source.stage is not None and begins_anew(trainer):
            self._begin()
        self._source.start(trainer)
        self._has_stopped_fit = False
        self._checked_validations = -1 if self._resumes_unchecked else 0
        self._resumes_unchecked = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._in_fit(trainer):
            self._source.update_in_training(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check, if the value is new after validation."""
        if self._should_skip_check(trainer):
            return
        self._source.update_after_validation(trainer)
        # A value not seen yet may be logged at the end of the training epoch, if it has one.
        may_come = self._source.stage is None and not math.isinf(trainer.num_training_batches)
        if not may_come and not self._checks_after_epoch(trainer):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check, if the value is new after the epoch."""
        if self._should_skip_check(trainer):
            return
        source = self._source
        source.update_after_epoch(trainer)
        if source.stage is None:
            if not source.validations and validates(trainer):
                return  # the first validation is still to come
        elif not self._checks_after_epoch(trainer):
            return
        if source.stage == "validate" and source.validations == self._checked_validations:
            return  # no validation since the last check: an old value must not reduce the patience
        self._run_early_stopping_check(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why training ended, unless ``verbose`` or the loop, which names the limits it reaches, has said it."""
        at_limit = trainer.current_epoch == trainer.max_epochs or trainer.global_step == trainer.max_steps
        if self._has_stopped_fit and trainer.should_stop and not at_limit and not self.verbose:
            reason = (self.stopping_reason_message or "").removesuffix(_TRAINING_STOPS)
            rank_zero_info(f"`Trainer.fit` stopped: {reason}")

    def _checks_after_epoch(self, trainer: Trainer) -> bool:
        chosen = self._check_on_train_epoch_end
        if chosen is None or self._source.stage == "epoch" or not validates(trainer):
            return self._source.is_new_after_epoch(trainer)
        return chosen

    def _should_skip_check(self, trainer: Trainer) -> bool:
        """Return whether nothing is checked now; subclasses of programs for Lightning override it."""
        return not self._in_fit(trainer)

    @staticmethod
    def _in_fit(trainer: Trainer) -> bool:
        return trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if trainer.runtime.several_processes:
            trainer.sync_step_values()
        metrics = trainer.callback_metrics
        if trainer.fast_dev_run or not self._validate_condition_metric(metrics):
            return
        self._checked_validations = self._source.validations
        # A copy on the host: the logged value may change later.
        current = metrics[self.monitor].detach().squeeze().cpu().clone()
        should_stop, reason = self._evaluate_stopping_criteria(current)
        should_stop = bool(trainer.strategy.reduce_boolean_decision(should_stop, all=False))
        if should_stop:
            trainer.should_stop = True
            self._stop_request = trainer.current_run.limits.stop_requests
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message, self._has_stopped_fit = reason, True
        elif self._has_stopped_fit and self.wait_count == 0:  # The value has improved.
            self._take_back(trainer)
        if reason and self.verbose:
            self._log_info(trainer, reason, self.log_rank_zero_only)

    def _take_back(self, trainer: Trainer) -> None:
        """Take the request to stop back: the value improved before ``min_epochs`` or ``min_steps`` let the fit end."""
        if self._stop_request == trainer.current_run.limits.stop_requests:  # Nobody else has asked.
            trainer.should_stop = False
            if self.verbose:
                self._log_info(trainer, f"{self.monitor} is better: training goes on.", self.log_rank_zero_only)
        self._has_stopped_fit, self.stopped_epoch = False, 0
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    @staticmethod
    def _log_info(trainer: Trainer, message: str, log_rank_zero_only: bool) -> None:
        """Report a check; subclasses of programs for Lightning call it."""
        if not trainer.runtime.several_processes:
            log.info(message)
        elif not log_rank_zero_only or trainer.global_rank == 0:
            log.info(rank_prefixed_message(message, trainer.global_rank))

    def _validate_condition_metric(self, logs: dict[str, Tensor]) -> bool:
        """Return whether the value is there; subclasses of programs for Lightning override it."""
        if self.monitor in logs:
            return True
        what = f"Early stopping conditioned on metric `{self.monitor}` which is not available"
        error = not_logged(what, self.monitor, logs)
        if self.strict:
            raise error
        if self.verbose:
            rank_zero_warn(error.what, RuntimeWarning, fix=error.fix)
        return False

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        better, value = self.monitor_op, f"{self.monitor} = {current}"
        if self.check_finite and not torch.isfinite(current):
            self.stopping_reason = EarlyStoppingReason.NON_FINITE_METRIC
            reason = f"Monitored metric {value} is not finite. Previous best value was {self.best_score:.3f}."
        elif self.stopping_threshold is not None and better(current, self.stopping_threshold):
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            is_better = f"{value} {self.order_dict[self.mode]} {self.stopping_threshold}"
            reason = f"Stopping threshold reached: {is_better}."
        elif self.divergence_threshold is not None and better(-current, -self.divergence_threshold):
            self.stopping_reason = EarlyStoppingReason.DIVERGENCE_THRESHOLD
            is_worse = f"{value} is worse than divergence_threshold={self.divergence_threshold}"
            reason = f"Divergence threshold reached: {is_worse}."
        elif better(current - self.min_delta, self.best_score.to(current.device)):
            reason = self._improvement_message(current)
            self.best_score = current
            self.wait_count = 0
            return False, reason
        else:
            self.wait_count += 1
            if self.wait_count < self.patience:
                return False, None
            self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
            reason = (
                f"Monitored metric {self.monitor} did not improve in the last {self.wait_count} records. Best score: "
                f"{self.best_score:.3f}."
            )
        return True, reason + _TRAINING_STOPS

    def _improvement_message(self, current: Tensor) -> str:
        if not torch.isfinite(self.best_score):
            return f"Metric {self.monitor} improved. New best score: {current:.3f}"
        change = f"{abs(self.best_score - current):.3f} >= min_delta = {abs(self.min_delta)}"
        return f"Metric {self.monitor} improved by {change}. New best score: {current:.3f}"


class MonitorNotLogged(MisconfigurationException, RuntimeError):
    """A callback monitors a value that was never logged."""


def check_monitor(owner: str, monitor: str) -> str:
    """Return ``monitor`` if it is a name."""
    if not isinstance(monitor, str) or not monitor:
        what = f"{owner}(monitor={monitor!r}):"
        fix = "use the name of a logged value, for instance monitor='val_loss'."
        raise MisconfigurationException(what, fix=fix, argument="monitor")
    return monitor


def not_logged(what: str, name: str, logged: Iterable[str]) -> MonitorNotLogged:
    """Return the error for a value that was not logged; after ``what`` it names those that were."""
    known = sorted(set(logged))
    listed = f"logged so far: {', '.join(map(repr, known))}" if known else "nothing has been logged so far"
    return MonitorNotLogged(
        f"{what}: {listed}.",
        fix=(
            f"{did_you_mean_value(name, known)} Log it with self.log({name!r}, ..., on_epoch=True), or monitor another "
            "value."
        ),
        argument="monitor",
    )


class MetricSource:
    """The part of a run that logs a monitored value, found by watching where it first appears.

    ``stage`` is ``"step"`` for a value logged in training steps, which may change at any time; ``"validate"`` for one
    that changes when a validation ends; ``"epoch"`` when a training epoch ends; None until the value appears.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.stage: Literal["step", "validate", "epoch"] | None = None
        self.validations = 0
        # The value when training started, of an earlier run or of the one that is continued; None if there was none.
        self._at_start: float | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether both watch the same value with the same state, like copies of a callback."""
        return type(other) is type(self) and vars(other) == vars(self)

    def start(self, trainer: Trainer) -> None:
        """Start watching when training starts; a value left from an earlier run is ignored until it changes."""
        self.validations = 0
        value = None
        if self.stage is None and self.name is not None:
            progress = trainer.progress
            # A run that resumes in the last hooks of an epoch has the values of that epoch.
            if progress.epoch_ended or not progress.last_batch:
                value = trainer.callback_metrics.get(self.name)
        self._at_start = None if value is None else float(value)

    def update_in_training(self, trainer: Trainer) -> None:
        """Check for the value between training batches, and just before a validation."""
        if not self._is_stale(trainer):
            self._update(trainer, "step")

    def update_after_validation(self, trainer: Trainer) -> None:
        """Check for the value when a validation has ended."""
        self.validations += 1
        self._update(trainer, "validate")

    def update_after_epoch(self, trainer: Trainer) -> None:
        """Check for the value when a training epoch has ended."""
        if not self._is_stale(trainer):
            self._update(trainer, "epoch")

    def is_new_after_epoch(self, trainer: Trainer) -> bool:
        """Return whether the value is complete when an epoch has ended, and not when a validation has ended before."""
        if self.stage == "epoch" or not validates(trainer):
            return True
        return bool(trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1)

    def _is_stale(self, trainer: Trainer) -> bool:
        if self._at_start is None or self.stage is not None:
            return False
        value = trainer.callback_metrics.get(str(self.name))
        return value is not None and float(value) == self._at_start

    def _update(self, trainer: Trainer, stage: Literal["step", "validate", "epoch"]) -> None:
        if self.stage is None and self.name in trainer.callback_metrics:
            self.stage = stage


def begins_anew(trainer: Trainer) -> bool:
    """Return whether training starts from nothing: from no checkpoint, and after no earlier fit of this Trainer."""
    return trainer.ckpt_path is None and not trainer.progress.total_batches


def ends_before(trainer: Trainer, epoch: int) -> bool:
    """Return whether a fit is known to end before this epoch, counted from 0. A fast_dev_run is not looked at."""
    # None before the first fit.
    epochs: Any = trainer.max_epochs
    return not trainer.fast_dev_run and isinstance(epochs, int) and 0 < epochs <= epoch


def validates(trainer: Trainer) -> bool:
    """Return whether this fit validates at all."""
    return not trainer.current_run.data.validation.is_off()
