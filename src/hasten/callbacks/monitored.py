"""Monitored values: their arguments, and where in a run they are logged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class MonitorNotLogged(MisconfigurationException, RuntimeError):
    """A callback monitors a value that was never logged."""


def check_mode(owner: str, mode: Literal["min", "max"]) -> Literal["min", "max"]:
    """Return ``mode`` if it is "min" (lower is better) or "max" (higher is better)."""
    return check.one_of(owner, "mode", mode, ("min", "max"), error=MisconfigurationException)


def check_monitor(owner: str, monitor: str) -> str:
    """Return ``monitor`` if it is a name."""
    if not isinstance(monitor, str) or not monitor:
        raise MisconfigurationException(
            f"{owner}(monitor={monitor!r}): use the name of a logged value, for instance monitor='val_loss'."
        )
    return monitor


def not_logged(owner: str, name: str, logged: Iterable[str]) -> MonitorNotLogged:
    """Return the error for a value that was not logged; it names those that were."""
    known = sorted(set(logged))
    listed = ", ".join(map(repr, known)) if known else "nothing"
    return MonitorNotLogged(
        f"{owner}(monitor={name!r}) could not find the monitored key, which is not available: logged so far is "
        f"{listed}.{did_you_mean(name, known)} Log it with self.log({name!r}, ...), or monitor another value."
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
        self._is_stale = False

    def start(self, trainer: Trainer) -> None:
        """Start watching when training starts; a value left from an earlier run is ignored."""
        self.validations = 0
        self._is_stale = self.stage is None and self.name in trainer.callback_metrics

    def update_in_training(self, trainer: Trainer) -> None:
        """Check for the value between training batches, and just before a validation."""
        if not self._is_stale:
            self._update(trainer, "step")

    def update_after_validation(self, trainer: Trainer) -> None:
        """Check for the value when a validation has ended."""
        self.validations += 1
        self._update(trainer, "validate")

    def update_after_epoch(self, trainer: Trainer) -> None:
        """Check for the value when a training epoch has ended."""
        if not self._is_stale:
            self._update(trainer, "epoch")

    def _update(self, trainer: Trainer, stage: Literal["step", "validate", "epoch"]) -> None:
        if self.stage is None and self.name in trainer.callback_metrics:
            self.stage = stage


def validates(trainer: Trainer) -> bool:
    """Return whether this fit validates at all."""
    return bool(trainer.enable_validation) and sum(trainer.num_val_batches) > 0
