"""The user's loaders made ready for one process of a run, and their batches moved to its device."""

from __future__ import annotations

import copy
import functools
import reprlib
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

from hasten._lib import tree
from hasten._lib.errors import MisconfigurationException, WrongType, with_article
from hasten._lib.rank_zero import rank_zero_warn
from hasten.batching.samplers import PlannedBatches
from hasten.data.divided import divided
from hasten.data.loader_parts import (
    ShardSampler,
    drawn_once,
    is_iterable,
    length_of,
    order_seed,
    sampler_of,
    samplers_of,
    takes_each_once,
    with_attributes,
)
from hasten.data.memory.resident import users_dataset
from hasten.data.resume.workers import SeedByRank
from hasten.elsewhere import conventions
from hasten.machine import collectives
from hasten.seed import seed_worker

_T = TypeVar("_T")


def prepare(
    loader: Any,
    *,
    stage: str = "train",
    name: str | None = None,
    num_replicas: int = 1,
    rank: int = 0,
    seed: int | None = None,
    overfit: bool = False,
    shuffle: bool = False,
    allow_empty: bool = False,
) -> Any:
    """Return ``loader`` checked and, if several processes share the data, limited to this process's part.

    The user's loader never changes: a shallow copy does. In training each process gets the same number of samples, some
    repeated; elsewhere every sample comes exactly once. An ``IterableDataset`` is divided too, and never repeated: see
    ``hasten.data.divided``. A loader whose sampler is distributed already, and one that is not a ``DataLoader``, are
    returned unchanged.

    Args:
        loader: a ``DataLoader``, or anything that can be iterated over.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        name: what to call the loader in messages.
        num_replicas: the number of processes that share the data.
        rank: the index of this process, from 0.
        seed: seed of the shuffling, the same on all processes; by default the seed of ``seed_everything``.
        overfit: read the samples in the same order each epoch.
        shuffle: shuffle on several processes also where the loader does not, as Lightning's Trainer does in training.
        allow_empty: accept a loader without batches.

    Raises:
        TypeError: ``loader`` cannot be iterated over.
        ValueError: it has no batches. Under Lightning's names this is a warning.

    """
    name = name or f"the {stage} dataloader"
    _check_iterable(loader, name)
    if not allow_empty and length_of(loader) == 0:
        _report_empty(loader, name)
    if not isinstance(loader, DataLoader):
        return loader
    _warn_of_sampler(loader, name, num_replicas)
    loader = _undropped(loader) if stage == "predict" else loader
    if num_replicas == 1 and not overfit:
        return loader
    train = stage == "train"
    seed = order_seed(seed)
    # Asked first: a list of indices no longer shows that it is one process's part.
    is_divided = _is_divided(loader, num_replicas)
    if overfit:
        loader = _unshuffled(loader, name, seed)
    if train and rank and loader.num_workers:
        loader = with_attributes(loader, worker_init_fn=SeedByRank(loader.worker_init_fn, rank))
    if is_divided:
        return loader
    if is_iterable(loader):
        return divided(loader, num_replicas, rank, name=name, seed=seed)
    return _shard(loader, num_replicas, rank, seed, train=train, shuffle=shuffle and not overfit)


def in_lightnings_order(loader: Iterable[Any], num_replicas: int, rank: int, *, shuffle: bool) -> object:
    """Return a prepared loader of one process in the order that Lightning's strategies for several processes draw.

    Of several, each has its part already. A loader with another sampler than those of ``shuffle=`` is returned
    unchanged.
    """
    if num_replicas > 1 or not isinstance(loader, DataLoader) or not takes_each_once(loader):
        return loader
    return _shard(loader, num_replicas, rank, order_seed(None), train=True, shuffle=shuffle)


def _warn_of_sampler(loader: DataLoader[Any], name: str, processes: int) -> None:
    """Warn of a sampler for more processes than read the data, and of weights of classes in place of samples."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > processes and collectives.world_size() == 1:
        rank_zero_warn(
            f"{name}: its DistributedSampler(num_replicas={sampler.num_replicas}) gives a part of the samples, and no "
            "other process reads the rest.",
            fix="Leave the sampler out: hasten divides the samples over the processes that there are.",
        )
    if not isinstance(sampler, WeightedRandomSampler):
        return
    dataset: Any = loader.dataset
    weights, samples = len(sampler.weights), length_of(dataset) or 0
    if weights < samples:
        rank_zero_warn(
            f"{name}: its WeightedRandomSampler has {weights} weights for {samples} samples, and draws no others.",
            fix="Give one weight for each sample: weights_of_classes[labels].",
        )


def _undropped(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that reads the last batch too: each sample has its prediction."""
    batches: Any = loader.batch_sampler
    # Not a property, which may follow from something else.
    if isinstance(batches, PlannedBatches) or not getattr(batches, "__dict__", {}).get("drop_last"):
        return loader
    # A copy, because a class of the program may have further arguments.
    whole = copy.copy(batches)
    whole.drop_last = False
    return with_attributes(loader, batch_sampler=whole, drop_last=False)


def _unshuffled(loader: DataLoader[Any], name: str, seed: int) -> DataLoader[Any]:
    """Return a loader that reads the same samples in the same order in each epoch."""
    batches, sampler = loader.batch_sampler, sampler_of(loader)
    if isinstance(batches, PlannedBatches):
        return with_attributes(loader, batch_sampler=batches.unshuffled())
    if is_iterable(loader):
        return loader
    if batches is not None and type(batches) is not BatchSampler:
        return with_attributes(loader, batch_sampler=drawn_once(batches, seed))
    if isinstance(sampler, RandomSampler):
        rank_zero_warn(
            f"You requested to overfit but enabled shuffling of {name}: it is off, so that each epoch has the same "
            "samples.",
            fix="Use shuffle=False there to avoid this warning.",
        )
    return _with_sampler(loader, drawn_once(sampler, seed))


def _shard(
    loader: DataLoader[Any], num_replicas: int, rank: int, seed: int, *, train: bool, shuffle: bool
) -> DataLoader[Any]:
    """Return a loader of numbered samples that reads the part of one process."""
    batches = loader.batch_sampler
    if isinstance(batches, PlannedBatches):
        return with_attributes(loader, batch_sampler=batches.shared(num_replicas, rank, seed=seed, repeat=train))
    if batches is not None and type(batches) is not BatchSampler:
        shard = ShardSampler(batches, num_replicas, rank, seed=seed, repeat=train)
        return with_attributes(loader, batch_sampler=shard)
    sampler = sampler_of(loader)
    if train and takes_each_once(loader) and getattr(sampler, "generator", None) is None:
        shuffle = shuffle or type(sampler) is RandomSampler
        return _with_sampler(loader, DistributedSampler(loader.dataset, num_replicas, rank, shuffle=shuffle, seed=seed))
    return _with_sampler(loader, ShardSampler(sampler, num_replicas, rank, seed=seed, repeat=train))


def with_seeded_workers(loader: Iterable[Any], rank: int, *, instead_of: Any) -> Any:
    """Return ``loader`` with workers that ``seed_worker`` seeds, unless the user's loader has a ``worker_init_fn``."""
    if not isinstance(loader, DataLoader) or getattr(instead_of, "worker_init_fn", None) is not None:
        return loader
    return with_attributes(loader, worker_init_fn=functools.partial(seed_worker, rank=rank))


def _with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` with another sampler, batched as before."""
    batches = loader.batch_sampler
    changed: dict[str, Any] = {"sampler": sampler}
    if batches is not None:
        assert isinstance(batches, BatchSampler)
        changed["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    return with_attributes(loader, **changed)


def _is_divided(loader: DataLoader[Any], num_replicas: int) -> bool:
    """Return whether a loader reads one process's part of the samples already."""
    samplers = samplers_of(loader)
    return num_replicas == 1 or any(
        hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers
    )


def _check_iterable(loader: Any, name: str) -> None:
    is_table = {"iloc", "columns"} <= {*dir(type(loader))}
    if is_table or isinstance(loader, dict):
        raise WrongType(
            f"{name} is {with_article(type(loader))}, and iterating over it gives its "
            f"{'columns' if is_table else 'keys'}, not batches.",
            fix="Give DataLoader(TensorDataset(x, y), batch_size=...), or a dict whose values are loaders.",
        )
    _refuse_datasets(loader, name)
    is_dataset = isinstance(loader, Dataset) or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__"))
    can_be_read = hasattr(loader, "__iter__") or (hasattr(loader, "__getitem__") and not is_dataset)
    if isinstance(loader, (str, bytes, type)) or not can_be_read:
        advice = "Wrap it: DataLoader(dataset, batch_size=...)" if is_dataset else "Give a DataLoader"
        shown = f"of type {type(loader).__name__}"
        if isinstance(loader, (str, bytes, int, float)):
            shown = f"{reprlib.repr(loader)}, {shown}"
        elif name_of := getattr(loader, "__name__", None):
            shown = f"{name_of} itself"
            advice = f"Make one: {name_of}(...)" if isinstance(loader, type) else "Call it"
        if isinstance(loader, (str, bytes)):
            advice = "Read the file in a Dataset, and give DataLoader(dataset, batch_size=...)"
        raise WrongType(
            f"{name} is {shown}, and cannot be iterated over.", fix=f"{advice}, or give another iterable of batches."
        )


def _refuse_datasets(loader: Any, name: str) -> None:
    """Refuse a list of datasets, whose items would be read as batches."""
    members = list(loader) if isinstance(loader, (list, tuple)) else []
    if members and all(isinstance(each, Dataset) and not hasattr(each, "__iter__") for each in members):
        raise WrongType(
            f"{name} is {with_article(type(loader))} of datasets ({type(members[0]).__name__}), not of loaders.",
            fix="Wrap each: [DataLoader(one, batch_size=...) for one in datasets].",
        )


def _report_empty(loader: Any, name: str) -> None:
    what, fix = f"an empty {type(loader).__name__}", "Give it at least one batch of samples."
    if isinstance(loader, DataLoader):
        dataset = type(users_dataset(loader.dataset)).__name__
        samples = length_of(loader.sampler) or 0
        what = f"{samples} samples of {dataset}, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        if samples and loader.drop_last:
            fix = f"Write drop_last=False, or a batch_size of at most {samples}."
    if name.startswith("the validate dataloader") or "val_dataloader()" in name:
        fix += " To run without validation, write Trainer(limit_val_batches=0)."
    message = f"{name} has no batches: {what}"
    if not conventions.current().mistakes_are_warnings:
        raise MisconfigurationException(f"{message}.", fix=fix)
    rank_zero_warn(f"{message}.", fix="Please make sure that this is intended.")


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: memory freed on a stream is reused on that stream only."""
    return torch.cuda.Stream(device)


class SideStream:
    """Moves batches to a CUDA device on a second stream.

    A copy on the stream that computes begins when all work before it is done, and from memory that is not pinned it
    makes the host wait as long. On a second stream it begins at once, while earlier steps are still being computed.
    No batch is fetched early for that: the host is ahead of the device already. From pinned memory
    (``DataLoader(pin_memory=True)``) the host does not wait either.

    Source: `PyTorch, CUDA streams and record_stream
    <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`_.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)

    def __call__(self, batch: _T) -> _T:
        """Return ``batch`` on the device, ready for the next work on the current stream."""
        device, side = self._device, self._stream
        computing = torch.cuda.current_stream(device)
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.is_cuda or type(tensor) is not Tensor:
                return tensor  # The tensor is there already, was made on another stream, or is a subclass: see below.
            moved = tensor.to(device, non_blocking=True)
            copied.append(moved)
            return moved

        with torch.cuda.stream(side):
            batch = tree.map_tensors(copy, batch)
        if copied:
            computing.wait_stream(side)
            for tensor in copied:
                # Without it, the side stream could reuse the memory as soon as Python frees the tensor.
                tensor.record_stream(computing)
        # Objects that move themselves do so on the stream that computes: their tensors are not known here.
        moved: _T = tree.move_to(batch, device, non_blocking=True)
        return moved
