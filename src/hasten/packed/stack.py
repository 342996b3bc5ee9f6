"""The blocks of one transformer, and the calls in which they compute packed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten.extend.origin import ROOTS, package_of
from hasten.packed.document_attention import of_all_heads, packed_attention
from hasten.packed.first_token import FirstToken, LossCheck, attend_first
from hasten.packed.layout import HELP, Layout, refusal
from hasten.packed.patches import HookPatch, MethodPatch
from hasten.packed.products import attend_within

# The keyword argument that passes the call to a block.
_CALL = "hasten_packed_call"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Call:
    """One call of a stack."""

    # Of its batch; None if the call is computed padded.
    layout: Layout | None
    # All tokens, for a block that receives first tokens only. It is not in the layout, to which earlier blocks refer:
    # that would be a reference cycle, and its memory would not be freed.
    row: Tensor | None = None


@dataclass
class Probe:
    """Observations of one trial call of a stack; see ``hasten.packed.verify``."""

    layout: Layout
    # Whether the first sample's tokens are nan, which must not spread to other samples.
    tainted: bool = False
    # Of the whole model.
    output: Any = None
    # The output of each block in the order of the calls, and the last one before it is padded again.
    outputs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    # Blocks that did not call the packed attention.
    idle: list[nn.Module] = field(default_factory=list)
    attended: int = 0
    # The sizes of draws of random numbers inside the blocks.
    draws: list[int] = field(default_factory=list)
    # Whether the model drew from the generator of Python or NumPy.
    drew_on_host: bool = False


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
            probe = stack.probe
            attended = 0 if probe is None else probe.attended
            output = self.original(*args, **kwargs)
            if probe is not None:
                probe.outputs.append((self.module, _hidden(output)))
                if probe.attended == attended:
                    probe.idle.append(self.module)
            return output


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


class Stack:
    """The blocks of one transformer and the call that they compute.

    ``asked`` is what requested packing and the class of the model, for messages. With ``first_token`` the last block is
    computed for the first token of each sequence only. ``norm`` computes each token of the last block's output
    separately, and is part of packing. In ``unpatched``, padded calls use the original attention.
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
        self.blocks, self._container, self.asked, self.causal = blocks, container, asked, causal
        self.unpatched = unpatched
        self.first = FirstToken(asked) if first_token else None
        # The module whose output becomes a padded batch again.
        self._end = blocks[-1] if norm is None else norm
        self._of_last_block = set(blocks[-1].modules())
        # Whether the call has a mask between tokens, which is causal then.
        self.masked = False
        # Open while a call is computed padded.
        self.padded = ExitStack()
        # None outside of all calls.
        self.call: Call | None = None
        # True between the first block and the end of packing.
        self.inside = False
        # Set during the trial calls of ``verify``, and whether it has passed.
        self.probe: Probe | None = None
        self.verified = False
        # Whether any call was packed, and whether any was padded because it needs no gradients.
        self.used = self.without_gradients = False
        self._padding = _PaddingCheck(asked)
        # The attributes of each module, and what they were when packing was verified.
        self._seen: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._checked_parts()

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
            self._padding.confirm()
            if not self._seen or any(_structure(own) != seen for own, seen in self._seen):
                modules = (self._container, *self._checked_parts())
                self._seen = [(vars(module), _structure(vars(module))) for module in modules]
                self.verified = False
        if self.first is not None:
            self.first.confirm()

    def finish(self, output: object) -> None:
        """End the current call; ``output`` is None if it failed.

        Raises:
            MisconfigurationException: the last block was skipped, so the output is still packed.

        """
        inside, self.call, self.inside = self.inside, None, False
        self.padded.close()
        if inside and output is not None:
            raise refusal(
                self.asked,
                f"the last block, {self.name_of(self.blocks[-1])}, was skipped (an early exit or dropped layers), "
                "but packing ends there",
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
        if self.call is None and torch_private.is_in_backward():
            raise refusal(
                self.asked,
                "its blocks are computed again in the backward by a checkpointing that packing does not support",
                "Use Trainer(memory='full'), or open packed_blocks(model) before hasten.memory.recomputed(model).",
            )
        return self.call

    def all_tokens(self, module: nn.Module) -> Tensor | None:
        """Return all tokens for a module of a block that receives first tokens only; None for others."""
        call = self.call
        if call is None or call.row is None or self.first is None or module not in self._of_last_block:
            return None
        return self.first.checked(call.row)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, p: float, scale: float, first_only: bool) -> Tensor:
        """Attend within each sequence of the row.

        ``query`` has the shape ``(real tokens, heads, features)``, with ``first_only`` that of the first tokens
        ``(sequences, heads, features)``; ``key`` and ``value`` have ``(real tokens, heads, features)``, perhaps of
        fewer heads.
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
        if p and query.is_cpu:
            key, value = of_all_heads(query, key, value)
            return attend_within(query, key, value, layout.bounds, p=p, scale=scale, causal=self.causal)
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
        self._padding.confirm()
        if self.first is not None:
            self.first.confirm()

    def _pack(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self.call
        if call is None or call.layout is None:
            return args, kwargs if call is None else {**kwargs, _CALL: call}
        layout = call.layout
        is_first = block is self.blocks[0]
        if not torch_private.is_in_backward():  # Otherwise backward recomputes this block.
            if not is_first and not self.inside:
                raise refusal(
                    self.asked,
                    f"{self.name_of(block)} was called before the first block (whole layers dropped, or another "
                    "order), where packing begins",
                )
            self.inside = True
        # The hidden states are a row already but for the first block; what comes along never is.
        row, *others = args or (kwargs["hidden_states"],)
        others = [layout.pack_like(each) for each in others]
        kwargs = {name: each if name == "hidden_states" else layout.pack_like(each) for name, each in kwargs.items()}
        if is_first:
            row = layout.pack_like(row)
            if self.probe is not None and self.probe.tainted:
                row = row.clone()
                row[:, : int(layout.bounds[1])] = math.nan
        if self.first is not None and block is self.blocks[-1]:
            firsts = self.first.begin(row, layout)
            if firsts is not None:
                call, row = Call(layout, row), firsts
        if args:
            return (row, *others), {**kwargs, _CALL: call}
        return (), {**kwargs, "hidden_states": row, _CALL: call}

    def _unpack(self, end: nn.Module, args: Any, output: Any) -> Any:
        if self.probe is not None and self.call is not None:
            self.probe.outputs.append((end, _hidden(output)))
        if self.call is None or self.call.layout is None:
            return output
        layout, self.inside = self.call.layout, False
        row = _hidden(output)
        if self.first is not None:
            batch = self.first.end(row, layout)
        else:
            batch = layout.unpack(row)
            if layout.has_padding:
                batch = self._padding.checked(batch, row, layout, trial=self.probe is not None)
        return (batch, *output[1:]) if isinstance(output, tuple) else batch

    def _checked_parts(self) -> list[nn.Module]:
        """Return the modules of the blocks and of the norm.

        Raises:
            MisconfigurationException: a block was replaced; or the user has a hook inside the blocks, which would
                receive rows of tokens instead of the padded batch.

        """
        for place, block in enumerate(self._container.children()):
            if block not in self.blocks:
                what = f"block {place} was replaced by a {type(block).__name__} after packing started"
                raise refusal(self.asked, what, "Replace it before training, or leave packed out.")
        parts = list(dict.fromkeys(part for owner in (*self.blocks, self._end) for part in owner.modules()))
        for module in parts:
            for hook in (hook for name in _HOOKS for hook in vars(module)[name].values()):
                if is_of_user(hook):
                    name = getattr(hook, "__name__", type(hook).__name__)
                    raise refusal(
                        self.asked,
                        f"the hook {name} on {type(module).__name__}, inside the blocks, would receive one row of "
                        "real tokens, not (samples, tokens, features)",
                        "Register it on the whole model, or leave packed out.",
                    )
        return parts

    def name_of(self, block: nn.Module) -> str:
        """Return the name of a block for messages, such as "block 1 (BertLayer)"."""
        kind = type(block).__name__
        places = (place for place, each in enumerate(self.blocks) if each is block)
        return next((f"block {place} ({kind})" for place in places), kind)


class _PaddingCheck(LossCheck):
    """Checks in each backward that the loss does not read padding, where packing leaves zeros."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            asked,
            "the loss reads its output at padding, where packing has zeros",
            "Exclude padding: use labels of -100, a mean weighted by the mask, or padding on the right (shifted labels "
            "read the last padding on the left). Leave out samples without a real token, whose mask is all 0.",
        )
        # Whether a backward was checked.
        self._passed = False

    def checked(self, batch: Tensor, row: Tensor, layout: Layout, *, trial: bool) -> Tensor:
        """Return ``batch``, (samples, tokens, features), and check its gradient in backward.

        Until the first check, the output of frozen blocks requires a gradient, and padding has other tokens instead of
        zeros, because the gradient of a square or absolute value is zero at zero.
        """
        unchecked = not self._passed and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not batch.requires_grad and unchecked and not trial:
            batch = batch.detach().requires_grad_()
        if not batch.requires_grad:
            return batch
        real = layout.real
        assert real is not None
        if not self._passed:
            samples, width = layout.shape
            others = torch.arange(samples * width, device=row.device) % max(row.shape[1], 1)
            filler = row.detach()[0, others] if row.shape[1] else batch.detach().flatten(0, 1)
            batch = torch.where(real[..., None], batch, filler.unflatten(0, (samples, width)))

        def check(gradient: Tensor) -> None:
            # Finite values only: where a scaled loss overflows, zero times infinity is nan.
            largest = gradient.detach().abs().amax(-1)
            # The first time even if the host has to wait for the device: before any weight changes.
            first = not self._passed
            # Behind a head of zero weights, all gradients are zero and prove nothing.
            self._passed = self._passed or bool((largest > 0).any())
            self.note(((largest > 0) & (largest < math.inf) & ~real).any(), at_once=first)

        batch.register_hook(check)
        return batch


def _structure(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides how a module computes; the number of attributes shows methods assigned to the instance."""
    return (
        len(attributes),
        tuple(attributes["_modules"].values()),
        sum([len(attributes[name]) for name in _HOOKS]),
        attributes.get("forward"),
        attributes["training"],
    )


def own_mask(asked: str, module: nn.Module, mask: Tensor) -> Exception:
    """Return the error for a module that attends with a mask that the stack does not know."""
    problem = f"{type(module).__name__} calls attention with its own mask, of shape {tuple(mask.shape)}"
    return refusal(asked, problem, HELP)


def is_of_user(hook: object) -> bool:
    """Return whether a hook is the user's, and not one of torch, transformers or hasten."""
    function = getattr(hook, "func", hook)
    owner = package_of(function)
    return owner not in {"torch", "transformers", *ROOTS}


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
