"""``torch.nn.TransformerEncoder`` on real tokens only."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten.packed.in_place import Hook, Method
from hasten.packed.layout import Layout
from hasten.packed.stack import HELP, LOOKS_BACK, Stack

# They treat each token by itself, so they may as well be given the first ones only.
_TOKEN_BY_TOKEN = (nn.LayerNorm, nn.RMSNorm)


@contextmanager
def packed_encoder(encoder: nn.TransformerEncoder, asked: str, first_token: bool) -> Iterator[int]:
    """Compute the layers of an encoder on real tokens only, for a while; yields how many layers.

    Args:
        encoder: batches first, with torch's own layers.
        asked: how it was asked for, for the messages.
        first_token: compute the last layer for the first token of each sequence only.

    Raises:
        MisconfigurationException: its layers are of another kind.

    """
    asked = f"{asked}: TransformerEncoder"
    blocks: list[Any] = list(encoder.layers)
    for block in blocks:
        problem = _problem(block)
        if problem is not None:
            raise MisconfigurationException(f"{asked}: {problem}. {HELP}")
    norm = encoder.norm if isinstance(encoder.norm, _TOKEN_BY_TOKEN) else None
    stack = Stack(blocks, asked, first_token=first_token, norm=norm)
    begin, finish = Hook(_Begin(encoder, stack)), Hook(lambda *_: stack.finish())
    with ExitStack() as changed:
        changed.callback(encoder.register_forward_pre_hook(begin, with_kwargs=True).remove)
        changed.callback(encoder.register_forward_hook(finish, always_call=True).remove)
        for block in blocks:
            changed.enter_context(_Attention(block, stack).in_place())
        changed.enter_context(stack.packing())
        yield len(blocks)


def _problem(block: nn.Module) -> str | None:
    """Say why a layer cannot be packed; None where it can."""
    inner = getattr(block, "self_attn", None)
    if not isinstance(block, nn.TransformerEncoderLayer) or not isinstance(inner, nn.MultiheadAttention):
        return f"its layers are {type(block).__name__}"
    if not inner.batch_first:
        return "its batches come tokens first"
    if not inner._qkv_same_embed_dim or inner.bias_k is not None or inner.add_zero_attn:
        return "its attention has keys of its own"
    return None


class _Begin:
    """Before an encoder computes: find out which tokens of its batch are real."""

    def __init__(self, encoder: nn.TransformerEncoder, stack: Stack) -> None:
        self._stack = stack
        self._signature = inspect.signature(type(encoder).forward)
        # The last mask, its version, and whether it was causal: on a GPU the host would wait to see it again.
        self._seen: tuple[weakref.ref[Tensor], int, bool] | None = None

    def __call__(self, encoder: nn.Module, args: Any, kwargs: Any) -> None:
        stack = self._stack
        given = self._signature.bind_partial(encoder, *args, **kwargs).arguments
        source, padding = given["src"], given.get("src_key_padding_mask")
        # In evaluation torch has a fast path of its own, which never calls the layers' attention.
        if not encoder.training or source.dim() != 3:
            stack.begin(None)
            return
        mask, width = given.get("mask"), source.shape[1]
        stack.causal = bool(given.get("is_causal")) or self._is_causal(mask, width)
        if stack.causal and stack.first is not None:
            raise MisconfigurationException(f"{stack.asked}: {LOOKS_BACK}")
        if mask is not None and not stack.causal:
            raise MisconfigurationException(
                f"{stack.asked} was given a mask of its own, of shape {tuple(mask.shape)}; only a causal one can be "
                f"packed. {HELP}"
            )
        stack.begin(Layout((source.shape[0], width), _real(padding, stack.asked), source.device))

    def _is_causal(self, mask: Tensor | None, width: int) -> bool:
        if mask is None:
            return False
        if self._seen is None or self._seen[0]() is not mask or self._seen[1] != mask._version:
            self._seen = weakref.ref(mask), mask._version, _is_causal(mask)
        return self._seen[2] and mask.shape[0] == width


def _is_causal(mask: Tensor) -> bool:
    """Say whether a mask hides those after a token and nothing else."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    after = torch.ones_like(hidden).triu_(1)
    return bool((hidden == after).all()) and (mask.dtype == torch.bool or bool((mask[~after] == 0).all()))


def _real(padding: Tensor | None, asked: str) -> Tensor | None:
    """Return 1 where a token is real, from torch's mask of padding: True or minus infinity where it is none."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        return ~padding
    hidden = padding == -torch.inf
    if not bool((hidden | (padding == 0)).all()):
        raise MisconfigurationException(
            f"{asked} was given a src_key_padding_mask with numbers other than 0 and -inf: it weighs tokens, which "
            f"cannot be packed. {HELP}"
        )
    return ~hidden


class _Attention(Method):
    """The attention of a layer: within the sequences of a row while its stack computes one."""

    def __init__(self, block: nn.TransformerEncoderLayer, stack: Stack) -> None:
        super().__init__(block.self_attn)
        self._block, self._stack = block, stack

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        block, stack = self._block, self._stack
        call = stack.known()
        if call is None or call.layout is None:
            return self.before(query, key, value, *args, **kwargs)
        layer = block.self_attn
        row = stack.all_tokens(layer)
        if row is not None:
            given = block.norm1(row) if block.norm_first else row
            heads = _heads_apart(layer, query[0], given[0])
        else:
            projected = nn.functional.linear(query[0], layer.in_proj_weight, layer.in_proj_bias)
            heads = projected.unflatten(-1, (3, layer.num_heads, layer.head_dim)).unbind(1)
        p = layer.dropout if layer.training else 0.0
        attended = stack.attend(*heads, p=p, scale=layer.head_dim**-0.5, first_only=row is not None)
        return layer.out_proj(attended.flatten(1)).unsqueeze(0), None


def _heads_apart(layer: nn.MultiheadAttention, first: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Return the queries of the first tokens, the keys and the values of all, each ``(tokens, heads, features)``."""
    weights = layer.in_proj_weight.chunk(3)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    return tuple(
        nn.functional.linear(given, weight, bias).unflatten(-1, (layer.num_heads, layer.head_dim))
        for given, weight, bias in zip((first, row, row), weights, biases, strict=True)
    )
