"""Activation checkpointing: recompute the repeated blocks of a module in backward instead of keeping activations."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

HOW = ("selective", "full")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a module: children of one class in an ``nn.ModuleList`` or ``nn.Sequential``.

    Args:
        module: any module. Single layers (``nn.Linear``) are not blocks, and blocks inside of blocks are not listed.

    Returns:
        the blocks in order, each once; an empty list if nothing is repeated.

    Example::

        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> len(repeated_blocks(nn.TransformerEncoder(layer, num_layers=3)))
        3
        >>> repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        []

    """
    found: dict[int, nn.Module] = {}

    def visit(parent: nn.Module) -> None:
        repeated: set[int] = set()
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            blocks = [child for child in parent if _is_block(child)]
            kinds = Counter(type(block) for block in blocks)
            repeated = {id(block) for block in blocks if kinds[type(block)] > 1}
            found.update({id(block): block for block in blocks if id(block) in repeated})
        for child in parent.children():
            if id(child) not in repeated:
                visit(child)

    visit(module)
    return list(found.values())


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


@contextmanager
def recomputed(module: nn.Module, how: str = "selective") -> Iterator[int]:
    """Recompute the repeated blocks of a module in backward instead of keeping their activations, inside the block.

    Results do not change, with dropout, too: the random generators and the buffers that the forward changes (running
    statistics) are restored for the recomputation. Keys of ``state_dict`` and classes do not change.

    Args:
        module: the module, on its device.
        how: "selective" keeps the results of matrix products, convolutions and attention, which are expensive, and
            recomputes the rest; "full" keeps only the inputs of each block, and costs one more forward.

    Yields:
        the number of blocks.

    Raises:
        ValueError: ``how`` has another value, or the module has no repeated blocks.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; `PyTorch, torch.utils.checkpoint
    <https://docs.pytorch.org/docs/stable/checkpoint.html>`_.

    Example::

        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> model = nn.TransformerEncoder(layer, num_layers=3)
        >>> with recomputed(model, "full") as blocks:
        ...     model(torch.ones(4, 1, 8)).sum().backward()
        >>> blocks
        3

    """
    if how not in HOW:
        raise ValueError(f"memory={how!r}: use {' or '.join(map(repr, HOW))}.")
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(f"memory={how!r}: {nothing_repeated(module)}")
    with recomputed_blocks(blocks, how):
        yield len(blocks)


@contextmanager
def recomputed_blocks(blocks: Sequence[nn.Module], how: str) -> Iterator[None]:
    """Recompute these modules in backward, inside the block; see ``recomputed``."""
    before = [block.__dict__.get("forward") for block in blocks]
    for block, own in zip(blocks, before, strict=True):
        # In the instance's own dictionary: neither its class nor the names of its parts change.
        block.__dict__["forward"] = _Recomputed(block, own, selective=how == "selective")
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = own


def nothing_repeated(module: nn.Module) -> str:
    """Return the message for a module without repeated blocks, with an alternative."""
    return (
        f"{type(module).__name__} has no repeated blocks (of one class, in an nn.ModuleList or nn.Sequential) to "
        "recompute. Use micro_batch='auto' to compute fewer samples at once."
    )


class _Recomputed:
    """Replaces the forward of one block by one that is recomputed in backward.

    An object instead of a function: in a deep copy of the module it calls the copied block.
    """

    def __init__(self, block: nn.Module, own: Callable[..., Any] | None, *, selective: bool) -> None:
        self.block = block
        self.own = own
        self.selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        function = self.own if self.own is not None else functools.partial(type(block).forward, block)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        args, kwargs, holds_more = _without_cache(args, kwargs)
        if holds_more:
            return function(*args, **kwargs)
        # The compiler separates writes to buffers from recomputation.
        buffers = [] if torch.compiler.is_compiling() else _buffers(block)
        if not buffers and self.selective:
            return checkpoint(function, *args, use_reentrant=False, context_fn=_selective, **kwargs)
        if not buffers:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return self._with_buffers(function, buffers, args, kwargs)

    def _with_buffers(
        self,
        function: Callable[..., Any],
        buffers: list[tuple[nn.Module, str, Tensor]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute with buffers that may change; the recomputation starts with their values before the forward."""
        versions = [tensor._version for _, _, tensor in buffers]
        kept = {(id(owner), name): (owner, name, tensor.clone()) for owner, name, tensor in buffers}

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = _selective() if self.selective else (nullcontext(), nullcontext())
            return first, _WithBuffers(kept, second)

        output = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        for (owner, name, tensor), version in zip(buffers, versions, strict=True):
            if owner._buffers.get(name) is tensor and not may_have_changed(owner, tensor, version):
                # Unchanged: the recomputation may read the buffer itself.
                del kept[id(owner), name]
        return output


def may_have_changed(owner: nn.Module, buffer: Tensor, version: int) -> bool:
    """Return whether a buffer may have been written to since it had ``version``."""
    # Writes to the running statistics of normalization do not increase the version.
    return buffer._version != version or isinstance(owner, nn.modules.batchnorm._NormBase)


class _WithBuffers:
    """A context that computes with earlier values of buffers, and leaves the current buffers alone."""

    def __init__(
        self, kept: dict[tuple[int, str], tuple[nn.Module, str, Tensor]], inner: AbstractContextManager[Any]
    ) -> None:
        self.kept, self.inner = kept, inner

    def __enter__(self) -> None:
        self.now = [(owner, name, owner._buffers[name]) for owner, name, _ in self.kept.values()]
        for owner, name, tensor in self.kept.values():
            owner._buffers[name] = tensor
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        for owner, name, tensor in self.now:
            owner._buffers[name] = tensor
        return self.inner.__exit__(*error)


def _buffers(block: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (owner, name, tensor)
        for owner in block.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None
    ]


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Remove caches of keys and values, which a decoder fills: the recomputation would find them filled.

    Returns the arguments, and whether a cache has content already and cannot be removed.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs, False
    if any(cache.get_seq_length() for cache in caches):
        return args, kwargs, True
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return args, kwargs, False


def _is_cache(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length") and hasattr(value, "update")


# -- what selective checkpointing keeps


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, second


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _expensive() and not _draws_numbers(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _expensive() -> frozenset[Any]:
    """Return the operations whose results are kept."""
    aten = torch.ops.aten
    packets = (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    )  # fmt: skip
    found = [getattr(aten, name).default for name in packets if hasattr(aten, name)]
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(found if flex is None else [*found, flex])


def _draws_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention has dropout: if it were not recomputed, all later random numbers would differ."""
    index = _index_of_dropout(op)
    if index is None:
        return False
    return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _index_of_dropout(op: Any) -> int | None:
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("dropout_p") if "dropout_p" in names else None
