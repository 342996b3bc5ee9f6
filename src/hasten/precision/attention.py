"""Attention that is faster than torch's under bfloat16 autocast, on CPUs without AMX."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import Tensor
from torch.nn import functional

from hasten._lib import torch_private
from hasten.packed.products import LONGEST, are_faster, attend_in_batch


class FastAttention:
    """Replaces what autocast does with torch's attention on the CPU, for as long as this object exists.

    The gradient of torch's attention in bfloat16 takes 3 times (64 tokens) to once (512 tokens) as long as in 32 bits
    (AVX-512; with AMX units there are other kernels). Attention without mask is computed as products of whole
    matrices, whose weights are kept for backward; with a mask, and on CPUs without bfloat16 instructions, in 32 bits.
    Results have the type that autocast gives them. With dropout, for float16 and for longer sequences nothing changes.

    Source: `PyTorch, torch.library <https://docs.pytorch.org/docs/stable/library.html>`_.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # That another kernel is replaced is the purpose.
            warnings.simplefilter("ignore")
            self._library.impl("scaled_dot_product_attention", _attention, "AutocastCPU", allow_override=True)


_current: weakref.ref[FastAttention] | None = None


def fast_attention() -> FastAttention | None:
    """Return the object of this process that replaces attention; None on a CPU where that would not be faster."""
    global _current
    if torch_private.cpu_has_amx():
        return None
    shared = None if _current is None else _current()
    if shared is None:
        shared = FastAttention()
        _current = weakref.ref(shared)
    return shared


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu")
    may_replace = dtype == torch.bfloat16 and not dropout_p and not query.is_nested
    may_replace = may_replace and max(query.shape[-2], key.shape[-2]) <= LONGEST
    if may_replace and attn_mask is None and _can_be_products(query, key, value, is_causal):
        q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
        return attend_in_batch(q, k, v, scale=q.size(-1) ** -0.5 if scale is None else scale, causal=is_causal)
    compute = torch.float32 if may_replace else dtype

    def converted(tensor: Tensor) -> Tensor:
        # As autocast: doubles and masks of bool stay.
        return tensor.to(compute) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = None if attn_mask is None else converted(attn_mask)
    with torch.autocast("cpu", enabled=False):
        attended = functional.scaled_dot_product_attention(
            converted(query), converted(key), converted(value), mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    return attended if attended.dtype == torch.float64 else attended.to(dtype)


def _can_be_products(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Return whether there are products for these tensors, and the program has not asked for another kernel."""
    return (
        query.dim() == 4
        and query.shape[:2] == key.shape[:2]
        and key.shape[:3] == value.shape[:3]
        and {query.dtype, key.dtype, value.dtype} <= {torch.bfloat16, torch.float16, torch.float32}
        and query.numel() * key.numel() > 0
        # Blocks of a causal mask are cut at places that are known: no symbols of a compiled program.
        and (not is_causal or all(isinstance(length, int) for length in (query.shape[2], key.shape[2])))
        and are_faster(query.shape[-2], key.shape[-2], torch.bfloat16)
    )
