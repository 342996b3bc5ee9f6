"""Reviews: reading, splitting, tokenising once."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from hasten.demo.imdb import split_reviews, tokens_of
from hasten.demo.task import DemoError
from hasten.demo.text import Pad, TextDataset, Tokens


def tokenize(texts: list[str]) -> list[list[int]]:
    """Words as numbers: enough to see where each review went."""
    return [[sum(word.encode()) % 30_000 for word in text.split()] for text in texts]


def never(texts: list[str]) -> list[list[int]]:
    raise AssertionError("tokenised again")


def read(
    data: Path, cache: Path | None = None, *, tokenize=tokenize, key: str = "words|512", say=None
) -> Tokens:
    return tokens_of(data, tokenize, tokenizer_key=key, cache=cache, say=say or (lambda line: None))


def test_only_labelled_reviews_are_read_with_their_labels(archive: Path) -> None:
    tokens = read(archive)
    assert len(tokens) == 80
    assert tokens.labels.sum() == 40
    texts = tokenize(["wonderful", "dreadful"])
    wonderful, dreadful = texts[0][0], texts[1][0]
    positive = torch.cat([tokens[place] for place in range(80) if tokens.labels[place] == 1])
    negative = torch.cat([tokens[place] for place in range(80) if tokens.labels[place] == 0])
    assert (positive == wonderful).any()
    assert not (positive == dreadful).any()
    assert (negative == dreadful).any()


def test_archive_and_folder_give_the_same_tokens(archive: Path, folder: Path) -> None:
    one, other, parent = read(archive), read(folder), read(folder.parent)
    for found in (other, parent):
        assert torch.equal(one.ids, found.ids)
        assert torch.equal(one.starts, found.starts)
        assert torch.equal(one.labels, found.labels)


def test_whole_set_is_split_as_published_without_overlap() -> None:
    split = split_reviews(50_000)
    assert [len(part) for part in split] == [35_000, 5_000, 10_000]
    assert len({each for part in split for each in part}) == 50_000
    assert split_reviews(50_000) == split
    assert split_reviews(50_000, seed=1) != split


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(2_000, (1_400, 200, 1_000)), (10_000, (7_000, 1_000, 2_000)), (80_000, (35_000, 5_000, 10_000))],
)
def test_a_limit_keeps_the_proportions_and_tests_at_least_1000(
    limit: int, sizes: tuple[int, int, int]
) -> None:
    split = split_reviews(50_000, limit=limit)
    assert tuple(len(part) for part in split) == sizes
    assert len({each for part in split for each in part}) == sum(sizes)


def test_a_part_of_a_small_set_tests_what_there_is() -> None:
    assert [len(part) for part in split_reviews(80, limit=40)] == [28, 4, 48]


@pytest.mark.parametrize(("count", "limit"), [(9, None), (50_000, 9)])
def test_too_few_reviews_to_split_are_refused(count: int, limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"10"):
        split_reviews(count, limit=limit)


def test_tokens_are_made_once_and_kept(archive: Path, tmp_path: Path) -> None:
    made = read(archive, tmp_path / "cache")
    kept = read(archive, tmp_path / "cache", tokenize=never)
    assert torch.equal(made.ids, kept.ids)
    assert torch.equal(made.labels, kept.labels)
    with pytest.raises(AssertionError, match="tokenised again"):
        read(archive, tmp_path / "cache", tokenize=never, key="words|128")


def test_a_changed_folder_is_tokenised_again(folder: Path, tmp_path: Path) -> None:
    read(folder, tmp_path / "cache")
    read(folder, tmp_path / "cache", tokenize=never)
    (folder / "train/pos/0_7.txt").write_text("another text", encoding="utf-8")
    with pytest.raises(AssertionError, match="tokenised again"):
        read(folder, tmp_path / "cache", tokenize=never)


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"not tokens"]
)
def test_damaged_tokens_are_made_anew(archive: Path, tmp_path: Path, damage) -> None:
    made = read(archive, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    said: list[str] = []
    again = read(archive, tmp_path / "cache", say=said.append)
    assert torch.equal(made.ids, again.ids)
    assert any(str(kept) in line for line in said)
    read(archive, tmp_path / "cache", tokenize=never)


def test_a_cache_that_cannot_be_written_only_costs_time(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    said: list[str] = []
    assert len(read(archive, tmp_path / "cache", say=said.append)) == 80
    assert any("--cache-dir" in line for line in said)


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"--data .*nowhere.*no such file or folder"):
        read(tmp_path / "nowhere")


def test_a_cut_archive_is_named(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(DemoError, match=r"aclImdb_v1\.tar\.gz: not a whole tar archive"):
        read(archive)


def test_an_archive_without_reviews_says_which_layout_is_needed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    with pytest.raises(DemoError, match=r"aclImdb/\{train,test\}/\{pos,neg\}"):
        read(tmp_path / "other.tar")


def test_batches_are_padded_to_a_width_or_to_their_longest() -> None:
    tokens = Tokens.of([[5, 6, 7], [8]], labels=[1, 0])
    data = TextDataset(tokens, [0, 1])
    samples = [data[0], data[1]]
    own = Pad(None)(samples)
    assert own["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert own["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert own["labels"].tolist() == [1, 0]
    wide = Pad(5)(samples)
    assert wide["input_ids"].shape == (2, 5)
    assert wide["attention_mask"].sum() == 4
