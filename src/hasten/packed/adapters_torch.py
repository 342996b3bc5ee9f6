"""Packing for ``torch.nn.TransformerEncoder``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten.extend.origin import source_file
from hasten.packed.first_token import CAUSAL
from hasten.packed.layout import HELP, Layout, refusal
from hasten.packed.patches import MethodPatch
from hasten.packed.stack import Stack, own_mask
from hasten.packed.verify import packing

# They compute each token separately, so they can compute first tokens only.
_TOKEN_BY_TOKEN = (nn.LayerNorm, nn.RMSNorm)


@contextmanager
def packed_encoder(encoder: nn.TransformerEncoder, asked: str, first_token: bool) -> Iterator[Stack]:
    """Compute torch's layers of an encoder (batch first) on real tokens only inside the block; yields them.

    With ``first_token``, the last layer computes the first token of each sequence only. Messages name what ``asked``.

    Raises:
        MisconfigurationException: a layer cannot be packed.

    """
    asked = f"{asked}: {type(encoder).__name__}"
    blocks: list[Any] = list(dict.fromkeys(encoder.layers))
    problem = _problem(encoder, blocks, first_token)
    if problem is not None:
        raise refusal(asked, problem, HELP)
    norm: Any = encoder.norm
    if type(norm) not in _TOKEN_BY_TOKEN or "forward" in vars(norm):
        norm = None
    stack = Stack(blocks, encoder.layers, asked, first_token=first_token, norm=norm)
    layouts = _Layouts(stack)

    def begin(given: dict[str, Any]) -> Layout | None:
        if given["src"].dim() != 3:
            return None
        # torch's fast path for evaluation without gradients never calls the attention of the layers.
        learns = given["src"].requires_grad or any(one.requires_grad for one in blocks[0].parameters())
        trains = torch.is_grad_enabled() and (encoder.training or learns)
        stack.without_gradients |= not trains
        return layouts(given) if trains else None

    with packing(encoder, stack, begin, layouts) as changed:
        for block in blocks:
            changed.enter_context(_Attention(block, stack).applied())
        yield stack


def _problem(encoder: nn.TransformerEncoder, blocks: list[Any], first_token: bool) -> str | None:
    """Return why an encoder cannot be packed; None if nothing is known against it before a call."""
    if "src" not in inspect.signature(encoder.forward).parameters:
        return "its forward takes no src"
    if len(blocks) not in (1, len(encoder.layers)):
        return "it contains some layers several times"
    problem = next(filter(None, map(_problem_of_block, blocks)), None)
    if problem is None and first_token and not all(map(_computes_as_torch, blocks)):
        return "a layer overrides forward, so the last one needs all tokens"
    return problem


def _problem_of_block(block: nn.Module) -> str | None:
    """Return why a layer cannot be packed; None if nothing is known against it before a call."""
    inner = getattr(block, "self_attn", None)
    if not isinstance(block, nn.TransformerEncoderLayer) or not isinstance(inner, nn.MultiheadAttention):
        return f"its layers are {type(block).__name__}"
    # The forward that packing replaces. By the file of its code, because decorators copy names.
    own = source_file(type(inner).forward) != inspect.getfile(nn.MultiheadAttention)
    patch = vars(inner).get("forward")
    patched = patch is not None and not isinstance(patch, MethodPatch)
    if own or (patched and getattr(patch, "__func__", None) is not type(inner).forward):
        return f"the forward of its {type(inner).__name__} is not torch's, and packing would skip it"
    if not inner.batch_first:
        return "it was made with batch_first=False"
    if not torch_private.projects_one_width(inner) or inner.bias_k is not None or inner.add_zero_attn:
        return "its attention adds keys or projects queries, keys and values differently"
    return None


def _computes_as_torch(block: nn.Module) -> bool:
    """Return whether a layer computes attention on its input, or on the norm of its input."""
    plain = nn.TransformerEncoderLayer
    kind: Any = type(block)
    return (
        kind.forward is plain.forward
        and torch_private.attention_block(kind) is torch_private.attention_block(plain)
        and not {"forward", "_sa_block"} & vars(block).keys()
    )


class _Layouts:
    """Finds out which tokens of a batch are real, and sets whether the attention of a stack is causal."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        # The last mask, its version, and whether it was causal; reading it again would make the host wait for a GPU.
        self._seen: tuple[weakref.ref[Tensor], int, bool] | None = None

    def __call__(self, given: dict[str, Any]) -> Layout:
        """Return the layout of a batch, given the arguments of the encoder's forward by name."""
        stack, source, padding = self._stack, given["src"], given.get("src_key_padding_mask")
        mask, width = given.get("mask"), source.shape[1]
        stack.causal = bool(given.get("is_causal")) or self._is_causal(mask, width)
        stack.masked = mask is not None
        if stack.causal and stack.first is not None:
            raise refusal(stack.asked, CAUSAL, "Use packed=True.")
        if mask is not None and not stack.causal:
            shape = tuple(mask.shape)
            raise refusal(
                stack.asked, f"it was called with a mask of shape {shape}; only a causal one can be packed", HELP
            )
        return Layout((source.shape[0], width), _real(padding, stack.asked), source.device)

    def _is_causal(self, mask: Tensor | None, width: int) -> bool:
        if mask is None:
            return False
        if self._seen is None or self._seen[0]() is not mask or self._seen[1] != mask._version:
            self._seen = weakref.ref(mask), mask._version, _is_causal(mask)
        return self._seen[2] and mask.shape[0] == width


def _is_causal(mask: Tensor) -> bool:
    """Return whether a mask hides exactly the later tokens."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    after = torch.ones_like(hidden).triu_(1)
    return bool((hidden == after).all()) and (mask.dtype == torch.bool or bool((mask[~after] == 0).all()))


def _real(padding: Tensor | None, asked: str) -> Tensor | None:
    """Return True for real tokens, given torch's mask of padding: True or minus infinity for padding."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        return ~padding
    hidden = padding == -torch.inf
    if not bool((hidden | (padding == 0)).all()):
        raise refusal(
            asked, "its src_key_padding_mask has numbers other than 0 and -inf: weighted tokens cannot be packed", HELP
        )
    return ~hidden


class _Attention(MethodPatch):
    """Replaces the attention of a layer: within each sequence of a row while its stack computes one."""

    def __init__(self, block: nn.TransformerEncoderLayer, stack: Stack) -> None:
        super().__init__(block.self_attn)
        self._block, self._stack = block, stack

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        block, stack = self._block, self._stack
        call = stack.current()
        if call is None or call.layout is None:
            return self.original(query, key, value, *args, **kwargs)
        layer = block.self_attn
        if kwargs.get("attn_mask") is not None and not stack.masked:
            raise own_mask(stack.asked, block, kwargs["attn_mask"])
        row = stack.all_tokens(layer)
        if row is not None:
            given = block.norm1(row) if block.norm_first else row
            heads = _heads_apart(layer, query[0], given[0], given[0])
        elif key is query and value is query:
            projected = nn.functional.linear(query[0], layer.in_proj_weight, layer.in_proj_bias)
            heads = projected.unflatten(-1, (3, layer.num_heads, layer.head_dim)).unbind(1)
        else:
            heads = _heads_apart(layer, query[0], key[0], value[0])
        p = layer.dropout if layer.training else 0.0
        attended = stack.attend(*heads, p=p, scale=layer.head_dim**-0.5, first_only=row is not None)
        # As torch does: it uses the weights of out_proj and never calls it.
        out = nn.functional.linear(attended.flatten(1), layer.out_proj.weight, layer.out_proj.bias)
        return out.unsqueeze(0), None


def _heads_apart(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values of these inputs, each ``(tokens, heads, features)``."""
    weights = layer.in_proj_weight.chunk(3)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    return tuple(
        nn.functional.linear(given, weight, bias).unflatten(-1, (layer.num_heads, layer.head_dim))
        for given, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
