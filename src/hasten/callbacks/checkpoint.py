"""Checkpoint: the base of all callbacks that save checkpoints."""

from __future__ import annotations

from typing import ClassVar

from hasten.module.callback import Callback


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints: a Trainer runs them after all others.

    Example::

        >>> issubclass(Checkpoint, Callback)
        True

    """

    runs_last: ClassVar[bool] = True
