"""What a program that decides itself when to validate is told: how batches of training are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.loops.user_code import takes_iterator

if TYPE_CHECKING:
    from hasten.trainer.properties import TrainerView


class DataFetcher:
    """How batches are read; hasten itself reads them elsewhere, and only the class tells something."""


class PrefetchDataFetcher(DataFetcher):
    """Batches are passed to ``training_step`` one by one."""


class DataLoaderIterDataFetcher(DataFetcher):
    """``training_step(self, dataloader_iter)`` reads batches itself."""


def data_fetcher(trainer: TrainerView) -> DataFetcher:
    """Return how the batches of the running fit are read."""
    module = trainer._module
    if module is not None and takes_iterator(module.training_step):
        return DataLoaderIterDataFetcher()
    return PrefetchDataFetcher()
