"""The garbage collector during a training: at most one full pass over what exists, and none by hand without need."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hasten.utilities.memory import garbage_collection_cuda
from tests.models import Classifier, loader, quiet


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """Give back what the tests have frozen, and freeze it again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


class Knot:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


class Looks(Classifier):
    """Notes how much is frozen; makes full passes where it is asked to, as Python does by itself once in a while."""

    def __init__(self, passes: tuple[int, ...] = (), fails_at: int | None = None) -> None:
        super().__init__()
        self.passes, self.fails_at = passes, fails_at
        self.frozen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.passes:
            gc.collect()
        self.frozen.append(gc.get_freeze_count())
        if batch_idx == self.fails_at:
            raise ZeroDivisionError
        return self.loss(batch)


def test_what_survived_a_full_pass_within_training_is_left_out_of_later_ones() -> None:
    model = Looks(passes=(1,))
    quiet().fit(model, loader(12))
    before, after, later = model.frozen
    # What is frozen can still go by itself.
    assert before == 0 < 0.9 * after < later <= after
    assert gc.get_freeze_count() == 0


def test_it_is_given_back_after_an_error() -> None:
    model = Looks(passes=(0,), fails_at=1)
    with pytest.raises(ZeroDivisionError):
        quiet().fit(model, loader(8))
    assert model.frozen[1] > 0
    assert gc.get_freeze_count() == 0
    assert not [callback for callback in gc.callbacks if "hasten" in getattr(callback, "__module__", "")]


def test_what_the_program_has_frozen_stays_so() -> None:
    gc.freeze()
    model = Looks(passes=(0,))
    quiet().fit(model, loader(8))
    assert min(model.frozen) > 0
    assert gc.get_freeze_count() > 0


def test_memory_is_given_back_in_full() -> None:
    class Drops(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.knot: Any = Knot()
                self.seen = weakref.ref(self.knot)
                gc.collect()
            if batch_idx == 1:
                assert gc.get_freeze_count() > 0
                self.knot = None
                garbage_collection_cuda()
            return self.loss(batch)

    model = Drops()
    quiet().fit(model, loader(8))
    assert model.seen() is None


@pytest.mark.parametrize("large", [True, False])
def test_a_large_model_of_an_earlier_training_makes_room(large: bool) -> None:
    def train(elements: int) -> weakref.ref[nn.Module]:
        model = Classifier()
        # Never written to: it takes no memory, but counts as if.
        model.table = nn.Parameter(torch.empty(elements), requires_grad=False)
        quiet().fit(model, loader(4))
        return weakref.ref(model)

    gc.collect()
    gc.disable()
    try:
        earlier = train(elements=25_000_000 if large else 10)
        assert earlier() is not None
        train(elements=10)
        assert (earlier() is None) == large
    finally:
        gc.enable()
