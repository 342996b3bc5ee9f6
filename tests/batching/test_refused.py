"""Wrong arguments of samplers, collate functions and ``batching=``: refused by name, with what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hasten as L
from hasten.data import (
    LengthBatching,
    LengthBatchSampler,
    PackCollator,
    PackedBatchSampler,
    PadCollator,
    TokenBatchSampler,
    pack,
    packed_attention,
    pad_collate,
)

Q, PLACES = torch.rand(4, 4, 8), torch.tensor([0, 4])
LISTS = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1], "labels": 3}]

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: LengthBatchSampler([], 4), ValueError, "at least one"),
    (lambda: LengthBatchSampler([1.5], 4), TypeError, "whole numbers"),
    (lambda: LengthBatchSampler("abc", 4), TypeError, "tokens of every sample"),
    (lambda: LengthBatchSampler([3, -1], 4), ValueError, r"lengths\[1\] is -1"),
    (lambda: LengthBatchSampler([3], 0), ValueError, "batch_size=0"),
    (lambda: LengthBatchSampler([3], 2.0), TypeError, r"batch_size=2\.0"),
    (lambda: LengthBatchSampler([3], 2, window=0), ValueError, "window=0"),
    (lambda: LengthBatchSampler([3], 2, multiple_of=0), ValueError, "multiple_of=0"),
    (lambda: LengthBatchSampler([3], 2, multiple_of="8"), TypeError, "multiple_of='8'"),
    (lambda: LengthBatchSampler([3], 2, num_replicas=2), ValueError, "both or neither"),
    (lambda: LengthBatchSampler([3], 2, num_replicas=2, rank=2), ValueError, "0 to 1"),
    (lambda: LengthBatchSampler([3], 2, seed=1, generator=torch.Generator()), ValueError, "Give one of them"),
    (lambda: TokenBatchSampler([3, 9], 8), ValueError, "sample 1 with 9 tokens. Use max_tokens=9"),
    (lambda: PackedBatchSampler([3, 9], 8), ValueError, "sample 1 with 9 tokens. Use max_length=9"),
    (lambda: pack([]), ValueError, "no samples"),
    (lambda: pack([[1, 2, 3]], 2), ValueError, "sequence 0 has 3 tokens. Use max_length=3"),
    (lambda: pack([[1, 2], [3, 4]], 3, rows=1), ValueError, "need 2 rows"),
    (lambda: pack([{"input_ids": [1], "text": "a"}]), TypeError, "text"),
    (lambda: pack([{"label": 1}]), TypeError, "no sequence"),
    (lambda: pack([{"input_ids": [1]}, {"input_ids": [1], "labels": [2]}]), ValueError, "sample 1"),
    (lambda: pack([{"input_ids": [1], "labels": [2]}, {"input_ids": [1]}]), ValueError, "sample 1"),
    (lambda: pack([{"input_ids": [1], "y": [1, 2]}, {"input_ids": [1], "y": [1]}]), ValueError, "'y'.*in sample 1"),
    (lambda: pack([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}]), ValueError, "of sample 0.*between others"),
    (lambda: pack([{"input_ids": [1, 2], "attention_mask": [[1, 0], [1, 1]]}]), ValueError, r"the shape \(2, 2\)"),
    (lambda: PackCollator(0), ValueError, "max_length=0"),
    (lambda: PackCollator(8, rows=1.5), TypeError, r"rows=1\.5"),
    (lambda: PackCollator(8, mask="left"), ValueError, "mask='left'"),
    (lambda: packed_attention(Q, Q, Q, PLACES - 1, 3), ValueError, "from -1 to 3, and there are 4"),
    (lambda: packed_attention(Q, Q, Q, torch.rand(2), 3), ValueError, "cu_seqlens"),
    (lambda: packed_attention(Q, Q[:, :3], Q[:, :3], PLACES, 4), ValueError, "4 heads of query, 3 of key"),
    (lambda: packed_attention(Q[None], Q, Q, PLACES, 4), ValueError, r"\(tokens, heads, head_dim\)"),
    (lambda: PadCollator("bert"), TypeError, "has no pad token"),
    (lambda: PadCollator(collate_fn=3), TypeError, "collate_fn=3.*use a function"),
    (lambda: PadCollator(keys="input_ids"), TypeError, r"keys=\['input_ids'\]"),
    (lambda: PadCollator(side="top"), ValueError, "'right', 'left'"),
    (lambda: PadCollator(multiple_of=-8), ValueError, "multiple_of=-8"),
    (lambda: pad_collate([]), ValueError, "no samples"),
    (lambda: pad_collate([{"input_ids": [1]}, {"input_ids": [1], "y": 2}]), ValueError, "sample 1"),
    (lambda: pad_collate([{"input_ids": ["a", "b"]}]), TypeError, "no sequence"),
    (lambda: pad_collate([{"label": 3}]), TypeError, "no sequence"),
    (lambda: pad_collate(LISTS), ValueError, r"a list\) in sample 0 of the batch and a single int in sample 1"),
    (lambda: L.Trainer(batching="lenght"), ValueError, "Did you mean 'length'"),
    (lambda: L.Trainer(batching="tokens"), ValueError, "'tokens:4096'"),
    (lambda: L.Trainer(batching="tokens:0"), ValueError, "'tokens:4096'"),
    (lambda: L.Trainer(batching="tokens:many"), ValueError, "'tokens:4096'"),
    (lambda: L.Trainer(batching=4096), TypeError, "batching=4096"),
    (lambda: L.Trainer(batching=True), TypeError, "batching=True"),
    (lambda: L.Trainer(batching="tokens:90", batch_size=4), ValueError, "the tokens say how large"),
    (lambda: LengthBatching(reorder=("train", "predict")), ValueError, "predictions keep the order"),
    (lambda: LengthBatching(reorder="train"), TypeError, r"reorder=\('train',\)"),
    (lambda: LengthBatching(over_tokens="tags"), TypeError, r"over_tokens=\('tags',\)"),
    (lambda: LengthBatching(max_tokens=0), ValueError, "max_tokens=0"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED)
def test_wrong_arguments_are_refused_by_name(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
