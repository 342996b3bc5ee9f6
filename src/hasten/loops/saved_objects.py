"""What a trial can change of the user's objects, noted before and put back afterwards, in place."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from hasten._lib.errors import MisconfigurationException
from hasten.seed import generator_state, set_generator_state

Undo = Callable[[], None]

# Objects inside objects inside objects ...: further in, nothing belongs to a training step any more.
_DEPTH = 4
# What is in a larger container (the names of all files of a dataset) is not looked at one by one.
_LARGE = 100_000
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, types.MethodType)
_KINDS = (nn.Module, Optimizer, LRScheduler, DataLoader, Dataset, Sampler)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "hasten"}
# Descendants of these are no data: callbacks, loggers, Trainers, handles of processes and files.
_LEFT_ALONE = {"hasten", "torch", "enum", "io", "logging", "multiprocessing", "threading"}


class SavedObjects:
    """Notes objects, with all that is inside them, and puts them back as they were.

    Attributes, lists, dicts and sets get their former contents, tensors their former values, generators of random
    numbers their former states. All of it in place: whoever else holds one of them sees it restored.

    Example::

        >>> losses, weights = [1.0], torch.zeros(2)
        >>> saved = SavedObjects()
        >>> saved.save([losses, weights])
        >>> losses.append(2.0)
        >>> _ = weights.add_(1)
        >>> saved.restore()
        >>> losses, weights
        ([1.0], tensor([0., 0.]))

    """

    def __init__(self) -> None:
        # The objects themselves: an id is theirs only as long as they live.
        self._seen: dict[int, Any] = {}
        self._undo: list[Undo] = []

    def save(self, thing: Any, *, values: bool = True) -> None:
        """Note ``thing``, and what it leads to.

        Args:
            thing: a module, a loader, an optimizer, a container, or any object of the user's.
            values: also the values of tensors; False where they are data, which may be large.

        Raises:
            MisconfigurationException: a module does not have its parameters yet.

        """
        self._keep(thing, values, _DEPTH, is_root=True)

    def restore(self) -> None:
        """Put everything back."""
        with torch.inference_mode(False), torch.no_grad():
            while self._undo:
                self._undo.pop()()

    def _keep(self, thing: Any, values: bool, depth: int, *, is_root: bool = False) -> None:
        if isinstance(thing, _SIMPLE) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            if values:
                self._keep_tensor(thing)
        elif isinstance(thing, (list, deque, dict, set)):
            self._undo.append(_contents_of(thing))
            if len(thing) <= _LARGE:
                for each in thing.values() if isinstance(thing, dict) else list(thing):
                    self._keep(each, values, depth)
        elif isinstance(thing, (tuple, frozenset)):
            for each in thing:
                self._keep(each, values, depth)
        elif (undo := _state_of_generator(thing)) is not None:
            self._undo.append(undo)
        elif values and type(thing).__module__ == "numpy" and hasattr(thing, "setflags"):
            self._undo.append(_values_of_array(thing))
        elif isinstance(thing, _KINDS) or is_root or (depth > 0 and _is_the_users(thing)):
            # The sub-modules of a module are parts of it, however deep they are.
            self._keep_attributes(thing, values, depth if isinstance(thing, nn.Module) else depth - 1)

    def _keep_attributes(self, thing: Any, values: bool, depth: int) -> None:
        attributes = getattr(thing, "__dict__", None)
        if attributes is None:
            return
        before = dict(attributes)

        def undo() -> None:
            if not _same(attributes, before):
                attributes.clear()
                attributes.update(before)

        self._undo.append(undo)
        # What a dataset holds is data, whoever has it.
        values = values and not isinstance(thing, Dataset)
        for name, value in before.items():
            if name not in ("_trainer", "trainer", "_logged"):
                self._keep(value, values, depth)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, (nn.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise MisconfigurationException(
                "The tuner cannot put a lazy layer back to what it was before it had parameters. Run one batch through "
                "the module first: model(batch)."
            )
        is_leaf, required = tensor.is_leaf, tensor.requires_grad
        gradient = tensor.grad if is_leaf else None
        with torch.inference_mode(False), torch.no_grad():
            here = tensor.detach()
            # On the host: the memory of a device is what is being measured.
            is_written = tensor.device.type != "meta" and not _is_expanded(tensor)
            value = here.to("cpu", copy=True) if is_written else None
        if gradient is not None:
            self._keep(gradient, True, 0)

        def undo() -> None:
            if isinstance(tensor, nn.Parameter):
                tensor.data = here
            if value is not None:
                with torch.inference_mode(here.is_inference()):
                    here.copy_(value)
            if is_leaf and tensor.is_leaf:
                tensor.requires_grad_(required)
                tensor.grad = gradient

        self._undo.append(undo)


def _contents_of(container: Any) -> Undo:
    if isinstance(container, dict):
        pairs = dict(container)
        return lambda: None if _same(container, pairs) else _fill(container, pairs)
    items = list(container)
    return lambda: _fill(container, items)


def _fill(container: Any, before: Any) -> None:
    container.clear()
    fill = container.extend if hasattr(container, "extend") else container.update
    fill(before)


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dicts hold the same objects in the same order."""
    return len(one) == len(other) and all(
        a is b and one[a] is other[b] for a, b in zip(one, other, strict=True)
    )


def _state_of_generator(thing: Any) -> Undo | None:
    """Return what puts a generator of random numbers back; None for anything else."""
    if isinstance(thing, torch.Generator):
        state = generator_state(thing)
        return lambda: set_generator_state(thing, state)
    if isinstance(thing, random.Random):
        words = thing.getstate()
        return lambda: thing.setstate(words)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.random.Generator):
        bits = thing.bit_generator
        position = bits.state
        return lambda: setattr(bits, "state", position)
    if numpy is not None and isinstance(thing, numpy.random.RandomState):
        position = thing.get_state()
        return lambda: thing.set_state(position)
    return None


def _values_of_array(array: Any) -> Undo:
    before = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = before

    return undo


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory: nothing can be written there."""
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_the_users(thing: Any) -> bool:
    """Return whether an object is of a class that the user wrote: what it holds may be part of a step."""
    packages = [kind.__module__.partition(".")[0] for kind in type(thing).__mro__]
    return packages[0] not in _FOREIGN and _LEFT_ALONE.isdisjoint(packages)
