"""The imdb task: fine-tune a language model to tell whether a film review is positive."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from hasten._lib.files import cache_folder
from hasten.checkpoint import files
from hasten.demo.download import Remote, download
from hasten.demo.task import DemoError, LadderRow, Say, Settings, first_rows, lever_rows, plural
from hasten.demo.text import TextDataset, TextTask, Tokens
from hasten.demo.text_models import ModelSource
from hasten.speed.safety import Safety

ARCHIVE = Remote(
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    size_bytes=84_125_825,
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
# The members that carry a label. The archive also holds 50,000 unlabelled reviews, which are left out.
LABELLED = re.compile(r"(?:^|/)((?:train|test)/(pos|neg)/[^/]+\.txt)$")
LAYOUT = "aclImdb/{train,test}/{pos,neg}/*.txt"
# 35,000 / 5,000 / 10,000 of the 50,000 labelled reviews.
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1
SMALLEST_TEST = 1_000
# A change of the format of kept tokens makes a new name, never a misread file.
CACHE_FORMAT = 1

Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]


class Imdb(TextTask):
    """Classify IMDB reviews: 35,000 train, 5,000 validate, 10,000 test.

    Args:
        data: ``aclImdb_v1.tar.gz`` or its folder; None downloads it to the cache folder.
        source: which model, from :func:`hasten.demo.text_models.find`.
        limit: use only so many reviews; see :func:`split_reviews`.
        max_length: maximum number of tokens of a review; longer ones are cut.
        cache: folder for the archive and the tokens; None takes hasten's cache folder.
        progress: show a bar while downloading.
        say: called with a line on what takes long.
        settings: see :class:`hasten.demo.task.Settings`.

    """

    name: ClassVar[str] = "imdb"
    epochs = 1
    batch_size = 12
    learning_rate = 1e-4

    def __init__(
        self,
        data: Path | None,
        source: ModelSource,
        *,
        limit: int | None = None,
        max_length: int = 512,
        cache: Path | None = None,
        progress: bool = True,
        say: Say = print,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        self.source = source
        self.max_length = max_length
        folder = cache or cache_folder()
        if data is None:
            data = download(ARCHIVE, folder / "aclImdb_v1.tar.gz", progress=progress)
        tokens = tokens_of(
            data,
            lambda texts: source.tokenize(texts, max_length=max_length),
            tokenizer_key=source.tokenizer_key(max_length),
            cache=folder,
            say=say,
        )
        parts = split_reviews(len(tokens), limit=limit)
        self.train_data, self.validation_data, self.test_data = (TextDataset(tokens, part) for part in parts)
        self.title = (
            f"{source.title} on IMDB reviews: {len(parts[0]):,} train / {len(parts[1]):,} validation / "
            f"{len(parts[2]):,} test, "
            f"{plural(self.epochs, 'epoch')} of batches of {self.batch_size}; padded to {max_length} tokens, "
            f"{self.text_share:.0%} of them are text"
        )
        self.rows = self._rows()

    def _rows(self) -> list[LadderRow]:
        packed = ["packed", "last block for one token"]
        if self.device.type == "cpu":
            names = ["pages kept", "batches by length", *packed, "cheap dropout masks", "bf16", "compiled"]
        else:
            # Steps this short wait for the host: to compute less pays once the host does not hold them up.
            names = ["TF32", "batches by length", "bf16", "compiled", "CUDA graphs", *packed]
        without_dropout = f"from_pretrained(..., {self.source.attention_dropout_field}=0.0)"
        shorter = self.max_length // 2
        other_maths: list[tuple[str, str, dict[str, Any]]] = [
            ("no attention dropout", without_dropout, {"attention_dropout": False}),
            ("lower half frozen", self.source.freezing, {"frozen": True}),
            (f"{shorter} tokens at most", f"tokenizer(..., max_length={shorter})", {"max_length": shorter}),
        ]
        return [
            *first_rows(self.epochs),
            *lever_rows("fused AdamW", *names),
            *(
                LadderRow(name, line, changes=changes, safety=Safety.OTHER_MATHS)
                for name, line, changes in other_maths
            ),
            *lever_rows("hasten's own choice"),
        ]


def split_reviews(count: int, *, limit: int | None = None, seed: int = 0) -> tuple[list[int], ...]:
    """Return which reviews train, validate and test: 70 / 10 / 20, shuffled in an order that stays.

    Args:
        count: how many reviews there are.
        limit: use only so many of them, in the same proportions; 1,000 reviews are tested where there are that many,
            as their accuracy has a standard error of about 1 %. Default: all.
        seed: of the shuffle.

    Raises:
        ValueError: when ``limit`` is below 10, or there are fewer than 10 reviews.

    Example::

        >>> [len(part) for part in split_reviews(50_000, limit=2_000)]
        [1400, 200, 1000]

    """
    if count < 10:
        raise ValueError(f"{count} labelled reviews cannot be split in three; at least 10 are needed.")
    if limit is not None and limit < 10:
        raise ValueError(
            f"limit={limit}: too few reviews to split in three. Use 10 or more, or leave it out."
        )
    used = count if limit is None else min(limit, count)
    train, validation = round(used * TRAIN_SHARE), round(used * VALIDATION_SHARE)
    test = min(max(used - train - validation, SMALLEST_TEST), count - train - validation)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    end = train + validation
    return order[:train], order[train:end], order[end : end + test]


def tokens_of(data: Path, tokenize: Tokenize, *, tokenizer_key: str, cache: Path | None, say: Say) -> Tokens:
    """Tokenise all labelled reviews of an archive or a folder, or take them from the cache.

    Args:
        data: ``aclImdb_v1.tar.gz`` (any tar with its layout) or the folder it unpacks to.
        tokenize: texts to token numbers, already cut to the longest length wanted.
        tokenizer_key: what the tokens depend on besides the data: tokenizer and longest length.
        cache: folder to keep the tokens in; None keeps nothing.
        say: called with a line on what takes long or went wrong without harm.

    Raises:
        DemoError: when the data cannot be read or has no reviews in the layout.

    """
    if not data.exists():
        raise DemoError(
            f"--data {data}: there is no such file or folder. Give aclImdb_v1.tar.gz or the folder it unpacks to."
        )
    key = hashlib.sha256(f"{CACHE_FORMAT}|{_digest(data)}|{tokenizer_key}".encode()).hexdigest()[:24]
    kept = cache / f"imdb-{key}.pt" if cache is not None else None
    if kept is not None and kept.exists():
        try:
            found = files.load(kept)
            return Tokens(found["ids"], found["starts"], found["labels"])
        except (RuntimeError, OSError, KeyError, TypeError) as error:
            say(f"The kept tokens cannot be read and are made again ({kept}: {error}).")
    say("Reading and tokenising the reviews; done once, then kept.")
    # By name: an archive and the folder it unpacks to give the same reviews under the same numbers.
    reviews = sorted(_labelled_reviews(data))
    if not reviews:
        raise DemoError(f"--data {data}: no reviews in it. The layout needed is {LAYOUT}.")
    tokens = Tokens.of(tokenize([text for _, _, text in reviews]), [label for _, label, _ in reviews])
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            files.save({"ids": tokens.ids, "starts": tokens.starts, "labels": tokens.labels}, kept)
        except OSError as error:
            say(f"The tokens are not kept for the next run: {error}. Choose a folder with --cache-dir.")
    return tokens


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
            f"--data {data}: not a whole tar archive ({error}). Give aclImdb_v1.tar.gz or the folder it unpacks to."
        ) from error


def _review_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.txt") if LABELLED.search(path.as_posix()))


def _digest(data: Path) -> str:
    """Return the sha256 of an archive; of a folder, that of its reviews' names and contents."""
    if data.is_file():
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for path in _review_files(data):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(data).as_posix()}|{len(content)}|".encode() + content)
    return whole.hexdigest()
