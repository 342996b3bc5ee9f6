"""Attention within each of several sequences that are packed into one row of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hasten._lib import torch_private
from hasten._lib.device import cuda_capability
from hasten.packed.products import are_faster, attend_within

# The largest head of flash attention, and the multiple of which both kernels take heads without padding.
_LARGEST_HEAD, _MULTIPLE = 256, 8
# The first token, the number of sequences, and their length.
Run = tuple[int, int, int]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend within each of several sequences that are packed into one row of tokens.

    The result and the gradients equal those of padded attention with a mask, up to rounding. On CUDA, flash
    attention computes it (bf16 and fp16, since the Ampere generation), otherwise memory-efficient attention; the host
    reads nothing back. On other devices, and for 64-bit floats, torch's attention is called for each run of equal
    lengths, and no masked score is computed. A CPU without AMX computes 16-bit floats in 32 bits, which is faster. If
    it has bfloat16 instructions, sequences of up to 512 tokens without dropout are products of whole matrices in
    bfloat16: scores are rounded before the softmax, as where attention is written out, and weights are kept for
    backward.

    Args:
        query: ``(tokens, heads, head_dim)``, floating point.
        key: ``(tokens, key_heads, head_dim)``; ``heads`` is a multiple of ``key_heads`` (grouped-query attention).
        value: ``(tokens, key_heads, head_dim)``.
        cu_seqlens: the first token of each sequence and the end of the last, ``(sequences + 1,)`` int32, from 0 to
            ``tokens``.
        max_seqlen: length of the longest sequence in tokens, or more.
        causal: whether a token attends only to itself and earlier tokens.
        dropout_p: share of attention weights to drop, 0 to 1; pass 0 in evaluation.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.

    Returns:
        ``(tokens, heads, head_dim)``.

    Raises:
        ValueError: a shape does not fit, or ``cu_seqlens`` does not end at ``tokens``.

    Example::

        >>> import torch
        >>> q, k, v = torch.randn(3, 7, 2, 4).unbind()
        >>> both = packed_attention(q, k, v, torch.tensor([0, 3, 7], dtype=torch.int32), 4)
        >>> alone = packed_attention(q[:3], k[:3], v[:3], torch.tensor([0, 3], dtype=torch.int32), 3)
        >>> torch.allclose(both[:3], alone)
        True

    Source: `PyTorch, variable-length attention
    <https://docs.pytorch.org/docs/stable/nn.attention.varlen.html>`_; Dao, `FlashAttention-2
    <https://arxiv.org/abs/2307.08691>`_.

    """
    _check(query, key, value, cu_seqlens)
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": causal, "scale": scale}
    if query.is_cpu:
        return _on_host(query, key, value, cu_seqlens, options)
    if not query.is_cuda:
        return _by_length(query, key, value, _places(cu_seqlens, query.size(0)), options)
    if torch.is_autocast_enabled("cuda"):
        # As autocast does for torch's attention; the kernels below are not on its list.
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return _by_length(query, key, value, _places(cu_seqlens, query.size(0)), options)
    key, value = of_all_heads(query, key, value)
    compute = _by_kernel if _kernels_are_known() else _jagged
    return compute(query, key, value, cu_seqlens.to(torch.int32), int(max_seqlen), options)


def on_host(attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return ``attend(query, key, value)``, computed in 32 bits where a CPU takes longer with 16.

    The gradient of torch's attention in bfloat16 takes 1.4 (320 tokens) to 9 times (16 tokens) as long there, and
    rounds more often. With AMX units it has other kernels.
    """
    dtype = _result_type(query)
    if not query.is_cpu or dtype not in (torch.bfloat16, torch.float16) or torch_private.cpu_has_amx():
        return attend(query, key, value)
    with torch.autocast("cpu", enabled=False):
        return attend(query.float(), key.float(), value.float()).to(dtype)


def _result_type(query: Tensor) -> torch.dtype:
    """Return the type of the result of attention on the host: autocast changes all but 64 bits."""
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return query.dtype


def _on_host(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend by products of whole matrices where they are faster, otherwise by torch's attention."""
    places, dtype = _places(cu_seqlens, query.size(0)), _result_type(query)
    longest = max((end - begin for begin, end in pairwise(places)), default=0)
    if options["dropout_p"] or not are_faster(longest, longest, dtype):
        return on_host(functools.partial(_by_length, places=places, options=options), query, key, value)
    scale = query.size(2) ** -0.5 if options["scale"] is None else options["scale"]
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return attend_within(
        query, *of_all_heads(query, key, value), cu_seqlens, p=0.0, scale=scale, causal=options["is_causal"]
    )


def of_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with as many heads as the query, ``(tokens, heads, features)``."""
    times = query.size(1) // key.size(1)
    return (key, value) if times == 1 else (key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))


def document_mask(document_ids: Tensor, causal: bool = False) -> Tensor:
    """Return the mask for ``scaled_dot_product_attention`` that keeps the sequences of a packed row apart.

    Padding (ids below 0) attends to padding only, so that no row of scores is empty.

    Args:
        document_ids: the sequence each token belongs to, ``(rows, time)`` or ``(time,)`` integers.
        causal: whether a token attends only to itself and earlier tokens.

    Returns:
        Bool, True for pairs that attend, ``(rows, 1, time, time)``; without ``rows``, ``(1, 1, time, time)``.

    Example::

        >>> import torch
        >>> document_mask(torch.tensor([[0, 0, 1, -1]]), causal=True)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    """
    ids = document_ids if document_ids.dim() > 1 else document_ids[None]
    seen = ids[:, None, :, None] == ids[:, None, None, :]
    return seen.tril() if causal else seen


def document_block_mask(document_ids: Tensor, causal: bool = False) -> Any:
    """Return the same mask for ``torch.nn.attention.flex_attention.flex_attention``, as a ``BlockMask``.

    Empty blocks are skipped, so a row costs about as much as its sequences separately. Compile ``flex_attention``:
    uncompiled, it computes every score.

    Args:
        document_ids: the sequence each token belongs to, ``(rows, time)`` or ``(time,)`` integers.
        causal: whether a token attends only to itself and earlier tokens.

    Example::

        >>> import torch
        >>> document_block_mask(torch.tensor([[0, 0, 1, -1]])).shape
        (1, 1, 4, 4)

    Source: `PyTorch, FlexAttention <https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html>`_.

    """
    from torch.nn.attention.flex_attention import create_block_mask

    ids = document_ids if document_ids.dim() > 1 else document_ids[None]

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = ids[row, query] == ids[row, key]
        return same & (query >= key) if causal else same

    rows, time = ids.shape
    return create_block_mask(seen, rows, None, time, time, device=ids.device)


def runs_of(bounds: Sequence[int]) -> list[Run]:
    """Return each run of sequences of equal length; empty sequences are left out.

    Example::

        >>> runs_of([0, 3, 6, 6, 7])
        [(0, 2, 3), (6, 1, 1)]

    """
    found, place = [], bounds[0]
    for length, same in groupby(end - begin for begin, end in pairwise(bounds)):
        count = len(list(same))
        if length:
            found.append((place, count, length))
        place += count * length
    return found


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> None:
    for name, given in (("query", query), ("key", key), ("value", value)):
        if given.dim() != 3 or given.size(0) != query.size(0):
            raise ValueError(
                f"packed_attention({name}): its shape is {tuple(given.shape)}; use (tokens, heads, head_dim) with the "
                f"same tokens for query, key and value ({query.size(0)} in query)."
            )
    if query.size(1) % key.size(1) or key.size(1) != value.size(1):
        raise ValueError(
            f"packed_attention: {query.size(1)} heads of query, {key.size(1)} of key, {value.size(1)} of value. key "
            "and value have the same number, and query a multiple of it."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"packed_attention(cu_seqlens): {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; use the first token of "
            "each sequence and the end of the last: (sequences + 1,) int32."
        )


def _places(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Return the bounds of sequences, checked."""
    places: list[int] = cu_seqlens.tolist()
    if places[0] != 0 or places[-1] != tokens or places != sorted(places):
        raise ValueError(
            f"packed_attention(cu_seqlens): it goes from {places[0]} to {places[-1]}, and there are {tokens} tokens. "
            "It begins with 0, never falls, and ends with the number of tokens."
        )
    return places


def _by_length(query: Tensor, key: Tensor, value: Tensor, places: list[int], options: dict[str, Any]) -> Tensor:
    """Call torch's attention once for each run of equal lengths."""
    runs = runs_of(places)
    if not runs:
        return torch.empty_like(query)
    sizes = [count * length for _, count, length in runs]
    parts = []
    # split instead of slices: its backward is one concatenation, not a full-size sum per sequence.
    for (_, count, length), *heads in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in heads)
        part = functional.scaled_dot_product_attention(q, k, v, enable_gqa=query.size(1) != key.size(1), **options)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, options: dict[str, Any]
) -> Tensor:
    """Call the kernel of torch's attention, which takes the bounds of the sequences.

    Jagged tensors reach the same kernels after thousands of Python calls; torch.nn.attention.varlen reaches one of
    them, without dropout.
    """
    width, wide = query.size(2), value.size(2)
    dropout_p, causal, scale = (options[name] for name in ("dropout_p", "is_causal", "scale"))
    scale = width**-0.5 if scale is None else scale
    is_ampere = (cuda_capability(query.device) or (8, 0)) >= (8, 0)
    flash = query.dtype != torch.float32 and width == wide <= _LARGEST_HEAD and is_ampere
    if width % _MULTIPLE or wide % _MULTIPLE:
        query, key, value = (functional.pad(each, (0, -each.size(2) % _MULTIPLE)) for each in (query, key, value))
    places = cu_seqlens, cu_seqlens, longest, longest
    if flash:
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, *places, dropout_p, causal, False, scale=scale
        )
        attended: Tensor = found[0]
    else:
        found = torch.ops.aten._efficient_attention_forward(
            query[None], key[None], value[None], None, *places, dropout_p, int(causal), True, scale=scale
        )
        attended = found[0][0]
    return attended[..., :wide]


@functools.cache
def _kernels_are_known() -> bool:
    """Return whether this version of torch has both kernels with the expected arguments."""
    return torch.version.hip is None and all(
        torch_private.argument_names(operation.default)[: len(names)] == names
        for operation, names in (
            (torch.ops.aten._flash_attention_forward, _OF_FLASH),
            (torch.ops.aten._efficient_attention_forward, _OF_EFFICIENT),
        )
    )


_OF_FLASH = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
_OF_EFFICIENT = [
    "query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p",
    "custom_mask_type", "compute_log_sumexp",
]  # fmt: skip


def _jagged(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, options: dict[str, Any]
) -> Tensor:
    # Without both lengths, torch would read them from the device, and the host would wait.
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            each.contiguous(), offsets=cu_seqlens, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for each in (query, key, value)
    )
    values: Tensor = functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).values()
    return values
