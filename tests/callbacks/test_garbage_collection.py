"""GarbageCollection: Python's collector runs after the same steps, and is on again whatever ends the fit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import GarbageCollection
from tests.models import Classifier, loader, quiet


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Collections:
    """The generation and the optimizer steps of each collection since the first step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer: L.Trainer | None = None
        self.seen: list[tuple[int, int]] = []
        collect = gc.collect

        def noted(generation: int = 2) -> int:
            assert self.trainer is not None
            self.seen.append((self.trainer.global_step, generation))
            return collect(generation)

        monkeypatch.setattr("hasten.callbacks.garbage_collection.gc.collect", noted)

    def of_fit(self, callback: GarbageCollection, **arguments: Any) -> Any:
        self.trainer = quiet(callbacks=[callback], **arguments)
        self.seen.clear()
        self.trainer.fit(Classifier(), loader(32))
        return self.seen


class Noting(Classifier):
    """Notes whether the collector is on in each step, and fails in the step that it is given."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.on: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.on.append(gc.isenabled())
        if batch_idx == self.fails_at:
            raise KeyError("a mistake of the program's")
        return super().training_step(batch, batch_idx)


def test_it_collects_after_every_n_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    collections = Collections(monkeypatch)
    callback = GarbageCollection(every_n_steps=3, generation=0)
    assert collections.of_fit(callback, max_epochs=1) == [(0, 2), (3, 0), (6, 0)]
    # Batches of one accumulation are one step.
    assert collections.of_fit(callback, max_epochs=2, accumulate_grad_batches=2) == [(0, 2), (3, 0), (6, 0)]


def test_the_collector_is_off_in_steps_and_on_again_after_the_fit() -> None:
    module = Noting()
    quiet(callbacks=[GarbageCollection()], max_epochs=1).fit(module, loader(16))
    assert module.on == [False] * 4
    assert gc.isenabled()


def test_it_is_on_again_after_an_exception() -> None:
    module = Noting(fails_at=2)
    with pytest.raises(KeyError):
        quiet(callbacks=[GarbageCollection()], max_epochs=1).fit(module, loader(16))
    assert module.on == [False] * 3
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    quiet(callbacks=[GarbageCollection()], max_epochs=1).fit(Classifier(), loader(16))
    assert not gc.isenabled()


@pytest.mark.world_size(2)
def test_both_processes_collect_after_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    collections = Collections(monkeypatch)
    seen = collections.of_fit(GarbageCollection(every_n_steps=2), max_epochs=1, devices=2, strategy="ddp")
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, seen)
    assert found[0] == found[1] == [(0, 2), (2, 1), (4, 1)]
