"""IMDB movie reviews: read the archive or its folder, split, tokenise once, keep the tokens."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable

    Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]
    Say = Callable[[str], None]

# The members that carry a label. The archive also holds 50,000 unlabelled reviews, which are passed over.
LABELLED = re.compile(r"(?:^|/)((?:train|test)/(pos|neg)/[^/]+\.txt)$")
LAYOUT = "aclImdb/{train,test}/{pos,neg}/*.txt"
# 35,000 / 5,000 / 10,000 of the 50,000 labelled reviews.
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1
SMALLEST_TEST = 1_000
# Reviews written by the archive's tokens format; a change of the format makes a new name, never a misread
# file.
CACHE_FORMAT = 1


@dataclass(frozen=True)
class Tokens:
    """Tokenised reviews, all in one flat tensor.

    Args:
        ids: token numbers of all reviews one after another, int32, shape ``(tokens,)``.
        starts: where each review begins in ``ids``, and the end of the last, int64, shape ``(reviews + 1,)``.
        labels: 1 for a positive review, 0 for a negative, int64, shape ``(reviews,)``.

    Example::

        >>> ids = torch.tensor([101, 7, 102, 101, 102])
        >>> tokens = Tokens(ids, starts=torch.tensor([0, 3, 5]), labels=torch.tensor([1, 0]))
        >>> len(tokens), tokens[1].tolist(), tokens.lengths.tolist()
        (2, [101, 102], [3, 2])

    """

    ids: Tensor
    starts: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each review, int64, shape ``(reviews,)``."""
        return self.starts[1:] - self.starts[:-1]


@dataclass(frozen=True)
class Split:
    """Which reviews train, validate and test: positions in the whole set, without overlap.

    Example::

        >>> split_reviews(50_000).sizes
        (35000, 5000, 10000)

    """

    train: list[int]
    validation: list[int]
    test: list[int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many reviews train, validate and test."""
        return len(self.train), len(self.validation), len(self.test)


def split_reviews(count: int, *, limit: int | None = None, seed: int = 0) -> Split:
    """Shuffle the reviews deterministically and split them 70 / 10 / 20.

    Args:
        count: how many reviews there are.
        limit: use only so many of them, in the same proportions; the test part still gets 1,000 reviews where
            there are that many, so that its accuracy says something (its standard error is then about 1 %).
            Default: all.
        seed: of the shuffle.

    Raises:
        ValueError: when ``limit`` is below 10, or there are fewer than 10 reviews.

    Example::

        >>> split_reviews(50_000, limit=2_000).sizes
        (1400, 200, 1000)

    """
    if count < 10:
        raise ValueError(f"{count} labelled reviews cannot be split in three; at least 10 are needed.")
    if limit is not None and limit < 10:
        raise ValueError(
            f"limit={limit}: too few reviews to split in three. Use 10 or more, or leave it out."
        )
    used = count if limit is None else min(limit, count)
    train, validation = round(used * TRAIN_SHARE), round(used * VALIDATION_SHARE)
    test = used - train - validation
    test = min(max(test, SMALLEST_TEST), count - train - validation)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    end = train + validation
    return Split(order[:train], order[train:end], order[end : end + test])


def tokens_of(data: Path, tokenize: Tokenize, *, tokenizer_key: str, cache: Path | None, say: Say) -> Tokens:
    """Tokenise all labelled reviews of an archive or a folder, or take them from the cache.

    Args:
        data: ``aclImdb_v1.tar.gz`` (any tar with its layout) or the folder it unpacks to.
        tokenize: texts to token numbers, already cut to the longest length wanted.
        tokenizer_key: what the tokens depend on besides the data: tokenizer and longest length.
        cache: folder to keep the tokens in; None keeps nothing.
        say: told in a line what takes long or went wrong without harm.

    Raises:
        DemoError: when the data cannot be read or has no reviews in the layout.

    """
    from hasten.checkpoint import files

    if not data.exists():
        raise DemoError(
            f"--data {data}: there is no such file or folder. Give aclImdb_v1.tar.gz or the folder it "
            "unpacks to."
        )
    named = hashlib.sha256(f"{CACHE_FORMAT}|{_digest(data)}|{tokenizer_key}".encode()).hexdigest()[:24]
    kept = cache / f"imdb-{named}.pt" if cache is not None else None
    if kept is not None and kept.exists():
        try:
            found = files.load(kept)
            return Tokens(found["ids"], found["starts"], found["labels"])
        except (RuntimeError, OSError, KeyError, TypeError) as error:
            say(f"The kept tokens are unreadable and are made anew ({kept}: {error}).")
    say("Reading and tokenising the reviews; done once, then kept.")
    tokens = _tokenized(list(_labelled_reviews(data)), tokenize, data)
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            files.save({"ids": tokens.ids, "starts": tokens.starts, "labels": tokens.labels}, kept)
        except OSError as error:
            say(f"The tokens are not kept for the next run: {error}. Choose a folder with --cache-dir.")
    return tokens


def _tokenized(reviews: list[tuple[str, int, str]], tokenize: Tokenize, data: Path) -> Tokens:
    if not reviews:
        raise DemoError(f"--data {data}: no reviews in it. The layout needed is {LAYOUT}.")
    # By name: an archive and the folder it unpacks to give the same reviews under the same numbers.
    reviews.sort()
    rows = tokenize([text for _, _, text in reviews])
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.empty(int(lengths.sum()), dtype=torch.int32)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64)
    starts[1:] = lengths.cumsum(0)
    for row, start, end in zip(rows, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        ids[start:end] = torch.tensor(row, dtype=torch.int32)
    return Tokens(ids, starts, torch.tensor([label for _, label, _ in reviews]))


def _labelled_reviews(data: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (name, label, text); nothing is unpacked to disk."""
    if data.is_dir():
        for path in _review_files(data):
            match = LABELLED.search(path.as_posix())
            assert match is not None
            yield match[1], int(match[2] == "pos"), path.read_text(encoding="utf-8", errors="replace")
        return
    try:
        with tarfile.open(data) as archive:
            for member in archive:
                match = LABELLED.search(member.name)
                content = archive.extractfile(member) if match and member.isfile() else None
                if match and content is not None:
                    yield match[1], int(match[2] == "pos"), content.read().decode("utf-8", errors="replace")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DemoError(
            f"--data {data}: not a whole tar archive ({error}). Give aclImdb_v1.tar.gz or the folder it "
            "unpacks to."
        ) from error


def _review_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.txt") if LABELLED.search(path.as_posix()))


def _digest(data: Path) -> str:
    """The sha256 of an archive; of a folder, that of its reviews' names and contents."""
    if data.is_file():
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for path in _review_files(data):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(data).as_posix()}|{len(content)}|".encode() + content)
    return whole.hexdigest()


class ReviewDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Some of the tokenised reviews, one sample each: ``{"input_ids": (tokens,) int32, "label": int}``.

    Example::

        >>> ids = torch.tensor([101, 7, 102, 101, 102])
        >>> tokens = Tokens(ids, starts=torch.tensor([0, 3, 5]), labels=torch.tensor([1, 0]))
        >>> ReviewDataset(tokens, [1])[0]
        {'input_ids': tensor([101, 102]), 'label': 0}

    """

    def __init__(self, tokens: Tokens, chosen: Sequence[int], *, max_length: int | None = None) -> None:
        self.tokens = tokens
        self.chosen = list(chosen)
        lengths = tokens.lengths[torch.tensor(self.chosen, dtype=torch.int64)]
        self.lengths: list[int] = (lengths if max_length is None else lengths.clamp(max=max_length)).tolist()

    def cut(self, max_length: int) -> ReviewDataset:
        """Return the same reviews, of at most so many tokens."""
        return ReviewDataset(self.tokens, self.chosen, max_length=max_length)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        review, length = self.chosen[index], self.lengths[index]
        ids = self.tokens[review]
        if len(ids) > length:
            # As a tokenizer cuts: the token that ends a review stays.
            ids = torch.cat([ids[: length - 1], ids[-1:]])
        return {"input_ids": ids, "label": int(self.tokens.labels[review])}


class Pad:
    """Join samples to a batch: input_ids and attention_mask ``(batch, width)`` int64, labels ``(batch,)``
    int64.

    Args:
        width: pad every batch to so many tokens; None pads each batch to its own longest review.
        pad_id: the token that fills up.

    Example::

        >>> Pad(None, pad_id=0)([{"input_ids": torch.tensor([101, 102]), "label": 1}])["input_ids"]
        tensor([[101, 102]])

    """

    def __init__(self, width: int | None, *, pad_id: int) -> None:
        self.width = width
        self.pad_id = pad_id

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        width = longest if self.width is None else self.width
        ids = torch.full((len(samples), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(samples), width), dtype=torch.int64)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            ids[row, :length] = sample["input_ids"]
            mask[row, :length] = 1
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
