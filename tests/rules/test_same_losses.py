"""The losses of a run are those of the loop written by hand, bit for bit, in every precision and strategy."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hasten as L
from tests.models import quiet

FEATURES, CLASSES, BATCH_SIZE, SAMPLES = 8, 3, 4, 44
EPOCHS = 2


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def make_loader(part: tuple[int, int] | None = None) -> DataLoader[Any]:
    """Return the data; with ``part`` (processes, rank) the part of one process, as PyTorch divides it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    dataset = TensorDataset(x, y)
    if part is None:
        return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, *part, shuffle=True, seed=seed)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01)


def adamw_groups(network: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in network.parameters() if p.dim() == 1]
    matrices = [p for p in network.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


@dataclass(frozen=True)
class Recipe:
    """One way to train, for the loop and for the Trainer alike."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    precision: str = "32-true"
    max_norm: float | None = None


@dataclass
class Outcome:
    """What training gave."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    optimizer_state: list[Tensor] = field(default_factory=list)

    def keep(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.weights = [p.detach().clone() for p in network.parameters()]
        states = optimizer.state_dict()["state"]
        self.optimizer_state = [
            v.clone() for s in states.values() for k, v in s.items() if isinstance(v, Tensor) and k != "full_weight"
        ]


TRUE_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def train_by_hand(recipe: Recipe, part: tuple[int, int] | None = None) -> Outcome:
    """Train as one does without any library; with ``part`` (processes, rank) in one of several processes."""
    outcome = Outcome()
    dtype = TRUE_DTYPES.get(recipe.precision)
    network = make_network().to(dtype)
    model = network if part is None else DistributedDataParallel(network)
    # 16-bit weights are the rounded ones of a copy in 32 bits, which the optimizer steps.
    is_short = dtype in (torch.bfloat16, torch.float16)
    full = copy.deepcopy(network).to(torch.float32) if is_short else network
    optimizer = recipe.optimizer(full)
    loader = make_loader(part)
    model.train()
    torch.manual_seed(2 if part is None else 2 + part[1])
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            x = x if dtype is None else x.to(dtype)
            with (
                torch.autocast("cpu", torch.bfloat16) if recipe.precision == "bf16-mixed" else contextlib.nullcontext()
            ):
                loss = F.cross_entropy(model(x), y)
            outcome.losses.append(loss.detach().clone())
            loss.backward()
            if recipe.max_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), recipe.max_norm)
            if is_short:
                for p, q in zip(network.parameters(), full.parameters(), strict=True):
                    q.grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            optimizer.zero_grad()
            if is_short:
                network.load_state_dict(full.state_dict())
                network.zero_grad()
    outcome.keep(network, optimizer)
    return outcome


class Classifier(L.LightningModule):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.network = make_network()
        self.recipe = recipe
        self.outcome = Outcome()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.outcome.losses.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_start(self) -> None:
        torch.manual_seed(2 + self.global_rank)

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer(self.network)


def train_with_trainer(recipe: Recipe, **arguments: Any) -> Outcome:
    """Train with the Trainer."""
    trainer = quiet(max_epochs=EPOCHS, precision=recipe.precision, gradient_clip_val=recipe.max_norm, **arguments)
    module = Classifier(recipe)
    trainer.fit(module, make_loader())
    module.outcome.keep(module.network, trainer.optimizers[0])
    return module.outcome


def train_with_fabric(recipe: Recipe) -> Outcome:
    """Train with a Fabric: the loop by hand, with the lines that a Fabric changes."""
    outcome = Outcome()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=recipe.precision)
    network = make_network()
    optimizer = recipe.optimizer(network)
    model, wrapped = fabric.setup(network, optimizer)
    loader = fabric.setup_dataloaders(make_loader())
    model.train()
    torch.manual_seed(2)
    for _ in range(EPOCHS):
        for x, y in loader:
            with fabric.autocast():
                loss = F.cross_entropy(model(x), y)
            outcome.losses.append(loss.detach().clone())
            fabric.backward(loss)
            if recipe.max_norm is not None:
                fabric.clip_gradients(model, wrapped, max_norm=recipe.max_norm)
            wrapped.step()
            wrapped.zero_grad()
    outcome.keep(network, optimizer)
    return outcome


def assert_equal(mine: Outcome, expected: Outcome) -> None:
    assert len(mine.losses) == len(expected.losses)
    for i, (a, b) in enumerate(zip(mine.losses, expected.losses, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"the loss of batch {i} differs: {a.item()} and {b.item()} by hand"
    torch.testing.assert_close(mine.weights, expected.weights, rtol=0, atol=0)
    torch.testing.assert_close(mine.optimizer_state, expected.optimizer_state, rtol=0, atol=0)


RECIPES = {
    "sgd": Recipe(),
    "adamw groups": Recipe(adamw_groups),
    "64-true": Recipe(precision="64-true"),
    "bf16-mixed": Recipe(adam, precision="bf16-mixed"),
    "bf16-true": Recipe(precision="bf16-true"),
    "16-true": Recipe(precision="16-true"),
    "bf16-mixed, clipping": Recipe(precision="bf16-mixed", max_norm=0.1),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_trainer_and_fabric_give_the_losses_of_the_loop_by_hand(recipe: Recipe) -> None:
    by_hand = train_by_hand(recipe)
    assert_equal(train_with_trainer(recipe), by_hand)
    assert_equal(train_with_fabric(recipe), by_hand)


DISTRIBUTED = {
    "sgd": Recipe(),
    "adam, clipping by norm": Recipe(adam, max_norm=0.1),
    "bf16-mixed": Recipe(precision="bf16-mixed"),
    "bf16-true": Recipe(adam, precision="bf16-true"),
}


@pytest.mark.world_size(2)
def test_two_processes_give_the_losses_of_the_loop_by_hand() -> None:
    rank = torch.distributed.get_rank()
    expected = {name: train_by_hand(recipe, part=(2, rank)) for name, recipe in DISTRIBUTED.items()}
    for name, recipe in DISTRIBUTED.items():
        assert_equal(train_with_trainer(recipe, strategy="ddp", devices=2), expected[name])


def test_different_training_gives_different_losses() -> None:
    with pytest.raises(AssertionError):
        assert_equal(train_by_hand(Recipe()), train_by_hand(Recipe(max_norm=0.1)))
