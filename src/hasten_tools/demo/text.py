"""The tasks that classify texts: which library a docstring comes from, and whether a film review is positive."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from hasten._lib.errors import make_error
from hasten._lib.files import cache_folder
from hasten._lib.optional import install_line
from hasten.checkpoint import files
from hasten_tools.demo.download import Remote, download, read_files, sha256_of
from hasten_tools.demo.task import (
    Batch,
    DemoError,
    LadderRow,
    RowVariant,
    Say,
    Settings,
    Task,
    first_rows,
    lever_rows,
    plural,
    rows_by_hand,
    shuffled,
)
from hasten_tools.demo.text_models import ModelSource
from hasten_tools.speed.safety import Safety

EVALUATION_BATCH = 32

# What the environment of the demo installs anyway.
LIBRARIES = ("python", "numpy", "sklearn", "torch", "transformers")
# Texts of each library to train and to test on, and at most so many of one module.
TRAIN, TEST, MODULE_TEXTS = 96, 40, 4
# Characters. Shorter docstrings do not tell where they come from ("Return the value."), longer ones are whole pages.
SHORTEST, LONGEST = 30, 1_000
# Generated and tested code, and packages of others.
SKIPPED = {"test", "tests", "testing", "site-packages", "idlelib", "lib2to3"}
# Seconds in which the plain loop is to be trained in full on docstrings.
FULL_SECONDS = 50.0
# New layers learn so many times as fast.
NEW_LAYERS = 30

ARCHIVE = Remote(
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    size_bytes=84_125_825,
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
# The files that carry a label. The archive also holds 50,000 unlabeled reviews, which are left out.
LABELED = re.compile(r"(?:^|/)((?:train|test)/(pos|neg)/[^/]+\.txt)$")
# 35,000 / 5,000 / 10,000 of the 50,000 labeled reviews.
TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.1
SMALLEST_TEST = 1_000
# A change of the format of kept tokens makes a new name, never a misread file.
CACHE_FORMAT = 2

Labeled = tuple[str, int]
Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]


# -- tokens and batches


@dataclass(frozen=True)
class Tokens:
    """Tokenized texts, all in one flat tensor.

    Args:
        ids: token numbers of all texts one after another, int32, shape ``(tokens,)``.
        starts: where each text begins in ``ids``, and the end of the last, int64, shape ``(texts + 1,)``.
        labels: the class of each text, int64, shape ``(texts,)``.

    Example::

        >>> tokens = Tokens.of([[101, 7, 102], [101, 102]], labels=[1, 0])
        >>> len(tokens), tokens[1].tolist()
        (2, [101, 102])

    """

    ids: Tensor
    starts: Tensor
    labels: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], labels: Sequence[int]) -> Tokens:
        """Return the token numbers of texts as one object."""
        ids = torch.cat([torch.tensor(row, dtype=torch.int32) for row in rows])
        return cls(ids, torch.tensor([0, *map(len, rows)]).cumsum(0), torch.tensor(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[int(self.starts[index]) : int(self.starts[index + 1])]


class TextDataset(Dataset[dict[str, Any]]):
    """Some of the tokenized texts, one sample each: ``{"input_ids": (tokens,) int32, "label": int}``.

    ``chosen`` are the numbers of the texts that are samples. Texts of more than ``max_length`` tokens are cut.

    Example::

        >>> tokens = Tokens.of([[101, 7, 102], [101, 102]], labels=[1, 0])
        >>> TextDataset(tokens, [1])[0]
        {'input_ids': tensor([101, 102], dtype=torch.int32), 'label': 0}

    """

    def __init__(self, tokens: Tokens, chosen: Sequence[int], *, max_length: int | None = None) -> None:
        self.tokens, self.chosen = tokens, list(chosen)
        lengths = tokens.starts.diff()[torch.tensor(self.chosen, dtype=torch.int64)]
        self.lengths: list[int] = (lengths if max_length is None else lengths.clamp(max=max_length)).tolist()

    def cut(self, max_length: int | None) -> TextDataset:
        """Return the same texts, of at most so many tokens."""
        return TextDataset(self.tokens, self.chosen, max_length=max_length)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, length = self.chosen[index], self.lengths[index]
        ids = self.tokens[text]
        if len(ids) > length:
            # As a tokenizer cuts: the token that ends a text stays.
            ids = torch.cat([ids[: length - 1], ids[-1:]])
        return {"input_ids": ids, "label": int(self.tokens.labels[text])}


@dataclass
class Pad:
    """Join samples into a batch: input_ids and attention_mask ``(batch, width)`` and labels ``(batch,)``, int64.

    Without ``width``, each batch is padded to its longest text.

    Example::

        >>> Pad(3)([{"input_ids": torch.tensor([101, 102]), "label": 1}])["input_ids"]
        tensor([[101, 102,   0]])

    """

    width: int | None

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        lengths = [len(row) for row in rows]
        width = self.width or max(lengths)
        return {
            "input_ids": torch.stack([F.pad(row, (0, width - len(row))) for row in rows]).long(),
            "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }


class TextTask(Task):
    """Fine-tune a language model to classify texts, padded to the longest that it reads."""

    imports = ("transformers",)
    epochs = 1
    learning_rate = 1e-4
    train_data: TextDataset
    validation_data: TextDataset | None = None
    test_data: TextDataset

    def __init__(self, source: ModelSource, max_length: int, settings: Settings) -> None:
        super().__init__(settings)
        self.source, self.max_length = source, max_length

    def configuration(self, variant: RowVariant) -> dict[str, Any]:
        """Return what the model's configuration changes."""
        return {} if variant.attention_dropout else {self.source.attention_dropout_field: 0.0}

    def build(self, variant: RowVariant) -> nn.Module:
        model = self.source.build(**self.configuration(variant))
        if variant.frozen:
            self.source.freeze_lower_half(model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast(Tensor, model(**batch).loss)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast(Tensor, model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits)

    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        return DataLoader(
            self.train_data.cut(variant.max_length),
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=Pad(None if variant.to_longest else variant.max_length or self.max_length),
        )

    def lengths(self, variant: RowVariant) -> Sequence[int]:
        return self.train_data.cut(variant.max_length).lengths

    def single(self, sample: int) -> Batch:
        return Pad(None)([self.train_data[sample]])

    def held_out(self) -> dict[str, DataLoader[Any]]:
        loaders = {}
        for name, data in (("test", self.test_data), ("validation", self.validation_data)):
            if data is not None:
                # Sorted by length, so that little of a batch is padding: the answers are the same, sooner.
                order = torch.tensor(data.lengths).argsort(stable=True)
                batches = [batch.tolist() for batch in order.split(EVALUATION_BATCH)]
                loaders[name] = DataLoader(data, batch_sampler=batches, collate_fn=Pad(None))
        return loaders

    @property
    def text_share(self) -> float:
        """Share of the plain loop's tokens that are text, 0 to 1."""
        return sum(self.train_data.lengths) / (len(self.train_data) * self.max_length)


# -- docstrings


class Docstrings(TextTask):
    """Tell from which of five libraries a docstring comes. Nothing is downloaded, and no module is imported.

    Training and test texts come from different modules, and no text comes twice.

    Args:
        source: which model, from :func:`hasten_tools.demo.text_models.find`.
        max_length: maximum number of tokens of a text; longer ones are cut, shorter ones padded.
        limit: number of training texts; None trains on as many as the plain loop can in about a minute.
        say: called with a line on what takes long.

    """

    name: ClassVar[str] = "docstrings"
    batch_size = 8

    def __init__(
        self,
        source: ModelSource,
        *,
        max_length: int = 512,
        limit: int | None = None,
        say: Say = print,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(source, max_length, settings)
        self.full_seconds = FULL_SECONDS if limit is None else None
        say("Reading docstrings of the installed libraries.")
        folders = {name: find_sources(name) for name in LIBRARIES}
        train, test = split_docstrings(folders, train=TRAIN, test=TEST)
        texts, labels = zip(*train, *test, strict=True)
        tokens = Tokens.of(source.tokenize(texts, max_length=max_length), labels)
        self.train_data = TextDataset(tokens, range(len(train)))
        self.test_data = TextDataset(tokens, range(len(train), len(tokens)))
        self.shorten(len(train) if limit is None else min(limit, len(train)))
        names = ["packed", "last block for one token"]
        names += ["pages kept"] * (self.device.type == "cpu")
        names += ["fused AdamW"]
        bf16 = has_bf16_units(self.device)
        names += ["bf16"] * bf16
        plain, same = first_rows(self.epochs)
        self.rows = [plain, *rows_by_hand(bf16=bf16), same, *lever_rows(*names, draws=False)]

    def shorten(self, samples: int) -> None:
        self.train_data = TextDataset(self.train_data.tokens, range(samples))
        self.title = (
            f"{self.source.title} tells from which of {len(LIBRARIES)} libraries a docstring comes: "
            f"{samples:,} train / {len(self.test_data):,} test from other modules, "
            f"batches of {self.batch_size}, no dropout; padded to {self.max_length} tokens, "
            f"{self.text_share:.0%} of them are text"
        )

    def configuration(self, variant: RowVariant) -> dict[str, Any]:
        # One short epoch does not overfit. Without dropout, all rows draw the same random numbers: none.
        no_dropout = dict.fromkeys(("hidden_dropout_prob", self.source.attention_dropout_field), 0.0)
        return {"num_labels": len(LIBRARIES), **no_dropout}

    def optimizer(self, model: nn.Module, *, fused: bool | None = None) -> Optimizer:
        new: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            new["pooler" in name or "classifier" in name].append(parameter)
        fast: dict[str, Any] = {"params": new[True], "lr": NEW_LAYERS * self.learning_rate}
        return AdamW([{"params": new[False]}, fast], lr=self.learning_rate, fused=fused)


def has_bf16_units(device: torch.device) -> bool:
    """Return whether products of bf16 are computed by units made for them."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def find_sources(library: str) -> Path:
    """Return the folder of an installed library's source files, found without importing it."""
    if library == "python":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The docstrings task reads the sources of {library}, which is not installed: {install_line('demo')}."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def split_docstrings(folders: dict[str, Path], *, train: int, test: int) -> tuple[list[Labeled], list[Labeled]]:
    """Return texts and labels to train and to test on: so many of each folder, from other modules, in a fixed order."""
    chance = random.Random(0)
    seen: set[str] = set()
    parts: tuple[list[Labeled], list[Labeled]] = ([], [])
    for label, folder in enumerate(folders.values()):
        modules = sorted(path for path in folder.rglob("*.py") if not SKIPPED & set(path.relative_to(folder).parts))
        chance.shuffle(modules)
        for part, count in ((parts[1], test), (parts[0], train)):
            texts: list[str] = []
            while modules and len(texts) < count:
                fresh = [text for text in dict.fromkeys(docstrings_of(modules.pop(0))) if text not in seen]
                texts += chance.sample(fresh, min(MODULE_TEXTS, len(fresh)))
                seen.update(fresh)
            part.extend((text, label) for text in texts[:count])
    for part in parts:
        chance.shuffle(part)
    return parts


def docstrings_of(path: Path) -> list[str]:
    """Return the docstrings of a source file that are not too short or too long; the file is parsed, not executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # Some packages ship files for other versions of Python.
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return [text for text in found if text and SHORTEST <= len(text) <= LONGEST]


# -- reviews


class Imdb(TextTask):
    """Classify IMDB reviews: 35,000 train, 5,000 validate, 10,000 test.

    Args:
        data: ``aclImdb_v1.tar.gz`` or its folder; None downloads it to the cache folder.
        source: which model, from :func:`hasten_tools.demo.text_models.find`.
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
        packed = ["packed", "last block for one token"]
        if self.device.type == "cpu":
            names = ["pages kept", "batches by length", *packed, "cheap dropout masks", "bf16", "compiled"]
        else:
            # Steps this short wait for the host: to compute less helps once the host does not hold them up.
            names = ["TF32", "batches by length", "bf16", "compiled", "CUDA graphs", *packed]
        shorter = max_length // 2
        without_dropout = f"from_pretrained(..., {source.attention_dropout_field}=0.0)"
        other_maths: list[tuple[str, str, dict[str, Any]]] = [
            ("no attention dropout", without_dropout, {"attention_dropout": False}),
            ("lower half frozen", source.freezing, {"frozen": True}),
            (f"{shorter} tokens at most", f"tokenizer(..., max_length={shorter})", {"max_length": shorter}),
        ]
        plain, same = first_rows(self.epochs)
        by_hand = rows_by_hand(bf16=has_bf16_units(self.device))
        self.rows = [plain, *by_hand, same, *lever_rows("fused AdamW", *names)]
        for name, line, changes in other_maths:
            self.rows.append(LadderRow(name, line, changes=changes, safety=Safety.OTHER_MATHS))
        self.rows += lever_rows("hasten's own choice")


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
        what = f"limit={limit}: {used} of {count} reviews are too few to split in three."
        raise make_error(ValueError, what, fix="Use 10 or more.", argument="limit")
    train, validation = round(used * TRAIN_SHARE), round(used * VALIDATION_SHARE)
    end = train + validation
    test = min(max(used - end, SMALLEST_TEST), count - end)
    order = shuffled(count, seed).tolist()
    return order[:train], order[train:end], order[end : end + test]


def tokens_of(data: Path, tokenize: Tokenize, *, tokenizer_key: str, cache: Path, say: Say) -> Tokens:
    """Tokenize all labeled reviews of an archive or a folder, or take them from the cache.

    Texts are already cut to the longest length wanted. ``tokenizer_key`` is what the tokens depend on besides the data.
    """
    digest = hashlib.sha256()
    if data.is_file():
        digest.update(sha256_of(data).encode())
    else:
        for name, _, content in _reviews(data):
            digest.update(f"{name}|{len(content)}|".encode() + content)
    digest.update(f"|{CACHE_FORMAT}|{tokenizer_key}".encode())
    kept = cache / f"imdb-{digest.hexdigest()[:24]}.pt"
    if kept.exists():
        try:
            return Tokens(**files.load(kept))
        except (RuntimeError, OSError, TypeError) as error:
            say(f"The kept tokens cannot be read and are made again ({kept}: {error}).")
    say("Reading and tokenizing the reviews; done once, then kept.")
    # By name: an archive and the folder it unpacks to give the same reviews under the same numbers.
    reviews = sorted(_reviews(data))
    if not reviews:
        raise DemoError(
            f"--data {data}: no reviews in it. The layout needed is aclImdb/{{train,test}}/{{pos,neg}}/*.txt."
        )
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
        if match := LABELED.search(path):
            yield match[1], int(match[2] == "pos"), content
