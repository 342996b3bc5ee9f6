"""Attention on the CPU as products of matrices: one for all heads of all sequences of the same length.

torch's kernel for the CPU computes each head of each sequence in small blocks. Its gradient takes 1.4 to 9 times as
long in 16 bits as in 32, and with dropout torch has no such kernel. Here the weights of a sequence are kept for
backward, as where attention is written out, and dropout masks come from random bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hasten._lib import torch_private
from hasten.packed.dropout import draw, kept, scale_of

# Queries of a block under a causal mask: keys behind the last of them take no part.
_BLOCK = 128
# In tokens. The weights of longer sequences need more memory than they are worth.
LONGEST = 512
# In bfloat16, sequences are padded to a multiple of this. For each new shape of a product, oneDNN makes a kernel, which
# takes 0.25 ms and 1 MB: more than the product itself. Padding leaves few shapes.
_MULTIPLE = 32
# Of each group: the number of matrices, of queries and keys of each, and the real lengths of its sequences if any is
# padded.
_Sizes: TypeAlias = tuple[tuple[int, int, int, tuple[int, ...]], ...]


def are_faster(queries: int, keys: int, dtype: torch.dtype) -> bool:
    """Return whether products are faster than torch's attention without dropout, and may take its place.

    In bfloat16 they take 0.4 to 0.7 of the time. In 32 bits they take about as long as torch's attention. With AMX
    units torch has other kernels. Longer sequences would need much memory for their weights.
    """
    return (
        dtype == torch.bfloat16
        and max(queries, keys) <= LONGEST
        and torch_private.cpu_multiplies_bfloat16()
        and not torch_private.cpu_has_amx()
        and not torch_private.is_transformed()
        # Second derivatives need torch's attention that is written out: torch.nn.attention.sdpa_kernel(MATH).
        and torch.backends.cuda.flash_sdp_enabled()
    )


class _Scores(NamedTuple):
    """The queries of a group that are multiplied with some of its keys."""

    queries: slice
    keys: slice
    # Where its weights are among all, and their shape.
    weights: slice
    shape: torch.Size
    # Keys of this part that a causal mask hides from some of its queries.
    hidden: slice
    # Matrices, and their first key that is padding.
    padding: list[tuple[slice, int]]


class _Group(NamedTuple):
    """Sequences with as many queries and keys as one another; each head of each is one matrix."""

    matrices: int
    queries: slice
    keys: slice
    scores: list[_Scores]

    def parts(
        self, queries: Iterable[Tensor], keys: Iterable[Tensor]
    ) -> Iterator[tuple[_Scores, list[Tensor], list[Tensor]]]:
        """Yield all scores with their parts of tensors that have a row for each query, and for each key."""
        ours = [rows[self.queries].view(self.matrices, -1, rows.shape[1]) for rows in queries]
        theirs = [rows[self.keys].view(self.matrices, -1, rows.shape[1]) for rows in keys]
        if self.scores[0].shape == (self.matrices, ours[0].shape[1], theirs[0].shape[1]):
            yield self.scores[0], ours, theirs
            return
        for part in self.scores:
            yield part, [each[:, part.queries] for each in ours], [each[:, part.keys] for each in theirs]


@functools.lru_cache(maxsize=64)
def _groups(sizes: _Sizes, causal: bool) -> tuple[list[_Group], int]:
    """Return groups of these sizes, and the number of their weights."""
    groups, pairs, query, key = [], 0, 0, 0
    for matrices, queries, keys, lengths in sizes:
        heads = matrices // max(len(lengths), 1)
        # A causal mask hides padding, which comes last, anyway.
        padding = [] if causal else [(slice(i * heads, (i + 1) * heads), n) for i, n in enumerate(lengths) if n < keys]
        scores = []
        for begin in range(0, queries, _BLOCK if causal else queries):
            end = min(begin + _BLOCK, queries) if causal else queries
            seen = min(end, keys) if causal else keys
            shape = torch.Size((matrices, end - begin, seen))
            place = slice(pairs, pairs + shape.numel())
            hidden = slice(min(begin, seen), seen)
            scores.append(_Scores(slice(begin, end), slice(0, seen), place, shape, hidden, padding))
            pairs = place.stop
        ours, theirs = slice(query, query + matrices * queries), slice(key, key + matrices * keys)
        groups.append(_Group(matrices, ours, theirs, scores))
        query, key = ours.stop, theirs.stop
    return groups, pairs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sizes: _Sizes, p: float, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results, with a row for each query, the weights, random bytes and their threshold."""
    groups, pairs = _groups(sizes, causal)
    output, weights = query.new_empty((len(query), value.shape[1])), query.new_empty(pairs)
    random, threshold = draw(pairs, p) if p else (torch.empty(0, dtype=torch.uint8), 0)
    tensors = (query * scale, output), (key, value)
    # Products of 32 bits stay products of 32 bits.
    with torch.autocast("cpu", enabled=False):
        for part, (q, o), (k, v) in chain.from_iterable(group.parts(*tensors) for group in groups):
            scores = torch.bmm(q, k.transpose(1, 2))
            if causal:
                diagonal = scores[..., part.hidden]
                diagonal.masked_fill_(torch.ones(diagonal.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)
            for matrices, length in part.padding:
                scores[matrices, :, length:].fill_(-torch.inf)
            probabilities = weights[part.weights].view(part.shape)
            torch.softmax(scores, -1, out=probabilities)
            if p:
                # The output, which is far smaller, is scaled by 1 / (1 - p) at the end.
                probabilities = kept(random[part.weights], threshold, part.shape, query.dtype).mul_(probabilities)
            torch.bmm(probabilities, v, out=o)
    return output.mul_(scale_of(p)) if p else output, weights, random, torch.tensor(threshold)


def _differentiate(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, random: Tensor, threshold: Tensor,
    sizes: _Sizes, p: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the rows of query, key and value."""
    # With a causal mask there are several parts, whose gradients are added.
    make, beta = (torch.zeros_like, 1) if causal else (torch.empty_like, 0)
    d_query, d_key, d_value = torch.empty_like(query), make(key), make(value)
    tensors = (query, gradient * scale_of(p) if p else gradient, d_query), (key, value, d_key, d_value)
    with torch.autocast("cpu", enabled=False):
        for part, (q, g, dq), (k, v, dk, dv) in chain.from_iterable(
            group.parts(*tensors) for group in _groups(sizes, causal)[0]
        ):
            probabilities = weights[part.weights].view(part.shape)
            d_weights = torch.bmm(g, v.transpose(1, 2))
            dropped = probabilities
            if p:
                mask = kept(random[part.weights], int(threshold), part.shape, query.dtype)
                d_weights.mul_(mask)
                dropped = mask.mul_(probabilities)
            torch.baddbmm(dv, dropped.transpose(1, 2), g, beta=beta, out=dv)
            # Not from the sum of result times gradient: where one key has all the weight, only rounding would be left.
            d_scores = torch_private.softmax_backward(d_weights, probabilities)
            torch.bmm(d_scores, k, out=dq)
            torch.baddbmm(dk, d_scores.transpose(1, 2), q, beta=beta, out=dk)
    return d_query.mul_(scale), d_key.mul_(scale), d_value


class _Order(NamedTuple):
    """An order in which sequences of one length are adjacent, and within a sequence all tokens of one head."""

    there: Tensor
    back: Tensor
    # Rows that pad a sequence; copies of its first token.
    padding: Tensor
    sizes: _Sizes


@functools.lru_cache(maxsize=8)
def _order(bounds: tuple[int, ...], heads: int, multiple: int) -> _Order:
    """Return the order of ``(tokens, heads)`` rows of sequences with these bounds, padded to a multiple of tokens."""
    found: dict[int, list[tuple[int, int]]] = {}
    for begin, end in pairwise(bounds):
        if begin < end:
            found.setdefault(-(-(end - begin) // multiple) * multiple, []).append((begin, end - begin))
    nothing = torch.empty(0, dtype=torch.int64)
    parts, real, sizes = [nothing], [nothing.bool()], []
    # Kept for other calls, so it must not belong to inference mode.
    with torch.inference_mode(False):
        for length, sequences in found.items():
            begins, lengths = torch.tensor(sequences)[..., None, None].unbind(1)
            places = torch.arange(length)
            tokens = begins + places.where(places < lengths, 0)
            parts.append((tokens * heads + torch.arange(heads)[:, None]).flatten())
            real.append((places < lengths).expand(-1, heads, -1).flatten())
            padded = tuple(each for _, each in sequences) if any(each < length for _, each in sequences) else ()
            sizes.append((len(sequences) * heads, length, length, padded))
        there, is_real = torch.cat(parts), torch.cat(real)
        back = torch.empty(bounds[-1] * heads, dtype=torch.int64)
        back[there[is_real]] = is_real.nonzero().flatten()
    return _Order(there, back, (~is_real).nonzero().flatten(), tuple(sizes))


def _multiple(dtype: torch.dtype) -> int:
    return _MULTIPLE if dtype == torch.bfloat16 else 1


@torch.library.custom_op("hasten::packed_attention", mutates_args=())
def _packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, p: float, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    order = _order(tuple(bounds.tolist()), query.shape[1], _multiple(query.dtype))
    q, k, v = (each.flatten(0, 1).index_select(0, order.there) for each in (query, key, value))
    rows, weights, random, threshold = _attend(q, k, v, order.sizes, p, scale, causal)
    # No view: the caller may change the result in place.
    result = rows.new_empty((*query.shape[:2], value.shape[2]))
    torch.index_select(rows, 0, order.back, out=result.view(-1, value.shape[2]))
    return result, q, k, v, weights, random, threshold


@_packed.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, p: float, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, heads, _ = query.shape
    pairs = torch.library.get_ctx().new_dynamic_size()
    padded = tokens * heads if _multiple(query.dtype) == 1 else torch.library.get_ctx().new_dynamic_size()
    q, k, v = (each.new_empty((padded, each.shape[2])) for each in (query, key, value))
    random = query.new_empty(pairs if p else 0, dtype=torch.uint8)
    result = query.new_empty((*query.shape[:2], value.shape[2]))
    return result, q, k, v, query.new_empty(pairs), random, torch.tensor(0)


@torch.library.custom_op("hasten::packed_attention_backward", mutates_args=())
def _packed_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, random: Tensor, threshold: Tensor,
    bounds: Tensor, heads: int, p: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    order = _order(tuple(bounds.tolist()), heads, _multiple(query.dtype))
    gradient = gradient.flatten(0, 1).index_select(0, order.there).index_fill_(0, order.padding, 0)
    found = _differentiate(gradient, query, key, value, weights, random, threshold, order.sizes, p, scale, causal)
    d_query, d_key, d_value = (each.index_select(0, order.back).view(-1, heads, each.shape[1]) for each in found)
    return d_query, d_key, d_value


@_packed_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, random: Tensor, threshold: Tensor,
    bounds: Tensor, heads: int, *_others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_query, d_key, d_value = (each.new_empty((*gradient.shape[:2], each.shape[1])) for each in (query, key, value))
    return d_query, d_key, d_value


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, *_, bounds, p, scale, causal = inputs
    ctx.constants = query.shape[1], p, scale, causal
    # Without this, backward would get zeros for each of the other outputs.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], bounds)


def _differentiate_packed(ctx: Any, gradient: Tensor | None, *_others: Any) -> tuple[Any, ...]:
    nothing = None, None, None, None
    if gradient is None:
        return None, None, None, *nothing
    return *_packed_backward(gradient, *ctx.saved_tensors, *ctx.constants), *nothing


_packed.register_autograd(_differentiate_packed, setup_context=_keep_packed)


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, p: float, scale: float, causal: bool
) -> Tensor:
    """Attend within each of several sequences that follow one another.

    Args:
        query: shape ``(tokens, heads, features)``, on the CPU.
        key: shape ``(tokens, heads, features)``.
        value: shape ``(tokens, heads, value features)``.
        bounds: the first token of each sequence and the end of the last; shape ``(sequences + 1,)``, on the CPU.
        p: probability of dropping an attention weight, 0 to 1.
        scale: factor of the products of query and key.
        causal: whether a token attends only to itself and earlier tokens.

    Returns:
        shape ``(tokens, heads, value features)``.

    Source: Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762

    """
    attended: Tensor = _packed(query, key, value, bounds, p, scale, causal)[0]
    return attended


def _sizes_of(query: Tensor, key: Tensor) -> _Sizes:
    return ((query.shape[0] * query.shape[1], query.shape[2], key.shape[2], ()),)


@torch.library.custom_op("hasten::attention", mutates_args=())
def _batched(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (each.flatten(0, 2) for each in (query, key, value))
    rows, weights, _, _ = _attend(q, k, v, _sizes_of(query, key), 0.0, scale, causal)
    return _like(query, value).copy_(rows.view(*query.shape[:3], -1)), weights


def _like(query: Tensor, value: Tensor) -> Tensor:
    """Return an empty result, which lies in memory as torch's does: as the query."""
    same = query.shape[3] == value.shape[3]
    return torch.empty_like(query) if same else query.new_empty((*query.shape[:3], value.shape[3]))


@_batched.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    # The batch, and without a causal mask the lengths, may be symbols.
    pairs = _groups(((1, queries, keys, ()),), causal)[1] if causal else queries * keys
    return _like(query, value), query.new_empty(batch * heads * pairs)


@torch.library.custom_op("hasten::attention_backward", mutates_args=())
def _batched_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    g, q, k, v = (each.flatten(0, 2) for each in (gradient, query, key, value))
    nothing = torch.empty(0, dtype=torch.uint8)
    found = _differentiate(g, q, k, v, weights, nothing, nothing, _sizes_of(query, key), 0.0, scale, causal)
    d_query, d_key, d_value = (each.view(of.shape) for each, of in zip(found, (query, key, value), strict=True))
    return d_query, d_key, d_value


@_batched_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_batched(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, ctx.scale, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, output[1])


def _differentiate_batched(ctx: Any, gradient: Tensor | None, _weights: Any) -> tuple[Any, ...]:
    if gradient is None:
        return None, None, None, None, None
    return *_batched_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None


_batched.register_autograd(_differentiate_batched, setup_context=_keep_batched)


def attend_in_batch(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` without mask and dropout, on the CPU.

    All have the shape ``(batch, heads, queries or keys, features)``, and the result that of the query, with the
    features of the value.
    """
    attended: Tensor = _batched(query, key, value, scale, causal)[0]
    return attended
