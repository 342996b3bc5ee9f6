"""Reviews: reading, splitting, tokenizing once."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused

from hasten_tools.demo.task import DemoError
from hasten_tools.demo.text import Pad, TextDataset, Tokens, split_reviews, tokens_of

from .conftest import silent


def tokenize(texts: list[str]) -> list[list[int]]:
    """Words as numbers: enough to see where each review went."""
    return [[sum(word.encode()) % 30_000 for word in text.split()] for text in texts]


def read(
    data: Path, cache: Path | None = None, tokenize: Any = tokenize, *, key: str = "words|512", say=silent
) -> Tokens:
    return tokens_of(data, tokenize, tokenizer_key=key, cache=cache or data.parent / "kept", say=say)


def same(one: Tokens, other: Tokens) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "starts", "labels"))


def test_only_labeled_reviews_are_read_with_their_labels(archive: Path, folder: Path, tmp_path: Path) -> None:
    tokens = read(archive)
    assert len(tokens) == 80
    assert tokens.labels.sum() == 40
    (wonderful,), (dreadful,) = tokenize(["wonderful", "dreadful"])
    for label, own, other in ((1, wonderful, dreadful), (0, dreadful, wonderful)):
        words = torch.cat([tokens[place] for place in range(80) if tokens.labels[place] == label])
        assert (words == own).any()
        assert not (words == other).any()
    for data in (folder, folder.parent):
        assert same(tokens, read(data, tmp_path / "other"))


@pytest.mark.parametrize(
    ("count", "limit", "sizes"),
    [
        (50_000, None, [35_000, 5_000, 10_000]),
        (50_000, 2_000, [1_400, 200, 1_000]),
        (50_000, 80_000, [35_000, 5_000, 10_000]),
        (80, 40, [28, 4, 48]),
    ],
)
def test_reviews_are_split_without_overlap_and_a_limit_tests_at_least_1000(
    count: int, limit: int | None, sizes: list[int]
) -> None:
    split = split_reviews(count, limit=limit)
    assert [len(part) for part in split] == sizes
    assert len({each for part in split for each in part}) == sum(sizes)
    assert split_reviews(count, limit=limit) == split
    assert split_reviews(count, limit=limit, seed=1) != split


@pytest.mark.parametrize(("count", "limit"), [(9, None), (50_000, 9)])
def test_too_few_reviews_to_split_are_refused(count: int, limit: int | None) -> None:
    with refused(ValueError, "limit", fix="10"):
        split_reviews(count, limit=limit)


def test_tokens_are_made_once_and_kept_until_something_changes_or_is_damaged(folder: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def counting(texts: list[str]) -> list[list[int]]:
        calls.append(len(texts))
        return tokenize(texts)

    cache = tmp_path / "cache"
    made = read(folder, cache, counting)
    assert same(made, read(folder, cache, counting))
    once = len(calls)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
    said: list[str] = []
    assert same(made, read(folder, cache, counting, say=said.append))
    assert any(str(kept) in line for line in said)
    assert len(calls) == 2 * once
    read(folder, cache, counting, key="words|128")
    (folder / "train/pos/0_7.txt").write_text("another text", encoding="utf-8")
    read(folder, cache, counting)
    assert len(calls) == 4 * once


def test_data_that_cannot_be_read_is_named(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-200])
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    for name, said in (
        ("nowhere", r"--data .*nowhere.*no such file or folder"),
        (archive.name, r"aclImdb_v1\.tar\.gz: not a whole tar archive"),
        ("other.tar", r"aclImdb/\{train,test\}/\{pos,neg\}"),
    ):
        with pytest.raises(DemoError, match=said):
            read(tmp_path / name)


def test_batches_are_padded_to_a_width_or_to_their_longest() -> None:
    data = TextDataset(Tokens.of([[5, 6, 7], [8]], labels=[1, 0]), [0, 1])
    own = Pad(None)([data[0], data[1]])
    assert own["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert own["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert own["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in own.values()} == {torch.int64}
    wide = Pad(5)([data[0], data[1]])
    assert wide["input_ids"].shape == (2, 5)
    assert wide["attention_mask"].sum() == 4
    # As a tokenizer cuts: the last token stays.
    assert data.cut(2)[0]["input_ids"].tolist() == [5, 7]
