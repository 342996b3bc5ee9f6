"""torchmetrics, their wrappers and collections go on in a resumed run with all that they had gathered."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import wrappers
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

import hasten as L
from hasten.callbacks import LambdaCallback
from hasten.checkpoint import files
from tests.callbacks.resuming import assert_same, fitted
from tests.models import Classifier, loader
from tests.refusals import warned


class Spread(torchmetrics.MeanMetric):
    """A user's metric, which keeps more than its states."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale, self.largest, self.history = scale, float("-inf"), []

    def update(self, value: Tensor) -> None:
        super().update(value * self.scale)
        self.largest = max(self.largest, float(value))
        self.history.append(value.detach())

    def compute(self) -> Tensor:
        return super().compute() + self.largest + torch.stack(self.history).median()


def accuracy() -> torchmetrics.Metric:
    return MulticlassAccuracy(2, average="micro")


class Measured(Classifier):
    """Gathers over all epochs and resets nothing."""

    def __init__(self, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tracker = wrappers.MetricTracker(torchmetrics.MetricCollection([accuracy(), MulticlassRecall(2)]))
        self.extremes = wrappers.MinMaxMetric(accuracy())
        self.running = wrappers.Running(torchmetrics.MeanMetric(), window=3)
        self.several = torchmetrics.MetricCollection(
            [MulticlassPrecision(2), MulticlassRecall(2), torchmetrics.MeanSquaredError()]
        )
        self.drawn = wrappers.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=2)
        self.own = Spread(scale)
        # Not a module's modules: in a plain list and a dict.
        self.listed = [torchmetrics.MeanMetric(), wrappers.MinMaxMetric(torchmetrics.MeanMetric())]
        self.named = {"sum": torchmetrics.SumMetric()}
        self.last: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        for metric in (self.running, self.own, *self.listed, self.named["sum"]):
            metric.update(loss.detach())
        self.drawn.update(logits[:, 0].detach())
        self.listed[1].compute()
        self.several.update(logits.argmax(1), batch[1])
        return loss

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.tracker.update(logits, batch[1])
        self.extremes.update(logits, batch[1])
        self.several.update(logits.argmax(1), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.extremes.compute()

    def on_train_epoch_end(self) -> None:
        metrics: list[Any] = [self.extremes, self.running, self.several, self.drawn, self.own, *self.listed]
        metrics.append(self.named["sum"])
        self.last = {str(i): metric.compute() for i, metric in enumerate(metrics)}
        if self.tracker.n_steps:
            self.last["tracker"] = self.tracker.compute_all()
            self.last["best"] = self.tracker.best_metric(return_step=True)
        self.last["groups"] = self.several.compute_groups


class Logged(Classifier):
    """Logs metrics, which are reset where their epoch begins; a wrapper's own extremes are kept."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.val, self.train_running = accuracy(), wrappers.Running(torchmetrics.MeanMetric(), window=3)
        self.window = wrappers.Running(torchmetrics.MeanMetric(), window=2)
        self.last: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_running.update(loss.detach())
        self.log("running", self.train_running, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val.update(self(batch[0]), batch[1])
        self.log("val", self.val)
        self.window.update(self.loss(batch))
        self.log("window", self.window)

    def on_train_epoch_end(self) -> None:
        self.last = {name: value.item() for name, value in self.trainer.callback_metrics.items()}


def save_at(path: Path, hook: str, call: int) -> LambdaCallback:
    """Return a callback that saves in a hook when it is called for the n-th time."""
    calls = itertools.count(1)
    return LambdaCallback(**{hook: lambda trainer, *_: trainer.save_checkpoint(path) if next(calls) == call else None})


SAVES = [
    ("on_train_batch_end", 2),
    ("on_train_batch_end", 9),
    ("on_validation_batch_end", 4),
    ("on_validation_epoch_end", 2),
    ("on_validation_end", 2),
    ("on_train_epoch_end", 2),
]


@pytest.mark.parametrize("kind", [Measured, Logged])
@pytest.mark.parametrize(("hook", "call"), SAVES)
def test_what_metrics_gathered_is_in_the_resumed_run(tmp_path: Path, kind: Any, hook: str, call: int) -> None:
    path, options = tmp_path / "a.ckpt", {"max_epochs": 3, "validation": loader(12, 4)}
    whole = fitted(kind, list, save_at(path, hook, call), **options)
    resumed = fitted(kind, list, ckpt_path=path, seed=1, **options)
    assert_same(resumed.lightning_module.last, whole.lightning_module.last)


class OnSteps(Classifier):
    """Logs the values that metrics have in steps: of one, of a collection, and of one that steps may leave out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.mean, self.sometimes = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection([MulticlassPrecision(2), MulticlassRecall(2)])
        self.begins: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins.append(self.trainer.callback_metrics.get("mean", torch.tensor(-1.0)).clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.several(self(batch[0]).argmax(1), batch[1])
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict(self.several, on_step=True, on_epoch=False)
        if batch_idx % 3 == 0:
            self.sometimes(loss.detach())
            self.log("sometimes", self.sometimes, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("batch", range(1, 13))
def test_the_row_of_the_step_has_the_values_of_metrics(tmp_path: Path, batch: int) -> None:
    path, options = tmp_path / "a.ckpt", {"max_epochs": 2, "log_every_n_steps": 1}
    whole = fitted(OnSteps, list, save_at(path, "on_train_batch_end", batch), **options)
    resumed = fitted(OnSteps, list, ckpt_path=path, seed=1, **options)

    def rows(trainer: L.Trainer) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "time"} for row in trainer.history]

    assert rows(resumed) == rows(whole)
    assert_same(resumed.callback_metrics, whole.callback_metrics)
    begins = resumed.lightning_module.begins
    assert_same(begins, whole.lightning_module.begins[12 - len(begins) :])


def test_a_checkpoint_of_a_resumed_run_has_all_of_it(tmp_path: Path) -> None:
    one, two, options = tmp_path / "1.ckpt", tmp_path / "2.ckpt", {"validation": loader(12, 4)}
    whole = fitted(Measured, list, save_at(one, "on_train_batch_end", 2), **options)
    fitted(Measured, list, save_at(two, "on_train_batch_end", 1), ckpt_path=one, seed=2, **options)
    twice = fitted(Measured, list, ckpt_path=two, seed=3, **options)
    assert_same(twice.lightning_module.last, whole.lightning_module.last)
    # What a metric is made with is the program's.
    other = fitted(lambda: Measured(scale=2.0), list, ckpt_path=one, **options)
    assert other.lightning_module.own.scale == 2.0


def test_metrics_that_the_resumed_module_lacks_are_named(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "a.ckpt"

    class Growing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.by_batch = nn.ModuleList()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.by_batch.append(torchmetrics.MeanMetric())
            self.by_batch[-1].update(loss.detach())
            return loss

    fitted(Growing, list, save_at(path, "on_train_batch_end", 2))
    with warned(UserWarning, says="['by_batch.0', 'by_batch.1']"):
        fitted(Growing, list, ckpt_path=path)


@pytest.mark.world_size(2)
def test_each_process_goes_on_with_what_it_gathered(tmp_path: Path) -> None:
    logging.getLogger("hasten").setLevel(logging.ERROR)
    path = tmp_path / "a.ckpt"
    options = {"devices": 2, "strategy": "ddp", "data": loader(48), "validation": loader(16)}
    whole = fitted(Measured, list, save_at(path, "on_train_batch_end", 3), **options)
    resumed = fitted(Measured, list, ckpt_path=path, seed=1, **options)
    assert_same(resumed.lightning_module.last, whole.lightning_module.last)
    first, second = (rank["metrics"]["named['sum']"]["state"] for rank in files.load(path)["hasten"]["ranks"])
    assert first != second
