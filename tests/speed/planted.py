"""Levers planted for the advisor's tests, and what they are planted on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

import hasten as L
from hasten.speed.levers import ROUNDING, SAME, Lever
from hasten.speed.race import Turn, Variant

# Steps that sleep differ by a factor that no busy machine hides.
NAP_SECONDS = 0.02


class Sleeper(L.LightningModule):
    """A small classifier whose every step sleeps; unpicklable, so that trials are copies of the test's process."""

    def __init__(self, nap_seconds: float = NAP_SECONDS) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.nap_seconds = nap_seconds
        self.unpicklable = lambda: None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.nap_seconds)
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _with_step(model: Any, changed: Any) -> None:
    step = model.training_step
    model.training_step = lambda batch, batch_idx: changed(step, batch, batch_idx)


def sleep_more(trainer: Any, model: Any) -> None:
    model.nap_seconds *= 4


def sleep_much_more(trainer: Any, model: Any) -> None:
    model.nap_seconds *= 20


def sleep_never(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0


def sleep_never_and_lie(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0
    _with_step(model, lambda step, batch, batch_idx: 2 * step(batch, batch_idx))


def start_slowly(trainer: Any, model: Any) -> None:
    time.sleep(1.5)
    model.nap_seconds /= 2


def refuse(trainer: Any, model: Any) -> None:
    raise ValueError("not with this model: use another")


def die(trainer: Any, model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def become_nan(trainer: Any, model: Any) -> None:
    _with_step(model, lambda step, batch, batch_idx: step(batch, batch_idx) * float("nan"))


SLOW = Lever("slow", "slow()", SAME, change=sleep_more)
QUICK = Lever("quick", "quick()", SAME, change=sleep_never)
LIAR = Lever("liar", "liar()", ROUNDING, change=sleep_never_and_lie)
LATE = Lever("late", "late()", SAME, change=start_slowly)
REFUSING = Lever("refusing", "refusing()", SAME, change=refuse)
DYING = Lever("dying", "dying()", SAME, change=die)
NAN = Lever("nan", "nan()", ROUNDING, change=become_nan)


def halve(trainer: Any, model: Any) -> None:
    model.nap_seconds /= 2


class Masked(Sleeper):
    """The same on batches that have an attention mask."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class Broken(Sleeper):
    """Raises in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("no such column")


class Hungry(Sleeper):
    """Fits two samples into memory, and no more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)


def variants(*seconds: list[float]) -> list[Variant]:
    """Return variants with turns of two steps that took so long."""
    return [Variant(turns=[_turn(each) for each in every]) for every in seconds]


def _turn(seconds: float) -> Turn:
    return Turn(
        seconds=seconds,
        step_seconds=[seconds / 2] * 2,
        losses=[0.0, 0.0],
        samples=None,
        faults=0,
        memory_bytes=0,
        tokens=None,
        slots=None,
        steps_planned=None,
        parts={},
    )
