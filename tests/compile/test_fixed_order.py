"""Compiled on several threads of a CPU, embeddings train to the same bits in each run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from tests.models import quiet

WIDTH, BATCH, LENGTH = 32, 128, 16
# Of a graph that one thread computes, and of one that several do.
FEW, MANY = 40, 60_000


class Model(L.LightningModule):
    """The mean of a text's embeddings tells its class; most tokens are one of ten."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.classes = nn.Embedding(rows, WIDTH, **options), nn.Linear(WIDTH, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(self.classes(self.table(tokens).mean(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Picking(Model):
    """Reads rows by an index, which is another operation than an embedding."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(self.classes(self.table.weight[tokens].mean(1)), labels)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def trained(model: Model, compile: Any, steps: int = 12) -> Model:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, (BATCH * steps, LENGTH), generator=generator)
    labels = torch.randint(5, (BATCH * steps,), generator=generator)
    trainer = quiet(compile=compile)
    trainer.fit(model, DataLoader(TensorDataset(tokens, labels), BATCH))
    if compile:
        assert not trainer.compile_report.graph_breaks
        assert trainer.compile_report.graphs
    return model


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


@pytest.mark.parametrize(("compile", "rows"), [(True, FEW), (True, MANY), ("step", MANY)])
def test_two_runs_are_equal(compile: Any, rows: int) -> None:
    assert_same_bits(trained(Model(rows), compile), trained(Model(rows), compile))


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_two_runs_that_read_rows_by_an_index_are_equal(rows: int) -> None:
    assert_same_bits(trained(Picking(rows), True), trained(Picking(rows), True))


@pytest.mark.parametrize(
    ("rows", "options"), [(FEW, {"padding_idx": 3, "scale_grad_by_freq": True}), (MANY, {"padding_idx": 3})]
)
def test_options_of_embeddings(rows: int, options: dict[str, Any]) -> None:
    plain, compiled = trained(Model(rows, **options), None), trained(Model(rows, **options), True)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], weight, msg=name)
    assert torch.equal(compiled.table.weight[3], Model(rows, **options).table.weight[3])


@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post-grad-custom-pre-pass"])
def test_options_of_the_program_stay(name: str) -> None:
    seen: list[int] = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.nodes))

    trained(Model(FEW), {"options": {name: look}}, steps=2)
    assert seen


def test_a_pass_that_the_program_sets_for_all_graphs_stays() -> None:
    seen: list[int] = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: seen.append(1)):
        trained(Model(FEW), True, steps=2)
    assert seen


def test_a_mode_stays() -> None:
    model = trained(Model(FEW), {"mode": "max-autotune-no-cudagraphs"}, steps=2)
    assert_same_bits(model, trained(Model(FEW), {"mode": "max-autotune-no-cudagraphs"}, steps=2))
