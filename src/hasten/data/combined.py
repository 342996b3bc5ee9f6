"""CombinedLoader: several loaders read as one."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from torch.utils.data import DataLoader

from hasten._lib import check, torch_private
from hasten._lib.errors import make_error
from hasten.data.loader_parts import length_of

if TYPE_CHECKING:
    from hasten.types import Batch

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]


class CombinedLoader:
    """Read several loaders as one.

    Args:
        iterables: loaders in a list, tuple or dict, nested as you like. A batch has the same structure.
        mode: ``"min_size"``: end with the shortest loader (default). ``"max_size_cycle"``: end with the longest and
            begin shorter ones again. ``"max_size"``: end with the longest; shorter ones give None after their end.
            ``"sequential"``: one loader after the other, each batch alone.

    Raises:
        ValueError: ``mode`` is none of these.
        TypeError: something in ``iterables`` cannot be iterated over.

    Iterating gives ``(batch, batch_idx, dataloader_idx)``; ``dataloader_idx`` is 0 except in sequential mode.

    Example::

        >>> loader = CombinedLoader({"a": range(3), "b": range(2)}, mode="max_size_cycle")
        >>> [batch for batch, batch_idx, dataloader_idx in loader]
        [{'a': 0, 'b': 0}, {'a': 1, 'b': 1}, {'a': 2, 'b': 0}]
        >>> len(loader)
        3

    """

    def __init__(self, iterables: Iterable[Any], mode: Mode = "min_size") -> None:
        check.one_of("CombinedLoader", "mode", mode, MODES)
        self._iterables = iterables
        self._leaves, self._rebuild = flatten(iterables)
        for leaf in self._leaves:
            is_iterable = hasattr(leaf, "__iter__") or hasattr(leaf, "__getitem__")
            # The numbers of numpy have __getitem__, and no elements.
            is_iterable &= getattr(leaf, "ndim", None) != 0
            if not is_iterable or isinstance(leaf, (str, bytes, type)):
                what = f"CombinedLoader(iterables=...): {type(leaf).__name__} objects cannot be iterated over."
                raise make_error(TypeError, what, argument="iterables")
        self._mode = mode
        # Batches of each loader to use, in sequential mode.
        self._limits: list[int | float | None] | None = None
        self._running: Iterator[tuple[Any, int, int]] | None = None

    @property
    def mode(self) -> str:
        """How the loaders are joined."""
        return self._mode

    @property
    def iterables(self) -> Any:
        """The loaders, in the structure they were given in."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The loaders as one list; assign a list of the same length to replace them."""
        return list(self._leaves)

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._leaves):
            raise ValueError(
                f"CombinedLoader.flattened: {len(loaders)} loaders were assigned and there are {len(self._leaves)}."
            )
        self._leaves = list(loaders)
        self._iterables = self._rebuild(self._leaves)

    @property
    def limits(self) -> list[int | float | None] | None:
        """The largest number of batches of each loader in sequential mode; assign a number for all of them."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float | None] | None) -> None:
        if limits is not None and not isinstance(limits, list | tuple):
            limits = [limits] * len(self._leaves)
        if limits is not None and len(limits) != len(self._leaves):
            raise ValueError(
                f"CombinedLoader.limits: {len(limits)} limits were assigned for {len(self._leaves)} loaders."
            )
        self._limits = limits

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in their structure."""
        return self._rebuild([getattr(leaf, "sampler", None) for leaf in self._leaves])

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in their structure."""
        return self._rebuild([getattr(leaf, "batch_sampler", None) for leaf in self._leaves])

    def combine(self, batches: list[Any]) -> Batch:
        """Return one batch of each loader in the structure of the loaders."""
        return self._rebuild(batches)

    def __len__(self) -> int:
        lengths = [length_of(leaf) for leaf in self._leaves]
        at_most = [lengths, map(_stop, self._limits or [None] * len(lengths))]
        lengths = [joint_length("min_size", list(pair)) for pair in zip(*at_most, strict=True)]
        length = joint_length(self._mode, lengths)
        if length is None:
            raise _NoLengthError("This CombinedLoader has no length: not all of its loaders have one.")
        return length

    def __iter__(self) -> Self:
        # Workers start now: in sequential mode only for the first loader, else for all.
        if self._mode == "sequential":
            starts = self._leaves and (self._limits is None or self._limits[0] != 0)
            self._running = self._sequential(iter(self._leaves[0]) if starts else None)
        else:
            self._running = self._side_by_side([iter(leaf) for leaf in self._leaves])
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._running is None:
            iter(self)
        assert self._running is not None
        return next(self._running)

    def reset(self) -> None:
        """Give up an iteration, and the worker processes it started."""
        self._running = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_running": None}

    def _sequential(self, first: Iterator[Any] | None) -> Iterator[tuple[Any, int, int]]:
        limits = self._limits or [None] * len(self._leaves)
        for loader_idx, (leaf, limit) in enumerate(zip(self._leaves, limits, strict=True)):
            if limit == 0:
                continue  # Its workers need not start.
            batches, first = (leaf if first is None else first), None
            for batch_idx, batch in enumerate(itertools.islice(batches, _stop(limit))):
                yield batch, batch_idx, loader_idx

    def _side_by_side(self, iterators: list[Iterator[Any]]) -> Iterator[tuple[Any, int, int]]:
        ended = [False] * len(iterators)
        batch_idx = 0
        while iterators:
            batches: list[Any] = []
            for index, leaf in enumerate(self._leaves):
                batch = next(iterators[index], _END)
                if batch is _END:
                    ended[index] = True
                    if self._mode == "min_size" or all(ended):
                        return
                    batch = None
                    if self._mode == "max_size_cycle":
                        iterators[index] = iter(leaf)
                        batch = next(iterators[index], _END)
                        if batch is _END:
                            return
                batches.append(batch)
            yield self.combine(batches), batch_idx, 0
            batch_idx += 1


_END = object()


def _stop(limit: int | float | None) -> int | None:
    return None if limit is None or math.isinf(limit) else math.ceil(limit)


class _NoLengthError(TypeError, NotImplementedError):
    """Both errors at once: Python expects the first of an object without a length, and programs catch the second."""


def joint_length(mode: str, lengths: list[int | None]) -> int | None:
    """Return how many batches loaders of these lengths give together, at most; None if one without a length decides."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths) and (mode != "min_size" or not known):
        return None
    if not known:
        return 0
    if mode == "sequential":
        return sum(known)
    return min(known) if mode == "min_size" else max(known)


def flatten(loaders: object) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the loaders of a nested collection as a list, and a function that puts such a list back in shape."""
    if isinstance(loaders, Mapping):
        # The outermost collection always holds loaders, whatever its items are.
        loaders = loaders if type(loaders) is OrderedDict else dict(loaders)
    is_empty = isinstance(loaders, (list, tuple)) and not loaders

    def is_loader(node: Any) -> bool:
        at_top = node is loaders and (is_empty or isinstance(node, dict))
        return not (at_top or is_collection(node) or _holds_lists(node))

    leaves, structure = torch_private.pytree.tree_flatten(loaders, is_loader)
    return leaves, partial(torch_private.pytree.tree_unflatten, treespec=structure)


def is_collection(thing: object) -> bool:
    """Return whether ``thing`` holds loaders; a list of batches is one loader itself."""
    if not isinstance(thing, (Mapping, list, tuple)):
        return False
    members = list(thing.values() if isinstance(thing, Mapping) else thing)
    # In a dict, whose iteration yields keys, and beside a loader a list is a loader too: its items are batches.
    may_be_list = isinstance(thing, Mapping) or any(isinstance(member, DataLoader) for member in members)
    return bool(members) and all(
        _is_loader(member) or is_collection(member) or (may_be_list and isinstance(member, (list, tuple)) and member)
        for member in members
    )


def _holds_lists(thing: object) -> bool:
    """Return whether ``thing`` is a list of lists of numbers or texts: each of those is read like a loader."""
    if not isinstance(thing, (list, tuple)) or not thing:
        return False
    return all(isinstance(member, (list, tuple)) and (_is_plain(member) or _holds_lists(member)) for member in thing)


def _is_plain(thing: list[Any] | tuple[Any, ...]) -> bool:
    return all(isinstance(member, (int, float, str)) for member in thing)


def _is_loader(thing: Any) -> bool:
    return isinstance(thing, (DataLoader, CombinedLoader)) or (
        hasattr(thing, "__iter__")
        and not isinstance(thing, (str, bytes, list, tuple, Mapping))
        and not hasattr(thing, "shape")
        and not hasattr(thing, "to")
    )
