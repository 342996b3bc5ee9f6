"""The order of batches that all rows of a ladder share."""

from __future__ import annotations

import random

import pytest

from hasten.demo.task import ShuffledBatches

CHANCE = random.Random(0)
LENGTHS = [CHANCE.randint(5, 500) for _ in range(530)]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_every_sample_comes_once_an_epoch(lengths: list[int] | None) -> None:
    batches = ShuffledBatches(530, 12, seed=3, lengths=lengths, window=10)
    for _ in range(3):
        epoch = list(batches)
        assert sorted(sample for batch in epoch for sample in batch) == list(range(530))
        assert len(epoch) == len(batches)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_order_is_the_same_in_each_copy_and_new_each_epoch(lengths: list[int] | None) -> None:
    one, other = (ShuffledBatches(530, 12, seed=3, lengths=lengths) for _ in range(2))
    first, second = list(one), list(one)
    assert first != second
    assert [first, second] == [list(other), list(other)]
    assert first != list(ShuffledBatches(530, 12, seed=4, lengths=lengths))


def test_batches_by_length_are_hardly_padded_but_stay_shuffled() -> None:
    def padded(batches: list[list[int]]) -> int:
        return sum(len(batch) * max(LENGTHS[sample] for sample in batch) for batch in batches)

    by_length = list(ShuffledBatches(530, 12, seed=3, lengths=LENGTHS))
    at_random = list(ShuffledBatches(530, 12, seed=3))
    assert padded(by_length) < 1.2 * sum(LENGTHS)
    assert padded(at_random) > 1.6 * sum(LENGTHS)
    widths = [max(LENGTHS[sample] for sample in batch) for batch in by_length]
    assert widths != sorted(widths)
