"""A network with embeddings on a table of 500,000 generated rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from benchmarks.workloads.task import SEED, Workload, index_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ROWS, HELD_OUT = 500_000, 50_000
# How many values each column of categories has.
CATEGORIES = (7, 12, 24, 31, 50, 100, 400, 1_000)
NUMBERS = 24


class Network(nn.Module):
    """Categories ``(batch, 8)`` and numbers ``(batch, 24)`` to the logit of a yes ``(batch,)``."""

    def __init__(self) -> None:
        super().__init__()
        widths = [min(16, (count + 1) // 2) for count in CATEGORIES]
        self.embeddings = nn.ModuleList(nn.Embedding(n, width) for n, width in zip(CATEGORIES, widths, strict=True))
        self.norm = nn.BatchNorm1d(NUMBERS)
        self.layers = nn.Sequential(
            nn.Linear(sum(widths) + NUMBERS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        columns = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        return cast(Tensor, self.layers(torch.cat([*columns, self.norm(numbers)], dim=1)).squeeze(1))


def make_table() -> tuple[Tensor, Tensor, Tensor]:
    """Return categories, numbers and answers: effects of the categories, two of them together, and of products."""
    generator = torch.Generator().manual_seed(SEED)
    categories = torch.stack([torch.randint(n, (ROWS,), generator=generator) for n in CATEGORIES], dim=1)
    numbers = torch.randn(ROWS, NUMBERS, generator=generator)
    score = numbers[:, 0] * numbers[:, 1] + 2 * (numbers[:, 2] * 2).sin() + numbers[:, 3:8] @ torch.linspace(-1, 1, 5)
    for i, count in enumerate(CATEGORIES):
        score += torch.randn(count, generator=generator)[categories[:, i]] * 0.7
    together = torch.randn(CATEGORIES[0], CATEGORIES[1], generator=generator)
    score += together[categories[:, 0], categories[:, 1]]
    answers = torch.rand(ROWS, generator=generator) < score.sigmoid()
    return categories, numbers, answers.float()


class Tabular(Workload):
    """450,000 rows to train on, 50,000 held out."""

    name = "tabular"
    title = "MLP with embeddings (0.1 M parameters) on 500,000 rows of 8 categories and 24 numbers, batches of 256"
    goal, goal_text, smaller_is_better = 0.42, "log loss 0.42 on other rows", True
    batch_size, learning_rate = 256, 1e-3
    max_steps, turn_steps, quick_steps = 4_000, 500, 200
    is_small = True
    best: ClassVar[Mapping[str, Any]] = {"resident": True, "allocator": "keep", "fused_optimizer": True}

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        table = make_table()
        self.train_data = TensorDataset(*(column[HELD_OUT:] for column in table))
        self._held_out = TensorDataset(*(column[:HELD_OUT] for column in table))

    def build(self, *, modern: bool) -> nn.Module:
        return Network()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        categories, numbers, answers = batch
        return F.binary_cross_entropy_with_logits(model(categories, numbers).float(), answers)

    def engineers_batches(self) -> Iterator[Any]:
        """Take rows of three tensors on the device by their indices."""
        columns = [column.to(self.device) for column in self.train_data.tensors]
        for indices in index_batches(len(self.train_data), self.batch_size):
            rows = indices.to(self.device)
            yield [column[rows] for column in columns]

    def quality(self, model: nn.Module) -> float:
        return self.mean_loss(model, [self._held_out.tensors])
