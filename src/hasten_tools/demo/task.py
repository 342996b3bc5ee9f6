"""Base classes of the demo's tasks: data, model and loss, and the rows of the ladder."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from hasten_tools.speed.levers import LEVERS
from hasten_tools.speed.safety import Safety

Batch = Mapping[str, Tensor]
Say = Callable[[str], None]


class DemoError(RuntimeError):
    """The demo cannot continue; the message says why and what to do. The command prints it without a traceback."""


@dataclass(frozen=True)
class RowVariant:
    """The variant that a row trains: arguments of its Trainer, and changes of model or data."""

    trainer: Mapping[str, Any] | None = None  # Arguments of ``hasten.Trainer``; None trains with the hand-written loop.
    attention_dropout: bool = True  # Keep the dropout inside attention.
    frozen: bool = False  # Train only the upper half of the blocks and the head.
    max_length: int | None = None  # Maximum number of tokens of a sample; None for the task's own.
    to_longest: bool = False  # Pad each batch to its own longest sample.
    fused: bool = False  # Use torch's fused optimizer in the hand-written loop.
    autocast: bool = False  # Compute the loss in bfloat16 where autocast does, in the hand-written loop.

    def argument(self, name: str) -> Any:
        """Return an argument of the Trainer, None where it is not given."""
        return (self.trainer or {}).get(name)

    @property
    def records_graphs(self) -> bool:
        """Whether steps are recorded as CUDA graphs."""
        return isinstance(self.argument("compile"), dict)


@dataclass(frozen=True)
class LadderRow:
    """One row of a ladder."""

    name: str  # For the table.
    line: str  # The line of code that makes the difference.
    # Arguments of the Trainer, in addition to the arguments of the rows above that were faster.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)  # To the other fields of the :class:`RowVariant`.
    safety: Safety = Safety.SAME_BITS  # What the row may change at most.
    alone: bool = False  # The row takes nothing from the rows above and passes nothing on.
    by_hand: bool = False  # The row is a loop without hasten, another one than the first row's.

    @property
    def same_maths(self) -> bool:
        """Whether the same model is trained as in the plain loop, up to rounding, random draws and batches."""
        return self.safety != Safety.OTHER_MATHS

    def on(self, above: RowVariant) -> RowVariant:
        """Return what is trained in this row on top of ``above``.

        Packed rows turn CUDA graphs off: each batch has another number of tokens, and so would need its own graph.
        """
        if self.by_hand:
            return replace(above, trainer=None, **self.changes)
        trainer = {} if self.alone else dict(above.trainer or {})
        if "packed" in self.arguments and above.records_graphs:
            trainer["compile"] = True
        return replace(above, trainer=trainer | dict(self.arguments), **self.changes)


# What somebody who knows PyTorch well writes in an afternoon: the row that a speed-up is to be judged by.
ENGINEERS_LOOP = "the loop a good engineer writes"

LEVER_ROWS: dict[str, dict[str, Any]] = {
    "data in memory": {"resident": True},
    "fused AdamW": {"fused_optimizer": True},
    "pages kept": {"allocator": "keep"},
    "TF32": {"matmul_precision": "high"},
    "batches by length": {"batching": "length"},
    "packed": {"packed": True},
    "packed attention": {"packed": True},
    "last block for one token": {"packed": "first_token"},
    "cheap dropout masks": {"dropout": "fast"},
    "bf16": {"precision": "bf16-mixed"},
    "compiled": {"compile": True},
    "CUDA graphs": {"compile": {"mode": "reduce-overhead"}},
    "hasten's own choice": {"speed": "auto"},
}


def first_rows(epochs: int) -> list[LadderRow]:
    """Return the two rows that every ladder begins with."""
    return [
        LadderRow("plain PyTorch loop", "loss.backward(); optimizer.step()"),
        LadderRow("the same in hasten", f"L.Trainer(max_epochs={epochs}).fit(module, loader)"),
    ]


def rows_by_hand(*, bf16: bool) -> list[LadderRow]:
    """Return the loops without hasten that a ladder of texts is compared with, besides the plain one."""
    code = ["pad_to_longest", "AdamW(..., fused=True)", *["torch.autocast(device, torch.bfloat16)"] * bf16]
    return [
        LadderRow(
            "padded to the longest text",
            "DataLoader(..., collate_fn=pad_to_longest)",
            changes={"to_longest": True},
            safety=Safety.ROUNDING,
            alone=True,
            by_hand=True,
        ),
        LadderRow(
            ENGINEERS_LOOP,
            "; ".join(code),
            changes={"to_longest": True, "fused": True, "autocast": bf16},
            safety=Safety.LOWER_PRECISION if bf16 else Safety.ROUNDING,
            alone=True,
            by_hand=True,
        ),
    ]


def lever_rows(*names: str, draws: bool = True) -> list[LadderRow]:
    """Return rows of ``LEVER_ROWS``, of which each adds an argument of the Trainer.

    Example::

        >>> [row.line for row in lever_rows("fused AdamW", "pages kept")]
        ['L.Trainer(fused_optimizer=True)', 'L.Trainer(allocator="keep")']

    """
    rows, facts = [], {"step_draws": draws, "samples_draw": False}
    for name in names:
        arguments = LEVER_ROWS[name]
        levers = [lever for lever in LEVERS if arguments.items() <= lever.arguments.items()]
        safety = max((lever.safety_in(facts) for lever in levers), default=Safety.ROUNDING)
        line = f"L.Trainer({code_of(arguments)})"
        rows.append(LadderRow(name, line, arguments, safety=safety, alone="speed" in arguments))
    return rows


def code_of(arguments: Mapping[str, Any]) -> str:
    """Return arguments as code, such as ``packed=True, allocator="keep"``."""
    return ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}" for name, value in arguments.items()
    )


class Settings(TypedDict, total=False):
    """Settings that every task accepts; the defaults are attributes of its class."""

    epochs: int
    batch_size: int
    learning_rate: float
    # Of the initial weights and the order.
    seed: int
    device: torch.device


class Task(ABC):
    """A real training job that can be run in several variants.

    Two runs of the same variant do the same work: the same initial weights, the same batches in the same order.
    A task can be pickled: each row is trained in its own process.
    """

    name: ClassVar[str]
    # What every row imports.
    imports: ClassVar[tuple[str, ...]] = ()
    title: str
    rows: list[LadderRow]
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    device: torch.device = torch.device("cpu")
    # Seconds in which the first row is to be trained in full, on fewer samples where necessary; None: on all of them.
    full_seconds: float | None = None

    def __init__(self, settings: Settings) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def model(self, variant: RowVariant) -> nn.Module:
        """Return a fresh model on the CPU, with the same weights in each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build(variant)

    @abstractmethod
    def build(self, variant: RowVariant) -> nn.Module:
        """Return a model with weights drawn from torch's generator, or read from a file."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, 0-d."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return scores, shape ``(batch, classes)``."""

    def optimizer(self, model: nn.Module, *, fused: bool | None = None) -> Optimizer:
        """Return the optimizer of the model's parameters, as a user writes it."""
        return AdamW(model.parameters(), lr=self.learning_rate, fused=fused)

    @abstractmethod
    def users_loader(self, variant: RowVariant) -> DataLoader[Any]:
        """Return the training loader as a user writes it; each call draws the same order.

        It gives mappings of tensors with the key ``"labels"``.
        """

    @abstractmethod
    def held_out(self) -> dict[str, DataLoader[Any]]:
        """Return loaders of the samples held out: "test", and "validation" where a task has such samples."""

    @abstractmethod
    def lengths(self, variant: RowVariant) -> Sequence[int]:
        """Return the tokens of each training sample, without padding."""

    @abstractmethod
    def single(self, sample: int) -> Batch:
        """Return a batch of one training sample, without padding."""

    def steps(self, variant: RowVariant) -> int:
        """Return the optimizer steps of the whole training."""
        return self.epochs * -(-len(self.lengths(variant)) // self.batch_size)

    def with_seed(self, seed: int) -> Task:
        """Return the same task with other initial weights and another order; the split of the data stays."""
        other = copy.copy(self)
        other.seed = seed
        return other

    def shorten(self, samples: int) -> None:
        """Train on so many of the samples only. A task with ``full_seconds`` defines it."""
        raise TypeError(f"The {self.name} task is trained on all of its samples.")


def shuffled(count: int, seed: int = 0) -> Tensor:
    """Return the numbers below ``count`` in an order that stays, int64, shape ``(count,)``."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: "1 epoch", "2 epochs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
