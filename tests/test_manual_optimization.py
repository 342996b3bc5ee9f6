"""Manual optimization: several optimizers, toggling, accumulation, schedulers; equal to the loop by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import hasten as L
from hasten.optim import HastenOptimizer
from hasten.precision import Precision
from hasten.strategies import DDPStrategy
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


def real(count: int) -> Tensor:
    return torch.ones(count, 1)


class Gan(L.LightningModule):
    """The generator and the critic step every second batch; only the gradients that are needed are computed."""

    def __init__(self, accumulate: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.needed: list[tuple[bool, ...]] = []

    def generator_loss(self, noise: Tensor) -> Tensor:
        return cross_entropy(self.critic(self.generator(noise)), real(len(noise)))

    def critic_loss(self, x: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return cross_entropy(self.critic(x), real(len(x))) + cross_entropy(self.critic(fake), 0 * real(len(x)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        noise = x.flip(0)
        opt_g, opt_c = self.optimizers()
        last = (batch_idx + 1) % self.accumulate == 0
        for optimizer, loss_of in (
            (opt_g, lambda: self.generator_loss(noise)),
            (opt_c, lambda: self.critic_loss(x, noise)),
        ):
            with optimizer.toggle_model(sync_grad=last):
                self.needed.append(tuple(part[0].weight.requires_grad for part in (self.generator, self.critic)))
                loss = loss_of()
                self.manual_backward(loss / self.accumulate)
                self.log("loss", loss)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        if last:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


def by_hand(model: Gan, batches: Any) -> None:
    (opt_g, opt_c), schedulers = model.configure_optimizers()
    for batch_idx, (x, _) in enumerate(batches):
        noise = x.flip(0)
        gradients = torch.autograd.grad(model.generator_loss(noise) / model.accumulate, [*model.generator.parameters()])
        add(model.generator, gradients)
        last = (batch_idx + 1) % model.accumulate == 0
        if last:
            opt_g.step()
            opt_g.zero_grad()
        gradients = torch.autograd.grad(model.critic_loss(x, noise) / model.accumulate, [*model.critic.parameters()])
        add(model.critic, gradients)
        if last:
            opt_c.step()
            opt_c.zero_grad()
            for scheduler in schedulers:
                scheduler.step()


def add(part: nn.Module, gradients: Any) -> None:
    for parameter, gradient in zip(part.parameters(), gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def test_gan_with_accumulation_and_toggling_equals_the_loop_by_hand() -> None:
    plain, model = Gan(), Gan()
    by_hand(plain, loader(32))
    trainer = quiet()
    trainer.fit(model, loader(32))
    assert same_weights(plain, model)
    assert trainer.global_step == 8  # two optimizers, four steps each
    assert model.needed == [(True, False), (False, True)] * 8
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [group["lr"] for opt in trainer.optimizers for group in opt.param_groups] == pytest.approx(
        [0.01 * 0.9**4] * 2
    )


@pytest.mark.world_size(2)
def test_gan_on_two_processes_equals_the_loop_by_hand_on_the_joined_batch() -> None:
    plain, model = Gan(), Gan()
    for each in (plain, model):
        # The mean over a batch is not the mean of two means where batch statistics are part of it.
        each.generator[1] = nn.Identity()
    trainer = quiet(devices=2, strategy="ddp")
    trainer.fit(model, loader(32))
    # The parts of a batch that the two processes hold are joined; noise is flipped within a part.
    parts = [
        [*loader(32, sampler=torch.utils.data.DistributedSampler(range(32), 2, rank, shuffle=False))] for rank in (0, 1)
    ]  # type: ignore[arg-type]
    (opt_g, opt_c), schedulers = plain.configure_optimizers()
    for batch_idx, pair in enumerate(zip(*parts, strict=True)):
        last = (batch_idx + 1) % 2 == 0
        for part, optimizer, loss_of in (
            (plain.generator, opt_g, lambda x: plain.generator_loss(x.flip(0))),
            (plain.critic, opt_c, lambda x: plain.critic_loss(x, x.flip(0))),
        ):
            loss = sum(loss_of(x) for x, _ in pair) / 2 / plain.accumulate
            add(part, torch.autograd.grad(loss, [*part.parameters()]))
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if last:
            for scheduler in schedulers:
                scheduler.step()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
    everyone = trainer.strategy.all_gather(model.critic[0].weight.detach())
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.world_size(2)
def test_no_exchange_of_gradients_while_accumulating() -> None:
    exchanges = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations that are there
        exchanges.append(len(exchanges))
        return allreduce_hook(state, bucket)

    trainer = quiet(devices=2, strategy=DDPStrategy(ddp_comm_hook=hook), limit_train_batches=4)
    trainer.fit(Gan(), loader(32))
    # One bucket in the first two backwards that exchange, as DDP builds it; four batches, each second one exchanges.
    assert len(exchanges) == 4


class Simple(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)
        self.b.bias.requires_grad = False
        self.checks: list[Any] = []

    def required(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        with refused(TypeError, "optimizer", says="toggle_optimizer(optimizer=0)", fix="self.optimizers()"):
            self.toggle_optimizer(0)
        self.toggle_optimizer(one)
        self.checks.append(self.required())
        self.toggle_optimizer(two)
        self.checks.append(self.required())
        if batch_idx:
            # What the program freezes in between stays frozen.
            self.b.weight.requires_grad = False
        self.untoggle_optimizer(two)
        self.checks.append(self.required())
        with pytest.raises(ZeroDivisionError), self.toggled_optimizer(one):
            raise ZeroDivisionError
        self.checks.append(self.required())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.a.parameters(), 0.1), torch.optim.SGD(self.b.parameters(), 0.1)]


def test_toggling_keeps_frozen_parameters_frozen_and_is_undone_also_after_an_error() -> None:
    model = Simple()
    quiet(limit_train_batches=2).fit(model, loader())
    untouched = [True, True, True, False]
    assert model.checks[-1] == [True, True, False, False]
    assert model.checks[:4] == [[True, True, False, False], [False, False, True, False], untouched, untouched]


def test_wrapped_optimizer_passes_everything_else_on() -> None:
    parameter = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([parameter], lr=0.5)
    wrapped = HastenOptimizer(inner)
    assert wrapped.param_groups is inner.param_groups
    assert wrapped._optimizer is inner
    with wrapped.toggle_model():
        parameter.grad = torch.ones(1)
        wrapped.step()
    assert parameter.item() == 0.5
    wrapped.defaults = {"lr": 3}
    assert inner.defaults == {"lr": 3}


class SchedulesWrapped(Gan):
    """Makes a scheduler of what self.optimizers() returns."""

    def on_train_start(self) -> None:
        critic = self.optimizers()[1]
        assert isinstance(critic, torch.optim.Adam)
        assert isinstance(critic, HastenOptimizer)
        self.own = torch.optim.lr_scheduler.StepLR(critic, 1, 0.5)

    def on_train_epoch_end(self) -> None:
        self.own.step()


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
def test_schedulers_can_be_made_of_a_wrapped_optimizer() -> None:
    model = SchedulesWrapped()
    trainer = quiet(max_epochs=2)
    trainer.fit(model, loader(16))
    assert trainer.global_step == 8
    assert trainer.optimizers[1].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**4 * 0.25)


class Clipped(L.LightningModule):
    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.algorithm = algorithm
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)
        self.gradient: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, HastenOptimizer)
        assert not isinstance(self.optimizers(use_pl_optimizer=False), HastenOptimizer)
        optimizer.zero_grad()
        self.manual_backward(100 * self.layer(batch[0]).pow(2).mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm=self.algorithm)
        self.gradient = torch.cat([p.grad.flatten() for p in self.parameters()])
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_clip_gradients_by_norm_and_value() -> None:
    model = Clipped("norm")
    quiet(limit_train_batches=1).fit(model, loader())
    assert float(model.gradient.norm()) == pytest.approx(0.5, rel=1e-4)
    model = Clipped("VALUE")
    quiet(limit_train_batches=1).fit(model, loader())
    assert float(model.gradient.abs().max()) == 0.5
    with refused(ValueError, "gradient_clip_algorithm", says="'norm'"):
        quiet(limit_train_batches=1).fit(Clipped("size"), loader())


class ScaledBy(Precision):
    """32-bit numbers and a gradient scaler whose scale doubles with each update."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)


class FactorSGD(torch.optim.SGD):
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * factor
        return super().step(closure)


class OneLoss(Clipped):
    """Two optimizers step after one backward, one of them clipped and one with an argument of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).pow(2).mean())
        self.clip_gradients(optimizers[1], gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.gradient = self.layer.weight.grad
        optimizers[0].step()
        optimizers[1].step(factor=0.5)

    def configure_optimizers(self) -> Any:
        return [FactorSGD([each], lr=0.1) for each in (self.layer.bias, self.layer.weight)]


def test_optimizers_that_step_after_one_backward_are_unscaled_once_and_with_its_scale() -> None:
    scaled, plain = OneLoss("norm"), OneLoss("norm")
    precision = ScaledBy()
    quiet(plugins=precision, limit_train_batches=3).fit(scaled, loader())
    quiet(limit_train_batches=3).fit(plain, loader())
    assert same_weights(scaled, plain)
    assert torch.equal(scaled.gradient, plain.gradient)
    # Once for each backward, and the last one for a backward to come.
    assert precision.scaler.get_scale() == 8.0 * 2**2


def test_a_step_that_is_left_out_after_clipping_leaves_the_next_one_scaled_right() -> None:
    class Skips(OneLoss):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                super().training_step(batch, batch_idx)
                return
            optimizers: Any = self.optimizers()
            self.manual_backward(self.layer(batch[0]).pow(2).mean())
            self.clip_gradients(optimizers[1], gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    scaled, plain = Skips("norm"), Skips("norm")
    quiet(plugins=ScaledBy(), limit_train_batches=3).fit(scaled, loader())
    quiet(limit_train_batches=3).fit(plain, loader())
    assert same_weights(scaled, plain)


def test_manual_backward_under_automatic_optimization_is_refused() -> None:
    class Wrong(Clipped):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.layer(batch[0]).mean())

    model = Wrong("norm")
    model.automatic_optimization = True
    with refused(ValueError, says=("automatic_optimization", "__init__")):
        quiet(limit_train_batches=1).fit(model, loader())


def test_validation_leaves_gradients_that_wait_for_more_batches() -> None:
    class Accumulates(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    torch.manual_seed(0)
    model = Accumulates()
    twin = copy.deepcopy(model)
    quiet(val_check_interval=1, num_sanity_val_steps=0).fit(model, loader(), loader())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for batch_idx, batch in enumerate(loader()):
        (twin.loss(batch) / 2).backward()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert same_weights(model, twin)


class Alternating(L.LightningModule):
    """Each part steps, and is clamped, with the weights that the other has by then."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def loss(self, x: Tensor) -> Tensor:
        return self.parts(x).float().square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, part in zip(self.optimizers(), self.parts, strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()
            with torch.no_grad():
                part.weight.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in self.parts]


def test_a_step_that_changes_weights_goes_on_with_the_new_ones_in_16_bits() -> None:
    model, by_hand = Alternating(), Alternating()
    quiet(max_epochs=2, precision="bf16-mixed").fit(model, loader())
    optimizers = by_hand.configure_optimizers()
    for _ in range(2):
        for x, _ in loader():
            for optimizer, part in zip(optimizers, by_hand.parts, strict=True):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = by_hand.loss(x)
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    part.weight.clamp_(-0.3, 0.3)
    assert same_weights(model, by_hand)


def test_a_program_decides_which_of_its_optimizers_count() -> None:
    # Programs with two optimizers do it, to count one step per batch.
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.calls: list[str] = []
            self.counts: list[int] = []

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            if batch_idx < 2:
                second._on_before_step = lambda: self.calls.append(f"before {batch_idx}")
                second._on_after_step = lambda: self.calls.append(f"after {batch_idx}")
                assert callable(second._on_after_step)
            for optimizer in (first, second):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
            self.counts.append(self.global_step)

    model = Two()
    trainer = quiet(max_epochs=1, limit_train_batches=3)
    trainer.fit(model, loader())
    assert model.calls == ["before 0", "after 0", "before 1", "after 1"]
    # Those of one batch do not last.
    assert model.counts == [1, 2, 4]
