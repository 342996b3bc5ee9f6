"""Train and eval modes of the parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


def remember_modes(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives each part of ``module`` the mode (train or eval) it has now.

    Example::

        >>> model = nn.Sequential(nn.Dropout().eval(), nn.Linear(1, 1))
        >>> restore = remember_modes(model)
        >>> _ = model.train()
        >>> restore()
        >>> model[0].training
        False

    """
    modes = [(part, part.training) for part in module.modules()]

    def restore() -> None:
        for part, training in modes:
            part.training = training

    return restore


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Give each part of ``module`` the mode it has now back when the block ends."""
    restore = remember_modes(module)
    try:
        yield
    finally:
        restore()
