"""Optimizers whose weights for evaluation are not those of training: schedule-free ones and their like."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.names import did_you_mean
from hasten._lib.optional import need
from hasten.precision.small_updates import full_precision

_CLASSES = {"adamw": "AdamWScheduleFree", "radam": "RAdamScheduleFree", "sgd": "SGDScheduleFree"}


def schedule_free(
    params: nn.Module | Iterable[Any], lr: float | None = None, *, kind: str = "adamw", **options: Any
) -> Any:
    """Return a schedule-free optimizer of the package schedulefree: no learning-rate schedule, no last step to know.

    It trains with other weights than it evaluates with, which are their running average. The Trainer changes between
    the two: validation, saved ``state_dict``s and the module after training have the averaged weights, and a resumed
    run goes on exactly. In a loop of your own, call ``optimizer.train()`` and ``optimizer.eval()``.

    Args:
        params: a module, or parameters or groups of them.
        lr: learning rate; the package's own by default (0.0025 for "adamw"; "sgd" wants about 1.0).
        kind: "adamw", "radam" (needs no warm-up) or "sgd".
        options: for the class: warmup_steps, weight_decay, betas, ...

    Raises:
        ValueError: ``kind`` is another.
        ModuleNotFoundError: schedulefree is not installed.

    Source: Defazio et al., The Road Less Scheduled, 2024; `schedulefree
    <https://github.com/facebookresearch/schedule_free>`_.

    """
    if kind not in _CLASSES:
        raise ValueError(
            f"schedule_free(kind={kind!r}): use {', '.join(map(repr, _CLASSES))}."
            + did_you_mean(str(kind), _CLASSES)
        )
    package = need("schedulefree", purpose="hasten.optim.schedule_free")
    if isinstance(params, nn.Module):
        params = [p for p in params.parameters() if p.requires_grad]
    if lr is not None:
        options["lr"] = lr
    return getattr(package, _CLASSES[kind])(params, **options)


class Averages:
    """Which weights the optimizers of a run have in the module: those of training, or their averages.

    Args:
        optimizers: of the run; those without ``train`` and ``eval`` are left alone.

    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if _changes(optimizer)]
        # While the averages are in the module: what training goes on with, in the order of the groups.
        self._training: list[Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the averages in the module; afterwards the weights of training again, bit for bit."""
        if self._training is not None or not self._optimizers:
            yield
            return
        self._training = self._show()
        try:
            yield
        finally:
            self.hide()

    def show_for_good(self) -> None:
        """Leave the averages in the module; those of training are kept for a checkpoint, in main memory."""
        if self._optimizers and self._training is None:
            self._training = [tensor.to("cpu") for tensor in self._show()]

    def hide(self) -> None:
        """Have the weights of training in the module."""
        training, self._training = self._training, None
        for optimizer in self._optimizers:
            full_precision(optimizer, optimizer.train)
        if training is not None:
            self._write(training)

    def training_weights(self) -> list[Tensor] | None:
        """Return copies of the weights of training, while the averages are in the module."""
        return self._training

    def go_on_with(self, weights: list[Tensor] | None) -> None:
        """Have the weights that a checkpoint says training goes on with; None for what the averages imply."""
        self._training = None
        for optimizer in self._optimizers:
            full_precision(optimizer, optimizer.train)
        if weights is not None:
            self._write(weights)

    def _show(self) -> list[Tensor]:
        """Put the averages into the module; return what was there."""
        training: list[Tensor] = []
        for optimizer in self._optimizers:
            training += full_precision(optimizer, functools.partial(_copies, optimizer))
            full_precision(optimizer, optimizer.eval)
        return training

    @torch.no_grad()
    def _write(self, weights: list[Tensor]) -> None:
        # Averaging back and forth rounds: training must not depend on how often it was looked at.
        remaining = iter(weights)

        def write(optimizer: Any) -> None:
            for parameter in _parameters(optimizer):
                parameter.copy_(next(remaining))

        for optimizer in self._optimizers:
            full_precision(optimizer, functools.partial(write, optimizer))


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copies(optimizer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in _parameters(optimizer)]


def _changes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
