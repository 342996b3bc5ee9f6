"""A monitored value: found by its name, and where in a run it gets a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class MonitorNotLogged(MisconfigurationException, RuntimeError):
    """A callback watches a value that was never logged."""


def check_mode(owner: str, mode: object) -> str:
    """Return ``mode`` if it is "min" or "max".

    Raises:
        MisconfigurationException: it is something else.

    """
    if mode not in ("min", "max"):
        raise MisconfigurationException(
            f"{owner}(mode={mode!r}): `mode` can be 'min' (lower is better) or 'max', got {mode}."
        )
    return str(mode)


def check_monitor(owner: str, monitor: object) -> str:
    """Return ``monitor`` if it is a name."""
    if not isinstance(monitor, str) or not monitor:
        raise MisconfigurationException(
            f"{owner}(monitor={monitor!r}): give the name of a logged value, for instance monitor='val_loss'."
        )
    return monitor


def not_logged(owner: str, name: str, logged: Iterable[str]) -> MonitorNotLogged:
    """Return the error for a value that is not there, naming what is."""
    known = sorted(set(logged))
    listed = ", ".join(map(repr, known)) if known else "nothing"
    return MonitorNotLogged(
        f"{owner}(monitor={name!r}) could not find the monitored key, which is not available: logged so far is "
        f"{listed}.{did_you_mean(name, known)} Log it with self.log({name!r}, ...), or monitor another value."
    )


class Origin:
    """Where a monitored value gets new values, learnt by watching when it first appears.

    ``"step"``: in training steps, so it is new at any time; ``"validate"``: in validation, so it is new when
    one ends; ``"epoch"``: when a training epoch ends; None: not seen yet.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.place: str | None = None
        self.validations = 0
        self._stale = False

    def start(self, trainer: Trainer) -> None:
        """Begin to watch, when training starts: a value that is there already says nothing."""
        self.validations = 0
        self._stale = self.place is None and self.name in trainer.callback_metrics

    def during_training(self, trainer: Trainer) -> None:
        """Look between training batches, and just before a validation."""
        if not self._stale:
            self._seen(trainer, "step")

    def after_validation(self, trainer: Trainer) -> None:
        """Look when a validation has ended."""
        self.validations += 1
        self._seen(trainer, "validate")

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Look when a training epoch has ended."""
        if not self._stale:
            self._seen(trainer, "epoch")

    def _seen(self, trainer: Trainer, place: str) -> None:
        if self.place is None and self.name is not None and self.name in trainer.callback_metrics:
            self.place = place


def validates(trainer: Trainer) -> bool:
    """Return whether this fit validates at all."""
    return bool(trainer.enable_validation) and sum(trainer.num_val_batches) > 0
