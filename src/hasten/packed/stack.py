"""The blocks of one transformer, one after the other, and the batches they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten.data.packing import packed_attention
from hasten.packed.attention import attention
from hasten.packed.first_token import FirstToken, attend_first
from hasten.packed.in_place import Hook, Method
from hasten.packed.layout import Layout

# The argument by which a block is told which call it belongs to.
_CALL = "hasten_packed_call"
LOOKS_BACK = (
    "its tokens see those before them only, so the first one knows nothing of the rest. Use packed=True."
)
HELP = (
    "packed=True works with the encoders and decoders of transformers that take an attention_mask, and with "
    "torch.nn.TransformerEncoder(batch_first=True). Use batching='length' instead: it pads less, for any model."
)


@dataclass(frozen=True)
class Call:
    """One call of a stack.

    Args:
        layout: of its batch; None where this call is computed padded.
        row: all tokens, where a block is given the first ones only. Not of the layout, which earlier blocks hold as
            well: what they made would hold what makes it, and never be freed.

    """

    layout: Layout | None
    row: Tensor | None = None


class _Block(Method):
    """The forward of a block: as long as it computes, its stack knows which call it is.

    Activation checkpointing computes a block again in the backward, when other calls have been; it gives it the same
    arguments, and the call is one of them.
    """

    def __init__(self, block: nn.Module, stack: Stack) -> None:
        super().__init__(block)
        self._stack = stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = kwargs.pop(_CALL, None)
        if call is None:
            return self.before(*args, **kwargs)
        with self._stack.computing(call):
            return self.before(*args, **kwargs)


class Stack:
    """The blocks of one transformer and the call they are computing.

    Args:
        blocks: in their order.
        asked: how packing was asked for, and for what, for the messages.
        causal: whether a token sees only those before it.
        first_token: compute the last block for the first token of each sequence only.
        norm: what the output of the last block goes through, and nothing else: token by token.

    """

    def __init__(
        self,
        blocks: list[nn.Module],
        asked: str,
        causal: bool = False,
        first_token: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        self.blocks = blocks
        self.asked = asked
        self.causal = causal
        self.first = FirstToken(asked) if first_token else None
        # What gives the padded batch back.
        self._end = blocks[-1] if norm is None else norm
        self._of_last_block = set(blocks[-1].modules())
        # None outside of all calls.
        self.call: Call | None = None

    def begin(self, layout: Layout | None) -> None:
        """Begin a call of the whole stack, packed or, without a layout, padded."""
        self.call = Call(layout)
        if self.first is not None:
            self.first.confirm()

    def finish(self) -> None:
        """End the call that was begun."""
        self.call = None

    @contextmanager
    def computing(self, call: Call) -> Iterator[None]:
        """Compute for one call, whichever it was until now."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def known(self) -> Call | None:
        """Return the call that is computed; None if a block is called by itself.

        Raises:
            MisconfigurationException: blocks are computed again in the backward, and nobody knows for which call.

        """
        if self.call is None and torch._C._current_graph_task_id() != -1:
            raise MisconfigurationException(
                f"{self.asked}: its blocks are computed again in the backward by a checkpointing that packing does not "
                "know. Use Trainer(memory='full'), or open packed_blocks(model) before hasten.memory.recomputed(model)."
            )
        return self.call

    def all_tokens(self, module: nn.Module) -> Tensor | None:
        """Return all tokens, where a module of a block is given the first ones only; else None."""
        call = self.call
        if call is None or call.row is None or self.first is None or module not in self._of_last_block:
            return None
        return self.first.checked(call.row)

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
        assert self.call is not None
        layout = self.call.layout
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
        with ExitStack() as changed:
            for block in self.blocks:
                hook = block.register_forward_pre_hook(Hook(self._pack), with_kwargs=True, prepend=True)
                changed.callback(hook.remove)
                changed.enter_context(_Block(block, self).in_place())
            changed.callback(self._end.register_forward_hook(Hook(self._unpack)).remove)
            try:
                yield
            finally:
                self.call = None
        if self.first is not None:
            self.first.confirm()

    def _pack(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self.call
        if call is None or call.layout is None:
            return args, kwargs if call is None else {**kwargs, _CALL: call}
        layout = call.layout
        first, last = block is self.blocks[0], block is self.blocks[-1]
        # The hidden states are a row already but for the first block; what comes along never is.
        keep = 0 if first else 1
        args = (*args[:keep], *(layout.alike(each) for each in args[keep:]))
        kwargs = {
            name: each if name == "hidden_states" and not first else layout.alike(each)
            for name, each in kwargs.items()
        }
        if self.first is not None and last:
            row = args[0] if args else kwargs["hidden_states"]
            firsts = self.first.begin(row, layout)
            if firsts is not None:
                call = Call(layout, row)
                if args:
                    args = (firsts, *args[1:])
                else:
                    kwargs["hidden_states"] = firsts
        return args, {**kwargs, _CALL: call}

    def _unpack(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self.call is None or self.call.layout is None:
            return output
        layout = self.call.layout

        def padded(row: Tensor) -> Tensor:
            return layout.unpack(row) if self.first is None else self.first.end(row, layout)

        return (padded(output[0]), *output[1:]) if isinstance(output, tuple) else padded(output)
