"""Batches, loaders, samplers and hyper-parameters, under the names that Lightning gives these helpers."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import batch_size_of, map_tensors, move_to
from hasten.loggers.base import plain as _plain
from hasten.machine.host import usable_cores

min_seed_value, max_seed_value = 0, 2**32 - 1


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a batch on a device.

    Args:
        batch: a tensor, a nested collection of tensors, or an object with a method ``to``.
        device: the target.

    Example::

        >>> move_data_to_device({"x": torch.zeros(2)}, "cpu")
        {'x': tensor([0., 0.])}

    """
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return move_to(batch, target, non_blocking=target.type not in ("cpu", "mps"))


def apply_to_collection(
    data: Any, dtype: type | tuple[type, ...] | Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return ``data`` with ``function(leaf, *args, **kwargs)`` in place of each leaf of a type.

    Args:
        data: a leaf, or a nested collection.
        dtype: the type, or a tuple of types.
        function: what is called.
        args: for the function.
        kwargs: for the function, or the options of ``lightning_utilities``, such as ``wrong_dtype``.

    Example::

        >>> apply_to_collection([1, {"a": 2.0}], float, lambda leaf: leaf + 1)
        [1, {'a': 3.0}]

    """
    from lightning_utilities.core.apply_func import apply_to_collection as apply

    return apply(data, dtype, function, *args, **kwargs)


def convert_to_tensors(data: Any, device: torch.device) -> Any:
    """Return ``data`` with its numbers and arrays as tensors on ``device``.

    Args:
        data: a nested collection.
        device: the device of the tensors.

    Example::

        >>> convert_to_tensors({"a": 1}, torch.device("cpu"))
        {'a': tensor(1)}

    """
    numbers = apply_to_collection(data, (bool, int, float), torch.tensor, device=device)
    import numpy

    return move_data_to_device(apply_to_collection(numbers, numpy.ndarray, torch.from_numpy), device)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Return ``data`` with each tensor of one element as a number. Waits for the device.

    Args:
        data: a nested collection.

    Raises:
        ValueError: a tensor has several elements.

    Example::

        >>> convert_tensors_to_scalars({"loss": torch.tensor(0.5)})
        {'loss': 0.5}

    """

    def number(tensor: Tensor) -> Any:
        if tensor.numel() != 1:
            raise ValueError(
                f"a tensor of one element is needed for a number; this one has the shape {tuple(tensor.shape)}. "
                "Reduce it first, for instance with .mean()."
            )
        return tensor.item()

    return map_tensors(number, data)


def extract_batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Args:
        batch: a tensor or a nested collection.

    Raises:
        MisconfigurationException: its tensors do not agree.

    Example::

        >>> extract_batch_size([torch.zeros(4, 2), torch.zeros(4)])
        4

    """
    size, known = batch_size_of(batch)
    if not known:
        raise MisconfigurationException(
            f"the batch size cannot be read from a {type(batch).__name__}. Write self.log(..., batch_size=...)."
        )
    return size


def sized_len(data: Any) -> int | None:
    """Return the length, or None without one.

    Example::

        >>> sized_len([1, 2]), sized_len(iter([1]))
        (2, None)

    """
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def has_iterable_dataset(dataloader: Any) -> bool:
    """Return whether a loader reads an ``IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: Any) -> bool:
    """Return whether a loader has a length; warn if it is 0.

    Example::

        >>> has_len([1])
        True

    """
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"the {type(dataloader).__name__} is empty: it has no batches.")
    return length is not None


def has_len_all_ranks(
    dataloader: Any, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return whether a loader has a length; see ``has_len``."""
    return has_len(dataloader)


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the largest sensible number of workers for the loader of each process.

    Args:
        local_world_size: processes on this machine.

    Raises:
        ValueError: it is less than 1.

    Example::

        >>> suggested_max_num_workers(10_000)
        1

    """
    check.whole("suggested_max_num_workers", "local_world_size", local_world_size, at_least=1)
    return max(1, usable_cores() // local_world_size - 1)


def is_shared_filesystem(
    strategy: Any, path: str | os.PathLike[str] | None = None, timeout: float = 3
) -> bool:
    """Return whether all processes see the same files in a folder; all of them must call it.

    Args:
        strategy: the strategy of the run.
        path: the folder; the working directory by default. URLs count as shared.
        timeout: seconds in which a file of the first process must appear on the others.

    """
    folder = Path(os.getcwd() if path is None else path)
    if "://" in str(path) or strategy.world_size == 1:
        return True
    if not folder.exists():
        raise FileNotFoundError(f"is_shared_filesystem(path={str(path)!r}): there is no such folder.")
    own = None
    if strategy.is_global_zero:
        handle, own = tempfile.mkstemp(prefix=".hasten-shared-", dir=folder)
        os.close(handle)
    name = strategy.broadcast(own)
    deadline = time.monotonic() + timeout
    while not (seen := os.path.exists(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    everywhere = bool(strategy.reduce_boolean_decision(seen, all=True))
    if own is not None:
        os.unlink(own)
    return everywhere


def optimizer_to_device(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    """Move the state of an optimizer to a device."""
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = move_to(state, device)


def merge_dicts(
    dicts: Iterable[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Callable[..., Any]] | None = None,
    default_func: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Return one dict with the values of several, combined by a function for each key.

    Args:
        dicts: the dicts.
        agg_key_funcs: for a key, the function that combines the list of its values.
        default_func: for all other keys; the mean by default.

    Example::

        >>> merge_dicts([{"a": 1.0}, {"a": 3.0, "b": 2}], default_func=max)
        {'a': 3.0, 'b': 2}

    """
    values: dict[str, list[Any]] = {}
    for one in dicts:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    combine = default_func or (lambda found: sum(found) / len(found))
    return {key: (agg_key_funcs or {}).get(key, combine)(found) for key, found in values.items()}


def as_text(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as numbers and texts, which loggers can write."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(_plain(value))
        for key, value in params.items()
    }


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that yields every sample exactly once, so processes may get different numbers.

    Example::

        >>> [list(UnrepeatedDistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_samples = len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]
        self.total_size = len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        indices = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class _SampledIndices:
    """The indices of a sampler as a dataset."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: list[Any] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self) -> None:
        self._drawn = list(self._sampler)

    def __getitem__(self, index: int) -> Any:
        return self._drawn[index]


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Share the indices of another sampler between processes; it must draw the same ones on each."""

    def __init__(self, sampler: Sampler[Any] | Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_SampledIndices(sampler), *args, **kwargs)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        assert isinstance(self.dataset, _SampledIndices)
        self.dataset.draw()
        return (self.dataset[index] for index in super().__iter__())


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed Python, numpy and torch in a worker of a loader, differently in each.

    Args:
        worker_id: which worker.
        rank: of the process; 0 by default.

    """
    seed = (torch.initial_seed() + worker_id + 1_000_003 * (rank or 0)) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    np.random.seed(seed)


__all__ = [
    "apply_to_collection",
    "convert_tensors_to_scalars",
    "convert_to_tensors",
    "extract_batch_size",
    "has_iterable_dataset",
    "has_len",
    "is_shared_filesystem",
    "merge_dicts",
    "move_data_to_device",
    "sized_len",
    "suggested_max_num_workers",
]
