"""A small transformer language model, and text to train it on."""

from __future__ import annotations

import math
import os
import urllib.request
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten._lib.errors import make_error
from hasten._lib.files import write_atomically
from hasten.module import LightningModule
from hasten.types import Dataloaders, OptimizerLRScheduler, StepOutput

# Words of WikiText-2.
VOCAB_SIZE = 33278
URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class PositionalEncoding(nn.Module):
    """Add a sine wave of each frequency, evaluated at the sequence's length, and drop out.

    All positions get the same offset, as in Lightning's demo of this name, so that losses can be compared.

    Source: https://arxiv.org/abs/1706.03762

    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dim = dim
        self.max_len = max_len
        self.pe: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, dim)."""
        if self.pe is None or self.pe.device != x.device:
            # Neither buffer nor parameter: checkpoints and gradient exchange have nothing to do with it.
            self.pe = _waves(self.max_len, self.dim, x.device)
        encoded: Tensor = self.dropout(x + self.pe[:, x.size(1)])
        return encoded


def _waves(length: int, dim: int, device: torch.device) -> Tensor:
    """Return sines in even and cosines in odd places: (1, length, dim)."""
    position = torch.arange(length, dtype=torch.float, device=device).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, dim, 2, device=device).float() * (-math.log(10000.0) / dim))
    waves = torch.zeros(length, dim, device=device)
    waves[:, 0::2] = torch.sin(position * frequency)
    waves[:, 1::2] = torch.cos(position * frequency)
    return waves.unsqueeze(0)


class Transformer(nn.Module):
    """Encoder and decoder for a language model.

    Args:
        vocab_size: number of words; by default the size of WikiText-2.
        ninp: width of the embedding.
        nhead: attention heads.
        nhid: width of the feed-forward layers.
        nlayers: layers of the encoder, and of the decoder.
        dropout: probability.

    Example::

        >>> model = Transformer(vocab_size=50)
        >>> words = torch.randint(0, 50, (2, 7))
        >>> model(words, words).shape
        torch.Size([14, 50])

    Source: https://arxiv.org/abs/1706.03762

    """

    # In addition to the plan for torch's layers, for ModelParallelStrategy(plan="auto").
    tp_plan: ClassVar[dict[str, str]] = {"embedding": "embedding_rowwise", "decoder": "colwise_gather_output"}

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            d_model=ninp,
            nhead=nhead,
            num_encoder_layers=nlayers,
            num_decoder_layers=nlayers,
            dim_feedforward=nhid,
            dropout=dropout,
            batch_first=True,
        )
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp = ninp
        self.vocab_size = vocab_size

    def generate_square_subsequent_mask(self, size: int) -> Tensor:
        """Return what keeps each word from seeing those after it: (size, size), 0 or -inf."""
        return torch.full((size, size), float("-inf")).triu(diagonal=1)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log-probabilities of words: (batch * time, vocab_size).

        Args:
            inputs: words, (batch, time), int64.
            target: words the decoder sees, (batch, time), int64.
            mask: added to the decoder's attention, (time, time); none sees those after it by default.

        """
        if mask is None:
            mask = self.generate_square_subsequent_mask(inputs.size(1)).to(inputs.device)
        scale = math.sqrt(self.ninp)
        source = self.pos_encoder(self.embedding(inputs) * scale)
        seen = self.pos_encoder(self.embedding(target) * scale)
        output = self.decoder(self.transformer(source, seen, tgt_mask=mask))
        return F.log_softmax(output, dim=-1).view(-1, self.vocab_size)


class Dictionary:
    """Words and their numbers, in the order in which they were added."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """Add a word if it is new; return its number."""
        number = self.word2idx.setdefault(word, len(self.idx2word))
        if number == len(self.idx2word):
            self.idx2word.append(word)
        return number

    def __len__(self) -> int:
        return len(self.idx2word)


def tokenize(path: str | os.PathLike[str]) -> tuple[Tensor, Dictionary]:
    """Read a text; return the numbers of its words, (words,), int64, and the dictionary; lines end in "<eos>"."""
    dictionary = Dictionary()
    with open(path, encoding="utf-8") as file:
        numbers = [dictionary.add_word(word) for line in file for word in (*line.split(), "<eos>")]
    return torch.tensor(numbers, dtype=torch.int64), dictionary


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """WikiText-2 in blocks: each sample is a block of words, and the same block one word later.

    Args:
        data_dir: folder that holds ``wikitext-2.txt``, or gets it.
        block_size: words of a sample.
        download: fetch the file if it is not there.

    Raises:
        FileNotFoundError: the file is not there, and ``download=False``.
        RuntimeError: the file is not there and cannot be fetched.

    Example::

        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "wikitext-2.txt").write_text("the cat sat on the mat " * 20)
        >>> inputs, target = WikiText2(folder, block_size=5)[0]
        >>> inputs.tolist(), target.tolist()
        ([0, 1, 2, 3, 0], [1, 2, 3, 0, 4])

    Source: https://arxiv.org/abs/1609.07843

    """

    def __init__(
        self, data_dir: str | os.PathLike[str] = "./data", block_size: int = 35, download: bool = True
    ) -> None:
        super().__init__()
        self.path = Path(data_dir) / "wikitext-2.txt"
        if download:
            self.download(self.path)
        if not self.path.exists():
            raise make_error(
                FileNotFoundError,
                f"WikiText2(data_dir={os.fspath(data_dir)!r}, download=False): {self.path} does not exist. Put the "
                "text there, or leave out download=False.",
                argument="data_dir",
            )
        self.data, self.dictionary = tokenize(self.path)
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """Number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block_size
        end = start + self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Fetch the text unless the file is there; raise ``RuntimeError`` without a network."""
        if destination.exists():
            return
        try:
            with urllib.request.urlopen(URL, timeout=10) as answer:
                text = answer.read().decode("utf-8")
        except OSError as error:
            raise RuntimeError(
                f"WikiText2: {URL} could not be reached ({error}). Put the text at {destination.absolute()}."
            ) from error
        destination.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(destination, text, durable=False)


class LightningTransformer(LightningModule):
    """``Transformer`` on WikiText-2.

    Args:
        vocab_size: number of words.

    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Return log-probabilities of words: (batch * time, vocab_size)."""
        output: Tensor = self.model(inputs, target)
        return output

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> StepOutput:
        """Return the mean negative log-likelihood."""
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        """Fetch the text."""
        WikiText2(download=True)

    def train_dataloader(self) -> Dataloaders:
        """Return the text in batches of one block."""
        return DataLoader(WikiText2())
