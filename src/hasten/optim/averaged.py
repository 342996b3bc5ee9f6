"""Schedule-free optimizers, and others that evaluate with averages of the training weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import check
from hasten._lib.optional import need
from hasten._lib.tree import parameters_of
from hasten.precision.small_updates import full_precision

_CLASSES = {"adamw": "AdamWScheduleFree", "radam": "RAdamScheduleFree", "sgd": "SGDScheduleFree"}


def schedule_free(
    params: nn.Module | Iterable[Any], lr: float | None = None, *, kind: str = "adamw", **options: object
) -> Optimizer:
    """Return a schedule-free optimizer of the package schedulefree, which needs no learning-rate schedule.

    The optimizer evaluates with a running average of the weights it trains. The Trainer switches between the two:
    validation, saved ``state_dict``s and the module after training have the averaged weights, and a resumed run
    continues exactly. In your own loop, call ``optimizer.train()`` and ``optimizer.eval()``.

    Args:
        params: a module, or parameters or groups of them.
        lr: learning rate; the default of the package (0.0025 for "adamw"; about 1.0 suits "sgd").
        kind: "adamw", "radam" (needs no warm-up) or "sgd".
        options: for the class: warmup_steps, weight_decay, betas, ...

    Raises:
        ValueError: ``kind`` has another value.
        ModuleNotFoundError: schedulefree is not installed.

    Source: Defazio et al., The Road Less Scheduled, 2024; `schedulefree
    <https://github.com/facebookresearch/schedule_free>`_.

    """
    check.one_of("schedule_free", "kind", kind, _CLASSES)
    package = need("schedulefree", purpose="hasten.optim.schedule_free")
    if isinstance(params, nn.Module):
        params = [p for p in params.parameters() if p.requires_grad]
    if lr is not None:
        options["lr"] = lr
    made: Optimizer = getattr(package, _CLASSES[kind])(params, **options)
    return made


class AveragedWeights:
    """Switches the module between the training weights of its optimizers and their averages; others are ignored."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.optimizers = [optimizer for optimizer in optimizers if _changes(optimizer)]
        # Copies of the training weights while the averages are in the module, in the order of the groups.
        self.training_weights: list[Tensor] | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the module inside the block; restore the training weights afterwards, bit for bit."""
        if self.training_weights is not None or not self.optimizers:
            yield
            return
        self.training_weights = self._apply()
        try:
            yield
        finally:
            self.restore()

    def keep_averaged(self) -> None:
        """Leave the averages in the module, and the training weights in main memory for a checkpoint."""
        if self.optimizers and self.training_weights is None:
            self.training_weights = [tensor.to("cpu") for tensor in self._apply()]

    def restore(self) -> None:
        """Put the training weights into the module."""
        self.resume_with(self.training_weights)

    def resume_with(self, weights: list[Tensor] | None) -> None:
        """Put the training weights of a checkpoint into the module; None to compute them from the averages."""
        self.training_weights = None
        for optimizer in self.optimizers:
            full_precision(optimizer, optimizer.train)
        if weights is not None:
            self._write(weights)

    def _apply(self) -> list[Tensor]:
        """Put the averages into the module and return the training weights."""
        training: list[Tensor] = []
        for optimizer in self.optimizers:

            def copy(optimizer: Any = optimizer) -> list[Tensor]:
                return [parameter.detach().clone() for parameter in parameters_of(optimizer)]

            training += full_precision(optimizer, copy)
            for group in optimizer.param_groups:
                # A group that was added since is marked as if it had its averages.
                if "train_mode" in group:
                    group["train_mode"] = True
            full_precision(optimizer, optimizer.eval)
        return training

    @torch.no_grad()
    def _write(self, weights: list[Tensor]) -> None:
        # Converting back from the averages rounds: training must not depend on how often it was evaluated.
        remaining = iter(weights)

        def write(optimizer: Any) -> None:
            for parameter in parameters_of(optimizer):
                parameter.copy_(next(remaining))

        for optimizer in self.optimizers:
            full_precision(optimizer, functools.partial(write, optimizer))


def _changes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
