"""Attention over packed documents: the results of masked attention, on every kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hasten._lib import torch_private
from hasten.data import document_block_mask, document_mask, packed_attention

LENGTHS = [3, 5, 5, 1, 0, 7]


def cu_seqlens(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def projections(tokens: int, key_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, key_heads, key_heads)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_packed_attention_and_its_gradients_are_those_of_masked_attention(causal: bool, key_heads: int) -> None:
    q, k, v = projections(sum(LENGTHS), key_heads)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    packed = packed_attention(q, k, v, cu_seqlens(LENGTHS), 7, causal=causal, scale=0.3)
    masked = functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (q, k, v)),
        attn_mask=document_mask(ids, causal),
        scale=0.3,
        enable_gqa=True,
    )[0].transpose(0, 1)
    assert torch.allclose(packed, masked, atol=1e-5)
    weight = torch.randn_like(packed)
    for mine, theirs in zip(
        torch.autograd.grad((packed * weight).sum(), (q, k, v)),
        torch.autograd.grad((masked * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("longest", [7, 520])
def test_a_cpu_computes_bfloat16_by_products_or_with_the_error_of_one_rounding(
    autocast: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)
    for is_fast in (True, False):
        monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda is_fast=is_fast: is_fast)
        places = cu_seqlens([*LENGTHS, longest])
        exact = projections(int(places[-1]))
        rounded = [each.detach().bfloat16().requires_grad_() for each in exact]
        wide = [each.detach().float().requires_grad_() for each in rounded]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = packed_attention(*(wide if autocast else rounded), places, longest)
        expected = packed_attention(*wide, places, longest)
        assert found.dtype == torch.bfloat16
        # Long sequences, and all without bfloat16 instructions, are computed in 32 bits and rounded once.
        once = longest > 512 or not is_fast
        assert ("hasten" in found.grad_fn.name()) is not once
        torch.testing.assert_close(found.float(), expected, rtol=2**-8 if once else 2**-5, atol=1e-6 if once else 0.03)
        weight = torch.randn_like(found)
        gradients = torch.autograd.grad(found, wide if autocast else rounded, weight)
        for one, other in zip(gradients, torch.autograd.grad(expected, wide, weight.float()), strict=True):
            size = other.abs().max().item()
            torch.testing.assert_close(one.float(), other, rtol=2**-8, atol=1e-6 if once else 0.02 * size)


def test_products_take_grouped_heads_other_widths_and_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda: True)
    lengths = [140, 3, 140, 300]
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), heads, width) for heads, width in ((4, 8), (2, 8), (2, 6))]
    gate = torch.rand(sum(lengths), 4, 6)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        ours = [each.bfloat16().to(dtype).requires_grad_() for each in tensors]
        result = packed_attention(*ours, cu_seqlens(lengths), 300, causal=True)
        assert ("hasten" in result.grad_fn.name()) is (dtype == torch.bfloat16)
        result.mul_(gate.to(dtype))
        found.append([result.detach(), *torch.autograd.grad(result.float().square().sum(), ours)])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()
    empty = [each[:0].bfloat16().requires_grad_() for each in tensors]
    assert packed_attention(*empty, cu_seqlens([]), 0).shape == (0, 4, 6)


def test_what_torch_transforms_or_differentiates_twice_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda: True)
    q, k, v = (each.detach().bfloat16().requires_grad_() for each in projections(sum(LENGTHS)))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        result = packed_attention(q, k, v, cu_seqlens(LENGTHS), 7)
        (first,) = torch.autograd.grad(result.float().square().sum(), q, create_graph=True)
        first.float().square().sum().backward()
    assert k.grad.isfinite().all()
    for p in (0.0, 0.3):
        gradient = torch.func.grad(lambda q, p=p: packed_attention(q, k, v, cu_seqlens(LENGTHS), 7, dropout_p=p).sum())(
            q
        )
        assert gradient.isfinite().all()
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        packed_attention(q, k, v, cu_seqlens(LENGTHS), 7, dropout_p=1.5)


def test_evaluation_in_inference_mode_leaves_nothing_behind_that_training_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(torch_private, "cpu_multiplies_bfloat16", lambda: True)
    q, k, v = (each.detach().bfloat16().requires_grad_() for each in projections(sum(LENGTHS)))
    with torch.inference_mode():
        before = packed_attention(q, k, v, cu_seqlens(LENGTHS), 7)
    found = packed_attention(q, k, v, cu_seqlens(LENGTHS), 7)
    assert torch.equal(before, found)
    found.sum().backward()
    assert q.grad.isfinite().all()


def test_dropout_drops_attention_weights() -> None:
    q, k, v = projections(20)
    torch.manual_seed(3)
    dropped = packed_attention(q, k, torch.ones_like(v), cu_seqlens([20]), 20, dropout_p=0.5)
    assert not torch.allclose(dropped, torch.ones_like(dropped))
    assert abs(dropped.mean().item() - 1) < 0.3
    assert torch.allclose(packed_attention(q, k, torch.ones_like(v), cu_seqlens([20]), 20), torch.ones_like(v))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dropout_p"), [(torch.bfloat16, 0.0), (torch.float32, 0.0), (torch.bfloat16, 0.1), (torch.float32, 0.1)]
)
def test_packed_attention_on_a_gpu(causal: bool, dtype: torch.dtype, dropout_p: float) -> None:
    q, k, v = (each.detach().cuda().to(dtype).requires_grad_() for each in projections(21))
    places = cu_seqlens([3, 5, 5, 1, 7])
    torch.cuda.set_sync_debug_mode("error")
    try:
        device_places = places.cuda(non_blocking=True)
        packed = packed_attention(q, k, v, device_places, 7, causal=causal, dropout_p=dropout_p)
        packed.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = packed_attention(*(each.detach().cpu().float() for each in (q, k, v)), places, 7, causal=causal)
    assert packed.shape == expected.shape
    assert packed.isfinite().all()
    if not dropout_p:
        assert torch.allclose(packed.cpu().float(), expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-4)
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_dropout_of_packed_attention_on_a_gpu_keeps_the_mean(dtype: torch.dtype, head_dim: int) -> None:
    q, k = torch.randn(2, 512, 4, head_dim, device="cuda", dtype=dtype).unbind()
    ones = torch.ones_like(q)
    places = cu_seqlens([200, 312]).cuda()
    dropped = packed_attention(q, k, ones, places, 312, dropout_p=0.5).float()
    assert dropped.std() > 0.01
    assert abs(dropped.mean().item() - 1) < 0.05


@pytest.mark.parametrize(("dtype", "flash"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (2, 20)])
def test_the_kernels_of_a_gpu_are_given_what_they_take(
    dtype: torch.dtype, flash: bool, heads: int, head_dim: int
) -> None:
    """On the meta device: shapes, types and gradients, as far as they are known without one."""
    from hasten.packed import document_attention

    assert document_attention._kernels_are_known()
    q, k, v = (torch.empty(9, heads, head_dim, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    places = cu_seqlens([4, 5]).to("meta")
    attended = document_attention._by_kernel(q, k, v, places, 5, {"dropout_p": 0.1, "is_causal": True, "scale": None})
    assert (attended.shape, attended.dtype) == (q.shape, dtype)
    if flash:
        # The gradient of the other kernel has no shapes on this device.
        attended.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_the_block_mask_is_the_same_mask() -> None:
    from torch.nn.attention.flex_attention import create_mask

    ids = torch.stack([torch.arange(256) // 70, torch.arange(256) // 128])
    for causal in (False, True):
        blocks = document_block_mask(ids, causal)
        dense = document_mask(ids, causal)
        assert torch.equal(create_mask(blocks.mask_mod, 2, 1, 256, 256, device="cpu"), dense)
        # Blocks of 128 that no token sees are left out.
        assert blocks.sparsity() > 0
