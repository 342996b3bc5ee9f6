"""Worker processes that are started again in each epoch: measured, and said where that costs seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hasten as L
from hasten.loops import run_data
from tests.models import Classifier, quiet

SECONDS = 0.2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take short epochs for long ones."""
    monkeypatch.setattr(run_data, "_SECONDS_OF_STARTS", SECONDS / 2)


def data(samples: int = 12) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 8), torch.zeros(samples, dtype=torch.int64))


def start_slowly(worker_id: int) -> None:
    time.sleep(SECONDS)


def slow_to_start(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or data(), 4, **{"num_workers": 1, "worker_init_fn": start_slowly, **options})


def told(train: Any, validation: Any = None, **arguments: Any) -> list[str]:
    """Train, and return what is said about workers and waiting."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(**{"max_epochs": 3, "num_sanity_val_steps": 0, **arguments}).fit(Classifier(), train, validation)
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "worker processes" in text or "waits for its data" in text]


def test_starts_that_cost_much_of_each_epoch_are_told_once_with_the_line_to_write() -> None:
    (text,) = told(slow_to_start())
    assert text.startswith("Starting the worker processes for training takes 0.")
    assert text.endswith("DataLoader(..., num_workers=1, persistent_workers=True) keeps them.")


def test_validation_has_workers_too() -> None:
    (text,) = told(DataLoader(data(), 4), slow_to_start(), num_sanity_val_steps=1)
    assert "for validation takes" in text
    (text,) = told(slow_to_start(), slow_to_start(), max_epochs=2)
    assert "for training and validation takes" in text


class Curriculum(Dataset[Any]):
    level = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), float(self.level)), index % 2


class Raising(L.Callback):
    """Makes the data harder, which workers that live on would not see."""

    def __init__(self, dataset: Curriculum) -> None:
        self.dataset = dataset

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.dataset.level = trainer.current_epoch


def test_what_would_not_help_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(slow_to_start(persistent_workers=True), max_epochs=2) == []
    assert told(slow_to_start(), max_epochs=1) == []
    assert told(slow_to_start(), max_epochs=2, reload_dataloaders_every_n_epochs=1) == []
    assert told(slow_to_start(given := Curriculum()), max_epochs=2, callbacks=[Raising(given)]) == []
    # Quick to start, compared with what counts.
    monkeypatch.setattr(run_data, "_SECONDS_OF_STARTS", 60.0)
    assert told(slow_to_start(), max_epochs=2) == []


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the first steps."""
    for name, value in {"_SECONDS": 0.1, "_WARM_UP": 1, "_STEPS": 3}.items():
        monkeypatch.setattr(run_data, name, value)


@pytest.mark.usefixtures("_soon")
def test_waiting_for_starts_is_cured_by_keeping_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "_SECONDS_OF_STARTS", 60.0)
    (text,) = told(slow_to_start())
    assert "Training waits for its data" in text
    assert "Most of it is the start of worker processes in each epoch" in text
    assert text.endswith("DataLoader(..., num_workers=1, persistent_workers=True) keeps them.")
    assert "num_workers='auto'" not in text


class Slow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            time.sleep(0.01)
            yield torch.ones(8), 0


@pytest.mark.usefixtures("_soon")
def test_a_stream_is_not_told_what_would_be_refused() -> None:
    (text,) = told(DataLoader(Slow(), 4), max_epochs=1)
    assert "num_workers='auto'" not in text
    assert "resident" not in text
    assert "if Slow gives each worker its part" in text
