"""Evaluations with fewer batches than processes: each gives on every process what one process gives."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import EarlyStopping, ModelCheckpoint
from hasten.loggers import CSVLogger
from tests.models import quiet
from tests.refusals import refused


class Evaluates(L.LightningModule):
    """Logs values of each kind for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        # Keeps its samples: scores in rows of three, and targets that are whole numbers.
        self.auroc = torchmetrics.classification.MulticlassAUROC(3, thresholds=None)
        self.after = torchmetrics.CatMetric()
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.batches += 1
        x, y = batch
        for reduce_fx in ("mean", "sum", "max", "min"):
            self.log(reduce_fx, x.mean(), sync_dist=True, reduce_fx=reduce_fx)
        self.log("rows", x.sum(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("counts", x.sum(), sync_dist=True, on_step=True, on_epoch=False, reduce_fx="sum")
        self.log("own", 3.0)
        scores = self.layer(x)
        self.accuracy(scores, y)
        self.auroc.update(scores.softmax(-1), y)
        self.after.update(x.sum())
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)

    def on_validation_epoch_end(self) -> None:
        self.log("after", self.after.compute().sum(), sync_dist=True)
        self.log("always", 2.0, sync_dist=True)
        self.after.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", batch[0].mean(), sync_dist=True)
        self.log("first", 1.0, rank_zero_only=True)
        self.log("found", batch[0].mean(), sync_dist=True, reduce_fx="max", on_step=True, on_epoch=False)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def samples(count: int) -> DataLoader[Any]:
    """Return batches of one sample with different values."""
    x = torch.arange(2.0 * count).view(count, 2) + 1
    return DataLoader(TensorDataset(x, torch.arange(count) % 3), batch_size=1)


def expected(count: int) -> dict[str, float]:
    """Return what one process logs."""
    model = Evaluates()
    sums = [x.sum().item() for x, _ in samples(count)]
    scores = torch.cat([model.layer(x) for x, _ in samples(count)])
    targets = torch.arange(count) % 3
    return {
        "mean": sum(sums) / 2 / count,
        "sum": sum(sums) / 2,
        "max": max(sums) / 2,
        "min": min(sums) / 2,
        "rows": sum(sums) / count,
        "own": 3.0,
        "accuracy": float(model.accuracy(scores, targets)),
        "auroc": float(model.auroc(scores.softmax(-1), targets)),
        "after": sum(sums),
        "always": 2.0,
    }


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
@pytest.mark.filterwarnings("ignore:.*No positive samples.*", "ignore:.*No negative samples.*")
def test_a_process_without_batches_has_the_values_of_one_process(strategy: str, tmp_path: Path) -> None:
    for count in (1, 3):
        model = Evaluates()
        logger = CSVLogger(str(tmp_path), name=f"{strategy}-{count}", version=0)
        trainer = quiet(devices=2, strategy=strategy, logger=logger)
        (values,) = trainer.validate(model, samples(count), verbose=False)
        assert trainer.strategy.reduce_boolean_decision(model.batches < count, all=False)
        assert {name.removesuffix("_epoch"): value for name, value in values.items()} == pytest.approx(expected(count))
        assert {name.removesuffix("_epoch"): float(v) for name, v in trainer.callback_metrics.items()} == pytest.approx(
            expected(count)
        )
        if trainer.is_global_zero:
            file = tmp_path / f"{strategy}-{count}" / "version_0" / "metrics.csv"
            with file.open(newline="") as lines:
                rows = [row for row in csv.DictReader(lines) if row["rows_step"]]
            # Two samples a step; the last one is one process's alone.
            assert [float(row["rows_step"]) for row in rows] == ([3.0] if count == 1 else [5.0, 11.0])
            assert [float(row["counts"]) for row in rows] == ([3.0] if count == 1 else [10.0, 11.0])
            assert [int(row["step"]) for row in rows] == list(range(len(rows)))

    # One sample for the first loader, three for the second.
    values, others = trainer.validate(Evaluates(), [samples(1), samples(3)], verbose=False)
    # The metrics are the same objects for both.
    for name in ("mean", "accuracy", "auroc"):
        assert values[f"{name}/dataloader_idx_0"] == pytest.approx(expected(1)[name])
        assert others[f"{name}/dataloader_idx_1"] == pytest.approx(expected(3)[name])
    (*_, others) = trainer.validate(Evaluates(), [samples(4), samples(2), samples(1)], verbose=False)
    assert others["auroc/dataloader_idx_2"] == pytest.approx(expected(1)["auroc"])
    (values,) = trainer.test(Evaluates(), samples(1), verbose=False)
    assert values == {"test": 1.5} | ({"first": 1.0} if trainer.is_global_zero else {})
    predictions = trainer.predict(Evaluates(), samples(1))
    assert trainer.strategy.gather_objects(predictions) == [[torch.tensor(3.0)], []]

    monitors = [
        ModelCheckpoint(str(tmp_path / strategy), monitor="mean"),
        EarlyStopping("own", patience=1),
    ]
    trainer = quiet(
        devices=2,
        strategy=strategy,
        max_epochs=5,
        num_sanity_val_steps=1,
        callbacks=monitors,
        enable_checkpointing=True,
    )
    trainer.fit(Evaluates(), samples(4), samples(1))
    assert trainer.current_epoch == 2
    scores: list[Any] = trainer.strategy.gather_objects(float(monitors[0].best_model_score))
    assert scores == [1.5, 1.5]


class Calls(Evaluates):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", self(batch[0]).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        pass


class OwnBatches:
    """Batches that each process makes itself: some have none."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        return iter([batch for batch, _ in zip(samples(9), range(self.counts[rank]), strict=False)])


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:.*No positive samples.*", "ignore:.*No negative samples.*")
def test_any_process_may_be_without_batches_and_all_of_them() -> None:
    for counts in ((0, 1), (1, 0), (0, 0)):
        for strategy in ("ddp", "fsdp"):
            trainer = quiet(devices=2, strategy=strategy)
            (values,) = trainer.validate(Evaluates(), OwnBatches(*counts), verbose=False) if sum(counts) else [{}]
            results = trainer.strategy.gather_objects(values) if values else [values, values]
            assert results[0] == results[1]
            if sum(counts):
                assert values["auroc"] == pytest.approx(expected(1)["auroc"])
                assert values["max"] == 1.5
            else:
                assert trainer.test(Evaluates(), OwnBatches(*counts), verbose=False) == [{}]
    # After a call of the whole module torch frees its parameters, in a process that computes along, too.
    results = trainer.validate(Calls(), [OwnBatches(2, 1), OwnBatches(2, 1)], verbose=False)
    assert len(results) == 2

    class Hidden(Evaluates):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torchmetrics.MeanMetric()]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.hidden[0].update(1.0)
            self.log("hidden", self.hidden[0])

    with refused(RuntimeError, says="'hidden' in validation_step (MeanMetric)"):
        quiet(devices=2, strategy="ddp").validate(Hidden(), OwnBatches(1, 0))


class OnOne(Evaluates):
    """Logs a value on one process alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.accuracy.update(self.layer(batch[0]), batch[1])
        if self.global_rank == 1:
            value = self.accuracy if self.kind == "metric" else 1.0
            self.log("here", value, sync_dist=True, on_step=self.kind == "step", on_epoch=self.kind != "step")

    def on_validation_epoch_end(self) -> None:
        pass


@pytest.mark.world_size(2)
def test_a_value_of_one_process_alone_is_an_error_on_all_of_them() -> None:
    for kind in ("mean", "metric", "step"):
        with refused(RuntimeError, says=("'here' in validation_step", "rank 1", "rank 0")):
            quiet(devices=2, strategy="ddp").validate(OnOne(kind), samples(4))


@pytest.mark.world_size(2)
def test_training_data_of_which_no_process_gets_a_batch_is_refused_with_the_reason() -> None:
    three_each = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=4, drop_last=True)
    with refused(ValueError, says=("divided over all", "smaller batch_size")):
        quiet(devices=2, strategy="ddp", max_epochs=1).fit(Evaluates(), three_each)
