"""Activations of repeated blocks: recomputed in backward (activation checkpointing), or kept in host memory."""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.weak import TensorWeakRef

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, Parts, make_error
from hasten._lib.observers import set_until
from hasten._lib.tree import leaves
from hasten.checkpoint.snapshots import own_attributes, put_attributes_back, ways_of
from hasten.extend.origin import ROOTS, comes_from, functions_reached, names_in
from hasten.seed import global_generators, is_generator

HOW = ("selective", "full")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a module: children of one class in an ``nn.ModuleList`` or ``nn.Sequential``.

    Single layers (``nn.Linear``) are not blocks, and blocks inside of blocks are not listed. They are in order, each
    once.

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

    Results do not change, with dropout, too. For the recomputation, what the forward changes is restored: random
    generators (of torch, Python, numpy and the blocks), buffers such as running statistics, attributes such as
    counters, and the weights of ``torch.func.functional_call``. Keys of ``state_dict`` and classes do not change.

    Args:
        module: the module, on its device.
        how: "selective" keeps the results of matrix products, convolutions and attention, which are expensive, and
            recomputes the rest. Attention of ``fast_attention`` is recomputed, too, because its weights need memory.
            "full" keeps only the inputs of each block, and costs one more forward.

    Yields:
        the number of blocks.

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
        raise make_error(ValueError, f"memory={how!r}:", fix=f"use {' or '.join(map(repr, HOW))}.", argument="memory")
    blocks = repeated_blocks(module)
    if not blocks:
        what, fix, _ = nothing_repeated(module)
        raise make_error(ValueError, f"memory={how!r}: {what}", fix=fix, argument="memory")
    with recomputed_blocks(blocks, how):
        yield len(blocks)


@contextmanager
def offloaded(module: nn.Module, *, smallest_bytes: int = 65536) -> Iterator[int]:
    """Keep in host memory what the repeated blocks of a module save for backward, inside the block.

    Each tensor is copied to pinned memory when it is saved, and back when backward needs it. Results do not change.
    Parameters stay on the device. On the CPU nothing is gained: the copies take the place of the tensors.

    Args:
        module: the module, on its device.
        smallest_bytes: smaller tensors stay on the device: a copy takes longer than its memory is worth.

    Yields:
        the number of blocks.

    Source: `PyTorch, saved tensors hooks
    <https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-default-hooks>`_; Ren et al., ZeRO-Offload, 2021.

    Example::

        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> model = nn.TransformerEncoder(layer, num_layers=3)
        >>> with offloaded(model) as blocks:
        ...     model(torch.ones(4, 1, 8)).sum().backward()
        >>> blocks
        3

    """
    blocks = repeated_blocks(module)
    if not blocks:
        what, _, _ = nothing_repeated(module)
        raise make_error(ValueError, f"memory='offload': {what}", fix="Leave memory out.", argument="memory")
    with _forwards_replaced(blocks, functools.partial(_Offloaded, smallest_bytes=smallest_bytes)):
        yield len(blocks)


def recomputed_blocks(blocks: Sequence[nn.Module], how: str) -> AbstractContextManager[None]:
    """Recompute these modules in backward, inside the block; see ``recomputed``."""
    return _forwards_replaced(blocks, functools.partial(_Recomputed, selective=how == "selective"))


@contextmanager
def _forwards_replaced(blocks: Sequence[nn.Module], replacement: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Call ``replacement(block, own)`` in place of the forward of each block, inside the block."""
    with ExitStack() as undo:
        for block in blocks:
            # Set in the instance's own dictionary, so that neither its class nor the names of its parts change.
            set_until(undo, vars(block), "forward", replacement(block, vars(block).get("forward")))
        yield


def nothing_repeated(module: nn.Module) -> Parts:
    """Return the message for a module without repeated blocks, with an alternative."""
    return Parts(
        f"{type(module).__name__} has no repeated blocks (of one class, in an nn.ModuleList or nn.Sequential) to "
        "recompute.",
        "Use micro_batch='auto' to compute fewer samples at once.",
    )


class _Recomputed:
    """Replaces the forward of one block by one that is recomputed in backward.

    An object instead of a function: in a deep copy of the module it calls the copied block.
    """

    def __init__(self, block: nn.Module, own: Callable[..., Any] | None, *, selective: bool) -> None:
        self.block = block
        self.own = own
        self.selective = selective
        # Whether the first recomputation was, or will be, compared with its forward.
        self.compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        function = self.own if self.own is not None else functools.partial(type(block).forward, block)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        args, kwargs, holds_more = _without_cache(args, kwargs)
        if holds_more:
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler separates writes to buffers from recomputation.
            if self.selective:
                return checkpoint(function, *args, use_reentrant=False, context_fn=_selective, **kwargs)
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return self._with_state(function, args, kwargs)

    def _with_state(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block; a recomputation starts from the state before it, and the first one is compared with it."""
        before = _Before(self.block, (*args, *kwargs.values()))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = _selective() if self.selective else (nullcontext(), nullcontext())
            return first, _Earlier(before, second)

        stops_early: AbstractContextManager[Any] = nullcontext()
        if not self.compared:
            self.compared = True
            function, stops_early = self._compared(function), set_checkpoint_early_stop(False)
        with stops_early:
            output = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        before.keep_what_changed()
        return output

    def _compared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` for a forward and its recomputation, which must give the same."""
        outputs: list[Tensor] = []
        versions: list[int] = []

        def compute(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            found = [leaf.detach() for leaf in leaves(output) if isinstance(leaf, Tensor)]
            if not versions:
                outputs.extend(found)
                versions.extend([leaf._version for leaf in found])
            elif not all(
                first._version != version or _alike(first, second)
                for first, second, version in zip(outputs, found, versions, strict=False)
            ):
                raise MisconfigurationException(
                    f"memory={'selective' if self.selective else 'full'!r}: {type(self.block).__name__}.forward gave "
                    "other values when it was computed again in backward. It changes or draws from something that "
                    "cannot be restored, for instance a global variable, an attribute of a class or an iterator.",
                    fix=(
                        "Keep it in an attribute of the block (a number, a list, a generator of random numbers), or "
                        "leave memory out: micro_batch='auto' needs less memory, too."
                    ),
                    argument="memory",
                )
            else:
                outputs.clear()
            return output

        return compute


class _Offloaded:
    """Replaces the forward of one block by one that keeps in host memory what backward needs.

    An object instead of a function: in a deep copy of the module it calls the copied block.
    """

    def __init__(self, block: nn.Module, own: Callable[..., Any] | None, *, smallest_bytes: int) -> None:
        self.block = block
        self.own = own
        self.smallest_bytes = smallest_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        function = self.own if self.own is not None else functools.partial(type(block).forward, block)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # Here they are whole: ``fully_shard`` has gathered them, and frees them after the forward.
        own = [torch_private.local_part(tensor) for tensor in (*block.parameters(), *block.buffers())]
        stay = {torch_private.identity_of(tensor.untyped_storage()) for tensor in own}
        # A tensor that several operations save is copied once. A weak reference keeps the storage's place taken, so
        # no later storage is mistaken for it.
        copies: dict[tuple[Any, ...], _OnHost] = {}

        def pack(tensor: Tensor) -> Any:
            part = torch_private.local_part(tensor)
            if not self._moves(part) or torch_private.identity_of(part.untyped_storage()) in stay:
                # An operation that saved its own output would refer to itself.
                return tensor.detach()
            place = (part.storage_offset(), part.shape, part.stride(), part.dtype, part._version, type(tensor))
            key = (StorageWeakRef(part.untyped_storage()), *place)
            if key not in copies:
                copies[key] = _OnHost(tensor, part)
            return copies[key]

        with torch.autograd.graph.saved_tensors_hooks(pack, _back):
            return function(*args, **kwargs)

    def _moves(self, part: Tensor) -> bool:
        """Return whether a tensor is worth a copy; one that repeats its elements takes less memory than its copy."""
        return (
            type(part) in (Tensor, nn.Parameter)
            and part.layout is torch.strided
            and part.numel() * part.element_size() >= self.smallest_bytes
            and 0 not in part.stride()
        )


class _OnHost:
    """A copy in host memory of the part of a tensor that this process has: all of it, unless it is a ``DTensor``."""

    def __init__(self, tensor: Tensor, part: Tensor) -> None:
        self._device = part.device
        self._copy = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda, requires_grad=False)
        # On the stream that has computed the tensor and will copy it back, so nothing waits on the host.
        self._copy.copy_(part.detach(), non_blocking=True)
        whole: Any = tensor
        self._layout = None if part is tensor else (whole.device_mesh, whole.placements, whole.shape, whole.stride())
        self._there: Callable[[], Tensor | None] = lambda: None

    def back(self) -> Tensor:
        """Return the tensor on its device, the same for all who need it at the same time."""
        tensor = self._there()
        if tensor is None:
            tensor = self._copy.to(self._device, non_blocking=True)
            if self._layout is not None:
                from torch.distributed.tensor import DTensor

                mesh, placements, shape, stride = self._layout
                tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
            self._there = TensorWeakRef(tensor)
        return tensor


def _back(saved: Any) -> Any:
    return saved.back() if isinstance(saved, _OnHost) else saved


def _alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two results of one computation are equal up to rounding."""
    # A plan (``hasten plan``) computes without values.
    has_values = type(first).__name__ != "FakeTensor"
    if first.shape != second.shape or not first.is_floating_point() or not has_values:
        return first.shape == second.shape
    fine = first.dtype in (torch.float32, torch.float64) and first.is_cpu
    tolerance = 1e-5 if fine else 1e-2
    # Outside of dispatch modes, because selective checkpointing counts each operation as part of the forward.
    with torch.no_grad(), torch_private.without_modes():
        one, other = torch.nan_to_num(first.float()), torch.nan_to_num(second.float())
        return bool((one - other).norm() <= tolerance * one.norm())


# -- state that a forward may change


class _Before:
    """The state that a forward uses or may change: weights, buffers, attributes, generators of random numbers."""

    def __init__(self, block: nn.Module, arguments: Iterable[Any]) -> None:
        self._held = [(thing, always, _contents(thing)) for thing, always in _holders(block, arguments)]
        self._copies = {
            id(value): (value._version, value.clone())
            for _, _, contents in self._held
            for value in _values(contents)
            if isinstance(value, Tensor) and not value.requires_grad
        }
        # torch.func.functional_call shows other weights for the time of a forward.
        self._weights = [(part._parameters, dict(part._parameters)) for part in block.modules() if part._parameters]
        # toggle_optimizer may freeze weights between forward and backward.
        self._trained = [(weight, weight.requires_grad) for weight in block.parameters()]

    def keep_what_changed(self) -> None:
        """Forget what the forward has not changed: the recomputation needs no copy of it."""
        kept = []
        for thing, always, contents in self._held:
            changed = not _same(contents, _contents(thing))
            for key, value in _items(contents):
                version, copy = self._copies.get(id(value), (None, None))
                if version is not None and (always or value._version != version):
                    contents[key], changed = copy, True
            if changed:
                kept.append((thing, always, contents))
        self._held, self._copies = kept, {}

    def exchange(self) -> list[tuple[Any, Any]]:
        """Restore the earlier state; return what ``put_back`` needs to undo that."""
        earlier = [(thing, contents) for thing, _, contents in self._held]
        earlier += [(table, weights) for table, weights in self._weights if not _same_objects(table, weights)]
        now = [(thing, _contents(thing)) for thing, _ in earlier]
        put_back(earlier)
        return now

    def exchange_trained(self) -> list[tuple[nn.Parameter, bool]]:
        """Train the weights that the forward trained; return what ``set_trained`` needs to undo that."""
        changed = [(weight, trained) for weight, trained in self._trained if weight.requires_grad != trained]
        set_trained(changed)
        return [(weight, not trained) for weight, trained in changed]


def put_back(held: Iterable[tuple[Any, Any]]) -> None:
    """Restore the contents of objects."""
    for thing, contents in held:
        _ways_of(thing)[1](thing, contents)


def set_trained(weights: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Set whether each weight receives a gradient."""
    for weight, trained in weights:
        weight.requires_grad_(trained)


class _Earlier:
    """A context that computes with the earlier state of a block, and does not change its present state."""

    def __init__(self, before: _Before, inner: AbstractContextManager[Any]) -> None:
        self.before, self.inner = before, inner

    def __enter__(self) -> None:
        self.now = self.before.exchange()
        self.trained_now = self.before.exchange_trained()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        set_trained(self.trained_now)
        put_back(self.now)
        return self.inner.__exit__(*error)


_SIMPLE = (int, float, complex, str, bytes, type(None))
_LIBRARIES = (*ROOTS, "torch", "lightning", "numpy", "builtins")
# How deep attributes of attributes are searched, how many objects at most, and how long a list may be.
_DEPTH, _MOST_THINGS, _MOST_ITEMS = 3, 200, 200


def _holders(block: nn.Module, arguments: Iterable[Any]) -> list[tuple[Any, bool]]:
    """Return the objects whose contents a forward may change, and whether each must be assumed to have changed."""
    found: dict[int, tuple[Any, bool]] = {id(each): (each, False) for each in global_generators()}

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, (*_SIMPLE, Tensor, nn.Module)) or id(value) in found or len(found) > _MOST_THINGS:
            return
        if is_generator(value):
            found[id(value)] = value, False
        elif isinstance(value, (list, dict, set, deque)):
            if len(value) <= _MOST_ITEMS:
                found[id(value)] = value, False
                for inner in value.values() if isinstance(value, dict) else value:
                    visit(inner, depth - 1)
        elif depth > 0 and _has_attributes(value):
            found[id(value)] = value, False
            for inner in vars(value).values():
                visit(inner, depth - 1)

    for part in block.modules():
        if part._buffers:
            found[id(part._buffers)] = part._buffers, isinstance(part, torch_private.NormBase)
        kind: Any = type(part)
        if comes_from(kind, "torch.nn"):
            continue
        found[id(part)] = part, False
        for value in _contents(part).values():
            visit(value, _DEPTH)
        for generator in _generators_of(kind):
            visit(generator, 0)
    for value in arguments:
        if is_generator(value):
            visit(value, 0)
    return list(found.values())


def _has_attributes(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, (type, FunctionType, MethodType, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return not comes_from(kind, *_LIBRARIES)


@functools.cache
def _generators_of(kind: Any) -> tuple[Any, ...]:
    """Return the generators that are global variables which the methods of a class read."""
    bases = [base for base in kind.__mro__ if not comes_from(base, *_LIBRARIES)]
    functions = functions_reached((each for base in bases for each in vars(base).values()), depth=2)
    values = [function.__globals__.get(name) for function in functions for name in names_in(function)]
    return tuple({id(value): value for value in values if is_generator(value)}.values())


def _own(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in own_attributes(thing).items() if name != "forward"}


def _ways_of(thing: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Return what looks at the contents of a thing, and what puts them back."""
    if isinstance(thing, nn.Module):
        # Its forward is replaced while blocks are recomputed.
        return _own, functools.partial(put_attributes_back, look=_own)
    return ways_of(thing)


def _contents(thing: Any) -> Any:
    return _ways_of(thing)[0](thing)


def _values(contents: Any) -> Iterable[Any]:
    return [value for _, value in _items(contents)]


def _items(contents: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(contents, dict):
        return list(contents.items())
    return list(enumerate(contents)) if isinstance(contents, (list, deque)) else ()


def _same_objects(table: dict[str, Any], other: dict[str, Any]) -> bool:
    return table.keys() == other.keys() and all(table[name] is value for name, value in other.items())


def _same(before: Any, now: Any) -> bool:
    """Return whether contents are the same: the same objects, or equal numbers and texts."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, _SIMPLE):
        return bool(before == now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(before[key], now[key]) for key in before)
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, set):
        return bool(before == now)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(before, numpy.ndarray) and numpy.array_equal(before, now)


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
    names = torch_private.argument_names(op)
    return names.index("dropout_p") if "dropout_p" in names else None
