"""Optimizers that step within backward train as they do otherwise, and hold no gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.optim import in_backward
from tests.models import Classifier, Manual, loader, quiet, same_weights
from tests.refusals import refused, warned

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Trained(Classifier):
    def __init__(self, kind: str = "adamw", within: bool = True, schedule: bool = True) -> None:
        super().__init__()
        self.kind, self.within, self.schedule = kind, within, schedule
        self.most_gradients = 0

    def on_after_backward(self) -> None:
        here = sum(p.grad is not None for p in self.parameters())
        self.most_gradients = max(self.most_gradients, here)

    def configure_optimizers(self) -> Any:
        kind, options = OPTIONS[self.kind]
        groups = [
            {"params": list(self.layers[0].parameters())},
            {"params": list(self.layers[3].parameters()), "lr": 0.02},
        ]
        made = in_backward(kind, groups, **options) if self.within else kind(groups, **options)
        if not self.schedule:
            return made
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(module: Trained, ckpt_path: Any = None, **arguments: Any) -> L.Trainer:
    trainer = quiet(**{"max_epochs": 2, **arguments})
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


class OwnStep(Trained):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


def made(kind: str = "adamw", within: bool = True, seed: int = 0, cls: type[Trained] = Trained) -> Trained:
    torch.manual_seed(seed)
    return cls(kind, within)


@pytest.mark.parametrize(
    ("cls", "kind", "arguments"),
    [
        (Trained, "rmsprop", {}),
        (Trained, "adafactor", {}),
        (Trained, "sgd", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Trained, "adamw", {"precision": "bf16-true"}),
        (Trained, "adamw", {"fused_optimizer": True}),
        (OwnStep, "adamw", {"precision": "bf16-true"}),
    ],
)
def test_weights_are_those_of_the_usual_step(cls: type[Trained], kind: str, arguments: dict[str, Any]) -> None:
    plain, within = made(kind, within=False, cls=cls), made(kind, cls=cls)
    train(plain, **arguments)
    trainer = train(within, **arguments)
    assert same_weights(plain, within)
    assert trainer.global_step == 20
    assert within.most_gradients == 0 < plain.most_gradients


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_checkpoints_are_those_of_the_usual_optimizer(first: bool, second: bool, tmp_path: Path) -> None:
    whole = made(within=False)
    train(whole)
    begun = train(made(within=first), max_steps=13)
    begun.save_checkpoint(tmp_path / "a.ckpt")
    resumed = made(within=second, seed=1)
    train(resumed, tmp_path / "a.ckpt")
    assert same_weights(whole, resumed)


def test_nothing_steps_after_the_run() -> None:
    module = made()
    train(module)
    before = [p.detach().clone() for p in module.parameters()]
    module.loss(next(iter(loader()))).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(p.grad is not None for p in module.parameters())


class Clips(Trained):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"accumulate_grad_batches": 2}, Trained, "accumulate_grad_batches=2.*Use larger batches"),
        ({"gradient_clip_val": 1.0}, Trained, "gradient_clip_val=1.0.*gradient_clip_algorithm='value'"),
        ({"micro_batch": 2}, Trained, "micro_batch=2"),
        ({}, Clips, r"Clips\.configure_gradient_clipping\(\): each parameter steps"),
    ],
)
def test_what_needs_all_gradients_is_refused_before_training(
    arguments: dict[str, Any], kind: type[Trained], says: str
) -> None:
    module = kind()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=rf"in_backward\(AdamW\) and .*{says}"):
        train(module, **arguments)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_accumulation_that_begins_later_is_refused_too() -> None:
    scheduler = L.callbacks.GradientAccumulationScheduler({1: 4})
    with refused(ValueError, says="accumulate_grad_batches=4"):
        train(made(), callbacks=[scheduler])


class Sgd(Classifier):
    def configure_optimizers(self) -> Any:
        return in_backward(torch.optim.SGD, self.parameters(), lr=0.1)


def test_in_manual_optimization_there_is_nothing_left_to_clip() -> None:
    class ClipsByHand(Manual, Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.clip_gradients(self.optimizers(), 0.5, "norm")

    with refused(ValueError, says=("clip_gradients()", "in_backward(SGD)", "clip_value")):
        quiet().fit(ClipsByHand(), loader())


def test_a_hook_that_would_find_no_gradients_is_warned_of() -> None:
    class ScalesGradients(Sgd):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    with warned(UserWarning, says=("ScalesGradients", "on_before_optimizer_step()", "SGD")):
        quiet().fit(ScalesGradients(), loader())


def test_groups_added_later_step_in_backward_too() -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = in_backward(torch.optim.SGD, first.parameters(), lr=1.0)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 10.0})
    before = [layer.weight.item() for layer in (first, second)]
    (first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum().backward()
    after = [layer.weight.item() for layer in (first, second)]
    assert [a - b for a, b in zip(before, after, strict=True)] == pytest.approx([1.0, 10.0])


def test_in_fabric_there_is_nothing_left_to_clip() -> None:
    fabric = L.Fabric(accelerator="cpu")
    layer = nn.Linear(2, 1)
    model, optimizer = fabric.setup(layer, in_backward(torch.optim.SGD, layer.parameters(), lr=0.1))
    before = layer.weight.detach().clone()
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert torch.allclose(layer.weight, before - 0.1)
    with refused(ValueError, fix="optimizer.clip_value"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


# -- a gradient is used and gone when backward reaches it: what needs it longer is refused, never trained otherwise


def a_step(net: nn.Module, rows: int = 3) -> torch.Tensor:
    return net(torch.ones(rows, 2)).square().mean()


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def assert_alike(
    make: Callable[[], nn.Module],
    train: Callable[[nn.Module, Any], None],
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    copied: bool = False,
) -> None:
    """Train two equal networks with the usual optimizer and within backward: the weights are the same."""
    plain, within = make(), make()
    inner: Any = in_backward(kind, within.parameters(), lr=0.1)
    if copied:
        within, inner = copy.deepcopy((within, inner))
    train(plain, kind(plain.parameters(), lr=0.1))  # type: ignore[call-arg]
    train(within, inner)
    assert same_weights(plain, within)


def test_accumulation_by_hand_is_refused_at_its_second_backward() -> None:
    fabric = L.Fabric(accelerator="cpu")
    net = small()
    model, _ = fabric.setup(net, in_backward(torch.optim.SGD, net.parameters(), lr=0.1))
    with fabric.no_backward_sync(model, enabled=True):
        fabric.backward(a_step(model) / 4)
    with refused(RuntimeError, says="in_backward(SGD)"):
        fabric.backward(a_step(model) / 4)


class Gan(L.LightningModule):
    def __init__(self, within: bool = True, toggles: bool = False, zeroes: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.within, self.toggles, self.zeroes = within, toggles, zeroes
        self.generator, self.discriminator = small(1), small(2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.fooled, self.told_apart), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if self.zeroes:
                optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def fooled(self) -> torch.Tensor:
        return a_step(nn.Sequential(self.generator, self.discriminator))

    def told_apart(self) -> torch.Tensor:
        made = self.generator(torch.ones(3, 2)).detach()
        return -self.discriminator(made).square().mean().clamp(max=1.0)

    def configure_optimizers(self) -> Any:
        def one(net: nn.Module) -> Any:
            kind = torch.optim.SGD
            return in_backward(kind, net.parameters(), lr=0.1) if self.within else kind(net.parameters(), lr=0.1)

        return [one(self.generator), one(self.discriminator)]


@pytest.mark.parametrize(("zeroes", "says"), [(True, r"zero_grad\(\) after a backward"), (False, "second gradient")])
def test_a_gan_whose_generator_would_also_step_the_discriminator_is_told_of_toggle(zeroes: bool, says: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{says}.*toggle_optimizer.*torch.optim.SGD as it is"):
        quiet().fit(Gan(zeroes=zeroes), loader())


def test_a_gan_that_toggles_trains_as_it_does_otherwise() -> None:
    plain, within = Gan(within=False, toggles=True), Gan(toggles=True)
    for module in (plain, within):
        quiet(max_epochs=2).fit(module, loader())
    assert same_weights(plain, within)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_tied_weights_and_several_losses_are_no_second_gradient(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block, self.last = nn.Linear(2, 2), small(), nn.Linear(2, 2)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x).tanh()
            y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)
            return self.last(y).square().mean(), (y - 1).square().mean()

    def train(net: nn.Module, optimizer: Any) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            torch.autograd.backward(list(net(torch.ones(3, 2))))
            optimizer.step()

    assert_alike(Net, train, torch.optim.AdamW)


def test_frozen_parameters_train_once_they_are_thawed() -> None:
    def make() -> nn.Module:
        net = small()
        net[0].requires_grad_(False)  # type: ignore[index]
        return net

    def train(net: Any, optimizer: Any) -> None:
        assert not net[0].weight.requires_grad
        for frozen in (True, False, False):
            net[0].requires_grad_(not frozen)
            optimizer.zero_grad()
            a_step(net).backward()
            optimizer.step()

    assert_alike(make, train)


@pytest.mark.parametrize("copied", [True, False])
def test_gradients_set_by_hand_and_those_of_a_copy_are_used_by_step(copied: bool) -> None:
    def train(net: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            if copied:
                a_step(net).backward()
            else:
                parameters = list(net.parameters())
                for p, gradient in zip(parameters, torch.autograd.grad(a_step(net), parameters), strict=True):
                    p.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    assert_alike(small, train, copied=copied)


def test_on_cuda_a_parameter_steps_in_one_kernel_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hasten.optim.backward.KERNELS_TO_JOIN", ("cpu",))
    fused = in_backward(torch.optim.AdamW, small().parameters())
    assert fused.param_groups[0]["fused"] is True
    # Checkpoints are those of the optimizer as the user made it.
    assert fused.state_dict()["param_groups"][0]["fused"] is None
    for options in ({"fused": False}, {"foreach": True}):
        assert not in_backward(torch.optim.AdamW, small().parameters(), **options).param_groups[0]["fused"]
    assert "fused" not in in_backward(torch.optim.RMSprop, small().parameters()).param_groups[0]
    monkeypatch.undo()
    assert in_backward(torch.optim.AdamW, small().parameters()).param_groups[0]["fused"] is None
