"""Training that waits for its data is warned of once, with figures; training that does not wait is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, default_collate, random_split

from tests.models import Classifier, quiet


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hasten.loops.run_data.perf_counter", clock.perf_counter)
    return clock


class Slow(Dataset[Any]):
    """Samples that take so many seconds each."""

    def __init__(self, clock: Clock, seconds: float, samples: int = 30) -> None:
        self.clock, self.seconds, self.samples = clock, seconds, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.clock.now += self.seconds
        return torch.ones(8), torch.tensor(index % 2)


class Computing(Classifier):
    """Takes a second a step, and a hundred for each validation batch."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = [clock]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock[0].now += 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock[0].now += 100.0


def warned(clock: Clock, train: Any, validation: Any = None, **arguments: Any) -> list[str]:
    """Train, and return the warnings about data."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(num_sanity_val_steps=0, **arguments).fit(Computing(clock), train, validation)
    return [str(each.message) for each in caught if "waits for its data" in str(each.message)]


def test_slow_data_is_named_with_its_share_and_what_helps(clock: Clock) -> None:
    (text,) = warned(clock, DataLoader(Slow(clock, 3.0)), max_epochs=2)
    assert "75 % of the time of the first 10 steps (3e+03 of 4e+03 ms a step)" in text
    assert "num_workers='auto'" in text
    # The speed-up in use is not named again.
    (text,) = warned(clock, DataLoader(Slow(clock, 3.0)), num_workers=0)
    assert "num_workers='auto'" not in text
    assert "resident='auto'" in text


def test_samples_in_memory_need_no_workers(clock: Clock) -> None:
    def collate(samples: Any) -> Any:
        clock.now += 3.0
        return default_collate(samples)

    rows = TensorDataset(torch.ones(40, 8), torch.zeros(40, dtype=torch.long))
    part, _ = random_split(ConcatDataset([rows, rows]), [0.5, 0.5])
    for dataset in (rows, part):
        (text,) = warned(clock, DataLoader(dataset, collate_fn=collate))
        assert "Trainer(resident=True) reads its samples, which are in memory" in text
        assert "num_workers" not in text


def test_data_that_costs_less_than_the_steps_is_no_cause_for_a_warning(clock: Clock) -> None:
    assert warned(clock, DataLoader(Slow(clock, 0.4))) == []
    assert warned(clock, DataLoader(Slow(clock, 3.0)), resident=True) == []


def test_validation_is_no_part_of_a_step(clock: Clock) -> None:
    validation = DataLoader(Slow(clock, 50.0, samples=1))
    (text,) = warned(clock, DataLoader(Slow(clock, 0.9)), validation, val_check_interval=5)
    assert "47 % of the time" in text


def test_a_slow_first_batch_or_a_short_run_is_no_cause(clock: Clock) -> None:
    class Opening(Slow):
        def __getitem__(self, index: int) -> Any:
            self.clock.now += 500.0 if index == 0 else 0.0
            return super().__getitem__(index)

    assert warned(clock, DataLoader(Opening(clock, 0.1))) == []
    assert warned(clock, DataLoader(Slow(clock, 3.0, samples=9))) == []


def test_every_batch_comes_whether_it_is_measured_or_not(clock: Clock) -> None:
    seen: list[float] = []

    class Noting(Computing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0][0, 0].item())
            return super().training_step(batch, batch_idx)

    class Numbers:
        """Batches in order, made by a program of the user's."""

        def __iter__(self) -> Iterator[Any]:
            for number in range(20):
                clock.now += 2.0
                yield torch.full((2, 8), float(number)), torch.tensor([0, 1])

    with pytest.warns(UserWarning, match="Make its samples cheaper"):
        quiet().fit(Noting(clock), Numbers())
    assert seen == [float(number) for number in range(20)]
