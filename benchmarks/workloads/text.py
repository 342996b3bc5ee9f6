"""Text classification: MiniLM tells from which of five libraries a docstring comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from benchmarks.workloads.task import SEED, Workload
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten_tools.demo import text_models
from hasten_tools.demo.task import RowVariant
from hasten_tools.demo.text import Docstrings


class Text(Workload):
    """Model, texts and optimizer are those of ``hasten demo``. The model drops nothing."""

    name = "text"
    title = "MiniLM-L6 (22.7 M parameters) on docstrings of five libraries, batches of 8 texts"
    goal, goal_text = 0.70, "accuracy 0.70 on texts of other modules"
    batch_size, learning_rate = 8, 1e-4
    max_steps, turn_steps, quick_steps = 80, 10, 2
    best: ClassVar[Mapping[str, Any]] = {"packed": "first_token", "allocator": "keep", "fused_optimizer": True}
    hugging_face = "transformers"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._task = Docstrings(text_models.find("minilm"), say=lambda line: None, seed=SEED)
        self._variant = RowVariant()

    def build(self, *, modern: bool) -> nn.Module:
        # The models of transformers attend in one kernel unless they are told otherwise.
        return self._task.build(self._variant)

    def optimizer(self, model: nn.Module, **arguments: Any) -> Optimizer:
        return self._task.optimizer(model, **arguments)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._task.loss(model, batch)

    def loader(self) -> DataLoader[Any]:
        return self._task.users_loader(self._variant)

    def longest_loader(self) -> DataLoader[Any]:
        """Return a loader of the same batches, each padded to its own longest text."""
        return self._task.users_loader(RowVariant(to_longest=True))

    def engineers_batches(self) -> Iterator[Any]:
        """Pad each batch to its own longest text. Tokens are made once, beforehand.

        Worker processes do not pay: padding eight texts takes a tenth of a millisecond.
        """
        loader = self.longest_loader()
        while True:
            for batch in loader:
                yield {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def quality(self, model: nn.Module) -> float:
        copy, correct = self.copy_of(model), []
        with torch.no_grad():
            for batch in self._task.held_out()["test"]:
                batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
                correct.append(self._task.logits(copy, batch).argmax(-1) == batch["labels"])
        return torch.cat(correct).double().mean().item()

    def useful_flops(self) -> float:
        # A transformer needs a * tokens + b * tokens ** 2 for a text: the shortest and the longest give both.
        lengths = self._task.train_data.lengths
        short, long = min(lengths), max(lengths)
        per_token = {n: self.flops_of(self._task.single(lengths.index(n))) / n for n in (short, long)}
        b = (per_token[long] - per_token[short]) / (long - short)
        a = per_token[short] - b * short
        return self.batch_size * sum(a * n + b * n**2 for n in lengths) / len(lengths)
