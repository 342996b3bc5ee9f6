"""Warnings about loaders: Lightning's, for programs that were written for it and may expect or silence them.

hasten itself measures whether training waits for its data, accepts shuffled validation data, and warns of shuffled
predictions.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten.data.loader_parts import is_iterable, is_plain_shuffle, length_of, sampler_of, samplers_of
from hasten.machine import host


def warn_about(loader: Iterable[Any], *, name: str, trains: bool, processes: int, reloads: bool) -> None:
    """Warn where Lightning does, about a ``DataLoader`` of one process, with ``name`` such as ``"train_dataloader"``.

    ``processes`` share the cores of this machine; ``reloads`` says that new loaders are made every so many epochs.
    """
    if not isinstance(loader, DataLoader):
        return
    warn_about_workers(loader, name=name, processes=processes, reloads=reloads)
    if is_iterable(loader) and length_of(loader) is not None:
        rank_zero_warn(
            f"The IterableDataset of the {name} has a `__len__`. With several workers it is only right if the dataset "
            "divides itself among them."
        )
    if not trains and any(isinstance(sampler, RandomSampler) for sampler in samplers_of(loader)):
        what = f"Your `{name}`'s sampler has shuffling enabled."
        rank_zero_warn(what, PossibleUserWarning, fix="Use shuffle=False where the order of samples is not to change.")


def warn_of_another_order(loader: Iterable[Any]) -> None:
    """Warn if the predictions for a loader come in another order than the samples of its dataset."""
    if isinstance(loader, DataLoader) and is_plain_shuffle(sampler_of(loader)):
        rank_zero_warn(
            "Your `predict_dataloader`'s sampler has shuffling enabled: the predictions come in another order than the "
            "samples of the dataset.",
            PossibleUserWarning,
            fix="Write DataLoader(..., shuffle=False).",
        )


def warn_about_workers(loader: DataLoader[Any], *, name: str, processes: int, reloads: bool) -> None:
    """Warn about the worker processes of a loader; see ``warn_about``."""
    context, workers = loader.multiprocessing_context, loader.num_workers
    starts = (context or multiprocessing).get_start_method()
    most = max(1, host.usable_cores() // processes - 1)
    if workers > 0 and starts == "spawn" and not loader.persistent_workers:
        rank_zero_warn(
            f"Consider setting `persistent_workers=True` in '{name}' to speed up the dataloader worker initialization."
        )
    elif workers < 2 and most > 1:
        what = f"The '{name}' does not have many workers which may be a bottleneck."
        fix = f"Consider increasing the value of the `num_workers` argument to num_workers={most}."
        rank_zero_warn(what, PossibleUserWarning, fix=fix)
    if loader.persistent_workers and loader.pin_memory and reloads:
        rank_zero_warn(
            f"The {name} has persistent_workers=True and pin_memory=True, and the combination with "
            "Trainer(reload_dataloaders_every_n_epochs=...) can be unstable.",
            PossibleUserWarning,
            fix="Use pin_memory=False.",
        )
