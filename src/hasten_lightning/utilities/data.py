"""Batches, loaders, samplers and hyper-parameters, under the names that Lightning gives these helpers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import map_tensors, move_to
from hasten.logged_value import batch_size_of
from hasten.machine import host
from hasten.seed import seed_worker

if TYPE_CHECKING:
    from hasten.strategies import Strategy
    from hasten.types import Batch

min_seed_value, max_seed_value = 0, 2**32 - 1


def move_data_to_device(batch: Batch, device: torch.device | str | int) -> Batch:
    """Return a batch, or an object with a method ``to``, on a device.

    Args:
        batch: tensors in nested collections, or such an object.
        device: where to; an int is the number of a CUDA device.

    Example::

        >>> move_data_to_device({"x": torch.zeros(2)}, "cpu")
        {'x': tensor([0., 0.])}

    """
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return move_to(batch, target, non_blocking=target.type not in ("cpu", "mps"))


def apply_to_collection(
    data: Batch, dtype: type | tuple[type, ...], function: Callable[..., object], *args: object, **kwargs: Any
) -> Batch:
    """Return ``data`` with ``function(leaf, *args, **kwargs)`` in place of each leaf of type ``dtype``.

    Args:
        data: a nested collection, or a leaf.
        dtype: the type of the leaves, or several.
        function: makes the new leaf.
        *args: for ``function``.
        **kwargs: for ``function``, and the options of ``lightning_utilities``, such as ``wrong_dtype``.

    Example::

        >>> apply_to_collection([1, {"a": 2.0}], float, lambda leaf: leaf + 1)
        [1, {'a': 3.0}]

    """
    from lightning_utilities.core.apply_func import apply_to_collection as apply

    return apply(data, dtype, function, *args, **kwargs)


def convert_to_tensors(data: Batch, device: torch.device) -> Batch:
    """Return ``data`` with its numbers and arrays as tensors on ``device``."""
    import numpy

    numbers = apply_to_collection(data, (bool, int, float), torch.tensor, device=device)
    return move_data_to_device(apply_to_collection(numbers, numpy.ndarray, torch.from_numpy), device)


def convert_tensors_to_scalars(data: Batch) -> Batch:
    """Return ``data`` with each tensor of one element as a number; waits for the device.

    Raises:
        ValueError: a tensor has several elements.

    """

    def number(tensor: Tensor) -> float:
        if tensor.numel() != 1:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} does not contain a single element and cannot become a "
                "number. Reduce it first, for instance with .mean()."
            )
        return tensor.item()

    return map_tensors(number, data)


def extract_batch_size(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor; warn if others differ.

    Raises:
        MisconfigurationException: there is no tensor in it.

    """
    size, known = batch_size_of(batch)
    if known:
        return size
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    if not tensors:
        raise MisconfigurationException(
            "We could not infer the batch_size from the batch. Either simplify its structure or provide the batch_size "
            f"as `self.log(..., batch_size=batch_size)`. The batch is a {type(batch).__name__}."
        )
    if len({tensor.shape[:1] for tensor in tensors}) > 1:
        rank_zero_warn(
            f"Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is {size}. To "
            "avoid any miscalculations, use `self.log(..., batch_size=batch_size)`."
        )
    return size


def sized_len(data: object) -> int | None:
    """Return the length, or None without one."""
    try:
        return len(cast("Sized", data))
    except (TypeError, NotImplementedError):
        return None


def has_iterable_dataset(dataloader: Iterable[Any]) -> bool:
    """Return whether a loader reads an ``IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: Iterable[Any]) -> bool:
    """Return whether a loader has a length; warn if it is 0, or if an ``IterableDataset`` defines it."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length: it has no batches.")
    if length is not None:
        _warn_of_iterable_length(dataloader)
    return length is not None


def _warn_of_iterable_length(dataloader: Iterable[Any]) -> None:
    if has_iterable_dataset(dataloader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined, which is wrong if several workers read the same samples.",
            fix="Let each worker read its own part.",
        )


def has_len_all_ranks(
    dataloader: Iterable[Any], strategy: Strategy, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return whether a loader has a length; all processes must call it.

    Warns if the loaders of all processes are empty.

    It also warns if only some loaders are empty, with ``allow_zero_length_dataloader_with_multiple_devices``.

    Raises:
        RuntimeError: the loader of this process is empty, and the loader of another process is not.

    """
    length = sized_len(dataloader)
    if length is None:
        return False
    total = int(strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum"))
    kind = type(dataloader).__name__
    if total == 0:
        rank_zero_warn(f"Total length of `{kind}` across ranks is zero: there are no batches.")
    elif length == 0:
        message = f"The `{kind}` within local rank has zero length, and others have batches."
        if not allow_zero_length_dataloader_with_multiple_devices:
            raise RuntimeError(f"{message} Give each process at least one batch.")
        warnings.warn(message, stacklevel=2)
    _warn_of_iterable_length(dataloader)
    return True


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the largest sensible number of workers for each of the ``local_world_size`` processes of this machine.

    Raises:
        ValueError: ``local_world_size`` is less than 1.

    """
    check.whole("suggested_max_num_workers", "local_world_size", local_world_size, at_least=1)
    return max(1, host.usable_cores() // local_world_size - 1)


def is_shared_filesystem(strategy: Strategy, path: str | os.PathLike[str] | None = None, timeout: float = 3) -> bool:
    """Return whether all processes see the same files in a folder; all of them must call it.

    Args:
        strategy: the strategy of the run.
        path: the folder, or a file in it; the working directory by default. URLs count as shared.
        timeout: seconds in which a file of the first process must appear on the others.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the first process cannot write there.

    """
    if "://" in str(path) or getattr(strategy, "world_size", 1) == 1:
        return True
    place = Path(os.getcwd() if path is None else path).resolve()
    marker = (place.parent if place.is_file() else place) / ".hasten-shared"
    marker.unlink(missing_ok=True)
    if not strategy.reduce_boolean_decision(strategy.broadcast(place) == place, all=True):
        return False
    failed = "" if place.exists() else "it does not exist"
    try:
        if strategy.is_global_zero and not failed:
            marker.touch()
    except OSError as error:
        failed = str(error)
    # All processes raise, as the others would wait for the first one.
    if not strategy.reduce_boolean_decision(not failed, all=True):
        marker.unlink(missing_ok=True)
        kind = OSError if place.exists() else FileNotFoundError
        failed = failed or "another process does not find it or cannot write there"
        raise make_error(kind, f"is_shared_filesystem(path={str(path)!r}): {failed}.", argument="path")
    deadline = time.monotonic() + timeout
    while not (seen := marker.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    everywhere = bool(strategy.reduce_boolean_decision(seen, all=True))
    marker.unlink(missing_ok=True)
    return everywhere


def optimizer_to_device(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    """Move the state of an optimizer to a device, except the number of the step, which stays where it is."""
    for parameter, state in optimizer.state.items():
        if isinstance(state, MutableMapping):
            state.update({name: move_to(value, device) for name, value in state.items() if name != "step"})
        else:
            optimizer.state[parameter] = move_to(state, device)


def optimizers_to_device(optimizers: Iterable[torch.optim.Optimizer], device: torch.device | str) -> None:
    """Move the states of optimizers to a device."""
    for optimizer in optimizers:
        optimizer_to_device(optimizer, device)


def merge_dicts(
    dicts: Iterable[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Callable[..., Any]] | None = None,
    default_func: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Return one dict with the values of several, combined by a function for each key.

    Args:
        dicts: the dicts.
        agg_key_funcs: for a key, the function that combines the list of its values; for a key of dicts, such a dict.
        default_func: for all other keys; the mean by default.

    Example::

        >>> merge_dicts([{"a": 1.0}, {"a": 3.0, "b": {"c": 2}}], default_func=max)
        {'a': 3.0, 'b': {'c': 2}}

    """
    values: dict[str, list[Any]] = {}
    for one in dicts:
        for key, value in one.items():
            if value is not None:
                values.setdefault(key, []).append(value)
    merged: dict[str, Any] = {}
    for key, found in values.items():
        combine: Any = (agg_key_funcs or {}).get(key)
        if isinstance(found[0], dict):
            merged[key] = merge_dicts(found, combine, default_func)
        else:
            merged[key] = (combine or default_func or (lambda given: sum(given) / len(given)))(found)
    return merged


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that yields every sample exactly once, so processes may get different numbers.

    Example::

        >>> [list(UnrepeatedDistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total_size = len(cast("Sized", self.dataset))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        indices = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Share the indices of another sampler between processes; it must draw the same ones on each."""

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], *args: Any, **kwargs: Any) -> None:
        # torch's sampler only takes the length of its dataset.
        super().__init__(sampler, *args, **kwargs)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        drawn = list(self.dataset)  # type: ignore[call-overload]
        return (drawn[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if callable(of_sampler := getattr(self.dataset, "set_epoch", None)):
            of_sampler(epoch)


pl_worker_init_function = seed_worker


__all__ = [
    "apply_to_collection", "convert_tensors_to_scalars", "convert_to_tensors", "extract_batch_size",
    "has_iterable_dataset", "has_len", "is_shared_filesystem", "merge_dicts", "move_data_to_device",
    "sized_len", "suggested_max_num_workers",
]  # fmt: skip
