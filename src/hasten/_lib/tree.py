"""Nested collections of tensors: change, move and measure them; and the modes of nested modules."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from hasten._lib.device import copies_in_background, widest_float
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ATOMS: frozenset[type] = frozenset({str, int, float, bool, bytes, complex, type(None)})


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Return ``data`` with each tensor replaced by what ``function`` returns; ``data`` itself if nothing changed.

    Dicts, lists, tuples, named tuples and dataclasses keep their types, and other leaves are unchanged.

    Example::

        >>> map_tensors(lambda tensor: tensor + 1, {"x": torch.zeros(2), "name": "a"})
        {'x': tensor([1., 1.]), 'name': 'a'}

    """
    if isinstance(data, Tensor):
        return function(data)
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to everything in it that is not a collection, see ``map_tensors``.

    Example::

        >>> map_leaves(str, {"x": [1, None], "name": "a"})
        {'x': ['1', 'None'], 'name': 'a'}

    """
    return _map(function, data, frozenset())


def leaves(data: Any) -> list[Any]:
    """Return everything in ``data`` that is not a collection, in order; see ``map_tensors``.

    Example::

        >>> leaves({"x": [1, None], "name": "a"})
        [1, None, 'a']

    """
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map(note, data, frozenset())
    return found


def move_to(data: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return a tensor or a collection (see ``map_tensors``) on ``device``; ``data`` itself if all of it is there.

    Other objects that have a method ``to`` move themselves. With ``non_blocking`` it returns before copies from pinned
    memory have finished.
    """
    if type(data) is Tensor:
        return data.to(device, non_blocking=non_blocking)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        if to is None or isinstance(leaf, type):
            return leaf
        moved = to(device)
        # Some objects move in place and return None.
        return leaf if moved is None else moved

    return _map(move, data)


def _map(function: Callable[[Any], Any], data: Any, unchanged: frozenset[type] = _ATOMS) -> Any:
    kind = type(data)
    if kind in unchanged:
        return data
    if kind is tuple or kind is list:
        values = [_map(function, item, unchanged) for item in data]
        return data if all(new is old for new, old in zip(values, data, strict=True)) else kind(values)
    if not isinstance(data, (dict, UserDict)) and (isinstance(data, (Tensor, type)) or hasattr(data, "to")):
        return function(data)
    if not isinstance(data, (Mapping, list, tuple)) and not dataclasses.is_dataclass(data):
        return function(data)
    before = [child for _, child in children(data)]
    values = [_map(function, child, unchanged) for child in before]
    same = all(new is old for new, old in zip(values, before, strict=True))
    return data if same else rebuilt(data, values)


def children(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a mapping, list, tuple or dataclass holds, with the step that leads there: "['x']", "[0]", ".x"."""
    if isinstance(data, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in data.items())
    elif isinstance(data, (list, tuple)):
        names = getattr(data, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", value) for i, value in enumerate(data))
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        yield from ((f".{field.name}", getattr(data, field.name, None)) for field in dataclasses.fields(data))


def rebuilt(data: Any, values: list[Any]) -> Any:
    """Return a collection of the same kind with other values, in the order of ``children``."""
    if isinstance(data, (list, tuple)):
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if isinstance(data, Mapping):
        items = dict(zip(data, values, strict=True))
        if type(data) is dict:
            return items
        if not isinstance(data, (dict, UserDict)):
            return type(data)(items)  # type: ignore[call-arg]
        # A copy keeps what a subclass has in addition to its items: a default factory, the encodings of a tokenizer.
        new: Any = copy.copy(data)
        for key, value in items.items():
            new[key] = value
        return new
    new = copy.copy(data)
    for field, value in zip(dataclasses.fields(data), values, strict=True):
        if value is not getattr(data, field.name, None):
            object.__setattr__(new, field.name, value)  # The dataclass may be frozen.
    return new


_Item = TypeVar("_Item")


def by_kind(items: Iterable[_Item], tensor_of: Callable[[_Item], Any] | None = None) -> list[list[_Item]]:
    """Group items by device and type, and DTensors by how they are split, for torch's ``_foreach`` operations.

    Items of a group keep their order.

    ``tensor_of`` returns the tensor of an item; by default the item itself.

    Example::

        >>> one, two, whole = torch.zeros(1), torch.zeros(2), torch.zeros(3, dtype=torch.int64)
        >>> [len(alike) for alike in by_kind([one, whole, two])]
        [2, 1]

    """
    kinds: dict[tuple[object, ...], list[_Item]] = {}
    for item in items:
        tensor: Any = item if tensor_of is None else tensor_of(item)
        mesh = getattr(tensor, "device_mesh", None)
        split = () if mesh is None else (mesh, tensor.placements)
        kinds.setdefault((tensor.device, tensor.dtype, *split), []).append(item)
    return list(kinds.values())


# -- values on their way to the host


class Arrival:
    """Scalars on their way to the host."""

    def __init__(
        self, scalars: list[Any], places: list[int], buffer: Tensor | None, event: torch.cuda.Event | None
    ) -> None:
        self._scalars = scalars
        self._places = places
        self._buffer = buffer
        self._event = event

    def ready(self) -> bool:
        """Return whether ``values`` would return at once; never waits."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """Return the values as floats, in the order given. This is a sync point if not ``ready``."""
        if self._buffer is not None:
            if self._event is not None:
                self._event.synchronize()
            for place, value in zip(self._places, self._buffer.tolist(), strict=True):
                self._scalars[place] = value
            self._buffer = None
        return [float(value) for value in self._scalars]


def weighed(value: Tensor, weight: Tensor) -> Tensor:
    """Return ``value`` times ``weight``, which has one element; 0 where that is 0, whatever the value is."""
    return torch.where(weight > 0, value, torch.zeros_like(value)) * weight.to(value.dtype)


def send_to_host(values: Sequence[Any]) -> Arrival:
    """Start moving 0-d tensors (numbers pass through) to the host with one copy a device.

    Only CUDA copies in the background; elsewhere the values are here when this returns.
    """
    scalars = list(values)
    places = [i for i, value in enumerate(scalars) if isinstance(value, Tensor)]
    if not places:
        return Arrival(scalars, [], None, None)
    devices = {scalars[i].device for i in places}
    if len(devices) > 1:
        # Rare: some values are metrics on the CPU, others losses on the device. The few CPU ones are read at once.
        for i in [i for i in places if scalars[i].is_cpu]:
            scalars[i] = float(scalars[i])
        if len(devices) > 2:
            return Arrival([float(value) for value in scalars], [], None, None)
        return send_to_host(scalars)
    (device,) = devices
    # Doubles hold every float and every count below 2**53; MPS has none.
    wide = widest_float(device)
    stacked = torch.stack([scalars[i].detach().reshape(()).to(wide) for i in places])
    if not copies_in_background(device):
        return Arrival(scalars, places, stacked.cpu(), None)
    buffer = torch.empty(len(places), dtype=wide, pin_memory=True)
    buffer.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Arrival(scalars, places, buffer, event)


# -- modules


def defines_train(part: nn.Module) -> bool:
    """Return whether a module has a ``train()`` of its own, in its class or put on the instance.

    Example::

        >>> defines_train(nn.Linear(1, 1))
        False

    """
    # Other objects put there, such as functools.partial and mocks, watch who calls it.
    found = getattr(part.train, "__func__", part.train)
    return isinstance(found, FunctionType) and found is not nn.Module.train


def remember_modes(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives each part of ``module`` the mode (train or eval) it has now.

    The ``train()`` of parts that define it is called, as by ``module.train()`` in a hand-written loop. Parts that it
    leaves in eval mode, for instance a frozen normalization, stay in eval mode.

    Example::

        >>> model = nn.Sequential(nn.Dropout().eval(), nn.Linear(1, 1))
        >>> restore = remember_modes(model)
        >>> _ = model.train()
        >>> restore()
        >>> model[0].training
        False

    """
    modes = [(part, part.training) for part in module.modules()]

    def restore() -> None:
        kept = _call_own_train(modes)
        for part, training in modes:
            part.training = training and part not in kept

    return restore


def call_own_train(module: nn.Module) -> None:
    """Call ``train()`` of the parts in train mode that define it, as ``module.train()`` in a loop by hand does."""
    remember_modes(module)()


def _call_own_train(modes: Iterable[tuple[nn.Module, bool]]) -> set[nn.Module]:
    """Call the ``train()`` of parts that define it; return the parts that it leaves in eval mode."""
    reached: set[nn.Module] = set()
    kept: set[nn.Module] = set()
    for part, training in modes:
        if not defines_train(part):
            continue
        if not training:
            if part.training:
                part.train(False)
        elif part not in reached:
            with suppress(NotImplementedError):  # Exported modules refuse every change of modes.
                part.train()
            reached.update(part.modules())
            kept.update(inner for inner in part.modules() if not inner.training)
    return kept


def left_in_eval_mode(module: nn.Module) -> set[nn.Module]:
    """Return the parts that ``module.train()`` leaves in eval mode, without changing their modes."""
    if not any(defines_train(part) for part in module.modules()):
        return set()
    with preserve_modes(module), suppress(NotImplementedError):
        module.train()
        return {part for part in module.modules() if not part.training}
    return set(module.modules())


_is_read_by_jit = False


@contextmanager
def readable_by_jit() -> Iterator[None]:
    """Inside the block, ``trainer`` of a module without a Trainer is None: TorchScript reads all attributes."""
    global _is_read_by_jit
    before, _is_read_by_jit = _is_read_by_jit, True
    try:
        yield
    finally:
        _is_read_by_jit = before


def is_read_by_jit() -> bool:
    """Return whether ``readable_by_jit`` is open."""
    return _is_read_by_jit


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Restore the present mode of each part of ``module`` when the block ends."""
    restore = remember_modes(module)
    try:
        yield
    finally:
        restore()


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return the parameters that optimizers train, in the order of their groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor: of a ``DTensor`` the whole, which all processes must ask for; others as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def copy_into(target: Tensor, source: Tensor) -> None:
    """Fill a tensor in place; a ``DTensor`` from a whole tensor with the part of this process."""
    with torch.no_grad():
        if not is_sharded(target) or is_sharded(source):
            target.copy_(source)
            return
        for chunk in target.__create_chunk_list__():
            part = source[
                tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            ]
            target.to_local().detach().copy_(part)


def sharded_parameter(module: nn.Module) -> str | None:
    """Return the name of a parameter of ``module`` of which other processes have a part or all; None if none has."""
    return next((name for name, p in module.named_parameters() if is_sharded(p) or is_absent(p)), None)


# The attribute of a parameter whose values another process has: one with another stage of a pipeline.
ABSENT = "_hasten_absent"


def is_absent(parameter: Tensor) -> bool:
    """Return whether the values of a parameter are in the process of another stage."""
    return hasattr(parameter, ABSENT)


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a ``DTensor``: a tensor of which each process may have a part."""
    # No value is a DTensor before this module is imported, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_array(value: object) -> bool:
    """Return whether a value is an array of NumPy, which need not be imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class AttributeDict(dict[str, Any]):
    """A dict whose keys are also attributes.

    Example::

        >>> hparams = AttributeDict(lr=0.1)
        >>> hparams.lr
        0.1

    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            inside = [name for name, value in self.items() if isinstance(value, Mapping) and key in value]
            instead = (
                ""
                if key.startswith("__")
                else f"Write hparams.{inside[0]}[{key!r}]."
                if inside
                else did_you_mean(key, self)
                or " Set it first; for an argument of a module, write self.save_hyperparameters() in its __init__."
            )
            raise make_error(AttributeError, f"no entry {key!r}; there are: {sorted(self)}.", fix=instead) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        del self[key]

    def __repr__(self) -> str:
        names = {key: f'"{key}":' for key in sorted(self, key=str)}
        width = max(map(len, names.values()), default=0)
        return "\n".join(f"{name:{width}} {self[key]}" for key, name in names.items())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in their order as one row of bytes, without a copy where they lie in a row."""
    values = tensor.contiguous()
    # Not view(-1): the single element of a tensor may keep a stride, and torch then has no bytes of it.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)
