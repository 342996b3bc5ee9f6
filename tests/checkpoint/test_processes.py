"""What processes had gathered, for another number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification, retrieval

from hasten.checkpoint.contents import state_of
from hasten.checkpoint.metrics import ModuleMetrics
from hasten.checkpoint.processes import by_share, joined


class Metrics(nn.Module):
    """One metric for each way in which states are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = classification.BinaryAccuracy()
        self.roc = classification.BinaryAUROC()
        self.binned = classification.BinaryAUROC(thresholds=5)
        self.most, self.least, self.mean = torchmetrics.MaxMetric(), torchmetrics.MinMetric(), torchmetrics.MeanMetric()
        self.rank = retrieval.RetrievalMRR()
        self.several = torchmetrics.MetricCollection(
            [classification.BinaryPrecision(), classification.BinaryRecall(), torchmetrics.CatMetric()]
        )

    def update(self, part: slice) -> None:
        generator = torch.Generator().manual_seed(0)
        scores, labels = torch.rand(30, generator=generator)[part], torch.arange(30)[part] % 3 == 0
        for metric in (self.accuracy, self.roc, self.binned):
            metric.update(scores, labels)
        for value in (self.most, self.least, self.mean):
            value.update(scores)
        self.rank.update(scores, labels, torch.arange(30)[part] // 5)
        self.several["BinaryPrecision"].update(scores, labels)
        self.several["BinaryRecall"].update(scores, labels)
        self.several["CatMetric"].update(scores)

    def results(self) -> dict[str, Any]:
        found = {name: metric.compute() for name, metric in self.named_children() if name != "several"}
        found |= {name: metric.compute() for name, metric in self.several.items()}
        found["CatMetric"] = found["CatMetric"].sort().values
        return found


def state_after(*parts: slice) -> dict[str, Any]:
    module = Metrics()
    for part in parts:
        module.update(part)
    return ModuleMetrics(module, set).state_dict()


def test_metrics_of_several_processes_are_joined_by_what_they_declare() -> None:
    module, whole = Metrics(), Metrics()
    states = [state_after(slice(0, 10)), state_after(slice(10, 15), slice(15, 20)), {}]
    state, lost = ModuleMetrics(module, set).joined(states)
    ModuleMetrics(module, set).load_state_dict(state)
    for part in (slice(0, 10), slice(10, 15), slice(15, 20)):
        whole.update(part)
    assert not lost
    assert module.mean._update_count == 3
    for each in (module, whole):
        each.update(slice(20, 30))
    torch.testing.assert_close(module.results(), whole.results())


def test_a_metric_that_joins_its_states_itself_starts_again() -> None:
    def correlation(part: slice) -> Any:
        module = nn.ModuleDict({"correlation": torchmetrics.PearsonCorrCoef(), "sum": torchmetrics.SumMetric()})
        module["correlation"].update(torch.arange(9.0)[part], torch.arange(9.0)[part] ** 2)  # type: ignore[operator]
        module["sum"].update(torch.arange(9.0)[part])  # type: ignore[operator]
        return module

    parts = [correlation(slice(0, 4)), correlation(slice(4, 9))]
    metrics = ModuleMetrics(parts[1], set)
    states = [ModuleMetrics(part, set).state_dict() for part in parts]
    state, lost = metrics.joined(states)
    assert lost == ["correlation"]
    metrics.load_state_dict(state)
    assert parts[1]["correlation"]._update_count == 0
    assert parts[1]["sum"].compute() == 36
    # One state needs no joining.
    assert metrics.joined(states[:1]) == (states[0], [])


def process(share: tuple[int, int], *values: dict[str, Any], **more: Any) -> dict[str, Any]:
    entries = [{"hook": "training_step", "metric": None, "value": 0.0, "sync": False, **value} for value in values]
    kept = {"train": entries, "callback": {}, "logged": {}, "bar": {}}
    return {"share": share, "values": kept, "window_weight": None, "metrics": {}, "data": {}, **more}


def test_logged_values_are_divided_so_that_all_together_have_all() -> None:
    ranks = [
        process((rank // 2, 2), {"name": "loss", "reduce": "mean", "total": 4.0 + rank // 2, "weight": 2})
        for rank in range(4)
    ]
    ranks[0] = process(
        (0, 2),
        {"name": "loss", "reduce": "mean", "total": torch.tensor(4.0), "weight": 2},
        {"name": "first", "reduce": "sum", "total": 7, "weight": 1},
        window_weight=3.0,
    )
    ranks[2] = process((1, 2), {"name": "loss", "reduce": "mean", "total": 5.0, "weight": 3}, window_weight=6.0)
    # Two processes of each group have read the same.
    assert by_share(ranks) == [ranks[0], ranks[2]]
    assert state_of(ranks, 3, (1, 2)) is ranks[3]
    assert state_of(ranks, 0, (1, 2)) is ranks[2]
    assert state_of(ranks, 0, (0, 4)) is None
    three = [joined(by_share(ranks), (rank, 3), lambda states: {"joined": len(states)}) for rank in range(3)]
    assert [one["metrics"]["joined"] for one in three] == [1, 1, 0]
    losses = [one["values"]["train"][0] for one in three]
    assert sum(float(loss["total"]) for loss in losses) == pytest.approx(9.0)
    assert sum(loss["weight"] for loss in losses) == pytest.approx(5.0)
    # A value of the first process alone stays there.
    assert [[value["name"] for value in one["values"]["train"]] for one in three] == [
        ["loss", "first"],
        *[["loss"]] * 2,
    ]
    assert three[0]["values"]["train"][1]["total"] == 7
    assert [one["window_weight"] for one in three] == [3.0] * 3
    # The row of the latest step, if it is still to be written, has what all processes share.
    for reduce, latest in (("mean", 2.0), ("sum", 4.0), ("max", 3.0)):
        shared = {"name": "x", "reduce": reduce, "weight": 1, "sync": True}
        ranks = [process((rank, 2), {**shared, "value": value, "total": value}) for rank, value in ((0, 1.0), (1, 3.0))]
        assert joined(ranks, (0, 1), lambda _: {})["values"]["train"][0]["value"] == latest


def test_the_state_of_an_earlier_version_has_no_share() -> None:
    ranks = [{"number": 0}, {"number": 1}]
    assert state_of(ranks, 1, (1, 2)) == {"number": 1}
    assert state_of(ranks, 0, (0, 1)) is None
