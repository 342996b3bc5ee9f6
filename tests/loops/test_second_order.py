"""Programs that differentiate twice train with all defaults as in a plain loop."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.utilities import ModelSummary

STEPS = 40
Loss = Callable[[nn.Module, Tensor], Tensor]


def force(net: nn.Module, x: Tensor) -> Tensor:
    """A force field: minus the gradient of an energy with respect to positions."""
    x = x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (gradient - 1).square().mean()


def gradient_penalty(net: nn.Module, x: Tensor) -> Tensor:
    """As of a Wasserstein GAN, on a mixture of two halves of the batch."""
    mixed = (0.3 * x[:2] + 0.7 * x[2:]).requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True, retain_graph=True)
    return net(x).mean() + (gradient.norm(dim=1) - 1).square().mean()


def laplacian(net: nn.Module, x: Tensor) -> Tensor:
    """The residual of a differential equation of second order."""
    x = x.requires_grad_(True)
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return (sum(second) + net(x).squeeze(1)).square().mean()


def of_a_hidden_layer(net: nn.Module, x: Tensor) -> Tensor:
    """The gradient with respect to the input of an inner module."""
    hidden = net[1](net[0](x))
    (gradient,) = torch.autograd.grad(net[2](hidden).sum(), hidden, create_graph=True)
    return gradient.square().mean() + net(x).square().mean()


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """By torch.func, over a batch."""
    weights = dict(net.named_parameters())
    of_one = torch.func.jacrev(lambda one: torch.func.functional_call(net, weights, (one,)))
    return torch.func.vmap(of_one)(x).square().mean()


def inner_step(net: nn.Module, x: Tensor) -> Tensor:
    """A step of gradient descent within the loss (MAML)."""
    weights = dict(net.named_parameters())
    gradients = torch.autograd.grad(net(x[:2]).square().mean(), list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(net, moved, (x[2:],)).square().mean()


def hessian_vector(net: nn.Module, x: Tensor) -> Tensor:
    """A product with the Hessian of the weights."""
    loss, weights = net(x).square().mean(), list(net.parameters())
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    products = torch.autograd.grad(sum(g.sum() for g in gradients), weights, create_graph=True)
    return loss + 0.01 * sum(p.square().sum() for p in products)


class Module(L.LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.example_input_array = torch.randn(4, 3)
        self._loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch[0])
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


class ByHand(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self._loss(self.net, batch[0])
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def batches() -> torch.utils.data.DataLoader[Any]:
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 3)), batch_size=4)


def plain(loss: Loss) -> nn.Module:
    net = Module(loss).net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (x,) in batches():
        optimizer.zero_grad()
        loss(net, x).backward()
        optimizer.step()
    return net


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it a tenth of a second later: all that waits for its time happens."""
    real, looks = time.perf_counter, itertools.count()
    for module in ("record.pace", "record.step_times"):
        monkeypatch.setattr(f"hasten.{module}.perf_counter", lambda: real() + 0.1 * next(looks))


LOSSES = [force, gradient_penalty, laplacian, of_a_hidden_layer, jacobian, inner_step, hessian_vector]


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("kind", [Module, ByHand], ids=["automatic", "manual"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_second_derivatives_train_with_all_defaults(
    loss: Loss, kind: type[Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = kind(loss)
    if kind is ByHand:
        module.automatic_optimization = False
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", log_every_n_steps=1)
    trainer.fit(module, batches())
    expected = plain(loss).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.net.state_dict().items())
    record = next(tmp_path.rglob("run.jsonl")).read_text()
    assert record.count('"step_time"') > 3, "steps were timed"


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_second_derivatives_train_while_a_monitor_counts_operations(loss: Loss, tmp_path: Path) -> None:
    module = Module(loss)
    L.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=1, default_root_dir=tmp_path, enable_progress_bar=False,
        callbacks=[L.callbacks.ThroughputMonitor(lambda batch: len(batch[0]))],
    ).fit(module, batches())  # fmt: skip
    expected = plain(loss).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.net.state_dict().items())


@pytest.mark.parametrize("enables", [True, False], ids=["enables gradients", "expects gradients"])
def test_a_forward_that_takes_derivatives_has_a_table_of_layers(enables: bool, tmp_path: Path) -> None:
    class Forces(Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad() if enables else contextlib.nullcontext():
                x = x.detach().requires_grad_(True)
                return torch.autograd.grad(self.net(x).sum(), x, create_graph=self.training)[0]

    module = Forces(force)
    L.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, logger=False).fit(module, batches())
    table = ModelSummary(module)
    assert table.out_sizes == [[4, 1]]
    assert table.total_flops > 0


@pytest.mark.usefixtures("fast_clock")
def test_the_modules_own_methods_are_never_replaced(tmp_path: Path) -> None:
    found: set[str] = set()

    class Steps(Module):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            found.update(name for name in ("optimizer_step", "optimizer_zero_grad", "forward") if name in vars(self))
            super().optimizer_step(*args, **kwargs)

        def optimizer_zero_grad(self, *args: Any) -> None:
            found.update(name for name in ("optimizer_step", "optimizer_zero_grad", "forward") if name in vars(self))
            super().optimizer_zero_grad(*args)

    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(Steps(force), batches())
    assert not found
