"""CUDA graphs: where a step begins, and gradients that outlive one. What needs no GPU is counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from hasten.callbacks import LambdaCallback
from hasten.compile.settings import CompileSettings
from hasten.loops import prepare as loops_prepare
from tests.compile.test_compile import TRACED, Deep, Net
from tests.compile.test_with_others import fitted_bert
from tests.models import loader, quiet, same_weights

RECORDED = {"mode": "reduce-overhead"}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have compiled runs taken for recorded ones; return what happened, in order."""
    seen: list[str] = []
    monkeypatch.setattr(CompileSettings, "cuda_graphs", property(lambda self: True))
    monkeypatch.setattr(loops_prepare, "check_possible", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: seen.append("begin"))
    return seen


class Events(L.Callback):
    """Says what happens, and which gradients there are when."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.copied: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.events.append("zero_grad")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.events.append("backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.events.append("step")
        gradients = [weight.grad for weight in module.parameters()]
        self.copied.append(all(hasattr(gradient, "_hasten_copied") for gradient in gradients))

    def on_validation_batch_end(self, *_: Any) -> None:
        self.events.append("evaluated")

    def on_predict_batch_end(self, *_: Any) -> None:
        self.events.append("predicted")


def trained(events: list[str], model: type[L.LightningModule] = Deep, **arguments: Any) -> tuple[Any, Events]:
    L.seed_everything(1, verbose=False)
    module = model()
    watched = Events(events)
    trainer = quiet(**{"limit_train_batches": 6, "callbacks": [watched], **arguments})
    trainer.fit(module, loader(24))
    return module, watched


@pytest.mark.parametrize(
    ("compile", "lever", "step"),
    [
        (TRACED, {}, ["zero_grad", "begin", "backward", "step"]),
        (
            {**TRACED, "regional": True},
            {"accumulate_grad_batches": 3},
            ["zero_grad", "begin", "backward", "backward", "backward", "step"],
        ),
        (TRACED, {"micro_batch": 2}, ["zero_grad", "begin", "backward", "backward", "step"]),
    ],
)
def test_a_step_begins_once_where_its_gradients_are_cleared(
    events: list[str], compile: dict[str, Any], lever: dict[str, Any], step: list[str]
) -> None:
    plain, _ = trained([], **lever)
    module, watched = trained(events, compile=compile, **lever)
    assert events == step * (6 // lever.get("accumulate_grad_batches", 1))
    # What more is added to is a copy; what is used up before the next step need not be one.
    assert set(watched.copied) == {bool(lever)}
    assert same_weights(module, plain)


def test_gradients_that_are_never_cleared_are_copied_once(events: list[str]) -> None:
    class Kept(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.pointers: set[int] = set()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradient = next(self.parameters()).grad
            assert gradient is not None
            self.pointers.add(gradient.data_ptr())

    plain, _ = trained([])
    module, watched = trained(events, Kept, compile=TRACED)
    assert watched.copied == [False] + [True] * 5
    assert len(module.pointers) == 2
    assert same_weights(module, plain)


class Gan(L.LightningModule):
    """Two optimizers, one of whose networks is called twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        for_generator, for_critic = self.optimizers()
        made = self.generator(real.flip(0))
        loss = nn.functional.softplus(-self.critic(made)).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        loss = nn.functional.softplus(self.critic(made.detach())) + nn.functional.softplus(-self.critic(real))
        for_critic.zero_grad()
        self.manual_backward(loss.mean())
        for_critic.step()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


def test_a_manual_step_begins_once_whatever_it_calls(events: list[str]) -> None:
    plain, _ = trained([], Gan)
    module, _ = trained(events, Gan, compile=TRACED)
    assert [event for event in events if event != "backward"] == ["begin", "step", "step"] * 6
    assert events[0] == "begin"
    assert same_weights(module, plain)


def test_each_batch_of_an_evaluation_and_of_a_prediction_is_a_step(events: list[str]) -> None:
    trainer = quiet(compile=TRACED, callbacks=[Events(events)])
    trainer.validate(Net(), loader(12), verbose=False)
    assert events == ["begin", "evaluated"] * 3
    events.clear()
    trainer.predict(Net(), loader(12))
    assert events == ["begin", "predicted"] * 3


def test_fabric_and_plain_runs_leave_it_to_torch(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.fabric import fabric as fabric_module

    monkeypatch.setattr(fabric_module, "check_possible", lambda *_: None)
    for compile in (None, TRACED):
        fabric = L.Fabric(accelerator="cpu", devices=1, compile=compile)
        net = Deep().net
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, _ in loader(12):
            optimizer.zero_grad()
            fabric.backward((model(x) + model(x)).sum())
            optimizer.step()
    trained([])
    assert events == []


def test_after_the_run_torch_finds_steps_by_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cudagraph_trees import MarkStepBox

    monkeypatch.setattr(CompileSettings, "cuda_graphs", property(lambda self: True))
    monkeypatch.setattr(loops_prepare, "check_possible", lambda *_: None)
    counts: list[int] = []
    note = LambdaCallback(on_train_batch_end=lambda *_: counts.append(MarkStepBox.mark_step_counter))
    trained([], compile=TRACED, callbacks=[note])
    assert counts == [-1, -2, -3, -4, -5, -6]
    assert MarkStepBox.mark_step_counter == 0


def test_only_the_batch_size_of_a_recorded_graph_is_fixed(events: list[str]) -> None:
    report = fitted_bert(compile=TRACED, batching="length")[1].compile_report
    # One graph a phase, though widths are several.
    assert (report.graphs, report.recompiles) == (2, ())


# -- on a GPU


def on_gpu(model: type[L.LightningModule], **arguments: Any) -> Any:
    L.seed_everything(1, verbose=False)
    module = model()
    trainer = quiet(**{"accelerator": "gpu", "max_epochs": 3, **arguments})
    trainer.fit(module, DataLoader(loader(50).dataset, 4), loader(18))
    return module.cpu()


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.isfinite(value).all(), name
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lever",
    [
        {"accumulate_grad_batches": 3},
        {"micro_batch": 2},
        {"micro_batch": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        {"val_check_interval": 2, "accumulate_grad_batches": 3},
        {},
    ],
)
@pytest.mark.parametrize("regional", [False, True])
def test_recorded_steps_train_to_the_weights_of_plain_ones(lever: dict[str, Any], regional: bool) -> None:
    plain = on_gpu(Deep, **lever)
    recorded = on_gpu(Deep, compile={**RECORDED, "regional": regional}, **lever)
    assert_alike(recorded, plain)


@pytest.mark.gpu
def test_a_recorded_gan_trains_to_the_weights_of_a_plain_one() -> None:
    plain = on_gpu(Gan)
    assert_alike(on_gpu(Gan, compile=RECORDED), plain)


@pytest.mark.gpu
def test_a_model_that_the_user_had_recorded_accumulates_too() -> None:
    plain = on_gpu(Deep, accumulate_grad_batches=3)
    L.seed_everything(1, verbose=False)
    module = Deep()
    trainer = quiet(accelerator="gpu", max_epochs=3, accumulate_grad_batches=3)
    trainer.fit(torch.compile(module, mode="reduce-overhead"), DataLoader(loader(50).dataset, 4), loader(18))
    assert_alike(module.cpu(), plain)


@pytest.mark.gpu
def test_few_widths_are_recorded_once_each_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"accelerator": "gpu", "batching": "length", "max_epochs": 4}
    module, trainer = fitted_bert(compile=RECORDED, **arguments)
    report = trainer.compile_report
    assert (report.graphs, report.recompiles) == (2, ())
    assert "distinct sizes" not in caplog.text
    for weight in module.state_dict().values():
        assert torch.isfinite(weight).all()


@pytest.mark.gpu
def test_a_loop_of_the_users_after_a_recorded_run_is_recorded_once() -> None:
    on_gpu(Deep, compile=RECORDED)
    network = Deep().net.cuda()
    call = torch.compile(network, mode="reduce-overhead")
    batch: Tensor = torch.randn(4, 8, device="cuda")
    for _ in range(6):
        loss = call(batch).square().mean()
        network.zero_grad()
        loss.backward()
    assert all(weight.grad is not None for weight in network.parameters())
