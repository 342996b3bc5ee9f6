"""Speed-ups planted for the advisor's tests, and what they are planted on."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import hasten as L
from hasten.profilers import simple
from hasten.record import step_times
from hasten_tools.speed import first_choice, trial
from hasten_tools.speed.levers import Lever
from hasten_tools.speed.safety import Safety

# Of the clock below.
NAP_SECONDS = 0.05


class Clock:
    """Stands in for the module ``time`` where steps are timed: only naps take long, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        self._now += 0.001
        return self._now

    def nap(self, seconds: float) -> None:
        self._now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


CLOCK = Clock()
# Where steps are timed: a module, its name for the clock, and what stands in for it.
TIMING: tuple[tuple[ModuleType, str, Any], ...] = (
    *((module, "time", CLOCK) for module in (first_choice, simple, trial)),
    (step_times, "perf_counter", CLOCK.perf_counter),
)
# The process of a trial imports this module with the model; a test takes the clock with its fixture.
if any(thread.name == "hasten-trial" for thread in threading.enumerate()):
    for _place in TIMING:
        setattr(*_place)
    trial.seconds_without_core = lambda: 0.0


class Sleeper(L.LightningModule):
    """A small classifier whose every step takes a nap."""

    def __init__(self, nap_seconds: float = NAP_SECONDS) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.nap_seconds = nap_seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK.nap(self.nap_seconds)
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _with_step(model: Any, changed: Any) -> None:
    step = model.training_step
    model.training_step = lambda batch, batch_idx: changed(step, batch, batch_idx)


def halve(trainer: Any, model: Any) -> None:
    model.nap_seconds /= 2


def sleep_never(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0


def sleep_never_and_lie(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0
    _with_step(model, lambda step, batch, batch_idx: 2 * step(batch, batch_idx))


def die(trainer: Any, model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


QUICK = Lever("quick", "quick()", Safety.SAME_BITS, change=sleep_never)
LIAR = Lever("liar", "liar()", Safety.ROUNDING, change=sleep_never_and_lie)
DYING = Lever("dying", "dying()", Safety.SAME_BITS, change=die)


class Texts(Sleeper):
    """Reads the tokens of a text that its mask names; the loss of a text depends on no other."""

    def __init__(self, nap_seconds: float = NAP_SECONDS, dropout: float = 0.0) -> None:
        super().__init__(nap_seconds)
        self.embedding = nn.Embedding(100, 8)
        self.dropout = nn.Dropout(dropout)

    def of_texts(self, batch: Any) -> Tensor:
        mask = batch["attention_mask"][..., None].float()
        return (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.dropout(self.of_texts(batch)), batch["y"]), batch_idx)


class Drawing(Texts):
    """Drops inputs where no module shows it."""

    def of_texts(self, batch: Any) -> Tensor:
        return nn.functional.dropout(super().of_texts(batch), 0.3)


class Leaking(Texts):
    """Mixes a little of each text into the others, which its loss hardly shows."""

    def of_texts(self, batch: Any) -> Tensor:
        return _leaked(super().of_texts(batch))


class Padded(Texts):
    """Divides by the width of the batch, padding and all."""

    def of_texts(self, batch: Any) -> Tensor:
        mask = batch["attention_mask"][..., None].float()
        return (self.embedding(batch["input_ids"]) * mask).mean(1)


def _leaked(texts: Tensor) -> Tensor:
    return texts + 0.05 * (texts.roll(1, 0) - texts)


def leak(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0
    of_texts = model.of_texts
    model.of_texts = lambda batch: _leaked(of_texts(batch))


def change_gradients(trainer: Any, model: Any) -> None:
    model.nap_seconds = 0.0
    weight = model.layer.weight
    # The loss is the same to the last bit.
    _with_step(model, lambda step, batch, i: step(batch, i) + 0.1 * (weight.sum() - weight.sum().detach()))


def leaking(safety: Safety, redraws: str = "") -> Lever:
    """Return a speed-up that is fast and lets texts affect one another."""
    return Lever(f"leak: {safety}", "leak()", safety, change=leak, redraws=redraws)


def texts() -> Any:
    """Return a loader of 64 short and long texts, padded to 32 tokens: 14 % of them are text."""
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 3, 4, 5] * 14 + [22] * 8)
    data = [
        {
            "x": torch.randn(8, generator=numbers),
            "input_ids": torch.randint(1, 100, (32,), generator=numbers) * (torch.arange(32) < length),
            "attention_mask": (torch.arange(32) < length).long(),
            "y": torch.tensor(index % 2),
        }
        for index, length in enumerate(lengths)
    ]
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)  # type: ignore[arg-type]


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
