"""Compute the blocks of a transformer on real tokens only: what ``Trainer(packed=True)`` does.

The padded batch enters the first block as one row of its real tokens and leaves the last block as a padded batch
again, zero where there is padding. Everything before and after (embeddings, heads, losses) sees what it always saw.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten.data.packing import packed_attention
from hasten.packed.attention import attention
from hasten.packed.first_token import FirstToken, attend_first
from hasten.packed.layout import Layout

# Under this name the models of transformers find the attention of this file.
ATTENTION = "hasten_packed"
_LOOKS_BACK = "its tokens see those before them only, so the first one knows nothing of the rest. Use packed=True."
_HELP = (
    "packed=True works with the encoders and decoders of transformers that take an attention_mask, and with "
    "torch.nn.TransformerEncoder(batch_first=True). Use batching='length' instead: it pads less, for any model."
)


class Stack:
    """The blocks of one transformer, one after the other, and the batch they compute.

    Args:
        blocks: in their order.
        asked: how packing was asked for, for the messages.
        causal: whether a token sees only those before it.
        first_token: compute the last block for the first token of each sequence only.

    """

    def __init__(
        self, blocks: list[nn.Module], asked: str, causal: bool = False, first_token: bool = False
    ) -> None:
        self.blocks = blocks
        self.asked = asked
        self.causal = causal
        self.first = FirstToken(asked) if first_token else None
        self._of_last_block = set(blocks[-1].modules())
        # Kept after the forward: activation checkpointing computes the blocks again within the backward.
        self.layout: Layout | None = None

    def first_only(self, module: nn.Module) -> FirstToken | None:
        """Return what knows all tokens, where a module of a block is given the first ones only; else None."""
        if self.first is None or self.layout is None or not self.layout.first_only:
            return None
        return self.first if module in self._of_last_block else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, p: float, scale: float, first_only: bool
    ) -> Tensor:
        """Attend within each sequence of the row.

        Args:
            query: shape ``(real tokens, heads, features)``, or of first tokens ``(sequences, heads, features)``.
            key: shape ``(real tokens, heads, features)``; the heads may be fewer.
            value: likewise.
            p: of the dropout of attention weights.
            scale: of the products.
            first_only: ``query`` is that of the first token of each sequence.

        """
        layout = self.layout
        assert layout is not None
        if first_only:
            return attend_first(query, key, value, layout, p=p, scale=scale)
        if p and query.device.type == "cpu":
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            return attention(
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                layout.bounds,
                p=p,
                scale=scale,
                causal=self.causal,
            )
        return packed_attention(
            query, key, value, layout.bounds, layout.width, causal=self.causal, dropout_p=p, scale=scale
        )

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Have the first block pack what it is given, all of them compute on it, and the last one unpack."""
        with ExitStack() as hooks:
            for block in self.blocks:
                first, last = block is self.blocks[0], block is self.blocks[-1]

                def pack(
                    _: nn.Module, args: Any, kwargs: Any, first: bool = first, last: bool = last
                ) -> tuple[Any, Any]:
                    layout = self.layout
                    if layout is None:
                        return args, kwargs
                    # The hidden states are a row already but for the first block; what comes along never is.
                    keep = 0 if first else 1
                    args = (*args[:keep], *(layout.alike(each) for each in args[keep:]))
                    kwargs = {
                        name: each if name == "hidden_states" and not first else layout.alike(each)
                        for name, each in kwargs.items()
                    }
                    if self.first is not None and last:
                        if args:
                            args = (self.first.begin(args[0], layout), *args[1:])
                        else:
                            kwargs["hidden_states"] = self.first.begin(kwargs["hidden_states"], layout)
                    return args, kwargs

                hooks.callback(block.register_forward_pre_hook(pack, with_kwargs=True, prepend=True).remove)

            def unpack(_: nn.Module, args: Any, output: Any) -> Any:
                layout = self.layout
                if layout is None:
                    return output
                padded = layout.unpack if self.first is None else partial(self.first.end, layout=layout)
                if isinstance(output, tuple):
                    return (padded(output[0]), *output[1:])
                return padded(output)

            hooks.callback(self.blocks[-1].register_forward_hook(unpack).remove)
            try:
                yield
            finally:
                self.layout = None


@contextmanager
def packed_blocks(
    module: nn.Module, *, first_token: bool = False, asked: str = "packed_blocks(module)"
) -> Iterator[int]:
    """Compute the transformer blocks inside a module on real tokens only, for a while; yields how many blocks.

    Args:
        module: holds one or several transformers. Its weights, classes and outputs stay as they are.
        first_token: while gradients are computed, compute the last block for the first token of each sequence only.
            For classifiers that read nothing else: their losses and gradients are the same. All others hold nan.
        asked: how it was asked for, for the messages.

    Raises:
        MisconfigurationException: there is no transformer in it whose blocks can be packed; with ``first_token``, in
            the backward: the loss depends on other tokens.

    Example::

        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> with packed_blocks(encoder) as count:
        ...     out = encoder(torch.ones(2, 3, 8), src_key_padding_mask=torch.tensor([[0, 0, 1], [0, 0, 0]]).bool())
        >>> count, out.shape, bool((out[0, 2] == 0).all())
        (2, torch.Size([2, 3, 8]), True)

    Source: Zeng et al., Boosting Distributed Training Performance of the Unpadded BERT Model,
    https://arxiv.org/abs/2208.08124

    """
    with ExitStack() as stack:
        count = 0
        for child in module.modules():
            if isinstance(child, nn.TransformerEncoder):
                count += stack.enter_context(_of_torch(child, asked, first_token))
            elif _is_of_transformers(child):
                count += stack.enter_context(_of_transformers(child, asked, first_token))
        if not count:
            raise MisconfigurationException(
                f"{asked}: {type(module).__name__} holds no transformer that can compute on real tokens "
                f"only. {_HELP}"
            )
        yield count


# -- transformers


# Of the modules that are packed at this moment.
_STACKS: dict[nn.Module, Stack] = {}


def _is_of_transformers(module: nn.Module) -> bool:
    """Say whether ``module`` is a model of transformers that runs its blocks itself."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    return kind is not None and isinstance(module, kind) and _blocks_of(module) is not None


def _blocks_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the repeated blocks of a model, but not those of a model within it."""
    transformers = sys.modules["transformers"]
    inner = [child for child in model.children() if not isinstance(child, transformers.PreTrainedModel)]
    for candidate in [model, *inner]:
        for child in candidate.children():
            if not isinstance(child, nn.ModuleList) or len({type(one) for one in child}) != 1:
                continue
            if any("Attention" in type(one).__name__ for one in child[0].modules()):
                return list(child)
    return None


@contextmanager
def _of_transformers(model: Any, asked: str, first_token: bool) -> Iterator[int]:
    config, name = model.config, type(model).__name__
    problem = None
    if not getattr(model, "_supports_attention_backend", False):
        problem = "its attention cannot be exchanged"
    elif getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        problem = "it attends to a second sequence"
    elif getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        problem = "output_hidden_states and output_attentions ask for what its blocks compute, padded"
    elif getattr(config, "sliding_window", None) or getattr(config, "layer_types", None):
        problem = "its tokens see a window of others only"
    elif "attention_mask" not in inspect.signature(model.forward).parameters:
        problem = "it takes no attention_mask"
    if problem is not None:
        raise MisconfigurationException(f"{asked}: {name}: {problem}. {_HELP}")
    from transformers import AttentionInterface  # type: ignore[import-untyped,unused-ignore]

    AttentionInterface.register(ATTENTION, _attention_of_transformers)
    blocks = _blocks_of(model)
    assert blocks is not None
    causal = any(getattr(one, "is_causal", False) for one in blocks[0].modules())
    if causal and first_token:
        raise MisconfigurationException(f"{asked}: {name}: {_LOOKS_BACK}")
    stack = Stack(blocks, asked, causal, first_token)
    inside = [one for block in blocks for one in block.modules()]
    _STACKS.update(dict.fromkeys(inside, stack))
    signature = inspect.signature(model.forward)

    def find_padding(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        stack.layout = _layout(f"{asked}: {name}", given)

    before = config._attn_implementation
    hook = model.register_forward_pre_hook(find_padding, with_kwargs=True)
    config._attn_implementation = ATTENTION
    try:
        with stack.packing():
            yield len(blocks)
    finally:
        hook.remove()
        config._attn_implementation = before
        for one in inside:
            _STACKS.pop(one, None)


def _layout(place: str, given: dict[str, Any]) -> Layout:
    if given.get("past_key_values") is not None:
        raise MisconfigurationException(f"{place} was given past_key_values. {_HELP}")
    if given.get("output_hidden_states") or given.get("output_attentions"):
        raise MisconfigurationException(
            f"{place} was asked for output_hidden_states or output_attentions. {_HELP}"
        )
    found = [given[key] for key in ("input_ids", "inputs_embeds") if given.get(key) is not None]
    mask = given.get("attention_mask")
    if not found:
        raise MisconfigurationException(f"{place} was given neither input_ids nor inputs_embeds. {_HELP}")
    shape = (found[0].shape[0], found[0].shape[1])
    if mask is not None and tuple(mask.shape) != shape:
        raise MisconfigurationException(
            f"{place} was given an attention_mask of shape {tuple(mask.shape)}; only one that says which "
            f"tokens are padding, of shape {shape}, can be packed. {_HELP}"
        )
    return Layout(shape, mask, found[0].device)


def _attention_of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: ``(1, heads, real tokens, features)`` in, tokens before heads out."""
    stack = _STACKS[module]
    for name in ("position_bias", "softcap", "sliding_window", "s_aux"):
        if others.get(name) is not None:
            raise MisconfigurationException(
                f"{stack.asked}: {type(module).__name__} computes attention with {name}. {_HELP}"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    first = stack.first_only(module)
    if first is not None:
        key, value = first.keys_and_values(module, key, value)
    # In one piece, however long the sequences are: a compiled block has a graph for views and one for copies.
    attended = stack.attend(query, key, value, p=dropout, scale=scale, first_only=first is not None)
    return attended.contiguous().unsqueeze(0), None


# -- torch.nn.TransformerEncoder


@contextmanager
def _of_torch(encoder: nn.TransformerEncoder, asked: str, first_token: bool) -> Iterator[int]:
    blocks: list[Any] = list(encoder.layers)
    for block in blocks:
        inner = getattr(block, "self_attn", None)
        problem = None
        if not isinstance(block, nn.TransformerEncoderLayer) or not isinstance(inner, nn.MultiheadAttention):
            problem = f"its layers are {type(block).__name__}"
        elif not inner.batch_first:
            problem = "its batches come tokens first"
        elif not inner._qkv_same_embed_dim or inner.bias_k is not None or inner.add_zero_attn:
            problem = "its attention has keys of its own"
        if problem is not None:
            raise MisconfigurationException(f"{asked}: TransformerEncoder: {problem}. {_HELP}")
    stack = Stack(blocks, asked, first_token=first_token)
    signature = inspect.signature(type(encoder).forward)

    def find_padding(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = signature.bind_partial(encoder, *args, **kwargs).arguments
        source, padding = given["src"], given.get("src_key_padding_mask")
        stack.layout = None
        # In evaluation torch has a fast path of its own, which never calls the layers' attention.
        if not encoder.training or source.dim() != 3:
            return
        mask, width = given.get("mask"), source.shape[1]
        stack.causal = bool(given.get("is_causal")) or _is_causal(mask, width)
        if stack.causal and first_token:
            raise MisconfigurationException(f"{asked}: TransformerEncoder: {_LOOKS_BACK}")
        if mask is not None and not stack.causal:
            raise MisconfigurationException(
                f"{asked}: TransformerEncoder was given a mask of its own, of shape {tuple(mask.shape)}; only a causal "
                f"one can be packed. {_HELP}"
            )
        stack.layout = Layout((source.shape[0], width), _real(padding, asked), source.device)

    hook = encoder.register_forward_pre_hook(find_padding, with_kwargs=True)
    try:
        with ExitStack() as changed:
            for block in blocks:
                changed.enter_context(_attending(block, stack))
            with stack.packing():
                yield len(blocks)
    finally:
        hook.remove()


def _is_causal(mask: Tensor | None, width: int) -> bool:
    """Say whether a mask hides those after a token and nothing else."""
    if mask is None or tuple(mask.shape) != (width, width):
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
            f"{asked}: TransformerEncoder was given a src_key_padding_mask with numbers other than 0 and -inf: it "
            f"weighs tokens, which cannot be packed. {_HELP}"
        )
    return ~hidden


def _heads_apart(layer: nn.MultiheadAttention, first: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Return the queries of the first tokens, the keys and the values of all, each ``(tokens, heads, features)``."""
    weights = layer.in_proj_weight.chunk(3)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    return tuple(
        nn.functional.linear(given, weight, bias).unflatten(-1, (layer.num_heads, layer.head_dim))
        for given, weight, bias in zip((first, row, row), weights, biases, strict=True)
    )


@contextmanager
def _attending(block: nn.TransformerEncoderLayer, stack: Stack) -> Iterator[None]:
    """Have the attention of a block attend within the sequences of a row while its stack has one."""
    layer = block.self_attn
    before: Callable[..., Any] = layer.forward
    own = "forward" in vars(layer)

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if stack.layout is None:
            return before(query, key, value, *args, **kwargs)
        first = stack.first_only(layer)
        if first is not None:
            row = first.all_tokens()
            given = block.norm1(row) if block.norm_first else row
            heads = _heads_apart(layer, query[0], given[0])
        else:
            projected = nn.functional.linear(query[0], layer.in_proj_weight, layer.in_proj_bias)
            heads = projected.unflatten(-1, (3, layer.num_heads, layer.head_dim)).unbind(1)
        p = layer.dropout if layer.training else 0.0
        attended = stack.attend(*heads, p=p, scale=layer.head_dim**-0.5, first_only=first is not None)
        return layer.out_proj(attended.flatten(1)).unsqueeze(0), None

    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            layer.forward = before  # type: ignore[method-assign]
        else:
            vars(layer).pop("forward", None)
