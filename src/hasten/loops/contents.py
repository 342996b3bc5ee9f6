"""What containers, objects and tensors hold, noted before an attempt and put back in place where it failed."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten._lib.out_of_memory import is_out_of_memory
from hasten.seed import generator_state, set_generator_state

# Objects inside objects inside objects ...: further in, nothing belongs to a step any more.
_DEPTH = 6
# Of a longer list only the length is noted: it grows, and a copy in each step would cost more than the step.
_LONG = 1000
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_LEFT_ALONE = (
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    nn.Module,
    DataLoader,
    Dataset,
    torch.optim.Optimizer,
)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "hasten"}
# What torch keeps in each module: parameters, sub-modules, buffers, hooks.
_TORCHS = frozenset(nn.Module().__dict__) - {"training"}
_ABSENT = object()


@dataclass(slots=True)
class _Leaf:
    """A tensor or an array, and what it takes to bring it back."""

    where: str
    tensor: Any
    version: int | None
    required: bool
    gradient: Any
    copy: Any
    compares: bool

    def may_have_changed(self) -> bool:
        """Return whether the version tells of a write."""
        return self.version is not None and self.tensor._version != self.version


class Contents:
    """Notes what is in some objects before each attempt, and puts it back in place after one that failed.

    Lists, dicts, sets, attributes and generators of random numbers get their former contents. Tensors are told to have
    changed by their version; their values are copied only until an attempt that succeeded has shown which of them a
    step changes, and from then on those alone. Whoever else holds one of these objects sees it restored.

    Args:
        most_bytes: of all tensors together that are copied before they are known to change; None for no limit.

    Example::

        >>> batch = {"x": torch.ones(2), "y": 3}
        >>> contents = Contents()
        >>> contents.note([("batch", batch)])
        >>> _ = batch.pop("y"), batch["x"].mul_(2)
        >>> contents.restore()
        >>> batch
        {'x': tensor([1., 1.]), 'y': 3}

    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        # By the place of a tensor: what successful attempts have shown.
        self._changes: set[str] = set()
        self._stays: set[str] = set()
        self._asked: _Answers | None = None
        # (object, what it held, whether that has changed, what puts it back, number of the root)
        self._nodes: list[tuple[Any, Any, Callable[..., bool], Callable[..., None], int]] = []
        self._leaves: list[tuple[_Leaf, int]] = []
        self._seen: set[int] = set()
        self._root = 0

    def note(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Remember what is in ``roots`` now: pairs of a name for messages and an object.

        Of a module only the attributes are noted that are the user's; its parameters are tensors like any other.
        """
        self._nodes, self._leaves, self._seen, self._bytes = [], [], set(), 0
        for self._root, (name, root) in enumerate(roots):
            if isinstance(root, nn.Module):
                self._note_module(name, root)
            else:
                self._visit(root, name, _DEPTH, of_batch=True)

    def restore(self) -> None:
        """Bring back what ``note`` saw; as often as needed.

        Raises:
            RuntimeError: a tensor was changed in place of which there is no copy; the message names it.

        """
        for thing, before, changed, put_back, _ in self._nodes:
            if changed(thing, before):
                put_back(thing, before)
        for leaf, _ in self._leaves:
            if leaf.copy is None and leaf.may_have_changed():
                raise RuntimeError(
                    f"{leaf.where} was changed in place by the attempt that ran out of memory, and has no copy, so the "
                    "step cannot begin again.\nMake a new tensor instead (x = x * 2, not x.mul_(2)), register "
                    "what belongs to the module with register_buffer, or give micro_batch a number that fits."
                )
            _put_back(leaf)

    def learn(self) -> set[int]:
        """After an attempt that succeeded: see what it changed; return the numbers of the roots that may change."""
        if self._asked is not None and (answers := self._asked.given()) is not None:
            self._asked = None
            for where, differs in answers.items():
                (self._changes if differs else self._stays).add(where)
        living = {root for thing, before, changed, _, root in self._nodes if changed(thing, before)}
        flags: dict[str, Tensor] = {}
        for leaf, root in self._leaves:
            where = leaf.where
            if where not in self._changes and leaf.may_have_changed():
                self._changes.add(where)
                self._stays.discard(where)
            elif where not in self._changes and where not in self._stays:
                unlike: Any = _differs(leaf.tensor, leaf.copy) if leaf.compares else False
                if not isinstance(unlike, Tensor):
                    (self._changes if unlike else self._stays).add(where)
                elif self._asked is None:
                    flags[where] = unlike
            if where not in self._stays:
                living.add(root)
        if flags:
            self._asked = _Answers(flags)
        self._nodes, self._leaves, self._seen = [], [], set()
        return living

    @property
    def is_sure(self) -> bool:
        """Whether the device has said which tensors the first step changed past their version."""
        return self._asked is None

    # -- looking

    def _note_module(self, name: str, module: nn.Module) -> None:
        attributes = module.__dict__
        mine = {key: value for key, value in attributes.items() if key not in _TORCHS}
        self._nodes.append((module, mine, _attributes_changed, _put_attributes_back, self._root))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self._note_tensor(parameter, f"{name}.{key}")
        for key, value in mine.items():
            if not isinstance(value, _PLAIN) and key not in ("_trainer", "trainer", "_logged"):
                self._visit(value, f"{name}.{key}", 2, of_batch=False)

    def _visit(self, thing: Any, where: str, depth: int, *, of_batch: bool) -> None:
        if isinstance(thing, _PLAIN):
            return
        if isinstance(thing, Tensor):
            self._note_tensor(thing, where)
            return
        if id(thing) in self._seen or depth < 0:
            return
        self._seen.add(id(thing))
        if isinstance(thing, tuple):
            names = getattr(thing, "_fields", None)
            for index, each in enumerate(thing):
                self._visit(
                    each,
                    f"{where}.{names[index]}" if names else f"{where}[{index}]",
                    depth - 1,
                    of_batch=of_batch,
                )
        elif isinstance(thing, list):
            if len(thing) > _LONG:
                self._nodes.append((thing, len(thing), _grew, _shorten, self._root))
                return
            self._nodes.append((thing, list(thing), _list_changed, _fill_list, self._root))
            for index, each in enumerate(thing):
                self._visit(each, f"{where}[{index}]", depth - 1, of_batch=of_batch)
        elif isinstance(thing, dict):
            if len(thing) > _LONG:
                return
            self._nodes.append((thing, dict(thing), _dict_changed, _fill_dict, self._root))
            for key, each in thing.items():
                self._visit(each, f"{where}[{key!r}]", depth - 1, of_batch=of_batch)
            if type(thing) is not dict:
                self._note_attributes(thing, where, depth, of_batch)
        elif isinstance(thing, (set, deque)):
            if len(thing) <= _LONG:
                self._nodes.append((thing, list(thing), _items_changed, _fill_items, self._root))
        elif _is_generator(thing):
            state = _state_of(thing)
            self._nodes.append((thing, state, _draws, _put_state_back, self._root))
        elif _is_array(thing):
            self._note_array(thing, where)
        elif not isinstance(thing, _LEFT_ALONE) and (of_batch or _is_the_users(thing)):
            self._note_attributes(thing, where, depth, of_batch)

    def _note_attributes(self, thing: Any, where: str, depth: int, of_batch: bool) -> None:
        held = {**getattr(thing, "__dict__", {}), **_slots_of(thing)}
        if not held and not hasattr(thing, "__dict__"):
            return
        self._nodes.append((thing, held, _attributes_changed, _put_attributes_back, self._root))
        for key, each in held.items():
            self._visit(each, f"{where}.{key}", depth - 1, of_batch=of_batch)

    def _note_tensor(self, tensor: Tensor, where: str) -> None:
        known = where in self._changes
        version = None if tensor.is_inference() else tensor._version
        writable = tensor.device.type != "meta" and not _is_expanded(tensor)
        copies = known or version is None or (where not in self._stays and self._may_copy(tensor))
        copy = _copy_of(tensor) if copies and writable else None
        # Not those of parameters: held here, the old ones would stay in memory during backward.
        has_own = tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        gradient = tensor.grad if has_own else None
        # Anything but a version shows a write through .data or NumPy only by the values.
        compares = copy is not None and not known
        leaf = _Leaf(where, tensor, version, tensor.requires_grad, gradient, copy, compares)
        self._leaves.append((leaf, self._root))

    def _note_array(self, array: Any, where: str) -> None:
        known = where in self._changes
        if known or (where not in self._stays and self._may_copy(array)):
            leaf = _Leaf(where, array, None, False, None, array.copy(), not known)
            self._leaves.append((leaf, self._root))

    def _may_copy(self, thing: Any) -> bool:
        """Return whether a copy may be made to see whether a step changes this."""
        if self._most_bytes is None:
            return True
        self._bytes += thing.nbytes
        return self._bytes <= self._most_bytes


# -- tensors and arrays


def _copy_of(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or tensor.device.type == "cpu":
            raise
    return tensor.detach().to("cpu", copy=True)


def _differs(one: Any, other: Any) -> Any:
    """Return whether values differ; of tensors on another device with a flag there, which is not waited for."""
    if not isinstance(one, Tensor):
        return one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes()
    one = one.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if type(one) is Tensor and one.layout is torch.strided and one.device.type == other.device.type == "cpu":
        one, other = one.contiguous(), other.contiguous()
        return ctypes.string_at(one.data_ptr(), one.nbytes) != ctypes.string_at(
            other.data_ptr(), other.nbytes
        )
    try:
        return (one != other.to(one.device)).any()
    except (RuntimeError, NotImplementedError):
        # A layout without comparison: a copy each time is dearer, and right.
        return True


class _Answers:
    """Flags on their way from a device, without waiting for it."""

    def __init__(self, flags: dict[str, Tensor]) -> None:
        self._names = list(flags)
        values = list(flags.values())
        self._arrived: torch.cuda.Event | None = None
        if {value.device.type for value in values} == {"cuda"} and len(
            {value.device for value in values}
        ) == 1:
            self._host = torch.empty(len(values), dtype=torch.bool, pin_memory=True)
            self._host.copy_(torch.stack(values), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values[0].device))
        else:
            self._host = torch.stack([value.cpu() for value in values])

    def given(self) -> dict[str, bool] | None:
        """Return the flags by name; None where the device has not come to them yet."""
        if self._arrived is not None and not self._arrived.query():
            return None
        return dict(zip(self._names, self._host.tolist(), strict=True))


def _put_back(leaf: _Leaf) -> None:
    tensor, copy = leaf.tensor, leaf.copy
    if not isinstance(tensor, Tensor):
        if tensor.flags.writeable:
            tensor[...] = copy
        return
    if copy is None:
        _put_gradient_back(leaf)
        return
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        if tensor.grad_fn is not None and not leaf.required:
            if tensor._is_view():
                raise RuntimeError(
                    f"{leaf.where} is a view and became part of the graph in the attempt that ran out of memory, so "
                    "the step cannot begin again.\nMake a new tensor instead of changing it in place, or give "
                    "micro_batch a number that fits."
                )
            tensor.detach_()
        here = tensor.detach()
        if here.shape == copy.shape and here.dtype == copy.dtype:
            here.copy_(copy)
        else:
            tensor.data = copy.to(here.device, copy=True)
    _put_gradient_back(leaf)
    if leaf.version is not None:
        leaf.version = tensor._version


def _put_gradient_back(leaf: _Leaf) -> None:
    tensor = leaf.tensor
    if isinstance(tensor, nn.Parameter) or not tensor.is_leaf or not (tensor.requires_grad or leaf.required):
        # The gradients of parameters belong to the moment, which knows those of an accumulation.
        return
    tensor.grad = leaf.gradient
    tensor.requires_grad_(leaf.required)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory: nothing can be written there."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_array(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)


# -- containers and objects: whether they changed, and what puts them back


def _list_changed(thing: Any, before: list[Any]) -> bool:
    return len(thing) != len(before) or any(a is not b for a, b in zip(thing, before, strict=True))


def _fill_list(thing: Any, before: list[Any]) -> None:
    list.__setitem__(thing, slice(None), before)


def _grew(thing: Any, before: int) -> bool:
    return len(thing) != before


def _shorten(thing: Any, before: int) -> None:
    list.__delitem__(thing, slice(before, None))


def _dict_changed(thing: Any, before: dict[Any, Any]) -> bool:
    return len(thing) != len(before) or any(
        a is not b or dict.__getitem__(thing, a) is not before[b] for a, b in zip(thing, before, strict=True)
    )


def _fill_dict(thing: Any, before: dict[Any, Any]) -> None:
    # Past what a subclass allows: outputs of transformers refuse to be changed.
    kind = OrderedDict if isinstance(thing, OrderedDict) else dict
    kind.clear(thing)
    for key, value in before.items():
        kind.__setitem__(thing, key, value)


def _items_changed(thing: Any, before: list[Any]) -> bool:
    return len(thing) != len(before) or any(a is not b for a, b in zip(thing, before, strict=True))


def _fill_items(thing: Any, before: list[Any]) -> None:
    thing.clear()
    (thing.extend if isinstance(thing, deque) else thing.update)(before)


def _held_now(thing: Any) -> dict[str, Any]:
    held = getattr(thing, "__dict__", {})
    if isinstance(thing, nn.Module):
        return {key: value for key, value in held.items() if key not in _TORCHS}
    return {**held, **_slots_of(thing)}


def _attributes_changed(thing: Any, before: dict[str, Any]) -> bool:
    now = _held_now(thing)
    return len(now) != len(before) or any(now.get(key, _ABSENT) is not value for key, value in before.items())


def _put_attributes_back(thing: Any, before: dict[str, Any]) -> None:
    now = _held_now(thing)
    own = getattr(thing, "__dict__", {})
    for key in now.keys() - before.keys():
        if key in own:
            del own[key]
        else:
            object.__delattr__(thing, key)
    for key, value in before.items():
        if now.get(key, _ABSENT) is value:
            continue
        if key in _slots_of_class(cast("Hashable", type(thing))):
            # Past a frozen dataclass.
            object.__setattr__(thing, key, value)
        else:
            own[key] = value


def _slots_of(thing: Any) -> dict[str, Any]:
    names = _slots_of_class(cast("Hashable", type(thing)))
    return {name: value for name in names if (value := getattr(thing, name, _ABSENT)) is not _ABSENT}


@functools.cache
def _slots_of_class(kind: Hashable) -> tuple[str, ...]:
    return tuple(
        name
        for base in cast("type", kind).__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    )


def _is_the_users(thing: Any) -> bool:
    """Return whether an object is of a class that the user wrote: what it holds may be part of a step."""
    return type(thing).__module__.partition(".")[0] not in _FOREIGN


# -- generators of random numbers


def _is_generator(thing: Any) -> bool:
    if isinstance(thing, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator_state(generator)
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return generator.get_state(legacy=True) if bits is None else bits.state


def _draws(generator: Any, before: Any) -> bool:
    # Comparing states costs more than putting one back.
    return True


def _put_state_back(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        set_generator_state(generator, state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
