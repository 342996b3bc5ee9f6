"""The imdb task: fine-tune a language model to tell whether a film review is positive."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack

from hasten._lib.files import cache_folder
from hasten.checkpoint import files
from hasten.demo.download import Remote, download, read_files, sha256_of
from hasten.demo.task import DemoError, LadderRow, Say, Settings, first_rows, lever_rows, plural, shuffled
from hasten.demo.text import TextDataset, TextTask, Tokens
from hasten.demo.text_models import ModelSource
from hasten.speed.safety import Safety

ARCHIVE = Remote(
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    size_bytes=84_125_825,
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
# The files that carry a label. The archive also holds 50,000 unlabeled reviews, which are left out.
LABELED = re.compile(r"(?:^|/)((?:train|test)/(pos|neg)/[^/]+\.txt)$")
LAYOUT = "aclImdb/{train,test}/{pos,neg}/*.txt"
# 35,000 / 5,000 / 10,000 of the 50,000 labeled reviews.
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1
SMALLEST_TEST = 1_000
# A change of the format of kept tokens makes a new name, never a misread file.
CACHE_FORMAT = 2

Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]


class Imdb(TextTask):
    """Classify IMDB reviews: 35,000 train, 5,000 validate, 10,000 test.

    Args:
        data: ``aclImdb_v1.tar.gz`` or its folder; None downloads it to the cache folder.
        source: which model, from :func:`hasten.demo.text_models.find`.
        limit: use only so many reviews; see :func:`split_reviews`.
        max_length: maximum number of tokens of a review; longer ones are cut.
        cache: folder for the archive and the tokens; None takes hasten's cache folder.
        say: called with a line on what takes long.

    """

    name: ClassVar[str] = "imdb"
    batch_size = 12

    def __init__(
        self,
        data: Path | None,
        source: ModelSource,
        *,
        limit: int | None = None,
        max_length: int = 512,
        cache: Path | None = None,
        say: Say = print,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(source, max_length, settings)
        folder = cache or cache_folder()
        tokens = tokens_of(
            data or download(ARCHIVE, folder),
            lambda texts: source.tokenize(texts, max_length=max_length),
            tokenizer_key=source.tokenizer_key(max_length),
            cache=folder,
            say=say,
        )
        parts = [TextDataset(tokens, part) for part in split_reviews(len(tokens), limit=limit)]
        self.train_data, self.validation_data, self.test_data = parts
        self.title = (
            f"{source.title} on IMDB reviews: {len(parts[0]):,} train / {len(parts[1]):,} validation / "
            f"{len(parts[2]):,} test, {plural(self.epochs, 'epoch')} of batches of {self.batch_size}; "
            f"padded to {max_length} tokens, {self.text_share:.0%} of them are text"
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

    With a limit only so many are used, in the same proportions; but 1,000 reviews are tested where there are that many,
    as their accuracy has a standard error of about 1 %.

    Example::

        >>> [len(part) for part in split_reviews(50_000, limit=2_000)]
        [1400, 200, 1000]

    """
    used = count if limit is None else min(limit, count)
    if used < 10:
        raise ValueError(
            f"limit={limit}: {used} of {count} reviews are too few to split in three. Use 10 or more."
        )
    train, validation = round(used * TRAIN_SHARE), round(used * VALIDATION_SHARE)
    end = train + validation
    test = min(max(used - end, SMALLEST_TEST), count - end)
    order = shuffled(count, seed).tolist()
    return order[:train], order[train:end], order[end : end + test]


def tokens_of(data: Path, tokenize: Tokenize, *, tokenizer_key: str, cache: Path, say: Say) -> Tokens:
    """Tokenize all labeled reviews of an archive or a folder, or take them from the cache.

    Args:
        data: ``aclImdb_v1.tar.gz`` or its folder.
        tokenize: texts to token numbers, already cut to the longest length wanted.
        tokenizer_key: what the tokens depend on besides the data.
        cache: folder to keep the tokens in.
        say: called with a line on what takes long or went wrong without harm.

    """
    key = hashlib.sha256(f"{CACHE_FORMAT}|{_digest(data)}|{tokenizer_key}".encode()).hexdigest()[:24]
    kept = cache / f"imdb-{key}.pt"
    if kept.exists():
        try:
            return Tokens(**files.load(kept))
        except (RuntimeError, OSError, TypeError) as error:
            say(f"The kept tokens cannot be read and are made again ({kept}: {error}).")
    say("Reading and tokenizing the reviews; done once, then kept.")
    # By name: an archive and the folder it unpacks to give the same reviews under the same numbers.
    reviews = sorted(_reviews(data))
    if not reviews:
        raise DemoError(f"--data {data}: no reviews in it. The layout needed is {LAYOUT}.")
    texts = [content.decode("utf-8", errors="replace") for _, _, content in reviews]
    tokens = Tokens.of(tokenize(texts), [label for _, label, _ in reviews])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        files.save(vars(tokens), kept)
    except OSError as error:
        say(f"The tokens are not kept for the next run: {error}. Choose a folder with --cache-dir.")
    return tokens


def _reviews(data: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, label and text of each labeled review."""
    for path, content in read_files(data, ARCHIVE, LABELED.search):
        match = LABELED.search(path)
        assert match is not None
        yield match[1], int(match[2] == "pos"), content


def _digest(data: Path) -> str:
    """Return the sha256 of an archive; of a folder, that of its reviews' names and contents."""
    if data.is_file():
        return sha256_of(data)
    whole = hashlib.sha256()
    for name, _, content in _reviews(data):
        whole.update(f"{name}|{len(content)}|".encode() + content)
    return whole.hexdigest()
