"""The parts of a ``DataLoader``: look into it, make changed copies of it, and divide its samples over processes."""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_info
from hasten.data.memory.dataset_parts import preserve
from hasten.extend.origin import comes_from, full_name
from hasten.seed import isolate_rng

_Loader = TypeVar("_Loader")


def with_attributes(loader: _Loader, **attributes: object) -> _Loader:
    """Return a shallow copy of a ``DataLoader`` with other attributes.

    Building a new one from its arguments would fail for subclasses with another ``__init__``.
    """
    new = copy.copy(loader)
    # Not setattr: DataLoader forbids changing some attributes once it is built, and this copy is new. Persistent
    # workers, behind ``_iterator``, read what the original reads.
    new.__dict__.update({"_iterator": None, **attributes})
    return new


def unchanged(batch: _Loader) -> _Loader:
    """Return the batch, which is joined already: a collate function that does nothing."""
    return batch


def sample_at(dataset: Dataset[Any], index: Hashable) -> Any:
    """Return the sample with this index; an error of the dataset gets a note that names both."""
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"in sample {index} of the dataset {full_name(type(dataset)).removeprefix('builtins.')}")
        raise


def samples_at(dataset: object, indices: list[Any]) -> list[Any]:
    """Return the samples with these indices, read in the way of a ``DataLoader``."""
    data = cast(Any, dataset)
    if callable(getattr(data, "__getitems__", None)):
        return cast("list[Any]", data.__getitems__(indices))
    return [sample_at(data, index) for index in indices]


def has_state(thing: object) -> bool:
    """Return whether ``thing`` can save and load its position, exactly."""
    able = callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    return able and not (is_hugging_face(thing) and _has_shuffle_buffer(thing))


def is_hugging_face(dataset: object) -> bool:
    """Return whether ``dataset`` is an ``IterableDataset`` of Hugging Face."""
    return any(comes_from(kind, "datasets.iterable_dataset") for kind in type(dataset).__mro__)


def _has_shuffle_buffer(dataset: object) -> bool:
    """Return whether ``dataset.shuffle()`` is among its parts: its state does not have what the buffer holds."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if part is not None:
            waiting += [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return False


def state_between(thing: object) -> Any:
    """Return the position from which the next iteration of ``thing`` begins."""
    between = getattr(type(thing), "_hasten_state_between", None)
    return cast(Any, thing).state_dict() if between is None else between(thing)


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the length of a loader in batches; None if it has none."""
    sized: Any = loader
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def samplers_of(loader: Iterable[Any]) -> list[Any]:
    """Return the sampler, the batch sampler and the sampler inside it, as far as a loader has them."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def _all_samplers_of(loader: Iterable[Any]) -> list[Any]:
    """Return ``samplers_of(loader)`` and those inside: a ``ShardSampler`` hides the user's samplers."""
    found = samplers_of(loader)
    for each in (*found,):
        if (inner := getattr(each, "sampler", None)) is not None:
            found.append(inner)
    return found


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that chooses the samples of a loader."""
    batches = loader.batch_sampler
    # A loader that is given its batches makes another sampler too, and does not use it.
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def index_sampler(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Return the sampler that a loader takes its indices from, and the attribute that holds it."""
    batches = loader.batch_sampler
    return ("sampler", loader.sampler) if batches is None else ("batch_sampler", batches)


def stateful_sampler(loader: DataLoader[Any]) -> Sampler[Any] | None:
    """Return the outermost sampler of ``loader`` that can save its position, or None."""
    innermost, *outer = samplers_of(loader)
    return next((sampler for sampler in (*outer, innermost) if has_state(sampler)), None)


def generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that the user gave to a loader and its samplers, each once."""
    found = [getattr(owner, "generator", None) for owner in (loader, *_all_samplers_of(loader))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def epoch_setters(loader: Iterable[Any]) -> list[Any]:
    """Return the parts of a loader that have ``set_epoch``, each once."""
    parts = (loader, *_all_samplers_of(loader), getattr(loader, "dataset", None))
    return list({id(each): each for each in parts if callable(getattr(each, "set_epoch", None))}.values())


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads an ``IterableDataset``."""
    return isinstance(loader.dataset, IterableDataset)


def overrides_iter(loader: DataLoader[Any]) -> bool:
    """Return whether a subclass of ``DataLoader`` changes how batches are yielded."""
    return type(loader).__iter__ is not DataLoader.__iter__


def is_plain_shuffle(sampler: object) -> bool:
    """Return whether a sampler is what ``shuffle=True`` makes: every sample once, in random order."""
    if not isinstance(sampler, RandomSampler) or type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def takes_each_once(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads every sample of its dataset once, in order or as ``shuffle=True`` does."""
    sampler = sampler_of(loader)
    is_plain = type(sampler) is SequentialSampler or is_plain_shuffle(sampler)
    # The sampler may choose from fewer samples than there are.
    return is_plain and length_of(sampler.data_source) == length_of(cast(Any, loader.dataset))


def drawn(sampler: Iterable[Any]) -> list[Any]:
    """Return all that a sampler gives in an epoch."""
    count = len(cast(Any, sampler))
    # Some samplers give more than their length.
    items = list(itertools.islice(sampler, 2 * count + 1))
    if len(items) > 2 * count:
        raise make_error(
            ValueError,
            f"the sampler {type(sampler).__name__} goes on after its length of {count}, so an epoch of it cannot be "
            "laid out.",
            fix="End its __iter__ after an epoch.",
        )
    return items


def drawn_once(sampler: Iterable[Any], seed: int) -> Iterable[Any]:
    """Return a sampler that gives the same in each epoch: in order what was shuffled, else what is drawn now."""
    if isinstance(sampler, RandomSampler):
        return SequentialSampler(sampler.data_source)
    count = length_of(sampler)
    if count is None or type(sampler) is SequentialSampler:
        return sampler
    # Training and validation on the same loader draw the same.
    with shared_random_numbers(seed), preserve(sampler):
        return list(itertools.islice(sampler, count))


def check_dataloader(
    loader: object, argument: str, name: str, *, batches: bool = True, iteration: bool = True, numbered: bool = False
) -> None:
    """Check that hasten can change how ``loader`` makes its batches; the flags say what has to be as usual."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        problem, advice = f"is a {kind}, whose batches are made elsewhere", "Give a DataLoader"
    elif iteration and (overrides_iter(loader) or type(loader)._get_iterator is not DataLoader._get_iterator):
        problem, advice = f"is a {kind}, which iterates in its own way", "Give a plain DataLoader"
    elif batches and loader.batch_sampler is None:
        problem, advice = "has batch_size=None, so it makes no batches", "Give it a batch_size"
    elif numbered and (is_iterable(loader) or not hasattr(loader.dataset, "__len__")):
        what = "an IterableDataset" if is_iterable(loader) else "which has no length"
        problem = f"reads {type(loader.dataset).__name__}, {what}"
        advice = "Use a dataset with __getitem__ and __len__"
    else:
        return
    raise make_error(
        TypeError,
        f"{argument}: {name} {problem}.",
        fix=f"{advice}, or leave {argument} out.",
        argument=argument.partition("=")[0],
    )


def required_in_training(
    change: Callable[[], _Loader], loader: _Loader, stage: str, name: str, *, always: tuple[type[Exception], ...] = ()
) -> _Loader:
    """Return ``change()``; outside training, log why it is impossible and return the loader unchanged."""
    try:
        return change()
    except (TypeError, ValueError) as error:
        if stage == "train" or isinstance(error, always):
            raise
        rank_zero_info(f"{name} is read as before. {error}")
        return loader


def shut_down(owner: object) -> None:
    """End the workers of a loader's iterator, or of the iterator that a loader keeps."""
    iterator = getattr(owner, "_iterator", None)
    for each in (owner, iterator):
        end = torch_private.shut_down_workers(each) or getattr(each, "close", None)
        if end is not None:
            end()
    if iterator is not None:
        cast(Any, owner)._iterator = None


# -- one process's part of the samples


class ShardSampler(Sampler[Any]):
    """One process's part of what another sampler, or batch sampler, gives: every ``num_replicas``-th item.

    All processes draw the same order, whatever else they have drawn: the random generators are seeded for it with
    ``seed`` plus the epoch, and restored afterwards.

    Args:
        sampler: gives sample indices, or lists of them; it needs a length.
        num_replicas: the number of processes.
        rank: the index of this process, from 0.
        seed: the same on every process.
        repeat: repeat the first items until all processes have the same number, as training needs it because the
            processes wait for one another at every step. Otherwise every item comes exactly once over all processes,
            and some processes have one more than others.

    Example::

        >>> [list(ShardSampler(range(5), 2, rank, repeat=False)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
        >>> [list(ShardSampler(range(5), 2, rank, repeat=True)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]

    Source: `torch.utils.data.distributed.DistributedSampler
    <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler>`_,
    which repeats always.

    """

    def __init__(self, sampler: Iterable[Any], num_replicas: int, rank: int, *, seed: int = 0, repeat: bool) -> None:
        if not hasattr(sampler, "__len__"):
            raise make_error(
                TypeError,
                f"the sampler {type(sampler).__name__} has no length, so its samples cannot be divided over "
                f"{num_replicas} processes.",
                fix="Give it a __len__, or divide them in it by its attributes num_replicas and rank.",
            )
        self.sampler: Any = sampler
        self.num_replicas, self.rank, self.seed, self.repeat = num_replicas, rank, seed, repeat
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order in another epoch."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with shared_random_numbers(self.seed + self.epoch):
            items = drawn(self.sampler)
        if self.repeat and items:
            items = list(itertools.islice(itertools.cycle(items), self._rounded_up(len(items))))
        return iter(items[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        total = len(self.sampler)
        if self.repeat:
            return self._rounded_up(total) // self.num_replicas
        return len(range(self.rank, total, self.num_replicas))

    def _rounded_up(self, number: int) -> int:
        return -(-number // self.num_replicas) * self.num_replicas


@contextmanager
def shared_random_numbers(seed: int) -> Iterator[None]:
    """Draw the same random numbers on every process within the block; restore the generators afterwards."""
    with isolate_rng(include_cuda=False):
        random.seed(seed)
        # Not torch.manual_seed, which would also seed the GPUs.
        torch.default_generator.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield


def order_seed(seed: int | None) -> int:
    """Return the seed of an order: the one that is given, else that of ``seed_everything``."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def drawn_generator() -> torch.Generator:
    """Return a new generator, seeded by one draw from torch's as ``RandomSampler`` does."""
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
