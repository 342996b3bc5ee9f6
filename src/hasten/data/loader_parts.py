"""Look into a ``DataLoader``: its samplers, generators and dataset; and make changed copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hasten._lib.rank_zero import rank_zero_info

_Loader = TypeVar("_Loader")


def with_attributes(loader: _Loader, **attributes: Any) -> _Loader:
    """Return a shallow copy of a ``DataLoader`` with other attributes.

    Building a new one from its arguments would fail for subclasses with another ``__init__``.
    """
    new = copy.copy(loader)
    # Not setattr: DataLoader forbids changing some attributes once it is built, and this copy is new.
    new.__dict__.update(attributes)
    return new


def has_state(thing: Any) -> bool:
    """Return whether ``thing`` can save and load its position."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def samplers_of(loader: Any) -> list[Any]:
    """Return the sampler, the batch sampler and the sampler inside it, as far as a loader has them."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def index_sampler(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Return the sampler that a loader takes its indices from, and the attribute that holds it."""
    batches = loader.batch_sampler
    return ("sampler", loader.sampler) if batches is None else ("batch_sampler", batches)


def stateful_sampler(loader: DataLoader[Any]) -> Any:
    """Return the outermost sampler of ``loader`` that can save its position, or None."""
    innermost, *outer = samplers_of(loader)
    return next((sampler for sampler in (*outer, innermost) if has_state(sampler)), None)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user gave to a loader and its samplers, each once."""
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def epoch_setters(loader: Any) -> list[Any]:
    """Return the parts of a loader that have ``set_epoch``, each once."""
    parts = (loader, *samplers_of(loader), getattr(loader, "dataset", None))
    found = [each for each in parts if callable(getattr(each, "set_epoch", None))]
    return list({id(each): each for each in found}.values())


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads an ``IterableDataset``."""
    return isinstance(loader.dataset, IterableDataset)


def overrides_iter(loader: DataLoader[Any]) -> bool:
    """Return whether a subclass of ``DataLoader`` changes how batches are yielded."""
    return type(loader).__iter__ is not DataLoader.__iter__


def is_plain_shuffle(sampler: Any) -> bool:
    """Return whether a sampler is what ``shuffle=True`` makes: every sample once, in random order."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def check_dataloader(
    loader: Any,
    argument: str,
    name: str,
    *,
    batches: bool = True,
    iteration: bool = True,
    numbered: bool = False,
) -> None:
    """Check that hasten can change how ``loader`` makes its batches; the flags say what has to be as usual.

    Raises:
        TypeError: it is not such a loader.

    """
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        problem, advice = f"is a {kind}, whose batches are made elsewhere", "Give a DataLoader"
    elif iteration and overrides_iter(loader):
        problem, advice = f"is a {kind}, which iterates in its own way", "Give a plain DataLoader"
    elif batches and loader.batch_sampler is None:
        problem, advice = "has batch_size=None, so it makes no batches", "Give it a batch_size"
    elif numbered and (is_iterable(loader) or not hasattr(loader.dataset, "__len__")):
        what = "an IterableDataset" if is_iterable(loader) else "which has no length"
        problem = f"reads {type(loader.dataset).__name__}, {what}"
        advice = "Use a dataset with __getitem__ and __len__"
    else:
        return
    raise TypeError(f"{argument}: {name} {problem}. {advice}, or leave {argument} out.")


def required_in_training(
    change: Callable[[], Any], loader: Any, stage: str, name: str, *, always: tuple[type[Exception], ...] = ()
) -> Any:
    """Return ``change()``; outside training, log why it is impossible and return the loader unchanged."""
    try:
        return change()
    except (TypeError, ValueError) as error:
        if stage == "train" or isinstance(error, always):
            raise
        rank_zero_info(f"{name} is read as before. {error}")
        return loader


def shut_down(owner: Any) -> None:
    """End the workers of a loader's iterator, or of the iterator that a loader keeps."""
    iterator = getattr(owner, "_iterator", None)
    for each in (owner, iterator):
        end = getattr(each, "_shutdown_workers", None) or getattr(each, "close", None)
        if end is not None:
            end()
    if iterator is not None:
        owner._iterator = None
