"""A large model of an earlier training is collected before the next one, a small one is not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.models import Classifier, loader, quiet


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
