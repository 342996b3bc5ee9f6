"""Batches of like length: every sample once, little padding, the same number of batches everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from hasten.batching.pad import rounded_up, widths_for
from hasten.batching.samplers import PlannedBatches
from hasten.data import LengthBatchSampler, PackedBatchSampler, TokenBatchSampler
from hasten.data.loaders import prepare
from tests.refusals import refused

LENGTHS = torch.randint(3, 200, (503,), generator=torch.Generator().manual_seed(0))
MAKE: dict[str, Callable[..., PlannedBatches]] = {
    "length": lambda **options: LengthBatchSampler(LENGTHS, 8, **{"window": 10, **options}),
    "length, few widths": lambda **options: LengthBatchSampler(LENGTHS, 8, multiple_of=(50, 100), **options),
    "tokens": lambda **options: TokenBatchSampler(LENGTHS, 1000, **options),
    "packed": lambda **options: PackedBatchSampler(LENGTHS, 256, 3, **options),
}
each_kind = pytest.mark.parametrize("kind", MAKE)


def useful_share(batches: list[list[int]]) -> float:
    """Return the share of tokens that are no padding when each batch is padded to its longest."""
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    return sum(int(LENGTHS[batch].sum()) for batch in batches) / padded


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@each_kind
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_an_epoch(kind: str, shuffle: bool) -> None:
    sampler = MAKE[kind](shuffle=shuffle)
    epochs = [list(sampler) for _ in range(3)]
    for batches in epochs:
        assert sorted(flat(batches)) == list(range(503))
        assert len(batches) == len(sampler)
        assert all(batches)
    assert (epochs[0] == epochs[1]) is not shuffle


@each_kind
@pytest.mark.parametrize("replicas", [2, 3, 7])
@pytest.mark.parametrize("options", [{}, {"shuffle": False, "repeat": False}], ids=["train", "evaluate"])
def test_processes_read_disjoint_samples_in_the_same_number_of_batches(
    kind: str, replicas: int, options: dict[str, Any]
) -> None:
    samplers = [MAKE[kind](num_replicas=replicas, rank=rank, **options) for rank in range(replicas)]
    for epoch in (0, 1):
        parts = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            torch.manual_seed(sampler.rank)  # Whatever a process has drawn before.
            parts.append(list(sampler))
        assert len({len(part) for part in parts}) == 1 or options
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
        assert sorted(flat(flat(parts))) == list(range(503))  # type: ignore[arg-type]


def test_too_few_samples_for_all_processes_repeat_only_in_training() -> None:
    for repeat, expected in ((True, 1), (False, 0)):
        sampler = LengthBatchSampler([3, 4], 4, num_replicas=3, rank=2, repeat=repeat)
        assert len(list(sampler)) == len(sampler) == expected
    packed = [list(PackedBatchSampler([3, 4], 8, num_replicas=2, rank=rank, shuffle=False)) for rank in (0, 1)]
    assert packed == [[[1]], [[0]]]  # one row, divided


@each_kind
def test_torchs_generator_decides_as_it_does_for_a_random_sampler(kind: str) -> None:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(list(MAKE[kind]()))
    assert orders[0] == orders[1] != orders[2]
    own = [list(MAKE[kind](generator=torch.Generator().manual_seed(5))) for _ in range(2)]
    assert own[0] == own[1]
    seeded = MAKE[kind](seed=3)
    first = list(seeded)
    assert list(seeded) == first
    seeded.set_epoch(1)
    assert list(seeded) != first


def test_sorting_in_windows_leaves_little_padding_and_batches_random() -> None:
    torch.manual_seed(0)
    batches = list(LengthBatchSampler(LENGTHS, 8, window=60))
    assert useful_share(list(torch.randperm(503).split(8))) < 0.62  # type: ignore[arg-type]
    assert useful_share(batches) > 0.93
    longest = torch.tensor([int(LENGTHS[batch].max()) for batch in batches]).double()
    # The batches are not sorted: neighbours are as far apart as any two.
    assert longest.diff().abs().mean() > 30
    in_order = list(LengthBatchSampler(LENGTHS, 8, shuffle=False, window=10))
    assert sorted(flat(in_order[:10])) == list(range(80))
    tokens = [int(LENGTHS[batch].sum()) for batch in PackedBatchSampler(LENGTHS, 256, 3)]
    assert max(tokens) <= 3 * 256
    assert sum(tokens) / (len(tokens) * 3 * 256) > 0.93


def test_the_last_batch_left_out_is_no_matter_of_length() -> None:
    dropped: list[int] = []
    for seed in range(40):
        kept = list(LengthBatchSampler(LENGTHS, 100, drop_last=True, seed=seed))
        assert {len(batch) for batch in kept} == {100}
        dropped += set(range(503)) - set(flat(kept))
    assert len(dropped) == 120
    assert abs(LENGTHS[dropped].double().mean() - LENGTHS.double().mean()) < 25


def test_a_sampler_of_ones_own_decides_which_samples_come() -> None:
    weights = torch.zeros(503)
    weights[:50] = 1
    sampler = LengthBatchSampler(LENGTHS, 8, sampler=WeightedRandomSampler(weights.tolist(), 100))
    batches = list(sampler)
    assert len(batches) == len(sampler) == 13
    assert set(flat(batches)) <= set(range(50))
    with refused(IndexError, says="3 lengths"):
        list(LengthBatchSampler([1, 2, 3], 2, sampler=[7]))
    with refused(TypeError, "sampler", fix="__len__"):
        LengthBatchSampler([1, 2, 3], 2, sampler=iter([0]))


def test_a_token_budget_holds_with_padding_and_shapes_are_few() -> None:
    torch.manual_seed(0)
    sampler = TokenBatchSampler(LENGTHS, 1000, shapes=6)
    batches = list(sampler)
    widths = [rounded_up(int(LENGTHS[batch].max()), sampler.widths) for batch in batches]
    assert max(len(batch) * width for batch, width in zip(batches, widths, strict=True)) <= 1000
    shapes = {(len(batch), width) for batch, width in zip(batches, widths, strict=True)}
    assert len(shapes) <= 7  # six and the last, which is not full
    assert useful_share(batches) > 0.85
    assert max(map(len, TokenBatchSampler(LENGTHS, 1000, max_batch_size=5))) == 5


def test_the_best_widths_leave_least_padding() -> None:
    lengths = [1, 2, 9, 10, 10, 30, 31, 90]
    assert widths_for(lengths, 3, multiple_of=1) == (10, 31, 90)
    assert widths_for(lengths, 1, multiple_of=1) == (90,)
    assert widths_for(lengths, 20, multiple_of=1) == (1, 2, 9, 10, 30, 31, 90)
    assert widths_for(lengths, 4, multiple_of=8)[-1] == 90  # not 96: nothing is that long
    found = widths_for(LENGTHS, 5)
    even = [40, 80, 120, 160, 200]
    total = [sum(rounded_up(length, widths) for length in LENGTHS.tolist()) for widths in (found, even)]
    assert total[0] <= total[1]


@each_kind
def test_loaders_are_shared_among_processes_by_the_sampler_itself(kind: str) -> None:
    loader: Any = DataLoader(range(503), batch_sampler=MAKE[kind]())  # type: ignore[arg-type]
    train = [prepare(loader, num_replicas=2, rank=rank) for rank in range(2)]
    assert len({len(part) for part in train}) == 1
    assert sorted(index for part in train for batch in part for index in batch.tolist()) == list(range(503))
    own: Any = DataLoader(range(503), batch_sampler=MAKE[kind](num_replicas=2, rank=1))  # type: ignore[arg-type]
    assert prepare(own, num_replicas=2, rank=0) is own
    assert not hasattr(loader.batch_sampler, "rank")
    overfit = prepare(loader, overfit=True)
    first = [batch.tolist() for batch in overfit]
    assert first == [batch.tolist() for batch in overfit]
