"""ModelSummary: the table of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.report import ModelSummary, summarize
from hasten.report.summary import human_readable
from tests.refusals import refused


class Net(nn.Module):
    example_input_array: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(3))
        self.head.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.head(self.body(x))


def test_depth() -> None:
    net = Net()
    assert ModelSummary(net, 1).layer_names == ["body", "head"]
    assert ModelSummary(net, 2).layer_names == ["body", "body.0", "body.1", "head"]
    assert ModelSummary(net, -1).layer_names == ["body", "body.0", "body.1", "body.1.0", "body.1.1", "head"]
    assert ModelSummary(net, 0).layer_names == []


@pytest.mark.parametrize("depth", [-2, 1.5, True, None])
def test_bad_depth(depth: Any) -> None:
    with refused(ValueError, "max_depth"):
        ModelSummary(Net(), depth)


def test_counts() -> None:
    summary = summarize(Net(), max_depth=1)
    assert summary.param_nums == [4 * 8 + 8 + 8 * 8 + 8, 18]
    assert summary.total_parameters == 112 + 18 + 3
    assert summary.trainable_parameters == 112 + 3
    assert summary.model_size == pytest.approx(133 * 4e-6)
    assert ModelSummary(Net().to(torch.bfloat16)).model_size == pytest.approx(133 * 2e-6)
    assert "other params" in str(summary)


def test_modes() -> None:
    net = Net()
    net.head.eval()
    summary = ModelSummary(net)
    assert summary.training_modes == [True, False]
    assert summary.total_training_modes == {"train": 5, "eval": 1}


def test_shared_layers_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net.append(net[0])
    assert ModelSummary(net).total_parameters == 20
    assert "other params" not in str(ModelSummary(net))


@pytest.mark.parametrize(
    "example", [torch.zeros(5, 4), (torch.zeros(5, 4),), {"x": torch.zeros(5, 4)}, [torch.zeros(5, 4)]]
)
def test_sizes_with_an_example(example: Any) -> None:
    net = Net()
    net.example_input_array = example
    net.train()
    state = torch.random.get_rng_state()
    summary = ModelSummary(net, -1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert summary.in_sizes[0] == [5, 4]
    assert summary.out_sizes == [[5, 8], [5, 8], [5, 8], [5, 8], [5, 8], [5, 2]]
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks for module in net.modules())
    assert "Out sizes" in str(summary)


def test_an_example_that_does_not_fit_says_whose_it_is() -> None:
    net = Net()
    net.example_input_array = torch.zeros(5, 3)
    with pytest.raises(RuntimeError) as caught:
        ModelSummary(net)
    assert "example_input_array" in caught.value.__notes__[0]
    assert not any(module._forward_hooks for module in net.modules())


def test_lazy_parameters_are_marked() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    summary = ModelSummary(net)
    assert summary.total_parameters == 4
    assert "| ?" in str(summary)
    assert "first forward pass" in str(summary)


def test_half_precision_takes_its_example_along() -> None:
    net = Net().to(torch.bfloat16)
    net.example_input_array = torch.zeros(5, 4)
    assert ModelSummary(net).out_sizes == [[5, 8], [5, 2]]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (999_999, "1.0 M"),
        (123_456, "123 K"),
        (2 * 10**9, "2.0 B"),
        (5 * 10**15, "5,000 T"),
    ],
)
def test_human_readable(number: int, text: str) -> None:
    assert human_readable(number) == text
