"""An optimizer that trains something else than the module says so before training."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from tests.models import Classifier, loader, quiet
from tests.refusals import refused

ELSEWHERE = nn.Linear(8, 2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class OfACopy(Classifier):
    def configure_optimizers(self) -> Any:
        return sgd(copy.deepcopy(self).parameters())


class MadeTooEarly(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.made = sgd(self.parameters())

    def configure_model(self) -> None:
        self.layers = nn.Sequential(nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        return self.made


class InAList(L.LightningModule):
    """Its layers are where torch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"heads": [nn.Linear(8, 2)]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.parts["heads"][0](batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return sgd(self.parts["heads"][0].parameters())


class BesideAList(InAList):
    """Has a layer that torch finds, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)


class Partly(Classifier):
    def configure_optimizers(self) -> Any:
        return sgd([*self.parameters(), *ELSEWHERE.parameters()])


@pytest.mark.parametrize("kind", [OfACopy, MadeTooEarly])
def test_a_module_that_would_not_be_trained_is_refused(kind: type[Classifier]) -> None:
    message = rf"{kind.__name__}.configure_optimizers\(\): 4 of the 4 parameters of SGD .*SGD\(self.parameters\(\)"
    with pytest.raises(ValueError, match=message):
        quiet().fit(kind(), loader())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InAList, r"2 of the 2 parameters of SGD are not among those of InAList: they are neither.*nn.ModuleList"),
        (BesideAList, r"2 of the 2 parameters of SGD .* BesideAList: they are neither"),
        (Partly, r"2 of the 6 parameters of SGD .* of Partly: they are neither"),
    ],
)
def test_parameters_that_the_module_does_not_know_are_warned_of(kind: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        quiet(limit_train_batches=1).fit(kind(), loader())


class Parts(Classifier):
    """Trains only a part, shares another, and holds a frozen teacher in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.layers[3]
        self.teacher = [copy.deepcopy(self.layers).requires_grad_(False)]

    def configure_optimizers(self) -> Any:
        return sgd([{"params": self.layers[0].parameters()}, {"params": self.same.parameters(), "lr": 0.01}])


class Gan(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) + self.critic(batch[0]).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [sgd(self.layers.parameters()), sgd(self.critic.parameters())]


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(2))

    def configure_optimizers(self) -> Any:
        self.layers(torch.zeros(1, 8))
        return sgd(self.parameters())


class Made(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.made = sgd(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.made


class In32Bits(Classifier):
    """Steps copies of its weights and writes them back."""

    def configure_optimizers(self) -> Any:
        self.copies = [parameter.detach().clone() for parameter in self.parameters()]
        return sgd(self.copies)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for mine, parameter in zip(self.copies, self.parameters(), strict=True):
            mine.grad = parameter.grad

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, parameter in zip(self.copies, self.parameters(), strict=True):
            parameter.data.copy_(mine)


@pytest.mark.parametrize("kind", [Parts, Gan, Lazy, Made])
def test_parts_shared_lazy_and_made_before_are_fine(kind: type[Classifier]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are not among those of")
        quiet(limit_train_batches=1, precision="bf16-true" if kind is Made else None).fit(kind(), loader())


def test_copies_that_are_stepped_on_purpose_are_not_refused() -> None:
    model = In32Bits()
    before = model.layers[0].weight.detach().clone()
    quiet(limit_train_batches=1).fit(model, loader())
    assert not torch.equal(before, model.layers[0].weight)


def test_parameters_whose_gradients_would_not_be_averaged_are_refused() -> None:
    with refused(Exception, fix="self.parameters()"):
        quiet(devices=2, strategy="ddp_fork").fit(Partly(), loader())
