"""The docstrings task: fine-tune a language model to tell which library a docstring comes from."""

from __future__ import annotations

import ast
import importlib.util
import random
import sysconfig
import warnings
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hasten.demo.task import RowVariant, Say, Settings, first_rows, lever_rows
from hasten.demo.text import TextDataset, TextTask, Tokens
from hasten.demo.text_models import ModelSource

# What the environment of the demo installs anyway.
LIBRARIES = ("python", "numpy", "sklearn", "torch", "transformers")
TRAIN, TEST = 96, 40
# Shorter docstrings do not tell where they come from: "Return the value."
SHORTEST = 30
# At most so many from one module.
MODULE_TEXTS = 4
# Generated and tested code, and packages of others.
SKIPPED = {"test", "tests", "testing", "site-packages", "idlelib", "lib2to3"}
# Seconds in which the plain loop is to be trained in full.
FULL_SECONDS = 50.0
# New layers learn so many times as fast.
NEW_LAYERS = 30

Labeled = tuple[str, int]


class Docstrings(TextTask):
    """Tell from which of five libraries a docstring comes. Nothing is downloaded, and no module is imported.

    Training and test texts come from different modules, and no text comes twice.

    Args:
        source: which model, from :func:`hasten.demo.text_models.find`.
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
        names += ["bf16"] * has_bf16_units(self.device)
        self.rows = [*first_rows(self.epochs), *lever_rows(*names, draws=False)]

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
        return {
            "num_labels": len(LIBRARIES),
            "hidden_dropout_prob": 0.0,
            self.source.attention_dropout_field: 0.0,
        }

    def optimizer(self, model: nn.Module) -> Optimizer:
        new: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            new["pooler" in name or "classifier" in name].append(parameter)
        fast: dict[str, Any] = {"params": new[True], "lr": NEW_LAYERS * self.learning_rate}
        return AdamW([{"params": new[False]}, fast], lr=self.learning_rate)


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
            f"The docstrings task reads the sources of {library}, which is not installed: pip install 'hasten[demo]'."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def split_docstrings(
    folders: dict[str, Path], *, train: int, test: int
) -> tuple[list[Labeled], list[Labeled]]:
    """Return texts and labels to train and to test on: so many of each folder, from other modules, in a fixed order."""
    chance = random.Random(0)
    seen: set[str] = set()
    parts: tuple[list[Labeled], list[Labeled]] = ([], [])
    for label, folder in enumerate(folders.values()):
        modules = sorted(
            path for path in folder.rglob("*.py") if not SKIPPED & set(path.relative_to(folder).parts)
        )
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
    """Return the docstrings of a source file that are long enough; the file is parsed, not executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # Some packages ship files for other versions of Python.
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return [text for text in found if text and len(text) >= SHORTEST]
