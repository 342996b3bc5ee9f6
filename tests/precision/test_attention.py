"""MixedPrecision(fast_attention=True): on a CPU without AMX, attention of short sequences by products or in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib import torch_private
from hasten.plugins import MixedPrecision
from hasten.precision.attention import LONGEST, fast_attention


@pytest.fixture(autouse=True)
def _a_processor_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda: True)


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


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return attention as it is written out."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize("sizes", [(24, 24), (7, 24), (24, 7), (300, 300), (300, 200)])
def test_products_are_as_exact_as_attention_that_is_written_out(
    sizes: tuple[int, int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    shapes = ((3, 2, sizes[0], 16), (3, 2, sizes[1], 16), (3, 2, sizes[1], 12))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def errors(attend: Any) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            found = attend(*tensors, **options)
        assert found.dtype == torch.bfloat16
        kinds.append(found.grad_fn.name())
        weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        exact = by_hand(*tensors, **options)
        pairs = [
            (found, exact),
            *zip(
                torch.autograd.grad(found, tensors, weight.bfloat16()),
                torch.autograd.grad(exact, tensors, weight),
                strict=True,
            ),
        ]
        return [((one - other).norm() / other.norm()).item() for one, other in pairs]

    kinds: list[str] = []
    written_out = errors(by_hand)
    kept = fast_attention()
    ours = errors(F.scaled_dot_product_attention)
    del kept
    assert "hasten" in kinds[1]
    assert all(one < 1.5 * other + 1e-3 for one, other in zip(ours, written_out, strict=True))


def test_where_one_key_has_all_the_weight_nothing_but_the_value_has_a_gradient() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, tokens, 16, requires_grad=True) for tokens in (24, 1, 1))
    kept = fast_attention()
    _, d_query, d_key, d_value = attended([query, key, value])
    del kept
    assert [bool(each.any()) for each in (d_query, d_key, d_value)] == [False, False, True]


@pytest.mark.parametrize("heads_first", [True, False])
def test_results_lie_in_memory_as_torchs_do(heads_first: bool) -> None:
    tensors = inputs()
    if not heads_first:
        tensors = [each.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for each in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        before = F.scaled_dot_product_attention(*tensors)
        kept = fast_attention()
        found = F.scaled_dot_product_attention(*tensors)
    del kept
    assert found.stride() == before.stride()
    # A gradient that is one number for all.
    assert all(each.isfinite().all() for each in torch.autograd.grad(found.sum(), tensors))


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}, {"attn_mask": MASK.float().log()}],
    ids=["plain", "causal", "scale", "mask of bool", "mask of numbers"],
)
def test_with_a_mask_or_slow_products_the_result_is_that_of_32_bits_rounded_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda: "attn_mask" in options)
    tensors = inputs()
    before = attended(tensors, **options)
    kept = fast_attention()
    found = attended(tensors, **options)
    wide = F.scaled_dot_product_attention(*tensors, **options).to(torch.bfloat16)
    expected = [wide.detach(), *torch.autograd.grad(wide.float().square().sum(), tensors)]
    assert equal(found, expected)
    assert not equal(found, before)
    assert all(torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.05) for a, b in zip(found, before, strict=True))
    del kept
    assert equal(attended(tensors, **options), before)


def test_second_derivatives_and_transforms_are_those_of_torch() -> None:
    tensors = inputs(tokens=5)

    def second() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            found = F.scaled_dot_product_attention(*tensors).float().square().sum()
        (first,) = torch.autograd.grad(found, tensors[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tensors[1])[0]

    def one(query: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(query, query, query).float().sum()

    def transformed() -> Tensor:
        return torch.func.vmap(torch.func.grad(one))(tensors[0].detach()[:, None])

    before = second(), transformed()
    kept = fast_attention()
    for found, other in zip((second(), transformed()), before, strict=True):
        assert (found - other).norm() < 0.05 * other.norm()
    del kept


def test_a_compiled_function_computes_the_same() -> None:
    tensors = inputs(tokens=150)
    kept = fast_attention()
    expected = attended(tensors, is_causal=True)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        result = compiled(*tensors, is_causal=True)
    found = [result.detach(), *torch.autograd.grad(result.float().square().sum(), tensors)]
    del kept
    assert equal(found, expected)
    q, k, v = (each.detach().bfloat16() for each in tensors)
    arguments = (q, k, v, 0.25, True)
    torch.library.opcheck(torch.ops.hasten.attention, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_function_takes_other_batches_and_lengths(causal: bool) -> None:
    kept = fast_attention()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, tokens in ((3, 24), (2, 24), (2, 150)):
        tensors = [torch.randn(batch, 2, tokens, 16, requires_grad=True) for _ in range(3)]
        with torch.autocast("cpu", torch.bfloat16):
            result = compiled(*tensors, is_causal=causal)
        expected = by_hand(*tensors, is_causal=causal)
        assert (result.float() - expected).norm() < 0.02 * expected.norm()
        gradients = torch.autograd.grad(result.float().square().sum(), tensors)
        for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), tensors), strict=True):
            assert (one - other).norm() < 0.03 * other.norm()
    del kept


def test_grouped_queries() -> None:
    tensors = inputs(heads=4, key_heads=2)
    kept = fast_attention()
    with torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    # Heads differ in number, so they are computed in 32 bits.
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
    kept = fast_attention()
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
    precision = MixedPrecision("bf16-mixed", "cpu", fast_attention=True)
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
    kept = fast_attention()
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
    assert fast_attention() is None
