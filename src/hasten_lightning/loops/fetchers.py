"""How batches of training are read, for programs that decide themselves when to validate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.loops.user_code import takes_iterator

if TYPE_CHECKING:
    from hasten.trainer.properties import TrainerView


class DataFetcher:
    """How batches are read. Only the class says something: hasten reads batches elsewhere."""


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
