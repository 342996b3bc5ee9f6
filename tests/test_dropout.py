"""Trainer(dropout="fast"): torch's dropout, from random bytes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import hasten as L
from hasten.packed.dropout import dropout, fast_dropout
from hasten.packed.products import attend_within
from tests.models import Classifier, loader, quiet, same_weights
from tests.programs import fork_python
from tests.refusals import refused

SHARES = [0.0, 0.001, 0.1, 0.25, 0.5, 0.9, 0.99, 0.997, 0.999, 1.0]


@pytest.mark.parametrize("p", SHARES)
def test_each_element_is_dropped_with_its_probability_and_the_others_scaled(p: float) -> None:
    torch.manual_seed(0)
    calls, dropped = 300, []
    for _ in range(calls):
        x = torch.full((1000,), 2.0, requires_grad=True)
        y = dropout(x, p)
        y.sum().backward()
        assert torch.equal(x.grad * 2.0, y.detach())
        kept = y.detach()[y != 0]
        assert kept.allclose(torch.tensor(2.0 / (1 - p) if p < 1 else 0.0))
        dropped.append(1 - len(kept) / 1000)
    # One threshold, a multiple of 1/256, serves a whole call: the shares of calls vary by that, their mean does not.
    of_thresholds = (p * 256 % 1 * (1 - p * 256 % 1)) ** 0.5 / 256
    error = ((p * (1 - p) / 1000 + of_thresholds**2) / calls) ** 0.5
    assert sum(dropped) / calls == pytest.approx(p, abs=5 * error + 1e-12)


@pytest.mark.parametrize("p", SHARES)
def test_packed_attention_drops_with_the_same_probability(p: float) -> None:
    torch.manual_seed(0)
    calls, total, gradients = 100, 0.0, 0.0
    # Equal weights of a row of ones: the mean output says which share was kept, times the scale.
    query, bounds = torch.zeros(32, 1, 4), torch.tensor([0, 32])
    for _ in range(calls):
        value = torch.ones(32, 1, 4, requires_grad=True)
        output = attend_within(query, query, value, bounds, p=p, scale=1.0, causal=False)
        output.sum().backward()
        total, gradients = total + output.mean().item(), gradients + value.grad.mean().item()
    assert gradients == pytest.approx(total, rel=1e-4)
    if p == 1.0:
        assert total == 0.0
        return
    of_thresholds = (p * 256 % 1 * (1 - p * 256 % 1)) ** 0.5 / 256
    error = ((p * (1 - p) / 1024 + of_thresholds**2) / calls) ** 0.5 / (1 - p)
    assert total / calls == pytest.approx(1.0, abs=5 * error + 1e-5)


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(400_000), 0.5) == 0).double()
    for distance in (1, 2, 4, 7, 8, 16):
        both = (dropped[:-distance] * dropped[distance:]).mean().item()
        assert both == pytest.approx(0.25, abs=0.004)


def test_the_gradient_goes_where_the_value_went() -> None:
    x = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)

    def with_one_mask(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return dropout(x, 0.3)

    assert torch.autograd.gradcheck(with_one_mask, (x,))
    torch.library.opcheck(torch.ops.hasten.dropout, (x.detach(), 0.3), test_utils=("test_schema", "test_faketensor"))


def test_the_ends_and_evaluation_are_exact() -> None:
    x = torch.randn(5)
    for p, training in ((0.0, True), (0.5, False), (1.0, True)):
        assert torch.equal(dropout(x, p, training), torch.nn.functional.dropout(x, p, training))
    for p in (-0.1, 1.5):
        with refused(ValueError, "p", says=f"p={p}"):
            dropout(x, p)
    layer = nn.Dropout(0.5).eval()
    with fast_dropout(layer) as count:
        assert count == 1
        assert torch.equal(layer(x), x)
    layer = nn.Dropout(1.0)
    with fast_dropout(layer):
        assert layer(input=x).abs().sum() == 0


def test_in_place_it_drops_where_the_tensor_lies() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 50, dtype=torch.float64, requires_grad=True)
    hidden = x * 1.0
    assert dropout(hidden, 0.25, inplace=True) is hidden
    dropped = hidden.detach() == 0
    assert dropped.double().mean().item() == pytest.approx(0.25, abs=0.05)
    hidden.sum().backward()
    factors = torch.where(dropped, 0.0, 1 / 0.75).double()
    torch.testing.assert_close(x.grad, factors)
    torch.testing.assert_close(hidden.detach(), x.detach() * factors)
    ones = torch.ones(3)
    assert dropout(ones, 1.0, inplace=True) is ones
    assert ones.tolist() == [0.0, 0.0, 0.0]


def test_in_place_layers_drop_where_their_result_is_not_read() -> None:
    layer, hidden = nn.Dropout(1.0, inplace=True), torch.ones(9)
    with fast_dropout(layer):
        layer(hidden)
    assert hidden.sum() == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_can_be_differentiated(inplace: bool) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def with_one_mask(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return dropout(x.sin(), 0.4, inplace=inplace).exp()

    assert torch.autograd.gradgradcheck(with_one_mask, (x,))


def test_functional_transforms_are_those_of_torchs_dropout() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2.0 * dropout(x, 0.5)

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return 2.0 * nn.functional.dropout(x, 0.5)

    def of(function: object) -> list[torch.Tensor]:
        x, found = torch.ones(6, 4), []
        for compute in (
            lambda: torch.func.vmap(function, randomness="same")(x),
            lambda: torch.func.vmap(function, randomness="different")(x),
            lambda: torch.func.grad(lambda x: function(x).sum())(x),
            lambda: torch.func.jvp(function, (x,), (x,))[1],
        ):
            torch.manual_seed(0)
            found.append(compute())
        with torch.autograd.forward_ad.dual_level():
            torch.manual_seed(0)
            pair = function(torch.autograd.forward_ad.make_dual(x, x))
            found.append(torch.autograd.forward_ad.unpack_dual(pair).tangent)
        return found

    for ours, theirs in zip(of(twice), of(torchs), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(twice)(torch.ones(2, 2))


@pytest.mark.parametrize("inplace", [False, True])
def test_shapes_strides_and_kinds(inplace: bool) -> None:
    torch.manual_seed(0)
    for x in (torch.ones(0, 3), torch.ones(()), torch.ones(30, 20).t(), torch.ones(64, dtype=torch.bfloat16)):
        y = dropout(x.clone(), 0.5, inplace=inplace)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert set(y.flatten().tolist()) <= {0.0, 2.0}


def test_recomputed_activations_have_the_same_mask() -> None:
    torch.manual_seed(0)
    x = torch.ones(500, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: dropout(x * 1.0, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


def test_layers_that_compute_something_else_keep_doing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    patched = nn.Dropout(0.5)
    patched.forward = lambda x: x + 2
    model = nn.Sequential(Own(), patched, nn.Dropout2d(), nn.AlphaDropout(), nn.Dropout())
    with fast_dropout(model) as count:
        assert count == 1
        assert model[:2](torch.zeros(1)).item() == 3

    torchs = nn.Dropout.forward

    @functools.wraps(torchs)
    def counted(layer: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torchs(layer, x)

    calls: list[int] = []
    monkeypatch.setattr(nn.Dropout, "forward", counted)
    with fast_dropout(model) as count:
        assert count == 0
        model[4](torch.ones(3))
    assert calls == [3]


def trained(**options: object) -> Classifier:
    L.seed_everything(7)
    module = Classifier(dropout=0.5)
    quiet(max_epochs=2, **options).fit(module, loader())
    return module


def test_a_layer_saved_in_the_middle_of_a_run_is_torchs_when_it_is_loaded(tmp_path) -> None:
    class Saving(Classifier):
        def training_step(self, batch: object, batch_idx: int) -> object:
            if batch_idx == 1:
                torch.save(self.layers, tmp_path / "layers.pt")
            return super().training_step(batch, batch_idx)

    quiet(dropout="fast").fit(Saving(dropout=0.5), loader())
    # Elsewhere there may be no hasten.
    program = (
        "import sys, torch; layers = torch.load(sys.argv[1], weights_only=False); "
        "assert 'hasten' not in sys.modules; layers[2].p = 1.0; print(layers[2](torch.ones(9)).sum().item())"
    )
    path = str(tmp_path / "layers.pt")
    assert fork_python("-c", program, path).stdout == "0.0\n"
    layers = torch.load(path, weights_only=False)
    with fast_dropout(layers) as replaced:
        assert replaced == 1
    assert "forward" not in vars(layers[2])


def test_a_run_repeats_with_the_seed_and_resumes_with_the_same_masks(tmp_path) -> None:
    whole, plain = trained(dropout="fast"), trained()
    assert not same_weights(whole, plain)
    assert all("forward" not in vars(layer) for layer in whole.modules())
    L.seed_everything(7)
    half = quiet(max_epochs=2, max_steps=13, dropout="fast")
    half.fit(Classifier(dropout=0.5), loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(99)
    rest = Classifier(dropout=0.5)
    quiet(max_epochs=2, dropout="fast").fit(rest, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert same_weights(rest, whole)


def test_a_module_without_dropout_and_other_words_are_refused() -> None:
    module = Classifier()
    module.layers = nn.Sequential(nn.Linear(8, 2))
    with refused(ValueError, "dropout", fix="packed=True"):
        quiet(dropout="fast").fit(module, loader())
    for value, kind in (("quick", ValueError), (0.1, TypeError), (True, TypeError)):
        with refused(kind, "dropout", fix="'fast'"):
            L.Trainer(dropout=value)
