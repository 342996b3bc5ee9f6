"""What the first samples of several readers show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.data.first_samples import DIFFERENT, MIXED, REPEATED, SAME, compare_readers, digest_of, number_to_compare


@pytest.mark.parametrize(
    ("samples", "shares", "processes", "workers"),
    [
        (["abcd", "abcd"], [0, 1], SAME, SAME),
        (["abcd", "efgh"], [0, 1], DIFFERENT, SAME),
        (["", ""], [0, 1], SAME, SAME),  # No samples at all.
        (["abcd", ""], [0, 1], DIFFERENT, SAME),
        (["aaaa", "aaaa"], [0, 1], REPEATED, SAME),
        (["abab", "abab"], [0, 1], REPEATED, SAME),
        (["a", "a"], [0, 1], REPEATED, SAME),
        (["aabc", "aabc"], [0, 1], SAME, SAME),
        (["abcd", "dcba"], [0, 1], MIXED, SAME),
        (["abcd", "abcd", "efgh"], [0, 1, 2], MIXED, SAME),
        # The first two are to read the same.
        (["abcd", "abcd", "efgh", "efgh"], [0, 0, 1, 1], DIFFERENT, SAME),
        (["abcd", "efgh", "abcd", "efgh"], [0, 0, 1, 1], MIXED, SAME),
        # Two workers each.
        (["abcd abcd", "abcd abcd"], [0, 1], SAME, SAME),
        (["abcd efgh", "abcd efgh"], [0, 1], SAME, DIFFERENT),
        (["abcd a", "abcd a"], [0, 1], SAME, MIXED),
        (["abcd e", "abcd e"], [0, 1], SAME, DIFFERENT),
        (["abcd ", "abcd "], [0, 1], SAME, DIFFERENT),
        (["abcd efgh", "ijkl mnop"], [0, 1], DIFFERENT, DIFFERENT),
        (["abcd abcd", "efgh efgh"], [0, 1], DIFFERENT, SAME),
        (["aaaa bbbb", "aaaa bbbb"], [0, 1], REPEATED, DIFFERENT),
    ],
)
def test_all_readers_are_compared(samples: Any, shares: list[int], processes: str, workers: str) -> None:
    readers = {(rank, at): list(own) for rank, each in enumerate(samples) for at, own in enumerate(each.split(" "))}
    assert compare_readers(readers, shares) == (processes, workers)


class Sample:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_digest_tells_samples_apart() -> None:
    samples = [0, 1, "1", 1.0, [1, 2], {"x": torch.arange(3)}, {"x": torch.arange(4)}, Sample(1), Sample(2), None]
    assert len({digest_of(sample) for sample in samples}) == len(samples)
    assert digest_of(Sample([1])) == digest_of(Sample([1]))
    # What cannot be pickled is like any other, and so shows nothing.
    assert digest_of(Sample(lambda: 1)) == digest_of(Sample(lambda: 2))
    assert [number_to_compare(size) for size in (None, 1, 8, 999)] == [4, 4, 8, 32]
