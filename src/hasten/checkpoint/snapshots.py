"""Snapshots of state in memory: what a thing holds is looked at, and put back in place later.

A ``Snapshot`` is of one container, object or generator of random numbers, ``SavedBuffers`` of the buffers of a module,
``snapshot_optimizer`` of an optimizer. What follows objects into one another, or knows what belongs to a step, is built
on these (``loops/saved_state.py``).
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import torch_private
from hasten.extend.origin import ROOTS, package_of
from hasten.seed import is_generator, set_state_of_generator, state_of_generator

Look = Callable[[Any], Any]
PutBack = Callable[[Any, Any], None]

# Packages whose classes are not the user's.
FOREIGN = {*sys.stdlib_module_names, *ROOTS, "torch", "numpy"}
# What torch keeps in each module: parameters, sub-modules, buffers, hooks.
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
_ABSENT = object()


class Snapshot(NamedTuple):
    """A container, an object or a generator, and what it held.

    Example::

        >>> losses = [1.0]
        >>> before = Snapshot.of(losses)
        >>> losses.append(2.0)
        >>> before.changed()
        True
        >>> before.restore()
        >>> losses
        [1.0]

    """

    thing: Any
    before: Any
    look: Look
    put_back: PutBack

    @classmethod
    def of(cls, thing: object) -> Snapshot:
        """Return what a thing holds now."""
        look, put_back = ways_of(thing)
        return cls(thing, look(thing), look, put_back)

    def changed(self) -> bool:
        """Return whether the thing holds other objects by now, or another number of them."""
        # Comparing the states of generators costs more than restoring one.
        return self.look is state_of_generator or _differ(self.look(self.thing), self.before)

    def restore(self) -> None:
        """Put back what the thing held; as often as needed."""
        if self.changed():
            self.put_back(self.thing, self.before)


def ways_of(thing: object) -> tuple[Look, PutBack]:
    """Return what looks at the contents of a thing, and what puts them back."""
    if isinstance(thing, dict):
        return dict, _fill_dict
    if isinstance(thing, (list, set, deque)):
        return list, _fill_items
    if is_generator(thing):
        return state_of_generator, set_state_of_generator
    return attributes, put_attributes_back


@contextmanager
def showing(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Have tables, such as the buffers of modules, hold other values within the block; no tensor is written to.

    An entry is (table, name in it, value to show).
    """
    present = [(table, name, table[name]) for table, name, _ in entries]
    try:
        for table, name, value in entries:
            table[name] = value
        yield
    finally:
        for table, name, value in present:
            table[name] = value


# -- containers and objects


def _differ(present: Any, before: Any) -> bool:
    """Return whether two looks at a thing saw other objects in it, or another number of them."""
    if isinstance(before, int):
        return bool(present != before)
    if len(present) != len(before) or any(map(operator.is_not, present, before)):
        return True
    return isinstance(before, dict) and any(map(operator.is_not, present.values(), before.values()))


def _fill_items(thing: Any, before: list[Any]) -> None:
    if isinstance(thing, list):
        list.__setitem__(thing, slice(None), before)
        return
    thing.clear()
    (thing.extend if isinstance(thing, deque) else thing.update)(before)


def _fill_dict(thing: Any, before: dict[Any, Any]) -> None:
    # Past what a subclass allows: outputs of transformers refuse to be changed.
    kind = OrderedDict if isinstance(thing, OrderedDict) else dict
    kind.clear(thing)
    for key, value in before.items():
        kind.__setitem__(thing, key, value)


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of an object, those in slots among them."""
    slots = {
        name: value for name in _slots_of(_class_of(thing)) if (value := getattr(thing, name, _ABSENT)) is not _ABSENT
    }
    return {**getattr(thing, "__dict__", {}), **slots}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are the user's."""
    return {key: value for key, value in module.__dict__.items() if key not in _TORCH_ATTRIBUTES}


def put_attributes_back(thing: object, before: dict[str, Any], *, look: Look = attributes) -> None:
    """Give an object the attributes it had; those that ``look`` does not see stay."""
    present, own = look(thing), getattr(thing, "__dict__", {})
    new = present.keys() - before.keys()
    for key in new - _TORCH_ATTRIBUTES if isinstance(thing, nn.Module) else new:
        if key in own:
            del own[key]
        else:
            object.__delattr__(thing, key)
    for key, value in before.items():
        if present.get(key, _ABSENT) is value:
            continue
        if key in _slots_of(_class_of(thing)):
            # Past a frozen dataclass.
            object.__setattr__(thing, key, value)
        else:
            own[key] = value


def _class_of(thing: Any) -> Any:
    return type(thing)


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    # Slots of torch's and Python's own classes are none of the user's.
    return tuple(
        name
        for base in kind.__mro__
        if package_of(base) not in FOREIGN
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    )


# -- optimizers


def snapshot_optimizer(
    optimizer: Optimizer, *, within: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Callable[[], None]:
    """Return a function that gives an optimizer the state it has now, as often as it is called.

    ``within`` returns the context in which its state can be read and loaded.
    """
    with within():
        before = copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        with within():
            optimizer.load_state_dict(copy.deepcopy(before))

    return restore


# -- buffers


def may_have_changed(owner: nn.Module, buffer: Tensor, version: int) -> bool:
    """Return whether a buffer may have been written to since it had ``version``."""
    # Writes to the running statistics of normalization do not increase the version.
    return buffer._version != version or isinstance(owner, torch_private.NormBase)


class _SavedBuffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor

    def was_written(self) -> bool:
        return may_have_changed(self.owner, self.tensor, self.version)


class SavedBuffers:
    """The buffers of a module, saved to be restored in place.

    A copy stays good as long as its buffer is not written to: large ones that never change are copied once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners = [part for part in module.modules() if part._buffers]
        self._saved: dict[tuple[int, str], _SavedBuffer] = {}
        self._empty: list[tuple[nn.Module, str]] = []

    def save(self) -> None:
        """Save the present values."""
        before, self._saved, self._empty = self._saved, {}, []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                if tensor is None:
                    self._empty.append((owner, name))
                    continue
                saved = before.get((id(owner), name))
                if saved is None or saved.tensor is not tensor or saved.was_written():
                    saved = _SavedBuffer(owner, name, tensor, tensor._version, tensor.detach().clone())
                self._saved[id(owner), name] = saved

    @torch.no_grad()
    def restore(self, *, all_values: bool = False) -> None:
        """Restore the buffers that were written to; with ``all_values`` those as well whose version shows no write."""
        for saved in self._saved.values():
            if saved.tensor.shape != saved.copy.shape:
                saved.tensor.data = saved.copy.clone()
            elif all_values or saved.was_written():
                saved.tensor.detach().copy_(saved.copy)
            saved.owner._buffers[saved.name] = saved.tensor
        for owner, name in self._empty:
            owner._buffers[name] = None

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that changed since ``save`` as they were then, by their names in the module."""
        paths = {id(part): path for path, part in self._module.named_modules()}
        return {
            f"{paths[id(saved.owner)]}.{saved.name}".lstrip("."): saved.copy
            for saved in self._saved.values()
            if saved.was_written()
        }

    def use(self, copies: dict[str, Tensor]) -> None:
        """Restore other values of some buffers than they had at ``save``, by their names in the module."""
        for path, owner in self._module.named_modules():
            for name in owner._buffers:
                copy = copies.get(f"{path}.{name}".lstrip("."))
                if copy is not None:
                    saved = self._saved[id(owner), name]
                    # A version it never has: to be restored in any case.
                    saved = saved._replace(version=-1, copy=copy.to(saved.tensor))
                    self._saved[id(owner), name] = saved

    def places(self) -> list[tuple[dict[str, Any], str, Tensor | None]]:
        """Return (buffers of a part, name, saved value) of each."""
        found: list[tuple[dict[str, Any], str, Tensor | None]] = [
            (one.owner._buffers, one.name, one.copy if one.was_written() else one.tensor)
            for one in self._saved.values()
        ]
        return found + [(owner._buffers, name, None) for owner, name in self._empty]
