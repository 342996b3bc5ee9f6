"""Packing for models of ``transformers``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.observers import set_during
from hasten.packed.first_token import CAUSAL
from hasten.packed.layout import HELP, Layout, refusal
from hasten.packed.patches import MethodPatch, NamePatch
from hasten.packed.stack import Call, Stack, own_mask
from hasten.packed.verify import packing

# The name under which models find the attention of this file.
ATTENTION = "hasten_packed"
# The attribute of models with the function that checkpoints their blocks.
_CHECKPOINT = "_gradient_checkpointing_func"
# Outputs of padded blocks only, requested in the configuration or in a call.
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")

# The stacks of the modules that are packed at the moment.
_STACKS: dict[nn.Module, Stack] = {}


def is_packable(module: nn.Module) -> bool:
    """Return whether ``module`` is a model of transformers that runs its blocks itself."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    return kind is not None and isinstance(module, kind) and bool(_lists_of_blocks(module))


def _lists_of_blocks(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of blocks of a model, without the blocks of models inside it."""
    transformers = sys.modules["transformers"]
    inner = [child for child in model.children() if not isinstance(child, transformers.PreTrainedModel)]
    return [
        child
        for candidate in [model, *inner]
        for child in candidate.children()
        if isinstance(child, nn.ModuleList)
        and len({type(one) for one in child}) == 1
        and any("Attention" in type(one).__name__ for one in child[0].modules())
    ]


@contextmanager
def packed_model(model: Any, asked: str, first_token: bool) -> Iterator[Stack]:
    """Compute the blocks of a model that ``is_packable`` on real tokens only inside the block; yields them.

    With ``first_token``, the last block computes the first token of each sequence only. Messages name what ``asked``.

    Raises:
        MisconfigurationException: the blocks need the padded batch.

    """
    asked = f"{asked}: {type(model).__name__}"
    problem = _problem(model)
    if problem is not None:
        raise refusal(asked, problem, HELP)
    from transformers import AttentionInterface  # type: ignore[import-untyped,unused-ignore]

    AttentionInterface.register(ATTENTION, _attention)
    config, (container,) = model.config, _lists_of_blocks(model)
    blocks = list(container)
    causal = any(getattr(one, "is_causal", False) for one in blocks[0].modules())
    if causal and first_token:
        raise refusal(asked, CAUSAL, "Use packed=True.")
    if first_token and getattr(config, "num_hidden_layers", len(blocks)) != len(blocks):
        # ALBERT: the last block is also the first, which needs all tokens.
        problem = "it computes the same blocks several times, so the last one needs all tokens"
        raise refusal(asked, problem, "Use packed=True.")

    def unpatched() -> AbstractContextManager[None]:
        return set_during(config, _attn_implementation=config._attn_implementation.original)

    stack = Stack(blocks, container, asked, causal, first_token, unpatched=unpatched)
    inside = [one for block in blocks for one in block.modules()]
    may_checkpoint = [one for one in model.modules() if hasattr(one, "gradient_checkpointing")]

    def begin(given: dict[str, Any]) -> Layout | None:
        if not torch.is_grad_enabled():
            # Validation, generate(): any output may be read.
            stack.without_gradients = True
            stack.padded.enter_context(unpatched())
            return None
        # In each call, because a program may enable it in the middle of a run.
        for one in may_checkpoint:
            if _CHECKPOINT in vars(one) and not isinstance(vars(one)[_CHECKPOINT], _Checkpoint):
                changed.enter_context(_Checkpoint(one, stack).applied())
        return layout(given)

    def layout(given: dict[str, Any]) -> Layout:
        return _layout(asked, {**given, **given.get("kwargs", {})})

    with packing(model, stack, begin, layout) as changed:
        before = config._attn_implementation
        changed.callback(setattr, config, "_attn_implementation", before)
        config._attn_implementation = NamePatch(ATTENTION, getattr(before, "original", before))
        _STACKS.update(dict.fromkeys(inside, stack))
        changed.callback(lambda: [_STACKS.pop(one, None) for one in inside])
        yield stack


def _problem(model: Any) -> str | None:
    """Return why a model cannot be packed; None if nothing is known against it before a call."""
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it attends to a second sequence"
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0.0):
            return f"{name}={getattr(config, name)} skips whole layers, where packing may begin or end"
    for name in _OUTPUTS:
        if getattr(config, name, False):
            return f"{name} requests the padded outputs of its blocks"
    if (problem := _problem_of_layers(config)) is not None:
        return problem
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return "it takes no attention_mask"
    if len(_lists_of_blocks(model)) > 1:
        return "its blocks are in more than one list"
    (blocks,) = _lists_of_blocks(model)
    if len(set(blocks)) != len(blocks):
        return "it contains some blocks several times"
    return None


def _problem_of_layers(config: Any) -> str | None:
    # A window in the configuration proves nothing: many models have one that their layers do not use.
    kinds = getattr(config, "layer_types", None)
    others = sorted(set(kinds or ()) - {"full_attention"})
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if any("sliding" in kind or "chunked" in kind for kind in others) or (window and not kinds):
        return "its tokens attend to a window of others only"
    return f"it has layers that cannot be packed: {', '.join(others)}" if others else None


def _layout(asked: str, given: dict[str, Any]) -> Layout:
    """Return which tokens of a batch are real, given the arguments of the model's forward by name."""
    if given.get("past_key_values") is not None:
        raise refusal(asked, "it was called with past_key_values", HELP)
    for name in _OUTPUTS:
        if given.get(name):
            raise refusal(asked, f"it was asked for {name}", HELP)
    found = [given[key] for key in ("input_ids", "inputs_embeds") if given.get(key) is not None]
    if not found:
        raise refusal(asked, "it was called without input_ids and inputs_embeds", HELP)
    shape, mask = (found[0].shape[0], found[0].shape[1]), given.get("attention_mask")
    if mask is not None and tuple(mask.shape) != shape:
        problem = (
            f"it was called with an attention_mask of shape {tuple(mask.shape)}; only a mask of padding, of shape "
            f"{shape}, can be packed"
        )
        raise refusal(asked, problem, HELP)
    return Layout(shape, mask, found[0].device)


class _Checkpoint(MethodPatch):
    """Replaces the function that checkpoints blocks: recomputation in backward belongs to the same call."""

    def __init__(self, module: nn.Module, stack: Stack) -> None:
        super().__init__(module, _CHECKPOINT)
        self._stack = stack

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._stack.call
        if call is None:
            return self.original(function, *args, **kwargs)
        return self.original(partial(self._recompute, call, function), *args, **kwargs)

    def _recompute(self, call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._stack.computing(call):
            return function(*args, **kwargs)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: ``(1, heads, real tokens, features)`` in, tokens before heads out."""
    kind = type(module).__name__
    stack = _STACKS.get(module)
    call = None if stack is None else stack.current()
    if stack is None or call is None or call.layout is None:
        asked = "packed=True" if stack is None else stack.asked
        problem = f"{kind} attends outside the blocks that are packed, or without the model around them"
        raise refusal(asked, problem, HELP)
    if attention_mask is not None:
        raise own_mask(stack.asked, module, attention_mask)
    for name in ("position_bias", "softcap", "sliding_window", "s_aux"):
        if others.get(name) is not None:
            raise refusal(stack.asked, f"{kind} computes attention with {name}", HELP)
    is_causal = others.get("is_causal")
    if bool(getattr(module, "is_causal", False) if is_causal is None else is_causal) != stack.causal:
        raise refusal(stack.asked, f"{kind} is causal and other blocks are not, or the reverse", HELP)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    row = stack.all_tokens(module)
    if row is not None:
        assert stack.first is not None
        key, value = stack.first.keys_and_values(module, row, call.layout, key, value)
    # Contiguous for all lengths: a compiled block would need one graph for views and one for copies.
    attended = stack.attend(query, key, value, p=dropout, scale=scale, first_only=row is not None)
    return attended.contiguous().unsqueeze(0), None
