"""Loaders are read when and as far as Lightning reads them: programs that draw random numbers see the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hasten as L
from hasten.elsewhere import alias
from tests.models import quiet


@pytest.fixture(autouse=True)
def lightning_s_names() -> Iterator[None]:
    alias.activate(True)
    yield
    alias.activate(False)


class Draws(L.LightningModule):
    """Draws a number in each step and before the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.drawn: list[float] = []

    def draw(self) -> None:
        self.drawn.append(torch.rand(()).item())

    def on_train_start(self) -> None:
        self.draw()

    def on_validation_start(self) -> None:
        self.draw()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.draw()
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draw()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1), 2)  # type: ignore[arg-type,var-annotated]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin() -> None:
    """Draw what a loader draws when it is iterated over."""
    torch.empty((), dtype=torch.int64).random_()


def test_random_numbers_come_in_lightning_s_order() -> None:
    module = Draws()
    torch.manual_seed(0)
    trainer = quiet(max_epochs=2, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, val_dataloaders=DataLoader(torch.ones(1, 1)))  # type: ignore[arg-type,var-annotated]
    torch.manual_seed(0)
    expected: list[float] = []

    def rand(number: int) -> None:
        expected.extend(torch.rand(()).item() for _ in range(number))

    begin()
    rand(2)  # on_train_start, training_step
    begin()
    rand(2)  # on_validation_start, validation_step
    begin()
    begin()  # New loaders are begun twice.
    rand(1)
    begin()
    rand(2)
    assert module.drawn == expected


def test_no_more_batches_are_read_than_the_length_says() -> None:
    class Endless:
        read = 0

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                self.read += 1
                yield torch.ones(1, 1)

    train, validation = Endless(), Endless()
    module = Draws()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, train, validation)
    assert (trainer.global_step, train.read, validation.read) == (6, 6, 6)
    together = {"first": Endless(), "second": DataLoader(torch.ones(1, 1))}  # type: ignore[arg-type,var-annotated]
    trainer = quiet(max_epochs=1, limit_val_batches=0)

    class Joined(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch["first"] + batch["second"]).sum()

    trainer.fit(Joined(), together)
    assert (trainer.global_step, together["first"].read) == (3, 3)  # type: ignore[attr-defined]
