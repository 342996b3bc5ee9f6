"""Reviews: reading, splitting, tokenizing once."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.demo.task import DemoError
from hasten.demo.text import Pad, TextDataset, Tokens, split_reviews, tokens_of

from .conftest import silent


def tokenize(texts: list[str]) -> list[list[int]]:
    """Words as numbers: enough to see where each review went."""
    return [[sum(word.encode()) % 30_000 for word in text.split()] for text in texts]


def never(texts: list[str]) -> list[list[int]]:
    raise AssertionError("tokenized again")


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


def test_whole_set_is_split_as_published_without_overlap() -> None:
    split = split_reviews(50_000)
    assert [len(part) for part in split] == [35_000, 5_000, 10_000]
    assert len({each for part in split for each in part}) == 50_000
    assert split_reviews(50_000) == split
    assert split_reviews(50_000, seed=1) != split


@pytest.mark.parametrize(
    ("count", "limit", "sizes"),
    [
        (50_000, 2_000, [1_400, 200, 1_000]),
        (50_000, 10_000, [7_000, 1_000, 2_000]),
        (50_000, 80_000, [35_000, 5_000, 10_000]),
        (80, 40, [28, 4, 48]),
    ],
)
def test_a_limit_keeps_the_proportions_and_tests_at_least_1000(count: int, limit: int, sizes: list[int]) -> None:
    split = split_reviews(count, limit=limit)
    assert [len(part) for part in split] == sizes
    assert len({each for part in split for each in part}) == sum(sizes)


@pytest.mark.parametrize(("count", "limit"), [(9, None), (50_000, 9)])
def test_too_few_reviews_to_split_are_refused(count: int, limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"10"):
        split_reviews(count, limit=limit)


def test_tokens_are_made_once_and_kept_until_something_changes(folder: Path) -> None:
    made = read(folder)
    assert same(made, read(folder, tokenize=never))
    with pytest.raises(AssertionError, match="tokenized again"):
        read(folder, tokenize=never, key="words|128")
    (folder / "train/pos/0_7.txt").write_text("another text", encoding="utf-8")
    with pytest.raises(AssertionError, match="tokenized again"):
        read(folder, tokenize=never)


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"not tokens"])
def test_damaged_tokens_are_made_again(archive: Path, tmp_path: Path, damage) -> None:
    made = read(archive, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    said: list[str] = []
    assert same(made, read(archive, tmp_path / "cache", say=said.append))
    assert any(str(kept) in line for line in said)
    read(archive, tmp_path / "cache", tokenize=never)


def test_a_cache_that_cannot_be_written_only_costs_time(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    said: list[str] = []
    assert len(read(archive, tmp_path / "cache", say=said.append)) == 80
    assert any("--cache-dir" in line for line in said)


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
