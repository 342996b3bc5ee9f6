"""The workloads of benchmarks/ train in every column, with the losses of the plain loop."""

from __future__ import annotations

import importlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# What other libraries do, what speed="auto" finds, and texts, which take seconds a step, are left to the benchmark.
COLUMNS = ("tutorial", "engineer", "engineer-bf16", "defaults", "best", "consent")

# The sizes say nothing about whether the columns agree.
SMALLER = {"language": {"CONTEXT": 32, "WIDTH": 96, "DEPTH": 2}, "images": {"SIDE": 16, "COPIES": 1}}


class Ended(Exception):
    """The orders have come to their end."""


class Orders(io.StringIO):
    """One turn of one step; what asks for more is interrupted."""

    def readline(self, *arguments: Any) -> str:
        line = super().readline(*arguments)
        if not line:
            raise Ended
        return line


@pytest.mark.parametrize("name", ["language", "resnet", "vit", "tabular"])
def test_the_columns_of_a_workload_train_with_the_same_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    columns = importlib.import_module("benchmarks.workloads.columns")
    # Steps in bfloat16 take minutes where a processor has no instructions for it.
    for module, sizes in SMALLER.items():
        for size, value in sizes.items():
            monkeypatch.setattr(importlib.import_module(f"benchmarks.workloads.{module}"), size, value)
    kind = importlib.import_module("benchmarks.workloads.registry").load(name)
    clock = importlib.import_module("benchmarks.workloads.clock").Clock
    monkeypatch.setattr(kind, "max_steps", 2)
    monkeypatch.setattr(kind, "batch_size", 2)
    workload = kind(torch.device("cpu"))
    losses: dict[str, list[float]] = {}
    for column in COLUMNS:
        reports = io.StringIO()
        orders = Orders(json.dumps({"steps": 1, "evaluate": False, "profile": False}) + "\n")
        with pytest.raises(Ended):
            columns.COLUMNS[column](workload, clock(orders, reports, torch.device("cpu"), workload.quality))
        losses[column] = [loss for line in reports.getvalue().splitlines() for loss in json.loads(line)["losses"]]
    for column, mine in losses.items():
        assert len(mine) == 2, column
        tolerance = 0.05 if column in columns.LOWER_PRECISION else 1e-3
        pairs = zip(mine, losses["engineer"], strict=True)
        assert all(math.isclose(one, other, rel_tol=tolerance) for one, other in pairs), (column, losses)


def test_a_workload_is_evaluated_on_samples_that_it_does_not_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    load = importlib.import_module("benchmarks.workloads.registry").load
    workload = load("tabular")(torch.device("cpu"))
    untrained = workload.quality(workload.model())
    assert 0.6 < untrained < 0.8  # About the log of 2.
    assert not workload.is_reached(untrained)
    assert workload.is_reached(workload.goal)
