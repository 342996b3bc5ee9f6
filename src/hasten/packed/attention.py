"""Attention with dropout on the CPU for several sequences in one row of tokens.

torch's attention on the CPU leaves its fast path with dropout, and computes every pair of tokens of a padded batch.
Here each sequence attends only to itself, by matrix products into reused buffers, with dropout masks from random bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hasten.packed.document_attention import Run, runs_of
from hasten.packed.dropout import draw, kept, scale_of


def _cut(rows: Tensor, run: Run) -> Tensor:
    """Return one run of ``(heads, tokens, features)`` as ``(heads * sequences, length, features)``."""
    begin, count, length = run
    part = rows[:, begin : begin + count * length]
    return part if count == 1 else part.unflatten(1, (count, length)).flatten(0, 1)


def _put(rows: Tensor, run: Run, part: Tensor) -> None:
    """Write one run, shaped as by ``_cut``, into ``(tokens, heads, features)``."""
    begin, count, length = run
    heads = part.unflatten(0, (-1, count)).permute(1, 2, 0, 3)
    rows[begin : begin + count * length].unflatten(0, (count, length)).copy_(heads)


def _scores(heads: int, runs: list[Run]) -> Iterator[tuple[Run, torch.Size, slice]]:
    """Yield each run with the shape of its scores and where they are among the scores of all runs."""
    place = 0
    for run in runs:
        _, count, length = run
        shape = torch.Size((heads * count, length, length))
        yield run, shape, slice(place, place + shape.numel())
        place += shape.numel()


@torch.library.custom_op("hasten::packed_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, p: float, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, tokens, _ = query.shape
    runs = runs_of(bounds.tolist())
    pairs = heads * sum(count * length**2 for _, count, length in runs)
    weights = torch.empty(pairs, dtype=query.dtype)
    random, threshold = draw(pairs, p) if p else (torch.empty(0, dtype=torch.uint8), 0)
    # The features of all heads of a token are adjacent, as the next layer needs them.
    output = torch.empty((tokens, heads, value.shape[-1]), dtype=query.dtype)
    scaled = query * scale
    for run, shape, part in _scores(heads, runs):
        scores = torch.bmm(_cut(scaled, run), _cut(key, run).transpose(1, 2))
        if causal:
            scores.masked_fill_(torch.ones(shape[1:], dtype=torch.bool).triu_(1), -torch.inf)
        probabilities = weights[part].view(shape)
        torch.softmax(scores, -1, out=probabilities)
        if p:
            # The output, which is far smaller, is scaled by 1 / (1 - p) at the end.
            probabilities = kept(random[part], threshold, shape, query.dtype).mul_(probabilities)
        _put(output, run, torch.bmm(probabilities, _cut(value, run)))
    if p:
        output.mul_(scale_of(p))
    return output, weights, random, torch.tensor(threshold)


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, p: float, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, tokens, _ = query.shape
    pairs = torch.library.get_ctx().new_dynamic_size()
    return (
        query.new_empty((tokens, heads, value.shape[-1])),
        query.new_empty(pairs),
        query.new_empty(pairs if p else 0, dtype=torch.uint8),
        torch.tensor(0),
    )


@torch.library.custom_op("hasten::packed_attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    weights: Tensor,
    random: Tensor,
    threshold: Tensor,
    bounds: Tensor,
    p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, least = query.shape[0], int(threshold)
    # (tokens, heads, features) in memory, as the projections need them
    d_query, d_key, d_value = (
        torch.empty((one.shape[1], heads, one.shape[2]), dtype=one.dtype) for one in (query, key, value)
    )
    # The softmax's mean gradient, weighted by the probabilities, is a product of two small tensors.
    center = (gradient * output).sum(-1, keepdim=True).transpose(0, 1)
    gradient = (gradient * scale_of(p) if p else gradient).transpose(0, 1)
    for run, shape, part in _scores(heads, runs_of(bounds.tolist())):
        probabilities, d_output = weights[part].view(shape), _cut(gradient, run)
        d_weights = torch.bmm(d_output, _cut(value, run).transpose(1, 2))
        dropped = probabilities
        if p:
            mask = kept(random[part], least, shape, query.dtype)
            d_weights.mul_(mask)
            dropped = mask.mul_(probabilities)
        _put(d_value, run, torch.bmm(dropped.transpose(1, 2), d_output))
        d_scores = d_weights.sub_(_cut(center, run)).mul_(probabilities)
        _put(d_query, run, torch.bmm(d_scores, _cut(key, run)))
        _put(d_key, run, torch.bmm(d_scores.transpose(1, 2), _cut(query, run)))
    return (
        d_query.mul_(scale).transpose(0, 1).contiguous(),
        d_key.mul_(scale).transpose(0, 1).contiguous(),
        d_value.transpose(0, 1).contiguous(),
    )


@_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, bounds, ctx.p, ctx.scale, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, key, value, *output, bounds)


def _backward(ctx: Any, gradient: Tensor, *_others: Any) -> tuple[Any, ...]:
    gradients = _attention_backward(gradient, *ctx.saved_tensors, ctx.p, ctx.scale)
    return *gradients, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, p: float, scale: float, causal: bool
) -> Tensor:
    """Attend within each of several sequences.

    Args:
        query: shape ``(heads, tokens, features)``; the sequences follow one another.
        key: shape ``(heads, tokens, features)``.
        value: shape ``(heads, tokens, features)``.
        bounds: the first token of each sequence and the end of the last; shape ``(sequences + 1,)``, on the CPU.
        p: probability of dropping an attention weight, 0 to 1.
        scale: factor of the products of query and key.
        causal: whether a token attends only to itself and earlier tokens.

    Returns:
        shape ``(tokens, heads, features)``.

    Source: Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762

    """
    attended: Tensor = _attention(query, key, value, bounds, p, scale, causal)[0]
    return attended
