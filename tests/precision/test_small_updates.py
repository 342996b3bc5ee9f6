"""Training with 16-bit weights loses no update: it is that of 32-bit weights that are rounded for the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader, quiet, same_weights
from torch import nn

import hasten as L
from hasten._lib.tree import leaves
from hasten.plugins import HalfPrecision

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


class Adamw(Classifier):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr=lr)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def train(precision: Any = None, ckpt_path: Any = None, seed: int = 0, **arguments: Any) -> L.Trainer:
    torch.manual_seed(seed)
    trainer = quiet(**{"max_epochs": 2, "precision": precision, **arguments})
    trainer.fit(Adamw(), loader(), ckpt_path=ckpt_path)
    return trainer


def fit_line(precision: Any, keep: bool, steps: int = 600) -> float:
    """Move a weight from 1 towards 1.1 by steps of 1e-4, of which bfloat16 holds none; return where it ends."""
    plugin = HalfPrecision(precision, keep_small_updates=keep) if precision != "32-true" else None
    fabric = L.Fabric(accelerator="cpu", plugins=plugin)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=5e-4)
    model, wrapped = fabric.setup(layer, optimizer)
    x = torch.ones(1, 1)
    for _ in range(steps):
        wrapped.zero_grad()
        fabric.backward((model(x) - 1.1).square().sum())
        wrapped.step()
    return layer.weight.item()


@pytest.mark.parametrize("precision", DTYPES)
def test_a_long_run_with_a_small_learning_rate_does_not_stall(precision: Any) -> None:
    expected = fit_line("32-true", True)
    assert expected == pytest.approx(1.0451, abs=1e-3)
    assert fit_line(precision, True) == pytest.approx(expected, abs=0.01)
    assert fit_line(precision, False) == 1.0, "without it every update is rounded away"


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3, line_search_fn="strong_wolfe"),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    ],
    ids=["adamw", "fused", "sgd", "lbfgs", "adagrad", "adagrad, filled"],
)
def test_steps_are_those_of_weights_in_32_bits(precision: Any, make: Any) -> None:
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    expected = copy.deepcopy(model)
    full = copy.deepcopy(model).float()
    optimizer, of_full = make(model.parameters()), make(full.parameters())
    HalfPrecision(precision).convert_optimizer(optimizer)
    HalfPrecision(precision).convert_optimizer(optimizer)  # Twice is once.

    def mine() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def by_hand() -> Any:
        expected.load_state_dict(full.state_dict())
        expected.zero_grad()
        loss = expected(x).square().mean()
        loss.backward()
        for p, q in zip(expected.parameters(), full.parameters(), strict=True):
            q.grad = p.grad.float()
        return loss

    for _ in range(10):
        x = torch.randn(4, 8).to(dtype)
        optimizer.step(mine)
        of_full.step(by_hand)
    expected.load_state_dict(full.state_dict())
    assert same_weights(model, expected)
    for p, q in zip(model.parameters(), full.parameters(), strict=True):
        if isinstance(optimizer, torch.optim.Adagrad):
            torch.testing.assert_close(optimizer.state[p]["sum"], of_full.state[q]["sum"], rtol=0, atol=0)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_resumed_run_goes_on_exactly(precision: Any, tmp_path: Path) -> None:
    whole = train(precision, gradient_clip_val=0.1)
    begun = train(precision, max_steps=13, gradient_clip_val=0.1)
    begun.save_checkpoint(tmp_path / "a.ckpt")
    resumed = train(precision, tmp_path / "a.ckpt", seed=1, gradient_clip_val=0.1)
    assert same_weights(whole.lightning_module, resumed.lightning_module)
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (whole, resumed)]
    for index, state in states[0].items():
        assert state["exp_avg"].dtype == torch.float32
        assert all(torch.equal(value, states[1][index][name]) for name, value in state.items())


class Made(Classifier):
    """Trains with the optimizer that ``make`` returns."""

    make: Any

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def assert_resumes(make: Any, precision: Any, path: Path) -> list[Any]:
    """Assert that a resumed run has the weights and states of an undisturbed one; return these states' tensors."""

    def run(seed: int = 0, ckpt_path: Any = None, **arguments: Any) -> L.Trainer:
        torch.manual_seed(seed)
        trainer = quiet(max_epochs=2, precision=precision, **arguments)
        module = Made()
        module.make = make
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return trainer

    whole = run()
    run(max_steps=13).save_checkpoint(path)
    resumed = run(1, path)
    assert same_weights(whole.lightning_module, resumed.lightning_module)
    states = [leaves(trainer.optimizers[0].state_dict()["state"]) for trainer in (whole, resumed)]
    for one, other in zip(*states, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other
    return [value for value in states[0] if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("precision", DTYPES)
def test_states_that_an_optimizer_creates_with_itself_are_in_32_bits(precision: Any, tmp_path: Path) -> None:
    values = assert_resumes(lambda p: torch.optim.Adagrad(p, lr=0.01), precision, tmp_path / "a.ckpt")
    assert {value.dtype for value in values} == {torch.float32}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("value", [0.1, 0.3])
def test_adagrad_starts_from_its_argument_unless_a_state_with_another_was_loaded(precision: Any, value: float) -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=value)
    fabric = L.Fabric(accelerator="cpu", precision=precision)
    model, wrapped = fabric.setup(layer, optimizer)
    state = wrapped.state_dict()
    state["state"][0]["sum"].fill_(0.25)

    def step() -> float:
        fabric.backward((0 * model(torch.ones(1, 1))).sum())
        wrapped.step()
        return float(optimizer.state[layer.weight]["sum"])

    wrapped.load_state_dict(state)
    assert step() == 0.25
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=value)
    model, wrapped = fabric.setup(layer, optimizer)
    assert step() == float(torch.tensor(value))


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lists_of_states_are_resumed_exactly(precision: Any, search: Any, tmp_path: Path) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4, line_search_fn=search)

    values = assert_resumes(lbfgs, precision, tmp_path / "a.ckpt")
    assert {value.dtype for value in values} == {torch.float32}


def test_counts_among_the_states_are_resumed_exactly() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("seen", {"count": torch.tensor(256)})["count"] += 1
            return super().step(closure)

    def prepared() -> torch.optim.Optimizer:
        layer = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        optimizer = Counts(layer.parameters(), lr=0.1)
        HalfPrecision("bf16-true").convert_optimizer(optimizer)
        return optimizer

    optimizer, resumed = prepared(), prepared()
    optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.step()
    resumed.step()
    count = resumed.state_dict()["state"][0]["seen"]["count"]
    assert count.dtype == torch.int64
    assert count == optimizer.state_dict()["state"][0]["seen"]["count"] == 258


@pytest.mark.parametrize(
    ("first", "second"), [("bf16-true", "32-true"), ("32-true", "bf16-true"), ("naive", "bf16-true")]
)
def test_checkpoints_of_other_precisions_can_be_resumed(first: str, second: str, tmp_path: Path) -> None:
    def arguments(name: str) -> dict[str, Any]:
        naive = HalfPrecision("bf16-true", keep_small_updates=False)
        return {"plugins": naive} if name == "naive" else {"precision": name}

    train(max_steps=13, **arguments(first)).save_checkpoint(tmp_path / "a.ckpt")
    resumed = train(ckpt_path=tmp_path / "a.ckpt", seed=1, **arguments(second))
    whole = train("32-true")
    assert resumed.global_step == 20
    for a, b in zip(resumed.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("what", ["zero_", "mask", "load_state_dict", "fill_", "data"])
def test_a_weight_that_the_program_sets_is_the_one_that_is_trained(precision: Any, name: str, what: str) -> None:
    """As 32-bit weights that the program sets in the same way, of which the model has the nearest 16-bit numbers."""
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(DTYPES[precision])
    full = copy.deepcopy(model).float()
    optimizer, of_full = make(model.parameters()), make(full.parameters())
    HalfPrecision(precision).convert_optimizer(optimizer)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])

    def change(layer: nn.Linear) -> None:
        with torch.no_grad():
            if what == "zero_":
                layer.weight.zero_()
            elif what == "mask":
                layer.weight.mul_(mask.to(layer.weight))
            elif what == "fill_":
                layer.weight[0].fill_(0.5)
            elif what == "data":
                layer.weight.data = torch.zeros_like(layer.weight)
            else:
                layer.load_state_dict({key: torch.zeros_like(value) for key, value in layer.state_dict().items()})

    for step in range(12):
        x = torch.randn(3, 4).to(DTYPES[precision])
        model.zero_grad()
        model(x).square().mean().backward()
        for p, q in zip(model.parameters(), full.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        of_full.step()
        if step % 4 == 1:
            change(model)
            change(full)
        for p, q in zip(model.parameters(), full.parameters(), strict=True):
            assert torch.equal(p, q.to(p.dtype)), step


@pytest.mark.parametrize("precision", DTYPES)
def test_an_optimizer_without_state_goes_on_exactly(precision: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(DTYPES[precision])

    def prepared(layer: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        HalfPrecision(precision).convert_optimizer(optimizer)
        return optimizer

    def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.ones(3, 4, dtype=DTYPES[precision])).square().mean().backward()
        optimizer.step()

    optimizer = prepared(model)
    for _ in range(5):
        step(model, optimizer)
    # The order in which a program loads its parts does not matter.
    again = nn.Linear(4, 2).to(DTYPES[precision])
    resumed = prepared(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    for _ in range(20):
        step(model, optimizer)
        step(again, resumed)
    assert same_weights(model, again)
    ends = [o.state_dict()["state"][0]["full_weight"] for o in (optimizer, resumed)]
    assert torch.equal(*ends)


def test_the_low_bits_of_an_older_checkpoint_are_used() -> None:
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    HalfPrecision("bf16-true").convert_optimizer(optimizer)
    nn.init.ones_(layer.weight)
    state = optimizer.state_dict()
    # 1.003 as the distance from 1, in 32-bit floats.
    wanted = torch.tensor([[1.003]])
    state["state"] = {0: {"low_bits": (wanted.view(torch.int32) - torch.ones(1, 1).view(torch.int32)).short()}}
    optimizer.load_state_dict(state)
    (-0.003 * layer(torch.ones(1, 1, dtype=torch.bfloat16))).sum().backward()
    optimizer.step()
    assert layer.weight.item() == 1.0078125, "the nearest to 1.006; from 1 it would be 1"


def test_weights_changed_from_outside_stay_changed() -> None:
    class Halved(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if trainer.global_step == 5:
                for p in module.parameters():
                    p.data.mul_(0.5)
                self.then = [p.detach().clone() for p in module.parameters()]

    halved = Halved()
    trainer = train("bf16-true", callbacks=[halved], max_steps=6)
    for a, b in zip(halved.then, trainer.lightning_module.parameters(), strict=True):
        assert (a - b).abs().max() < 0.05


def test_an_error_within_a_step_leaves_the_parameters_in_place() -> None:
    class Breaks(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            raise KeyError("broken")

    layer = nn.Linear(2, 1).to(torch.bfloat16)
    optimizer = Breaks(layer.parameters(), lr=0.1)
    HalfPrecision("bf16-true").convert_optimizer(optimizer)
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.state_dict()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], layer.parameters(), strict=True))


@pytest.mark.parametrize("precision", DTYPES)
def test_running_statistics_stay_in_32_bits(precision: Any) -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2)
            )

    module = Normed()
    mean = torch.randn(16)
    module.layers[1].running_mean.copy_(mean)
    HalfPrecision(precision).convert_module(module)
    assert torch.equal(module.layers[1].running_mean, mean), "nothing was rounded on the way"
    quiet(precision=precision).fit(module, loader(), loader(8))
    kinds = {name: value.dtype for name, value in module.state_dict().items()}
    assert kinds["layers.0.weight"] == kinds["layers.3.weight"] == DTYPES[precision]
    assert kinds["layers.1.weight"] == kinds["layers.1.running_var"] == torch.float32
    assert not torch.equal(module.layers[1].running_mean, mean)
