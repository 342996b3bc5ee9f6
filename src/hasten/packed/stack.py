"""The blocks of one transformer, one after the other, and the batches they compute."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten.packed.attention import attention
from hasten.packed.document_attention import packed_attention
from hasten.packed.first_token import FirstToken, attend_first, waits_for
from hasten.packed.layout import Layout
from hasten.packed.patches import Hook, Method

# The argument by which a block is told which call it belongs to.
_CALL = "hasten_packed_call"
LOOKS_BACK = (
    "its tokens see those before them only, so the first one knows nothing of the rest. Use packed=True."
)
INSTEAD = "Use batching='length' instead: it pads less, for any model."
HELP = (
    "packed=True works with the encoders and decoders of transformers that take an attention_mask, and with "
    f"torch.nn.TransformerEncoder(batch_first=True). {INSTEAD}"
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


@dataclass
class Probe:
    """What one trial call of a stack showed; see ``hasten.packed.verify``.

    Args:
        tainted: the first sample's tokens are not numbers, and may make no other's so.

    """

    tainted: bool = False
    # The output of each block, in the order of the calls, and what becomes the padded batch again.
    outputs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    # Blocks that were computed without calling the packed attention.
    idle: list[nn.Module] = field(default_factory=list)
    attended: int = 0
    # The states of the generators that torch does not know when the blocks began, and whether they drew from them.
    states: tuple[Any, ...] | None = None
    drew: bool = False


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False)["state"]["pos"],
    )


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
        stack = self._stack
        with stack.computing(call):
            if stack.probe is None:
                return self.before(*args, **kwargs)
            attended = stack.probe.attended
            output = self.before(*args, **kwargs)
            stack.probe.outputs.append((self.module, output[0] if isinstance(output, tuple) else output))
            if stack.probe.attended == attended:
                stack.probe.idle.append(self.module)
            return output


class Stack:
    """The blocks of one transformer and the call they are computing.

    Args:
        blocks: in their order.
        container: holds them, and is looped over.
        asked: how packing was asked for, and for what, for the messages.
        causal: whether a token sees only those before it.
        first_token: compute the last block for the first token of each sequence only.
        norm: what the output of the last block goes through, and nothing else: token by token.
        unpatched: opens a call that is computed padded, by the attention of before.

    """

    def __init__(
        self,
        blocks: list[nn.Module],
        container: nn.Module,
        asked: str,
        causal: bool = False,
        first_token: bool = False,
        norm: nn.Module | None = None,
        unpatched: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.blocks = blocks
        self.asked = asked
        self.causal = causal
        self.first = FirstToken(asked) if first_token else None
        # What gives the padded batch back.
        self._end = blocks[-1] if norm is None else norm
        self._of_last_block = set(blocks[-1].modules())
        self.unpatched = unpatched
        # Whether the call was given a mask between tokens, which is that of a causal stack then.
        self.masked = False
        # None outside of all calls.
        self.call: Call | None = None
        # Between the first block and what gives the padded batch back.
        self.inside = False
        # While ``verify`` tries the stack out, and whether it has.
        self.probe: Probe | None = None
        self.verified = False
        # Whether a call was packed, and whether one was not for want of gradients.
        self.used = self.without_gradients = False
        self._reads = _PaddingUnread(asked)
        self._parts = _Parts(asked, blocks, container, norm)

    def begin(self, layout: Layout | None) -> None:
        """Begin a call of the whole stack, packed or, without a layout, padded.

        Raises:
            MisconfigurationException: blocks were replaced or hooks registered inside them meanwhile; or the loss of
                the last backward reads what packing leaves out.

        """
        self.call, self.inside = Call(layout), False
        if layout is None:
            return
        if self.probe is None:
            self.used = True
            self._reads.confirm()
            if self._parts.changed():
                self._parts.look()
                self.verified = False
        if self.first is not None:
            self.first.confirm()

    def finish(self, output: Any) -> None:
        """End the call that was begun.

        Args:
            output: of the whole stack; None where it failed.

        Raises:
            MisconfigurationException: the last block was not reached, so nothing gave the padded batch back.

        """
        inside, self.call, self.inside = self.inside, None, False
        if inside and output is not None:
            raise MisconfigurationException(
                f"{self.asked}: the last block, {name_of(self.blocks, self.blocks[-1])}, was left out (an early exit, "
                f"or whole layers dropped), and packing ends there. {INSTEAD}"
            )

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
        if self.probe is not None:
            self.probe.attended += 1
            if self.probe.tainted:
                return _attend_apart(query, key, value, layout.bounds.tolist(), scale, self.causal)
            p = 0.0
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
        self._reads.confirm()
        if self.first is not None:
            self.first.confirm()

    def _pack(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self.call
        if call is None or call.layout is None:
            return args, kwargs if call is None else {**kwargs, _CALL: call}
        layout = call.layout
        first, last = block is self.blocks[0], block is self.blocks[-1]
        if torch._C._current_graph_task_id() == -1:  # Else it is computed again, by itself.
            if not first and not self.inside:
                raise MisconfigurationException(
                    f"{self.asked}: {name_of(self.blocks, block)} was called before the first block (whole layers "
                    f"dropped, or another order), where packing begins. {INSTEAD}"
                )
            if not self.inside and self.probe is not None:
                self.probe.states = _generators()
            self.inside = True
        # The hidden states are a row already but for the first block; what comes along never is.
        keep = 0 if first else 1
        args = (*args[:keep], *(layout.alike(each) for each in args[keep:]))
        kwargs = {
            name: each if name == "hidden_states" and not first else layout.alike(each)
            for name, each in kwargs.items()
        }
        if self.probe is not None and self.probe.tainted and first:
            args, kwargs = _tainted(args, kwargs, layout)
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

    def _unpack(self, end: nn.Module, args: Any, output: Any) -> Any:
        if self.probe is not None and self.call is not None:
            self.probe.outputs.append((end, output[0] if isinstance(output, tuple) else output))
            self.probe.drew |= self.probe.states is not None and self.probe.states != _generators()
        if self.call is None or self.call.layout is None:
            return output
        layout, self.inside = self.call.layout, False

        def padded(row: Tensor) -> Tensor:
            if self.first is not None:
                return self.first.end(row, layout)
            batch = layout.unpack(row)
            if not layout.has_padding:
                return batch
            if not batch.requires_grad and self.probe is None:
                batch = self._reads.of_frozen(batch)
            return self._reads.watched(batch, row, layout) if batch.requires_grad else batch

        return (padded(output[0]), *output[1:]) if isinstance(output, tuple) else padded(output)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Parts:
    """The modules inside the blocks: whether any was changed since it was looked at, in a run for instance.

    Args:
        asked: how packing was asked for, and for what, for the messages.
        blocks: in their order.
        container: holds them.
        norm: behind the last block, if packing ends there.

    """

    def __init__(
        self, asked: str, blocks: list[nn.Module], container: nn.Module, norm: nn.Module | None
    ) -> None:
        self._asked, self._blocks, self._container = asked, blocks, container
        self._owners = blocks if norm is None else [*blocks, norm]
        # (its attributes, how many, its parts, its hooks, how many, its own forward, its mode)
        self._seen: list[tuple[dict[str, Any], int, tuple[Any, ...], tuple[Any, ...], int, Any, bool]] = []
        self.check()

    def changed(self) -> bool:
        """Return whether a module has other parts, another forward, more hooks or another mode than when looked at.

        More attributes, too: a method that somebody put on the instance is one.
        """
        for own, size, parts, (first, second, third, fourth), count, forward, training in self._seen:
            if (
                len(own) != size
                or tuple(own["_modules"].values()) != parts
                or len(first) + len(second) + len(third) + len(fourth) != count
                or own.get("forward") is not forward
                or own["training"] is not training
            ):
                return True
        return not self._seen

    def look(self) -> None:
        """Remember the modules as they are now.

        Raises:
            MisconfigurationException: see ``check``.

        """
        self.check()
        self._seen = []
        for module in [
            self._container,
            *dict.fromkeys(part for one in self._owners for part in one.modules()),
        ]:
            own = vars(module)
            hooks = tuple(own[name] for name in _HOOKS)
            parts = tuple(own["_modules"].values())
            count = sum(map(len, hooks))
            self._seen.append((own, len(own), parts, hooks, count, own.get("forward"), own["training"]))

    def check(self) -> None:
        """Look for what cannot be packed.

        Raises:
            MisconfigurationException: a block is not one of those that were packed; or a hook inside the blocks is the
                user's, and would be given rows of tokens, not the padded batch.

        """
        asked = self._asked
        for place, block in enumerate(self._container.children()):
            if block not in self._blocks:
                raise MisconfigurationException(
                    f"{asked}: block {place} was replaced by a {type(block).__name__} after packing had begun. Replace "
                    "it before training, or leave packed out."
                )
        for module in (part for owner in self._owners for part in owner.modules()):
            for hook in (hook for name in _HOOKS for hook in vars(module)[name].values()):
                if is_of_user(hook):
                    kind, name = type(module).__name__, getattr(hook, "__name__", type(hook).__name__)
                    raise MisconfigurationException(
                        f"{asked}: the hook {name} on {kind}, inside the blocks, would be given one row of real "
                        "tokens, not (samples, tokens, features). Register it on the whole model, or leave packed out."
                    )


class _PaddingUnread:
    """Checks in each backward that the loss does not read the places of padding, where packing leaves zeros.

    Args:
        asked: how packing was asked for, and for what, for the messages.

    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        # Whether a backward has come by.
        self._looked = False
        self._wrong: Tensor | None = None

    def of_frozen(self, batch: Tensor) -> Tensor:
        """Return what blocks without trained weights gave, with a gradient until one has been looked at."""
        if self._looked or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return batch
        return batch.detach().requires_grad_()

    def watched(self, batch: Tensor, row: Tensor, layout: Layout) -> Tensor:
        """Return ``batch``, (samples, tokens, features), and look at its gradient once it is known.

        Up to the first backward there are other tokens in the place of zeros, at which the gradient of a square or of
        an absolute value is zero, too.
        """
        real = layout.real
        assert real is not None
        if not self._looked:
            samples, width = layout.shape
            others = torch.arange(samples * width, device=row.device) % max(row.shape[1], 1)
            filler = row.detach()[0, others] if row.shape[1] else batch.detach().flatten(0, 1)
            batch = torch.where(real[..., None], batch, filler.unflatten(0, (samples, width)))

        def check(gradient: Tensor) -> None:
            # Numbers only: where a scaled loss overflows, zero times infinity is none.
            largest = gradient.detach().abs().amax(-1)
            wrong = ((largest > 0) & (largest < math.inf) & ~real).any()
            self._wrong = wrong if self._wrong is None else self._wrong | wrong
            # The first time also where the host has to wait for it: before any weight changes.
            if not self._looked or not waits_for(gradient):
                # Behind a head whose weights are zero, no gradient says anything yet.
                self._looked = self._looked or bool((largest > 0).any())
                self.confirm()

        batch.register_hook(check)
        return batch

    def confirm(self) -> None:
        """Raise if a loss since the last look reads padding. On CUDA the host waits for the answer.

        Raises:
            MisconfigurationException: it does.

        """
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            raise MisconfigurationException(
                f"{self._asked}: the loss reads its output where there is padding, and packing has zeros there. Leave "
                "those places out: labels of -100, a mean weighted by the mask, padding on the right (shifted labels "
                "read the last padded place on the left)."
            )


def name_of(blocks: list[nn.Module], block: nn.Module) -> str:
    """Return what to call a block in messages.

    Example::

        >>> name_of([nn.Linear(1, 1)], nn.Linear(1, 1))
        'Linear'

    """
    kind = type(block).__name__
    return next((f"block {number} ({kind})" for number, each in enumerate(blocks) if each is block), kind)


def is_of_user(hook: Any) -> bool:
    """Return whether a hook of a module is the user's, and may read samples and tokens."""
    function = getattr(hook, "func", hook)
    owner = getattr(function, "__module__", None) or type(function).__module__
    return owner.partition(".")[0] not in ("torch", "transformers", "hasten")


def _tainted(args: Any, kwargs: Any, layout: Layout) -> tuple[Any, Any]:
    """Return what the first block is given with the first sample's tokens not a number."""
    row = (args[0] if args else kwargs["hidden_states"]).clone()
    row[:, : int(layout.bounds[1])] = math.nan
    return ((row, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": row})


def _attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float, causal: bool
) -> Tensor:
    """Attend in each sequence by itself, by separate calls: nothing of one can reach another."""
    parts = []
    for begin, end in pairwise(bounds):
        q, k, v = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
        part = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
