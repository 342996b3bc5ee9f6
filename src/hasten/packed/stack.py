"""The blocks of one transformer, and the calls in which they compute packed batches."""

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
from hasten.packed.first_token import FirstToken, attend_first, would_wait
from hasten.packed.layout import Layout
from hasten.packed.patches import HookPatch, MethodPatch

# The keyword argument that passes the call to a block.
_CALL = "hasten_packed_call"
CAUSAL_FIRST_TOKEN = "it is causal, so the first token depends on no other token. Use packed=True."
INSTEAD = "Use batching='length' instead: it pads less, for any model."
HELP = (
    "packed=True works with the encoders and decoders of transformers that take an attention_mask, and with "
    f"torch.nn.TransformerEncoder(batch_first=True). {INSTEAD}"
)


@dataclass(frozen=True)
class Call:
    """One call of a stack.

    Args:
        layout: of its batch; None if the call is computed padded.
        row: all tokens, for a block that receives first tokens only. It is not in the layout, to which earlier blocks
            refer: that would be a reference cycle, and its memory would not be freed.

    """

    layout: Layout | None
    row: Tensor | None = None


@dataclass
class Probe:
    """Observations of one trial call of a stack; see ``hasten.packed.verify``.

    Args:
        tainted: whether the first sample's tokens are nan, which must not spread to other samples.

    """

    tainted: bool = False
    # The output of each block in the order of the calls, and the last one before it is padded again.
    outputs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    # Blocks that did not call the packed attention.
    idle: list[nn.Module] = field(default_factory=list)
    attended: int = 0
    # The states of Python's and NumPy's generators at the first block, and whether a block drew from them.
    states: tuple[Any, ...] | None = None
    drew: bool = False


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False)["state"]["pos"],
    )


class _Block(MethodPatch):
    """Replaces the forward of a block and sets the current call of its stack.

    Activation checkpointing computes a block again in backward, after other calls, with the same arguments. The call is
    therefore passed as an argument.
    """

    def __init__(self, block: nn.Module, stack: Stack) -> None:
        super().__init__(block)
        self._stack = stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = kwargs.pop(_CALL, None)
        if call is None:
            return self.original(*args, **kwargs)
        stack = self._stack
        with stack.computing(call):
            if stack.probe is None:
                return self.original(*args, **kwargs)
            attended = stack.probe.attended
            output = self.original(*args, **kwargs)
            stack.probe.outputs.append((self.module, output[0] if isinstance(output, tuple) else output))
            if stack.probe.attended == attended:
                stack.probe.idle.append(self.module)
            return output


class Stack:
    """The blocks of one transformer and the call that they compute.

    Args:
        blocks: in order.
        container: the module list that contains them.
        asked: the argument or call that requested packing and the class of the model, for messages.
        causal: whether a token attends only to itself and earlier tokens.
        first_token: compute the last block for the first token of each sequence only.
        norm: a layer that computes each token of the last block's output separately, and is part of packing.
        unpatched: a context for padded calls, in which the model uses its original attention.

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
        # The module whose output becomes a padded batch again.
        self._end = blocks[-1] if norm is None else norm
        self._of_last_block = set(blocks[-1].modules())
        self.unpatched = unpatched
        # Whether the call has a mask between tokens, which is causal then.
        self.masked = False
        # None outside of all calls.
        self.call: Call | None = None
        # True between the first block and the end of packing.
        self.inside = False
        # Set during the trial calls of ``verify``, and whether it has passed.
        self.probe: Probe | None = None
        self.verified = False
        # Whether any call was packed, and whether any was padded because it needs no gradients.
        self.used = self.without_gradients = False
        self._reads = _PaddingUnread(asked)
        self._parts = _Parts(asked, blocks, container, norm)

    def begin(self, layout: Layout | None) -> None:
        """Begin a call of the whole stack, packed or, without a layout, padded.

        Raises:
            MisconfigurationException: blocks were replaced or hooks registered inside them since the last call; or the
                loss of the last backward reads padding.

        """
        self.call, self.inside = Call(layout), False
        if layout is None:
            return
        if self.probe is None:
            self.used = True
            self._reads.confirm()
            if self._parts.changed():
                self._parts.remember()
                self.verified = False
        if self.first is not None:
            self.first.confirm()

    def finish(self, output: Any) -> None:
        """End the current call.

        Args:
            output: of the whole stack; None if it failed.

        Raises:
            MisconfigurationException: the last block was skipped, so the output is still packed.

        """
        inside, self.call, self.inside = self.inside, None, False
        if inside and output is not None:
            raise MisconfigurationException(
                f"{self.asked}: the last block, {name_of(self.blocks, self.blocks[-1])}, was skipped (an early exit or "
                f"dropped layers), but packing ends there. {INSTEAD}"
            )

    @contextmanager
    def computing(self, call: Call) -> Iterator[None]:
        """Make ``call`` the current call inside the block."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def current(self) -> Call | None:
        """Return the current call; None if a block is called outside of its model.

        Raises:
            MisconfigurationException: blocks are recomputed in backward for an unknown call.

        """
        if self.call is None and torch._C._current_graph_task_id() != -1:
            raise MisconfigurationException(
                f"{self.asked}: its blocks are computed again in the backward by a checkpointing that packing does "
                "not support. Use Trainer(memory='full'), or open packed_blocks(model) before "
                "hasten.memory.recomputed(model)."
            )
        return self.call

    def all_tokens(self, module: nn.Module) -> Tensor | None:
        """Return all tokens for a module of a block that receives first tokens only; None for others."""
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
            key: shape ``(real tokens, heads, features)``; there may be fewer heads.
            value: shape ``(real tokens, heads, features)``; there may be fewer heads.
            p: probability of dropping an attention weight.
            scale: factor of the products.
            first_only: whether ``query`` has only the first token of each sequence.

        """
        assert self.call is not None
        layout = self.call.layout
        assert layout is not None
        if self.probe is not None:
            self.probe.attended += 1
            if self.probe.tainted:
                return _attend_separately(query, key, value, layout.bounds.tolist(), scale, self.causal)
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
        """Pack the input of the first block and unpack the output of the last, inside the block."""
        with ExitStack() as changed:
            for block in self.blocks:
                hook = block.register_forward_pre_hook(HookPatch(self._pack), with_kwargs=True, prepend=True)
                changed.callback(hook.remove)
                changed.enter_context(_Block(block, self).applied())
            changed.callback(self._end.register_forward_hook(HookPatch(self._unpack)).remove)
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
        if torch._C._current_graph_task_id() == -1:  # Otherwise backward recomputes this block.
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
        args = (*args[:keep], *(layout.pack_like(each) for each in args[keep:]))
        kwargs = {
            name: each if name == "hidden_states" and not first else layout.pack_like(each)
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
            return self._reads.with_check(batch, row, layout) if batch.requires_grad else batch

        return (padded(output[0]), *output[1:]) if isinstance(output, tuple) else padded(output)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Parts:
    """Detects changes of the modules inside the blocks, for example in the middle of a run.

    Args:
        asked: the argument or call that requested packing and the class of the model, for messages.
        blocks: in order.
        container: the module list that contains them.
        norm: behind the last block, if packing ends there.

    """

    def __init__(
        self, asked: str, blocks: list[nn.Module], container: nn.Module, norm: nn.Module | None
    ) -> None:
        self._asked, self._blocks, self._container = asked, blocks, container
        self._owners = blocks if norm is None else [*blocks, norm]
        # Of each module: (attributes, their number, children, hooks, their number, forward of the instance, mode)
        self._seen: list[tuple[dict[str, Any], int, tuple[Any, ...], tuple[Any, ...], int, Any, bool]] = []
        self.check()

    def changed(self) -> bool:
        """Return whether a module has different children, attributes, hooks, forward or mode since ``remember``.

        The number of attributes shows methods that were assigned to the instance.
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

    def remember(self) -> None:
        """Remember the current state of the modules.

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
        """Check that the modules can be packed.

        Raises:
            MisconfigurationException: a block was replaced; or the user has a hook inside the blocks, which would
                receive rows of tokens instead of the padded batch.

        """
        asked = self._asked
        for place, block in enumerate(self._container.children()):
            if block not in self._blocks:
                raise MisconfigurationException(
                    f"{asked}: block {place} was replaced by a {type(block).__name__} after packing started. "
                    "Replace it before training, or leave packed out."
                )
        for module in (part for owner in self._owners for part in owner.modules()):
            for hook in (hook for name in _HOOKS for hook in vars(module)[name].values()):
                if is_of_user(hook):
                    kind, name = type(module).__name__, getattr(hook, "__name__", type(hook).__name__)
                    raise MisconfigurationException(
                        f"{asked}: the hook {name} on {kind}, inside the blocks, would receive one row of real "
                        "tokens, not (samples, tokens, features). Register it on the whole model, or leave packed out."
                    )


class _PaddingUnread:
    """Checks in each backward that the loss does not read padding, where packing leaves zeros.

    Args:
        asked: the argument or call that requested packing and the class of the model, for messages.

    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        # Whether a backward was checked.
        self._checked = False
        self._wrong: Tensor | None = None

    def of_frozen(self, batch: Tensor) -> Tensor:
        """Return the output of frozen blocks; until a backward was checked, it requires a gradient."""
        if self._checked or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return batch
        return batch.detach().requires_grad_()

    def with_check(self, batch: Tensor, row: Tensor, layout: Layout) -> Tensor:
        """Return ``batch``, (samples, tokens, features), and check its gradient in backward.

        Until the first check, padding has other tokens instead of zeros, because the gradient of a square or absolute
        value is zero at zero.
        """
        real = layout.real
        assert real is not None
        if not self._checked:
            samples, width = layout.shape
            others = torch.arange(samples * width, device=row.device) % max(row.shape[1], 1)
            filler = row.detach()[0, others] if row.shape[1] else batch.detach().flatten(0, 1)
            batch = torch.where(real[..., None], batch, filler.unflatten(0, (samples, width)))

        def check(gradient: Tensor) -> None:
            # Finite values only: where a scaled loss overflows, zero times infinity is nan.
            largest = gradient.detach().abs().amax(-1)
            wrong = ((largest > 0) & (largest < math.inf) & ~real).any()
            self._wrong = wrong if self._wrong is None else self._wrong | wrong
            # The first time even if the host has to wait for the device: before any weight changes.
            if not self._checked or not would_wait(gradient):
                # Behind a head of zero weights, all gradients are zero and prove nothing.
                self._checked = self._checked or bool((largest > 0).any())
                self.confirm()

        batch.register_hook(check)
        return batch

    def confirm(self) -> None:
        """Check the losses since the last call. On CUDA the host waits for the device.

        Raises:
            MisconfigurationException: a loss reads padding.

        """
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            raise MisconfigurationException(
                f"{self._asked}: the loss reads its output at padding, where packing has zeros. Exclude padding: use "
                "labels of -100, a mean weighted by the mask, or padding on the right (shifted labels read the last "
                "padding on the left)."
            )


def name_of(blocks: list[nn.Module], block: nn.Module) -> str:
    """Return the name of a block for messages.

    Example::

        >>> name_of([nn.Linear(1, 1)], nn.Linear(1, 1))
        'Linear'

    """
    kind = type(block).__name__
    return next((f"block {number} ({kind})" for number, each in enumerate(blocks) if each is block), kind)


def is_of_user(hook: Any) -> bool:
    """Return whether a hook is the user's, and not one of torch, transformers or hasten."""
    function = getattr(hook, "func", hook)
    owner = getattr(function, "__module__", None) or type(function).__module__
    return owner.partition(".")[0] not in ("torch", "transformers", "hasten")


def _tainted(args: Any, kwargs: Any, layout: Layout) -> tuple[Any, Any]:
    """Return the arguments of the first block with the first sample's tokens set to nan."""
    row = (args[0] if args else kwargs["hidden_states"]).clone()
    row[:, : int(layout.bounds[1])] = math.nan
    return ((row, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": row})


def _attend_separately(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float, causal: bool
) -> Tensor:
    """Attend in each sequence by a separate call, so that nothing of one can reach another."""
    parts = []
    for begin, end in pairwise(bounds):
        q, k, v = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
        part = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
