"""What a training step may cost, counted in Python-level calls: exact and repeatable, unlike a clock."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hasten as L
from tests.models import quiet

STEPS = 40
STEADY = slice(10, 35)  # After the first steps, before the end of the epoch and the logging interval.
ALLOWED_PER_STEP = 40
ALLOWED_PER_LOGGED_VALUE = 8


class CountingBatches:
    """Batches that note, each time one is handed out, how many Python functions were called so far."""

    def __init__(self, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.steps = steps
        self.batch = (torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator))
        self.calls = 0
        self.noted: list[int] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            self.noted.append(self.calls)
            yield self.batch

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls += 1

    def calls_per_step(self, train: Callable[[CountingBatches], Any]) -> list[int]:
        """Run ``train(self)`` and return the calls between each batch and the next."""
        gc.collect()
        gc.disable()  # Finalizers of earlier tests would be counted.
        sys.setprofile(self._count)
        try:
            train(self)
        finally:
            sys.setprofile(None)
            gc.enable()
        return [after - before for before, after in zip(self.noted, self.noted[1:], strict=False)]


class Regression(L.LightningModule):
    """A linear model; ``logs`` says what is logged each step."""

    def __init__(self, log: Callable[[L.LightningModule, Tensor], None] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.logs = log

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.layer(x), y)
        if self.logs is not None:
            self.logs(self, loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        F.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def plain_loop(batches: CountingBatches, accumulate: int = 1, max_norm: float | None = None) -> None:
    layer = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for i, (x, y) in enumerate(batches, start=1):
        loss = F.mse_loss(layer(x), y) / accumulate
        loss.backward()
        if i % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(layer.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def fit_calls(module: L.LightningModule, **arguments: Any) -> list[int]:
    return CountingBatches().calls_per_step(lambda batches: quiet(**arguments).fit(module, batches))


def steady(calls: list[int]) -> int:
    """Return the calls of a step in the steady state, where every step costs the same."""
    costs = calls[STEADY]
    assert len(set(costs)) == 1, f"steps cost differently: {costs}"
    return costs[0]


@pytest.fixture(scope="module")
def bare() -> int:
    return steady(fit_calls(Regression()))


def test_a_training_step_costs_few_calls_more_than_the_plain_loop(bare: int) -> None:
    plain = steady(CountingBatches().calls_per_step(plain_loop))
    assert bare <= plain + ALLOWED_PER_STEP


@pytest.mark.parametrize(
    ("arguments", "plain_arguments"),
    [({"accumulate_grad_batches": 4}, {"accumulate": 4}), ({"gradient_clip_val": 0.5}, {"max_norm": 0.5})],
    ids=["accumulation", "clipping"],
)
def test_accumulation_and_clipping_stay_within_the_same_allowance(
    arguments: dict[str, Any], plain_arguments: dict[str, Any]
) -> None:
    plain = CountingBatches().calls_per_step(lambda batches: plain_loop(batches, **plain_arguments))
    mine = fit_calls(Regression(), **arguments)
    window = slice(8, 36)  # Whole accumulation windows.
    assert statistics.mean(mine[window]) <= statistics.mean(plain[window]) + ALLOWED_PER_STEP


def log_nothing(module: L.LightningModule, loss: Tensor) -> None:
    """Be called, as the others."""


@pytest.mark.parametrize(
    "log",
    [
        lambda module, loss: module.log("value", 0.5),
        lambda module, loss: module.log("loss", loss, prog_bar=True),
        lambda module, loss: module.log("loss", loss, on_step=True, on_epoch=True, batch_size=4),
    ],
    ids=["number", "bar", "epoch"],
)
def test_one_logged_value_costs_few_calls(log: Callable[[L.LightningModule, Tensor], None]) -> None:
    assert steady(fit_calls(Regression(log))) - steady(fit_calls(Regression(log_nothing))) <= ALLOWED_PER_LOGGED_VALUE


def test_a_callback_costs_calls_only_where_it_overrides_a_hook(bare: int) -> None:
    class Counts(L.Callback):
        seen = 0

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.seen += 1

    assert steady(fit_calls(Regression(), callbacks=[L.Callback(), L.Callback()])) == bare
    counts = Counts()
    added = steady(fit_calls(Regression(), callbacks=[counts])) - bare
    assert counts.seen == STEPS
    assert 1 <= added <= 4


def test_a_validation_step_costs_few_calls_more_than_the_plain_loop() -> None:
    def plain(batches: CountingBatches) -> None:
        layer = nn.Linear(8, 1)
        with torch.inference_mode():
            for x, y in batches:
                F.mse_loss(layer(x), y)

    plain_calls = steady(CountingBatches().calls_per_step(plain))
    mine = CountingBatches().calls_per_step(lambda batches: quiet().validate(Regression(), batches, verbose=False))
    assert steady(mine) <= plain_calls + ALLOWED_PER_STEP
