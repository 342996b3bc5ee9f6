"""Where Lightning and hasten do something else on purpose, a program under Lightning's names has Lightning's numbers.

Loaders are read when and as far as Lightning reads them: programs that draw random numbers see the same ones.
"""

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


def test_a_generator_of_the_loader_does_not_move_at_its_end() -> None:
    generator = torch.Generator()
    data = torch.arange(4.0)[:, None]

    class Sees(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn += batch.flatten().tolist()
            return self.layer(batch).sum()

    module = Sees()
    loader = DataLoader(data, 2, shuffle=True, generator=generator.manual_seed(0))  # type: ignore[arg-type,var-annotated]
    quiet(max_epochs=2, limit_val_batches=0).fit(module, loader)
    drawn, orders = module.drawn[1:], []
    generator.manual_seed(0)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        orders += torch.randperm(4, generator=generator).tolist()
    assert drawn == orders


def test_the_last_accumulation_is_divided_by_its_full_size() -> None:
    module = Draws()
    torch.nn.init.zeros_(module.layer.weight)
    data = DataLoader(torch.ones(3, 1))  # type: ignore[arg-type,var-annotated]
    quiet(max_epochs=1, limit_val_batches=0, accumulate_grad_batches=2).fit(module, data)
    # Each gradient is 1. The first step is by (1 + 1) / 2, the second by 1 / 2, with a learning rate of 0.1.
    assert module.layer.weight.item() == pytest.approx(-0.15)


def test_16_bit_weights_are_updated_in_16_bits(recwarn: pytest.WarningsRecorder) -> None:
    class Clipped(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).pow(2).mean()

        # Lightning gives the two numbers by name, always.
        def configure_gradient_clipping(  # type: ignore[override]
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            assert (gradient_clip_val, gradient_clip_algorithm) == (None, None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    module, plain = Clipped(), Clipped().to(torch.bfloat16).layer
    quiet(max_epochs=1, precision="bf16-true").fit(module, batches)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        plain(batch.to(torch.bfloat16)).pow(2).mean().backward()
        optimizer.step()
    assert torch.equal(module.layer.weight, plain.weight)
    assert not [each for each in recwarn if "cannot be called" in str(each.message)]


@pytest.mark.world_size(2)
def test_processes_train_on_shuffled_samples() -> None:
    class Seen(Draws):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch.flatten().tolist()
            return self.layer(batch).sum()

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(8.0).view(8, 1), 2)  # type: ignore[arg-type,var-annotated]

    alias.activate(True)  # Fixtures run in the first process only.
    module = Seen()
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1)
    try:
        trainer.fit(module)
    finally:
        alias.activate(False)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    assert module.seen == order[trainer.global_rank :: 2]
