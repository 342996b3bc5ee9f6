"""What a workload gives: model, data and optimizer as a tutorial has them, an engineer's loop, and hasten's line."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from hasten.plugins import MixedPrecision

Batch = Any
# Another one: ``WORKLOADS_SEED=1 python -m benchmarks.workloads``.
SEED = int(os.environ.get("WORKLOADS_SEED", "0"))


class Workload(ABC):
    """A training of one model on one device.

    Every call of ``model`` gives the same weights and every ``loader`` the same order, so that all columns that do the
    same maths see the same batches and have the same losses, up to rounding.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    # Reached where ``quality`` is at least this, or at most this if smaller values are better.
    goal: ClassVar[float]
    goal_text: ClassVar[str]
    smaller_is_better: ClassVar[bool] = False
    batch_size: ClassVar[int]
    learning_rate: ClassVar[float] = 1e-3
    # Where a training that has not reached the goal ends.
    max_steps: ClassVar[int]
    # Steps between two evaluations. A turn has as many.
    turn_steps: ClassVar[int]
    # Steps of a turn of ``--quick``.
    quick_steps: ClassVar[int]
    # Arguments of hasten's Trainer: the fastest that do the same maths, and what else a user can agree to.
    best: ClassVar[Mapping[str, Any]]
    consent: Mapping[str, Any] = {"precision": "bf16-mixed"}
    # Whether the model calls torch's attention, for which a CPU has an option of its own.
    attends: ClassVar[bool] = False
    # The library of Hugging Face that people train such a model with: "transformers" or "accelerate".
    hugging_face: ClassVar[str] = "accelerate"
    # Whether its operations are so small that a whole step in one graph is worth its compiling.
    is_small: ClassVar[bool] = False
    train_data: Any

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if self.attends and device.type == "cpu":
            self.consent = {"plugins": MixedPrecision("bf16-mixed", "cpu", fast_attention=True)}

    def model(self, *, modern: bool = False) -> nn.Module:
        """Return a new model with the same weights each time.

        Args:
            modern: as an engineer writes it: attention in one kernel, convolutions with channels last.

        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build(modern=modern)

    @abstractmethod
    def build(self, *, modern: bool) -> nn.Module:
        """Return a model with weights drawn from torch's generator, or read from a file."""

    def loader(self) -> DataLoader[Any]:
        """Return the loader that a tutorial writes."""
        return shuffled_loader(self.train_data, self.batch_size)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def engineers_batches(self) -> Iterator[Batch]:
        """Yield batches without end, on the device, as a good engineer makes them: nothing is done twice."""

    @abstractmethod
    def quality(self, model: nn.Module) -> float:
        """Return the quality on held-out samples."""

    def useful_flops(self) -> float:
        """Return the operations that a step needs on average, without those for padding."""
        return self.flops_of(next(iter(self.loader())))

    def optimizer(self, model: nn.Module, **arguments: Any) -> Optimizer:
        """Return the optimizer; ``arguments`` such as ``fused=True`` are an engineer's."""
        return AdamW(model.parameters(), lr=self.learning_rate, **arguments)

    def is_reached(self, quality: float) -> bool:
        """Say whether a quality is the stated one or better."""
        return quality <= self.goal if self.smaller_is_better else quality >= self.goal

    def mean_loss(self, model: nn.Module, batches: Iterable[Batch]) -> float:
        """Return the loss over held-out batches, of a plain copy of the model."""
        copy = self.copy_of(model)
        with torch.no_grad():
            losses = [self.loss(copy, [part.to(self.device) for part in batch]) for batch in batches]
        return torch.stack(losses).mean().item()

    def copy_of(self, model: nn.Module) -> nn.Module:
        """Return a plain model with the weights of one that may be compiled, packed or wrapped, for evaluation."""
        fresh = self.model(modern=True).to(self.device)
        fresh.load_state_dict(model.state_dict())
        return fresh.eval()

    def flops_of(self, batch: Batch) -> int:
        """Count the operations of forward and backward of a batch."""
        from hasten.report.peaks import flop_counter

        model = self.model(modern=True)
        with flop_counter() as counter:
            self.loss(model, batch).backward()
        return int(counter.get_total_flops())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on the device, as the loops of tutorials do it."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return [tensor.to(device) for tensor in batch]


def shuffled_loader(dataset: Any, batch_size: int, **arguments: Any) -> DataLoader[Any]:
    """Return a shuffling loader, in the same order each time."""
    return DataLoader(
        dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(SEED), drop_last=True, **arguments
    )


def index_batches(samples: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the places of the samples of one batch after another, without end, in the order of ``shuffled_loader``."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        # A DataLoader draws a seed for its workers before each order.
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples // batch_size * batch_size].split(batch_size)
