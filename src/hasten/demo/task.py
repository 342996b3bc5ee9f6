"""What a task of the demo provides: data, model, loss and the rows of its ladder."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.batching.widths import rounded_up
from hasten.data import LengthBatching, rebatch
from hasten.speed.levers import LEVERS
from hasten.speed.safety import Safety

if TYPE_CHECKING:
    from hasten.demo.plain import Batch


@dataclass(frozen=True)
class Switches:
    """What the rows of a ladder turn on; the default is the plain PyTorch loop.

    Args:
        hasten: train with ``hasten.Trainer``, not by the hand-written loop.
        fused: ``Trainer(fused_optimizer=True)``.
        keep: ``Trainer(allocator="keep")``.
        by_length: ``Trainer(batching="length")``.
        resident: ``Trainer(resident=True)``.
        tf32: ``Trainer(matmul_precision="high")``.
        packed: ``Trainer(packed=True)``.
        first_token: ``Trainer(packed="first_token")``.
        fast_dropout: ``Trainer(dropout="fast")``.
        compiled: ``Trainer(compile=True)``.
        graphs: ``Trainer(compile={"mode": "reduce-overhead"})``: compiled, and recorded as CUDA graphs.
        precision: as in ``Trainer(precision=...)``.
        attention_dropout: keep the dropout inside attention; without it the maths is another.
        frozen: train the upper half of the blocks and the head only.
        max_length: tokens of a sample at most; None for what the task says.

    """

    hasten: bool = False
    fused: bool = False
    keep: bool = False
    by_length: bool = False
    resident: bool = False
    tf32: bool = False
    packed: bool = False
    first_token: bool = False
    fast_dropout: bool = False
    compiled: bool = False
    graphs: bool = False
    precision: str = "32-true"
    attention_dropout: bool = True
    frozen: bool = False
    max_length: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the Trainer's arguments for these switches.

        Example::

            >>> Switches(hasten=True, packed=True).arguments()
            {'packed': True}

        """
        chosen = {
            "fused_optimizer": True if self.fused else None,
            "allocator": "keep" if self.keep else None,
            "batching": "length" if self.by_length else None,
            "resident": True if self.resident else None,
            "matmul_precision": "high" if self.tf32 else None,
            "packed": "first_token" if self.first_token else True if self.packed else None,
            "dropout": "fast" if self.fast_dropout else None,
            "compile": {"mode": "reduce-overhead"} if self.graphs else True if self.compiled else None,
            "precision": self.precision if self.precision != "32-true" else None,
        }
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """One row of a ladder.

    Args:
        name: for the table.
        line: the line that makes the difference.
        changes: the switches it turns, on top of those of the rows above that paid.
        safety: what the switch may change at most.

    """

    name: str
    line: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    safety: Safety = Safety.SAME_BITS

    @property
    def same_maths(self) -> bool:
        """Whether the model trained is the one of the plain loop; rounding, draws and batches may be others."""
        return self.safety != Safety.OTHER_MATHS

    def on(self, switches: Switches) -> Switches:
        """Return ``switches`` with those of this row turned as well.

        Packed rows put CUDA graphs off: each batch has another number of tokens, and would be recorded anew.
        """
        turned = replace(switches, **self.changes)
        packs = "packed" in self.changes or "first_token" in self.changes
        return replace(turned, graphs=False) if packs else turned


def _safety_of(changes: Mapping[str, Any]) -> Safety:
    """Return the class of switches: that of the least safe lever they turn on."""
    arguments = replace(Switches(), **changes).arguments()
    # The models of the demo have dropout; their data has no augmentation.
    known = {"step_draws": True, "samples_draw": False}
    classes = [
        lever.safety_in(known)
        for lever in LEVERS
        for name, value in arguments.items()
        if lever.arguments.get(name) == value
    ]
    if not classes:
        return Safety.SAME_BITS if set(changes) <= {"hasten"} else Safety.OTHER_MATHS
    return max(classes)


@dataclass
class Ladder:
    """Rows that each add one switch to those above.

    Example::

        >>> ladder = Ladder("loss.backward(); optimizer.step()")
        >>> ladder.add("the same in hasten", "L.Trainer().fit(module, loader)", hasten=True)
        >>> ladder.add("fused Adam", "L.Trainer(fused_optimizer=True)", fused=True)
        >>> [dict(row.changes) for row in ladder.rows]
        [{}, {'hasten': True}, {'fused': True}]

    """

    first_line: str
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows.append(Row("plain PyTorch loop", self.first_line))

    def add(self, name: str, line: str, **changes: Any) -> None:
        """Append a row that turns these switches: of the class of its lever; what is not a lever changes the maths."""
        self.rows.append(Row(name, line, changes, _safety_of(changes)))

    def add_smaller_and_compiled(self) -> None:
        """Append the rows of bf16 and of the compiler."""
        self.add("bf16", 'L.Trainer(precision="bf16-mixed")', precision="bf16-mixed")
        self.add("compiled", "L.Trainer(compile=True)", compiled=True)

    def add_graphs(self) -> None:
        """Append the row of CUDA graphs, for a GPU."""
        self.add("CUDA graphs", "L.Trainer(compile={'mode': 'reduce-overhead'})", graphs=True)


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
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters, as a user writes it."""

    @abstractmethod
    def users_loader(self, switches: Switches) -> DataLoader[Any]:
        """The training loader as a user writes it; it gives mappings of tensors with the key ``"labels"``.

        Each call draws the same order.
        """

    @abstractmethod
    def validation_loader(self) -> DataLoader[Any]:
        """A loader of the samples held out to choose settings with."""

    @abstractmethod
    def test_loader(self) -> DataLoader[Any]:
        """A loader of the samples held out to the end."""

    def with_seed(self, seed: int) -> Task:
        """Return the same task with other new weights and another order; the split of the data stays."""
        other = copy.copy(self)
        other.seed = seed
        return other

    @abstractmethod
    def length(self, switches: Switches, sample: int) -> int:
        """What the work of a training sample grows with: its tokens, without padding."""

    def width(self, switches: Switches, batch: Sequence[int]) -> int:
        """The length that the samples of a batch are padded to."""
        return max(self.length(switches, sample) for sample in batch)

    def alone(self, sample: int) -> Batch:
        """A batch of one training sample, without padding."""
        batch: Batch = next(iter(self.loader(Switches(), [[sample]])))
        return batch

    def loader(self, switches: Switches, batches: Sequence[list[int]]) -> DataLoader[Any]:
        """A loader of these training batches alone, made as the switches would make them."""
        like = self._changed(switches)
        # Workers stay: how samples are read is part of what a row is.
        return DataLoader(
            like.dataset,
            batch_sampler=batches,
            collate_fn=like.collate_fn,
            num_workers=like.num_workers,
        )

    def batches(self, switches: Switches) -> list[list[int]]:
        """Sample numbers of the training batches of all epochs; the same in each call."""
        sampler = self._changed(switches).batch_sampler
        assert sampler is not None
        found: list[list[int]] = []
        for epoch in range(self.epochs):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            found += sampler
        return found

    def pad_share(self, switches: Switches) -> float:
        """Share of what the model computes that is padding, 0 to 1."""
        if switches.packed or switches.first_token:
            return 0.0
        batches = self.batches(switches)
        widths = self.padded_widths(switches, batches)
        computed = sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
        return 1 - sum(self.length(switches, sample) for batch in batches for sample in batch) / computed

    def padded_widths(self, switches: Switches, batches: Sequence[Sequence[int]]) -> list[int]:
        """The widths that batches are computed in: those made by length are rounded up to a few."""
        multiple = getattr(self._changed(switches).collate_fn, "multiple_of", None)
        return [rounded_up(self.width(switches, batch), multiple) for batch in batches]

    def _changed(self, switches: Switches) -> DataLoader[Any]:
        """What ``Trainer(batching="length")`` makes of the user's loader, if that is on."""
        loader = self.users_loader(switches)
        if not switches.by_length:
            return loader
        changed: DataLoader[Any] = rebatch(
            loader, LengthBatching(), few_shapes=switches.compiled or switches.graphs
        )
        return changed
