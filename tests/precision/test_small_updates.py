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
    ],
    ids=["adamw", "fused", "sgd", "lbfgs"],
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
