"""Loaders are checked, and split over processes: equal parts in training, every sample once elsewhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.batching.samplers import LengthBatchSampler
from hasten.data.loaders import prepare
from hasten.data.resume.stream import Stream
from hasten.seed import collect_rng_state, seed_everything
from tests.refusals import refused, warned

DATA = list(range(11))


class Buckets(Sampler):
    """Batches of neighbours, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 5


class Endless(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Cycling(Buckets):
    """Has a length, and goes on after it."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(5))


class Told(Sampler):
    """Gives the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)

    def __len__(self) -> int:
        return 4


class OwnBatches(BatchSampler):
    """Batches that cannot be made of another sampler."""


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class WithInit(DataLoader):
    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(DATA, batch_size=2, shuffle=True)


class Drawing(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])

    def __len__(self) -> int:
        return 4


def parts(loader: Any, *, replicas: int = 2, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each rank; the ranks have drawn different random numbers before."""
    found = []
    for rank in range(replicas):
        torch.manual_seed(rank)
        random.seed(rank)
        prepared = prepare(loader, num_replicas=replicas, rank=rank, **options)
        stream = Stream(prepared)
        stream.set_epoch(epoch)
        found.append([batch.tolist() for batch, _ in stream.batches()])
        assert len(found[-1]) == len(prepared)
    return found


def samples(batches: list[list[list[int]]]) -> list[int]:
    return sorted(sample for part in batches for batch in part for sample in batch)


# -- one process


def test_what_needs_no_change_is_left_alone() -> None:
    for loader in (DataLoader(DATA, shuffle=True), [1, 2]):
        assert prepare(loader) is loader
    own = DataLoader(DATA, sampler=DistributedSampler(DATA, 4, 3))
    assert prepare(own, num_replicas=2, rank=1) is own


def test_overfitting_reads_in_order() -> None:
    with warned(UserWarning, fix="shuffle=False"):
        prepared = prepare(DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True), overfit=True)
    assert [batch.tolist() for batch in prepared] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(7))},
        {"sampler": WeightedRandomSampler([1.0] * 7, 9, generator=torch.Generator().manual_seed(1))},
        {"sampler": RandomSampler(range(7))},
        {"sampler": DistributedSampler(range(7), 2, 1)},
        {"sampler": Cycling()},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(7)), 2, drop_last=False)},
        {"batch_sampler": Buckets()},
        {"batch_sampler": LengthBatchSampler(DATA, 3, sampler=SubsetRandomSampler(range(7)))},
    ],
    ids=["subset", "weighted", "random", "distributed", "cycling", "batches", "own", "by length"],
)
@pytest.mark.filterwarnings("ignore:overfit_batches reads the same")
def test_overfitting_reads_the_same_batches_in_each_epoch_and_in_validation(options: Any) -> None:
    loader = DataLoader(DATA, **options)
    train, validation = (prepare(loader, overfit=True) for _ in range(2))
    epochs = [[batch.tolist() for batch in prepared] for prepared in (train, train, validation)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert max(samples([epochs[0]])) < 7 or isinstance(options.get("batch_sampler"), Buckets)
    found = parts(loader, overfit=True)
    assert parts(loader, overfit=True, epoch=1) == found
    assert set(samples(found)) == {*samples([epochs[0]])}


# -- training on several


@pytest.mark.parametrize("shuffle", [False, True])
def test_training_gives_each_process_as_many_samples(shuffle: bool) -> None:
    loader = DataLoader(DATA, batch_size=2, shuffle=shuffle)
    found = parts(loader)
    assert [len(part) for part in found] == [3, 3]
    assert set(samples(found)) == set(DATA)
    assert len(samples(found)) == 12
    assert (parts(loader, epoch=1) != found) == shuffle


def test_training_uses_the_same_sampler_as_a_hand_written_loop() -> None:
    seed_everything(7, verbose=False)
    sampler = prepare(DataLoader(DATA, shuffle=True), num_replicas=2, rank=1).sampler
    assert isinstance(sampler, DistributedSampler)
    sampler.set_epoch(2)
    by_hand = DistributedSampler(DATA, 2, 1, shuffle=True, seed=7)
    by_hand.set_epoch(2)
    assert list(sampler) == list(by_hand)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 10 + [0.0], 20),
        SubsetRandomSampler([1, 3, 5, 7]),
        RandomSampler(DATA, replacement=True, num_samples=8),
        RandomSampler(DATA, num_samples=6),
        RandomSampler(DATA[:4]),
        SequentialSampler(DATA[:4]),
    ],
    ids=["weighted", "subset", "replacement", "part", "first", "in order"],
)
@pytest.mark.parametrize("batched", [False, True])
def test_other_samplers_keep_what_they_choose(sampler: Any, batched: bool) -> None:
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if batched else {"batch_size": 2, "sampler": sampler}
    loader = DataLoader(DATA, **batches)
    found = parts(loader)
    assert [len(part) for part in found] == [-(-len(sampler) // 4)] * 2
    assert len(samples(found)) == len(sampler)
    assert 10 not in samples(found) or not isinstance(sampler, WeightedRandomSampler)
    if isinstance(sampler, SubsetRandomSampler):
        assert samples(found) == [1, 3, 5, 7]
    if len(sampler) == 4 and not isinstance(sampler, SubsetRandomSampler):
        assert samples(found) == [0, 1, 2, 3]
    if not isinstance(sampler, SequentialSampler):
        assert any(parts(loader, epoch=epoch) != found for epoch in range(1, 4))


def test_batches_of_a_batch_sampler_stay_whole() -> None:
    found = parts(DataLoader(DATA, batch_sampler=Buckets()))
    assert [len(part) for part in found] == [3, 3]
    whole = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]]
    assert all(batch in whole for part in found for batch in part)
    assert set(samples(found)) == set(DATA)


def test_torch_batch_sampler_is_split_by_samples() -> None:
    loader = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, True))
    assert parts(loader) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]


def test_a_sampler_without_length_cannot_be_divided() -> None:
    with refused(TypeError, fix="__len__"):
        prepare(DataLoader(DATA, batch_size=1, sampler=Endless()), num_replicas=2, rank=0)


def test_a_sampler_that_goes_on_after_its_length_is_refused_where_it_is_divided() -> None:
    options: Any
    for options in ({"sampler": Cycling()}, {"batch_sampler": LengthBatchSampler(DATA, 2, sampler=Cycling())}):
        prepared = prepare(DataLoader(DATA, **options), num_replicas=2, rank=0)
        with refused(ValueError, fix="__iter__", says=("Cycling", "length of 5")):
            list(prepared)


def test_a_sampler_inside_batches_of_ones_own_hears_of_the_epoch() -> None:
    loader = DataLoader(DATA, batch_sampler=OwnBatches(Told(), 2, False))
    assert parts(loader, epoch=3) == [[[3, 3]], [[3, 3]]]
    assert parts(loader, epoch=4) == [[[4, 4]], [[4, 4]]]


def test_splitting_leaves_the_random_generators_alone() -> None:
    prepared = prepare(DataLoader(DATA, batch_sampler=Buckets()), num_replicas=2, rank=0)
    before = collect_rng_state()
    list(prepared.batch_sampler)
    assert collect_rng_state() == before


@pytest.mark.parametrize("stage", ["train", "validate"])
def test_loader_given_is_not_changed_and_its_class_is_kept(stage: str) -> None:
    loader = WithInit("here")
    before = dict(vars(loader))
    prepared = prepare(loader, stage=stage, num_replicas=2, rank=1)
    assert type(prepared) is WithInit
    assert prepared.folder == "here"
    assert prepared is not loader
    assert vars(loader) == before


def test_workers_that_live_on_read_the_part_of_their_process() -> None:
    loader = DataLoader(DATA, batch_size=2, num_workers=1, persistent_workers=True)
    next(iter(loader))
    prepared = prepare(loader, num_replicas=2, rank=1)
    assert [batch.tolist() for batch in prepared] == [[1, 3], [5, 7], [9, 0]]


# -- evaluation on several


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("number", [1, 7, 11])
def test_evaluation_sees_every_sample_once(stage: str, replicas: int, number: int) -> None:
    loader = DataLoader(DATA[:number], batch_size=2)
    found = parts(loader, stage=stage, replicas=replicas)
    assert samples(found) == DATA[:number]
    sizes = [sum(map(len, part)) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert samples(parts(DataLoader(DATA, batch_sampler=Buckets()), stage=stage)) == DATA


# -- workers


def test_workers_of_other_ranks_draw_other_numbers_and_those_of_the_first_stay() -> None:
    loader = DataLoader(Drawing(), batch_size=4, num_workers=1)

    def drawn(loader: DataLoader) -> list[float]:
        seed_everything(4, workers=True, verbose=False)
        return [value for batch in loader for value in batch.flatten().tolist()]

    plain = drawn(loader)
    first = drawn(prepare(loader, num_replicas=2, rank=0))
    second = drawn(prepare(loader, num_replicas=2, rank=1))
    assert second == drawn(prepare(loader, num_replicas=2, rank=1))
    assert len({*first, *second}) == 12
    assert first == plain[:6]
