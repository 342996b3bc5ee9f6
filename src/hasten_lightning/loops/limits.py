"""What a run of Lightning works out before it begins, for Trainers that packages write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.errors import MisconfigurationException
from hasten.callbacks import Timer

if TYPE_CHECKING:
    from hasten import Trainer


def parse_loop_limits(
    min_steps: int | None, max_steps: int, min_epochs: int | None, max_epochs: int | None, trainer: Trainer
) -> tuple[int, int]:
    """Return ``min_epochs`` and ``max_epochs`` of a run, where some limits may be None, as for ``Trainer``.

    A ``Timer`` among the callbacks of the trainer is a limit, too.
    """
    if min_epochs is None:
        min_epochs = 0 if min_steps is None else 1
    if max_epochs is None:
        is_limited = max_steps != -1 or any(isinstance(callback, Timer) for callback in trainer.callbacks)
        max_epochs = -1 if is_limited else 1000
    return min_epochs, max_epochs


def verify_loop_configurations(trainer: Trainer) -> None:
    """Refuse: the hooks of a run are checked when it begins.

    Raises:
        MisconfigurationException: always.

    """
    raise MisconfigurationException(
        "_verify_loop_configurations: hasten checks the hooks when fit() and the others begin.",
        fix="Leave the call out.",
    )


__all__ = ["parse_loop_limits", "verify_loop_configurations"]
