"""A small recurrent language model, trained on text in order."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from hasten.module import LightningModule
from hasten.types import Dataloaders, OptimizerLRScheduler, StepOutput
from hasten_lightning.demos.transformer import VOCAB_SIZE, WikiText2

Hidden = tuple[Tensor, Tensor]


class SimpleLSTM(nn.Module):
    """Embedding, LSTM and a linear layer.

    Args:
        vocab_size: number of words; by default the size of WikiText-2.
        ninp: width of the embedding.
        nhid: width of the LSTM.
        nlayers: layers of the LSTM.
        dropout: probability.

    Example::

        >>> model = SimpleLSTM(vocab_size=50, ninp=8, nhid=8, nlayers=1, dropout=0.0)
        >>> output, hidden = model(torch.randint(0, 50, (2, 7)), model.init_hidden(2))
        >>> output.shape
        torch.Size([14, 50])

    """

    def __init__(
        self, vocab_size: int = VOCAB_SIZE, ninp: int = 512, nhid: int = 512, nlayers: int = 4, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        self.nlayers = nlayers
        self.nhid = nhid
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights of embedding and output between -0.1 and 0.1."""
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return log-probabilities of words, (batch * time, vocab_size), and the new hidden state.

        Args:
            input: words, (batch, time), int64.
            hidden: state and cell, each (nlayers, batch, nhid).

        """
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.vocab_size)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch_size: int) -> Hidden:
        """Return zeros as state and cell: each (nlayers, batch_size, nhid)."""
        zeros = next(self.parameters()).new_zeros
        shape = (self.nlayers, batch_size, self.nhid)
        return zeros(shape), zeros(shape)


class SequenceSampler(Sampler[list[int]]):
    """Batches whose k-th sample follows the k-th sample of the batch before.

    Args:
        dataset: has a length.
        batch_size: samples of a batch.

    Example::

        >>> list(SequenceSampler(range(7), batch_size=2))
        [[0, 3], [1, 4], [2, 5]]

    """

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.batch_size = batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        whole = len(self.dataset) - len(self.dataset) % self.batch_size
        return (list(range(first, whole, self.chunk_size)) for first in range(self.chunk_size))

    def __len__(self) -> int:
        return self.chunk_size


class LightningLSTM(LightningModule):
    """``SimpleLSTM`` on WikiText-2; its hidden state goes from one batch to the next.

    Args:
        vocab_size: number of words.

    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: Hidden | None = None

    def on_train_epoch_end(self) -> None:
        """Forget the hidden state."""
        self.hidden = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> StepOutput:
        """Return the mean negative log-likelihood, and log it as "train_loss"."""
        inputs, target = batch
        state, cell = self.hidden if self.hidden is not None else self.model.init_hidden(inputs.size(0))
        output, self.hidden = self.model(inputs, (state.detach(), cell.detach()))
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def prepare_data(self) -> None:
        """Fetch the text."""
        WikiText2(download=True)

    def train_dataloader(self) -> Dataloaders:
        """Return the text in 20 strands."""
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=20.0)
