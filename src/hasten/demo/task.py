"""What a task of the demo provides: data, model, loss and the rows of its ladder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

if TYPE_CHECKING:
    from hasten.demo.plain import Batch


@dataclass(frozen=True)
class Switches:
    """What the rows of a ladder turn on; the default is the plain PyTorch loop.

    Args:
        hasten: train with ``hasten.Trainer``, not by the hand-written loop.
        precision: as in ``Trainer(precision=...)``.
        fused: the optimizer that updates all parameters in one kernel.
        whole_batches: index a whole batch at once, not sample by sample.
        pad_each_batch: pad to the longest sample of the batch, not of the data.
        by_length: put samples of like length in one batch.
        attention_dropout: keep the dropout inside attention.

    """

    hasten: bool = False
    precision: str = "32-true"
    fused: bool = False
    whole_batches: bool = False
    pad_each_batch: bool = False
    by_length: bool = False
    attention_dropout: bool = True


@dataclass(frozen=True)
class Row:
    """One row of a ladder.

    Args:
        name: for the table.
        line: the line that makes the difference to the row above.
        switches: everything that is on in this row.
        same_maths: False when the switch changes what is computed, not only how (up to rounding).

    """

    name: str
    line: str
    switches: Switches
    same_maths: bool = True


@dataclass
class Ladder:
    """Rows that each add one switch to those above.

    Example::

        >>> ladder = Ladder("loss.backward(); optimizer.step()")
        >>> ladder.add("the same in hasten", "L.Trainer().fit(module, loader)", hasten=True)
        >>> ladder.add("fused Adam", "torch.optim.AdamW(..., fused=True)", fused=True)
        >>> [(row.switches.hasten, row.switches.fused) for row in ladder.rows]
        [(False, False), (True, False), (True, True)]

    """

    first_line: str
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows.append(Row("plain PyTorch loop", self.first_line, Switches()))

    def add(self, name: str, line: str, *, same_maths: bool = True, **switches: Any) -> None:
        """Append a row: what the last one has, and ``switches``."""
        self.rows.append(Row(name, line, replace(self.rows[-1].switches, **switches), same_maths))


class Task(ABC):
    """A real training job that can be run with any set of switches.

    Two calls with the same switches do the same work: same weights to begin with, same batches in the
    same order.
    """

    name: ClassVar[str]
    title: str
    metric: ClassVar[str] = "test accuracy"
    rows: list[Row]
    epochs: int
    batch_size: int
    seed: int
    device: torch.device

    @abstractmethod
    def model(self, switches: Switches) -> nn.Module:
        """A fresh model on the CPU; its weights are the same in each call."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch, 0-d."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores, shape ``(batch, classes)``."""

    @abstractmethod
    def optimizer(self, model: nn.Module, switches: Switches) -> Optimizer:
        """The optimizer of the model's parameters."""

    @abstractmethod
    def batches(self, switches: Switches) -> Sampler[list[int]]:
        """Sample numbers of each training batch, drawn anew for each epoch, the same in each call."""

    @abstractmethod
    def width(self, switches: Switches, batch: Sequence[int]) -> int:
        """What the cost of a batch grows with: the length that its samples are padded to."""

    @abstractmethod
    def train_loader(self, switches: Switches, batches: Iterable[list[int]]) -> DataLoader[Any]:
        """A loader of these training batches; it gives mappings of tensors with the key ``"labels"``."""

    @abstractmethod
    def validation_loader(self) -> DataLoader[Any]:
        """A loader of the samples held out to choose settings with."""

    @abstractmethod
    def test_loader(self) -> DataLoader[Any]:
        """A loader of the samples held out to the end."""


class ShuffledBatches(Sampler[list[int]]):
    """Every sample once an epoch, in random batches; with lengths, samples of like length share a batch.

    With lengths the shuffled samples are cut into windows, sorted by length within each window, cut into
    batches, and the batches are shuffled: batches stay random, and little of them is padding.

    Args:
        count: number of samples.
        batch_size: samples in a batch; the last of an epoch (of a window) may have fewer.
        seed: of the shuffles; each epoch draws anew.
        lengths: of each sample; None leaves the order random.
        window: batches in a window.

    Example::

        >>> lengths = [5, 90, 7, 80]
        >>> sorted(sorted(batch) for batch in ShuffledBatches(4, 2, seed=0, lengths=lengths))
        [[0, 2], [1, 3]]

    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        seed: int,
        lengths: Sequence[int] | None = None,
        window: int = 50,
    ) -> None:
        self.count = count
        self.batch_size = batch_size
        self.lengths = lengths
        self.window = window
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        size, window = self.batch_size, self.batch_size * self.window
        if self.lengths is None:
            return -(-self.count // size)
        whole, rest = divmod(self.count, window)
        return whole * self.window + -(-rest // size)

    def __iter__(self) -> Iterator[list[int]]:
        size = self.batch_size
        order: list[int] = torch.randperm(self.count, generator=self.generator).tolist()
        if self.lengths is None:
            yield from (order[start : start + size] for start in range(0, self.count, size))
            return
        lengths, step = self.lengths, size * self.window
        batches = []
        for first in range(0, self.count, step):
            window = sorted(order[first : first + step], key=lengths.__getitem__)
            batches += [window[start : start + size] for start in range(0, len(window), size)]
        for position in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[position]
