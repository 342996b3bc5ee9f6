"""MixedPrecision(attention_in_32_bits=True): on a CPU without AMX, attention of short sequences in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib import torch_private
from hasten.plugins import MixedPrecision
from hasten.precision.attention import LONGEST, attention_32


@pytest.fixture(autouse=True)
def _a_processor_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)


def inputs(tokens: int = 24, heads: int = 2, key_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, n, tokens, 16, requires_grad=True) for n in (heads, key_heads, key_heads)]


def attended(tensors: list[Tensor], dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Tensor]:
    """Return the result of torch's attention under autocast, and the gradients."""
    with torch.autocast("cpu", dtype):
        result = F.scaled_dot_product_attention(*tensors, **options)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), tensors)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


MASK = torch.ones(24, 24, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}, {"attn_mask": MASK.float().log()}],
    ids=["plain", "causal", "scale", "mask of bool", "mask of numbers"],
)
def test_the_result_is_that_of_32_bits_rounded_once(options: dict[str, Any]) -> None:
    tensors = inputs()
    before = attended(tensors, **options)
    kept = attention_32()
    found = attended(tensors, **options)
    wide = F.scaled_dot_product_attention(*tensors, **options).to(torch.bfloat16)
    expected = [wide.detach(), *torch.autograd.grad(wide.float().square().sum(), tensors)]
    assert equal(found, expected)
    assert not equal(found, before)
    assert all(torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.05) for a, b in zip(found, before, strict=True))
    del kept
    assert equal(attended(tensors, **options), before)


def test_grouped_queries() -> None:
    tensors = inputs(heads=4, key_heads=2)
    kept = attention_32()
    with torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    assert torch.equal(found, expected.to(torch.bfloat16))
    del kept


@pytest.mark.parametrize(
    ("tensors", "dtype", "options"),
    [
        (inputs(LONGEST + 1, 1, 1), torch.bfloat16, {}),
        (inputs(), torch.float16, {}),
        (inputs(), torch.bfloat16, {"dropout_p": 0.3}),
        ([each.detach().double().requires_grad_() for each in inputs()], torch.bfloat16, {}),
    ],
    ids=["long", "float16", "dropout", "doubles"],
)
def test_nothing_else_changes(tensors: list[Tensor], dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    before = attended(tensors, dtype, **options)
    kept = attention_32()
    torch.manual_seed(1)
    assert equal(attended(tensors, dtype, **options), before)
    del kept


class Encoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.encoder(x)).mean(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(loader: DataLoader[Any], **arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Encoder()
    precision = MixedPrecision("bf16-mixed", "cpu", attention_in_32_bits=True)
    quiet(plugins=precision, max_epochs=1, **arguments).fit(module, loader)
    return module.state_dict()


def test_a_fit_has_it_for_as_long_as_it_trains() -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(12, 5, 16), torch.randn(12, 1))
    tensors = inputs()
    before = attended(tensors)
    weights = trained(DataLoader(data, 4))
    assert equal(attended(tensors), before)
    # By hand, with attention that is replaced.
    torch.manual_seed(0)
    module = Encoder()
    optimizer = module.configure_optimizers()
    kept = attention_32()
    for batch in DataLoader(data, 4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del kept
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    # Recomputing activations in backward finds the same attention.
    recomputed = trained(DataLoader(data, 4), memory="full")
    assert all(torch.equal(weights[name], value) for name, value in recomputed.items())


def test_with_amx_units_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: True)
    assert attention_32() is None
