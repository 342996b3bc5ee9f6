"""One switch has optimizers update all parameters in one kernel; nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.optim import adamw, use_fused
from hasten.optim.fused import check_dense, fused_where_possible
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused

MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Trained(Classifier):
    def __init__(self, kind: str = "adamw") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return MAKERS[self.kind](self.parameters())


def train(kind: str, ckpt_path: Any = None, seed: int = 0, **arguments: Any) -> tuple[Trained, L.Trainer]:
    torch.manual_seed(seed)
    module, trainer = Trained(kind), quiet(**{"max_epochs": 2, **arguments})
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module, trainer


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "clip"), [("adam", None), ("adamw", "norm"), ("sgd", "value"), ("adagrad", "norm")])
def test_fused_weights_equal_the_others_up_to_rounding(kind: str, clip: str | None) -> None:
    clipping = {} if clip is None else {"gradient_clip_val": 0.05, "gradient_clip_algorithm": clip}
    plain, _ = train(kind, **clipping)
    fused, trainer = train(kind, fused_optimizer=True, **clipping)
    assert all(group["fused"] for group in trainer.optimizers[0].param_groups)
    assert_close(fused, plain)


def test_asking_for_a_fused_kernel_changes_no_layer() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))
    before = copy.deepcopy(layer)
    # Computing the weight would take a step of its power iteration.
    check_dense(torch.optim.SGD(layer.parameters(), lr=0.1), [layer], "Trainer")
    assert same_weights(before, layer)


def test_none_leaves_the_users_choice_and_false_overrides_it() -> None:
    class Fused(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01, fused=True)

    for chosen, result in ((None, True), (False, False)):
        trainer = quiet(fused_optimizer=chosen, limit_train_batches=1)
        trainer.fit(Fused(), loader())
        assert trainer.optimizers[0].param_groups[0]["fused"] is result
    _, trainer = train("adam", max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    ("kind", "first", "second"), [("adamw", None, True), ("sgd", True, None), ("adam", True, True)]
)
def test_a_run_goes_on_from_a_checkpoint_of_either_kind(
    kind: str, first: bool | None, second: bool | None, tmp_path: Path
) -> None:
    whole, _ = train(kind, fused_optimizer=second if first is second else None)
    _, begun = train(kind, max_epochs=1, fused_optimizer=first)
    path = tmp_path / "a.ckpt"
    begun.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert not saved["fused"], "a checkpoint is that of the optimizer as the user made it"
    resumed, trainer = train(kind, path, seed=1, fused_optimizer=second)
    assert bool(trainer.optimizers[0].param_groups[0]["fused"]) is bool(second)
    if first is second:
        assert same_weights(resumed, whole)
    else:
        assert_close(resumed, whole)


def test_a_scaler_leaves_out_infinite_steps_of_a_fused_optimizer() -> None:
    plugin = L.plugins.MixedPrecision("16-mixed", device="cuda", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    plugin.device = "cpu"
    fabric = L.Fabric(accelerator="cpu", plugins=plugin)
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    use_fused(optimizer)
    model, wrapped = fabric.setup(layer, optimizer)
    before = layer.weight.detach().clone()
    fabric.backward(model(torch.full((2, 4), float("inf"))).sum())
    wrapped.step()
    assert torch.equal(layer.weight, before)
    wrapped.zero_grad()
    fabric.backward(model(torch.ones(2, 4)).sum())
    norm = fabric.clip_gradients(model, wrapped, max_norm=0.1)
    wrapped.step()
    assert norm is not None
    assert norm.item() == pytest.approx(2 * 5**0.5, rel=0.05), "the norm of the unscaled gradients"
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("by_argument", [True, False])
def test_momentum_begins_after_steps_that_a_scaler_skips(by_argument: bool) -> None:
    plugin = L.plugins.MixedPrecision("16-mixed", device="cuda", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    plugin.device = "cpu"
    fabric = L.Fabric(accelerator="cpu", plugins=plugin, fused_optimizer=True if by_argument else None)
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)
    model, wrapped = fabric.setup(layer, optimizer)
    fabric.backward(model(torch.full((2, 4), float("inf"))).sum())
    wrapped.step()
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values()), "the step was skipped"
    wrapped.zero_grad()
    fabric.backward(model(torch.ones(2, 4)).sum())
    wrapped.step()
    assert torch.equal(optimizer.state[layer.weight]["momentum_buffer"], torch.full((1, 4), 2.0))


class Thawed(Trained):
    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)


def test_layers_that_are_thawed_later_get_their_momentum() -> None:
    def trained(**arguments: Any) -> nn.Module:
        torch.manual_seed(0)
        module = Thawed("sgd")
        quiet(max_epochs=3, **arguments).fit(module, loader())
        return module

    assert_close(trained(fused_optimizer=True), trained())


class Dampened(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


class Rms(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters())


class Own(Classifier):
    def configure_optimizers(self) -> Any:
        class MyAdam(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                return None

        return MyAdam(self.parameters())


class Words(Classifier):
    """Looks its inputs up in a table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(4, 8, sparse=True)

    def forward(self, x: Any) -> Any:
        return super().forward(x + self.table((x.abs() * 2).long().clamp(0, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SPARSE = "a fused SGD cannot take sparse gradients, and table is EmbeddingBag\\(sparse=True\\)"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Rms, "torch has no fused RMSprop; it has Adagrad, Adam, AdamW, SGD"),
        (Own, "torch has no fused MyAdam"),
        (Dampened, "a fused SGD with dampening cannot begin the momentum"),
        (Words, SPARSE),
    ],
)
def test_optimizers_without_a_fused_kernel_are_refused_before_training(module: type[Classifier], message: str) -> None:
    made = module()
    before = copy.deepcopy(made)
    with pytest.raises(ValueError, match=rf"^Trainer\(fused_optimizer=True\): {message}"):
        quiet(fused_optimizer=True).fit(made, loader())
    assert same_weights(made, before)


def test_sparse_gradients_are_refused_by_fabric_and_left_to_the_optimizer_of_a_command_line() -> None:
    module = Words()
    with refused(ValueError, "fused_optimizer", says="EmbeddingBag(sparse=True)"):
        L.Fabric(accelerator="cpu", fused_optimizer=True).setup(module, module.configure_optimizers())
    quiet(fused_optimizer=False).fit(Words(), loader())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert not fused_where_possible(optimizer, module).defaults.get("fused")
    assert fused_where_possible(optimizer, module.layers).param_groups[0]["fused"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_fabric_fuses_what_it_sets_up_and_saves_it_as_it_was(precision: Any) -> None:
    weights = []
    for fused in (None, True):
        torch.manual_seed(0)
        fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision, fused_optimizer=fused)
        layer = nn.Linear(4, 1)
        model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
        for _ in range(3):
            fabric.backward(model(torch.ones(2, 4)).sum())
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["fused"] is fused
        assert optimizer.state_dict()["param_groups"][0]["fused"] is None
        weights.append(layer.weight.detach().float())
    torch.testing.assert_close(weights[0], weights[1])
    with refused(ValueError, says=("Fabric(fused_optimizer=True)", "RMSprop")):
        fabric.setup_optimizers(torch.optim.RMSprop(nn.Linear(1, 1).parameters()))


def test_adamw_decays_matrices_alone_and_is_fused() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].bias.requires_grad_(False)
    optimizer = adamw(model, lr=0.1, weight_decay=0.5, no_decay=["0."])
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = {group["weight_decay"]: [name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert names == {0.5: ["1.weight"], 0.0: ["0.weight", "2.weight", "2.bias"]}
    assert all(group["fused"] for group in optimizer.param_groups)
    assert adamw(model, fused=False).param_groups[0]["fused"] is False


@pytest.mark.gpu
def test_fused_on_a_gpu_with_a_scaler_and_clipping() -> None:
    plain, _ = train("adamw", accelerator="cuda", precision="16-mixed", gradient_clip_val=0.1)
    fused, trainer = train(
        "adamw", accelerator="cuda", precision="16-mixed", gradient_clip_val=0.1, fused_optimizer=True
    )
    assert trainer.optimizers[0].param_groups[0]["fused"]
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
