"""Batches of every kind, in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.batching.split import join, measure, split
from tests.refusals import refused


def test_splitting_keeps_structure_and_shares_what_is_no_sample() -> None:
    from collections import namedtuple
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Batch:
        x: Tensor
        scale: float

    Pair = namedtuple("Pair", "x names")
    x = torch.arange(10.0).view(5, 2)
    batch = {
        "a": Batch(x, 0.5),
        "b": Pair(x, list("abcde")),
        "position": torch.zeros(1, 2),
        "mode": "train",
        "none": None,
    }
    parts = split(batch, 2)
    assert [count for _, count in parts] == [2, 2, 1]
    middle = parts[1][0]
    assert torch.equal(middle["a"].x, x[2:4])
    assert middle["a"].scale == 0.5
    assert middle["b"].names == ["c", "d"]
    assert type(middle["b"]) is Pair
    assert middle["position"].shape == (1, 2)
    assert middle["mode"] == "train"
    assert middle["none"] is None
    assert middle["a"].x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_lists_of_images_of_unlike_sizes_are_samples() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 6, 8)]
    targets = [{"boxes": torch.zeros(3, 4)} for _ in images]
    assert measure((images, targets)) == 3
    assert [len(part[0]) for part, _ in split((images, targets), 2)] == [2, 1]


def test_a_tokenizers_batch_stays_one() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    part = split(batch, 2)[1][0]
    assert type(part) is transformers.BatchEncoding
    assert part.input_ids.tolist() == [[4, 5]]


@pytest.mark.parametrize(
    ("batch", "fact"),
    [
        (torch.tensor(1.0), "micro_batch"),
        ({"x": nn.utils.rnn.pack_sequence([torch.zeros(3)])}, "PackedSequence"),
        ((torch.zeros(3), torch.eye(3).to_sparse()), "sparse_coo"),
        ({"a": [torch.zeros(3, 2), torch.zeros(3)], "b": [torch.zeros(4, 2), torch.zeros(4)]}, "batch['b'][0]"),
    ],
    ids=["number", "packed", "sparse", "loaders-of-unlike-sizes"],
)
def test_batches_that_cannot_be_split(batch: Any, fact: str) -> None:
    with refused(ValueError, says=fact):
        measure(batch)


def test_outputs_of_parts_become_those_of_the_whole() -> None:
    joined = join(
        [
            {
                "mean": torch.tensor(1.0),
                "count": 1,
                "logits": torch.ones(2, 3),
                "words": ["a", "b"],
                "pair": (1.0, "x"),
            },
            {"mean": torch.tensor(4.0), "count": 2, "logits": torch.ones(1, 3), "words": ["c"], "pair": (4.0, "x")},
        ],
        [2, 1],
    )
    assert joined["mean"] == 2.0
    assert joined["count"] == 3
    assert joined["logits"].shape == (3, 3)
    assert joined["words"] == ["a", "b", "c"]
    assert joined["pair"] == (2.0, "x")
