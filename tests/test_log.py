"""``self.log``: what each option means, through the Trainer's public properties and a logger's rows."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

import hasten as L
from hasten.elsewhere import conventions
from hasten_lightning.conventions import LIGHTNING
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned


class Logs(L.LightningModule):
    """One parameter; what it logs is given as functions of (module, batch_idx)."""

    def __init__(self, train: Any = None, validation: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_log, self.validation_log = train, validation

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.train_log is not None:
            self.train_log(self, batch, batch_idx)
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LoadersApart(Logs):
    """Knows in ``index`` from which loader a validation batch comes."""

    index = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.index = dataloader_idx
        self.validation_log(self, batch, batch_idx)


class Validates(Logs):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.validation_log is not None:
            self.validation_log(self, batch, batch_idx)


BATCHES = [torch.full((size, 1), float(size)) for size in (4, 4, 2)]


def changed_in_place(m: Any, b: Any, i: int) -> None:
    value = torch.tensor(float(i))
    m.log("x", value)
    value += 100


EPOCH = {"on_step": False, "on_epoch": True}
MEAN = (4 * 4 + 4 * 4 + 2 * 2) / 10  # Weighted by batch size.


@pytest.mark.parametrize(
    ("log", "options", "rows"),
    [
        (changed_in_place, {"log_every_n_steps": 2, "max_epochs": 2}, [(1, 1.0), (3, 0.0), (5, 2.0)]),
        (changed_in_place, {"log_every_n_steps": 1, "accumulate_grad_batches": 2}, [(0, 1.0), (1, 2.0)]),
        (lambda m, b, i: m.log("x", b.mean(), **EPOCH), {}, [(2, MEAN)]),
        (lambda m, b, i: m.log("x", float(b.mean()), **EPOCH), {}, [(2, MEAN)]),
    ],
)
def test_rows_of_the_logger_have_the_index_of_the_step(log: Any, options: dict[str, Any], rows: list[Any]) -> None:
    logger = RowLogger()
    trainer = quiet(logger=logger, **options)
    trainer.fit(Logs(log), BATCHES)
    assert logger.of("x") == [(step, pytest.approx(value)) for step, value in rows]
    assert [row["epoch"] for _, row in logger.rows] == [step // 3 for step, _ in rows]
    assert trainer.callback_metrics["x"].item() == pytest.approx(rows[-1][1])


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 10.0), ("max", 4.0), (torch.min, 2.0), ("mean", 10 / 3)])
def test_reductions(reduce: Any, expected: float) -> None:
    module = Logs(lambda m, b, i: m.log("x", b.mean(), on_epoch=True, reduce_fx=reduce, batch_size=1))
    trainer = quiet()
    trainer.fit(module, BATCHES)
    assert trainer.callback_metrics["x"].item() == pytest.approx(expected)
    assert trainer.callback_metrics["x_epoch"].item() == pytest.approx(expected)
    assert trainer.callback_metrics["x_step"].item() == 2.0


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize(
    "values",
    [
        (0, torch.tensor(2.7), torch.tensor(1)),
        (torch.tensor(3), 2.5, torch.tensor(True)),
        (torch.tensor(0.5, dtype=torch.float16), 2**24 + 1, torch.tensor(-(2**24) - 1)),
        (0.1, torch.tensor(0.5), torch.tensor(0.25, dtype=torch.float64)),
    ],
)
def test_extremes_of_mixed_types_are_those_of_their_numbers(values: tuple[Any, ...], reduce: str) -> None:
    def log(m: Any, b: Any, i: int) -> None:
        m.log("x", values[i], on_step=False, on_epoch=True, reduce_fx=reduce)

    trainer, pick = quiet(), max if reduce == "max" else min
    trainer.fit(Logs(log), BATCHES)
    assert trainer.callback_metrics["x"].item() == pytest.approx(float(pick(map(float, values))), rel=1e-7)


@pytest.mark.parametrize(
    "values",
    [
        (torch.tensor(2**24), torch.tensor(1), torch.tensor(1)),
        (2**24, torch.tensor(1), 1),
        (torch.tensor(2**24, dtype=torch.int32), 1, torch.tensor(1, dtype=torch.uint8)),
        (torch.tensor(True), 2**24, torch.tensor(True)),
        (torch.tensor(2**24), torch.tensor(1.0), torch.tensor(1)),
    ],
)
def test_sums_of_counts_are_exact(values: tuple[Any, ...]) -> None:
    logger = RowLogger()

    def log(m: Any, b: Any, i: int) -> None:
        m.log("x", values[i], on_step=False, on_epoch=True, reduce_fx="sum")

    trainer = quiet(logger=logger)
    trainer.fit(Logs(log), BATCHES)
    assert trainer.callback_metrics["x"].item() == 2**24 + 2
    assert trainer.logged_metrics["x"].item() == 2**24 + 2
    assert logger.of("x") == [(2, 2**24 + 2)]


def test_validation_values_are_epoch_means_and_go_to_the_logger_once() -> None:
    logger = RowLogger()
    module = Validates(validation=lambda m, b, i: m.log("v", b.mean()))
    trainer = quiet(logger=logger, num_sanity_val_steps=0)
    trainer.fit(module, BATCHES, BATCHES)
    assert logger.of("v") == [(2, pytest.approx(3.6))]
    assert trainer.validate(module, BATCHES, verbose=False) == [{"v": pytest.approx(3.6)}]


def test_under_lightning_s_names_numbers_have_its_digits_and_hooks_read_what_the_epoch_logged() -> None:
    numbers, seen = [0.1, 0.7, 1 / 3], {}

    class Reads(L.Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.update(trainer.logged_metrics)

    total = torch.tensor(0.0)
    for number, batch in zip(numbers, BATCHES, strict=True):
        total = total + torch.tensor(number) * len(batch)
    expected = {
        "mean": total / 10,
        "sum": torch.tensor(numbers[0]) + numbers[1] + numbers[2],
        "max": torch.tensor(0.7),
        "share": torch.tensor(2 / 3),
    }

    def log(module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        module.log("mean", numbers[batch_idx])
        module.log("sum", numbers[batch_idx], reduce_fx="sum")
        module.log("max", numbers[batch_idx], reduce_fx=max)
        module.log("share", torch.tensor(batch_idx < 2), batch_size=1)

    try:
        conventions.use(LIGHTNING)
        (shown,) = quiet(callbacks=[Reads()]).validate(Validates(validation=log), BATCHES, verbose=False)
    finally:
        conventions.use(conventions.HASTEN)
    assert shown == {name: value.item() for name, value in expected.items()} == {k: v.item() for k, v in seen.items()}


def test_several_validation_loaders_get_suffixes() -> None:
    class Two(Logs):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            self.log("v", batch.mean())
            self.log("plain", 1.0 + dataloader_idx, add_dataloader_idx=dataloader_idx > 0)

    results = quiet().validate(
        Two(), [torch.utils.data.DataLoader(torch.ones(4, 1) * k, 2) for k in (1, 2)], verbose=False
    )
    assert results[0]["v/dataloader_idx_0"] == 1.0
    assert results[1]["v/dataloader_idx_1"] == 2.0
    assert results[0]["plain"] == 1.0


PAIR = [DataLoader(torch.full((2, 1), value), 2) for value in (1.0, 11.0)]  # type: ignore[arg-type,var-annotated]


def test_loaders_that_log_one_name_are_refused() -> None:
    def log(m: Any, b: Any, i: int) -> None:
        m.log("x", float(b.mean()), add_dataloader_idx=False)

    module = LoadersApart(validation=log)
    with refused(ValueError, says=("dataloaders 0", "1 both", "'x'", "add_dataloader_idx")):
        quiet().fit(module, BATCHES, PAIR)
    # It is found before anything is trained.
    assert module.trainer.global_step == 0
    with refused(ValueError, says="'x'"):
        quiet().validate(LoadersApart(validation=log), PAIR, verbose=False)


def test_loaders_may_share_a_metric_or_use_names_of_their_own() -> None:
    def log(m: Any, b: Any, i: int) -> None:
        m.shared.update(b.mean())
        m.log("shared", m.shared, add_dataloader_idx=False)
        m.log(f"own{m.index}", float(m.index), add_dataloader_idx=False)

    module = LoadersApart(validation=log)
    module.shared = torchmetrics.MeanMetric()
    trainer = quiet(max_epochs=2)
    trainer.fit(module, BATCHES, PAIR)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert values == {"shared": 6.0, "own0": 0.0, "own1": 1.0}


class OneMetricForAll(Logs):
    """Logs the same metrics for each loader, one of them under two names, and the value over all loaders at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.samples = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.most = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])
        self.doubled = torchmetrics.MeanMetric() + torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.mean(batch)
        self.log("again", self.mean)
        self.most.update(batch)
        self.log_dict(self.most)
        self.doubled.update(batch)
        self.log("doubled", self.doubled)
        self.samples.update(batch.mean())

    def on_validation_epoch_end(self) -> None:
        self.log("over_all", self.mean.compute() + 0)
        self.log("object", self.mean)


@pytest.mark.parametrize("fetches", [False, True])
def test_one_metric_logged_for_several_loaders_has_a_value_of_each(fetches: bool) -> None:
    class Fetches(OneMetricForAll):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            OneMetricForAll.validation_step(self, batch, batch_idx, dataloader_idx)

    first, second, third = (DataLoader(torch.tensor([[v] for v in x]), 2) for x in ([1.0, 3.0, 5.0], [8.0], [0.0, 4.0]))
    loaders: Any = [first, second, third]
    model = Fetches() if fetches else OneMetricForAll()
    trainer = quiet(max_epochs=2)
    trainer.fit(model, BATCHES, loaders)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    for index, (mean, most, least, total) in enumerate(
        [(3.0, 5.0, 1.0, 9.0), (8.0, 8.0, 8.0, 8.0), (2.0, 4.0, 0.0, 4.0)]
    ):
        of_loader = {name.split("/")[0]: v for name, v in values.items() if name.endswith(f"_idx_{index}")}
        names = {"MaxMetric": most, "MinMetric": least, "doubled": mean + total}
        assert of_loader == {"mean": mean, "mean_epoch": mean, "again": mean, **names}
    assert values["over_all"] == values["object"] == pytest.approx(21 / 6)
    assert model.samples._update_count == 2 * 4 + 4, "a metric that is not logged goes on"
    (_, values) = trainer.validate(OneMetricForAll(), [third, first], verbose=False)
    assert values["again/dataloader_idx_1"] == 3.0, "that of another module"


class OneMetricForSome(Logs):
    """Updates one metric with all batches, and logs it for some loaders."""

    def __init__(self, *logged_for: int) -> None:
        super().__init__()
        self.mean, self.logged_for = torchmetrics.MeanMetric(), logged_for

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(batch)
        if dataloader_idx in self.logged_for:
            self.log("mean", self.mean)


def test_a_metric_logged_for_some_loaders_says_what_else_it_has_gathered() -> None:
    loaders = [DataLoader(torch.tensor([[value]]), 1) for value in (1.0, 3.0, 8.0)]

    def values(*logged_for: int) -> dict[str, float]:
        trainer = quiet(max_epochs=2)
        trainer.fit(OneMetricForSome(*logged_for), BATCHES, loaders)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    # As with Lightning, whose value of a dataloader includes those before it.
    with warned(UserWarning, says=("MeanMetric", "before 1")):
        assert values(1) == {"mean/dataloader_idx_1": 2.0}
    with refused(ValueError, says="before 2"):
        values(0, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has gathered")
        assert values(0) == {"mean/dataloader_idx_0": 1.0}
        assert values(0, 1) == {"mean/dataloader_idx_0": 1.0, "mean/dataloader_idx_1": 3.0}


def test_a_metric_of_two_stages_is_said() -> None:
    class Shares(Validates):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.steps = torchmetrics.MeanMetric(), list[Any]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch)
            self.log("train", self.mean, on_epoch=True)
            return self.weight * 1.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean(batch)
            self.log("validation", self.mean)
            self.steps.append(self.trainer.callback_metrics.get("train_step"))

    shares = Shares()
    with warned(UserWarning, says=("log('train'", "training_step", "MeanMetric")):
        quiet(num_sanity_val_steps=1).fit(shares, BATCHES, BATCHES)
    assert shares.steps[1:] == [BATCHES[-1].mean()] * len(BATCHES)  # Not what validation has computed since.


def test_prog_bar_values_are_on_the_host() -> None:
    module = Logs(lambda m, b, i: m.log("x", b.mean(), prog_bar=True))
    trainer = quiet(log_every_n_steps=1)
    trainer.fit(module, BATCHES)
    assert trainer.progress_bar_metrics["x"] == 2.0
    assert isinstance(trainer.progress_bar_metrics["x"], float)


def test_values_of_epoch_hooks_share_the_row_of_the_epoch_and_monitors_see_them() -> None:
    class Ends(Logs):
        def on_train_epoch_end(self) -> None:
            self.log("end", 5.0)

    class Monitor(L.Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.callback_metrics["end"] == 5.0

    logger = RowLogger()
    module = Ends(lambda m, b, i: m.log("x", b.mean(), on_step=False, on_epoch=True))
    quiet(logger=logger, callbacks=[Monitor()]).fit(module, BATCHES)
    assert logger.rows == [(2, {"x": pytest.approx(3.6), "end": 5.0, "epoch": 0})]


def test_torchmetrics_objects() -> None:
    from torchmetrics import MeanMetric

    class Metric(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch)
            self.log("m", self.mean, on_step=True, on_epoch=True)
            return self.weight * 1.0

    logger = RowLogger()
    trainer = quiet(logger=logger, log_every_n_steps=1, max_epochs=2)
    module = Metric()
    trainer.fit(module, BATCHES)
    assert [value for _, value in logger.of("m_step")] == [4.0, 4.0, 2.0] * 2
    assert [value for _, value in logger.of("m_epoch")] == [pytest.approx(3.6)] * 2
    assert module.mean._update_count == 0


def test_a_name_may_be_logged_twice_with_arguments_that_mean_the_same() -> None:
    def log(m: Any, b: Any, i: int) -> None:
        m.log("x", 1.0)
        m.log("x", 3.0, on_step=True, on_epoch=False, logger=True, reduce_fx=torch.mean, sync_dist=True)
        m.log("mine/dataloader_idx_0", 1.0, add_dataloader_idx=False)

    trainer = quiet(logger=RowLogger())
    trainer.fit(Logs(log), BATCHES)
    assert trainer.callback_metrics["x"] == 3
    assert trainer.callback_metrics["mine/dataloader_idx_0"] == 1


def test_log_dict_and_metric_collections() -> None:
    from torchmetrics import MaxMetric, MeanMetric, MetricCollection

    class Both(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection({"mean": MeanMetric(), "max": MaxMetric()}, prefix="t_")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metrics.update(batch)
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            self.log_dict({"a": 1.0, "b": torch.tensor(2.0), "c": np.ones(1)})  # type: ignore[dict-item]
            return self.weight * 1.0

    trainer = quiet()
    trainer.fit(Both(), BATCHES)
    metrics = trainer.callback_metrics
    assert metrics["t_mean"].item() == pytest.approx(3.6)
    assert metrics["t_max"].item() == 4.0
    assert (metrics["a"], metrics["b"], metrics["c"]) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda m, b, i: m.log_dict(("a", 1.0)), r"use a dict of names and values, .*not a tuple"),
        (lambda m, b, i: m.log("x", torch.ones(3)), r"'x', ...\).*single element, .* of shape \(3,\).*mean\(\)"),
        (lambda m, b, i: m.log("x", np.ones((2, 2))), r"'x', ...\).*ndarray of shape \(2, 2\).*mean\(\)"),
        (lambda m, b, i: m.log("x", [1.0, 2.0]), "`list` values cannot be logged"),
        (lambda m, b, i: m.log("x", "text"), "`str` values cannot be logged"),
        (lambda m, b, i: m.log("x", torch.nn.Linear), r"class Linear cannot be logged.*Linear\(\.\.\.\)"),
        (lambda m, b, i: m.log(3, 1.0), "must be a str"),
        (lambda m, b, i: m.log("x", 1.0, on_step=False, on_epoch=False), "goes nowhere"),
        (lambda m, b, i: m.log("x", 1.0, reduce_fx="median"), "median"),
        (lambda m, b, i: m.log("x", 1.0, prog_bar=i > 0, on_step=True), r"\(prog_bar=False then True\)"),
        (lambda m, b, i: m.log("x/dataloader_idx_0", 1.0), "dataloader_idx"),
    ],
)
def test_bad_values_are_refused_with_the_name(log: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        quiet().fit(Logs(log), BATCHES)


@pytest.mark.parametrize(
    ("hook", "options", "fact"),
    [("on_fit_start", {}, "on_fit_start"), ("on_train_epoch_end", {"on_step": True}, "on_step=True")],
)
def test_logging_that_a_hook_does_not_allow_is_refused(hook: str, options: dict[str, Any], fact: str) -> None:
    model = Classifier()
    setattr(model, hook, lambda: model.log("x", 1.0, **options))
    with refused(ValueError, says=fact):
        quiet().fit(model, loader())


class Lines:
    """A batch of the program's own class."""

    def __iter__(self) -> Any:
        return iter([torch.ones(3, 1), ["a", "b"]])


@pytest.mark.parametrize("batch", [Lines(), (["a", "b"], torch.ones(3, 1)), {"n": [1, 2], "x": torch.ones(3)}])
def test_the_first_tensor_of_a_batch_has_its_size(batch: Any) -> None:
    module = Logs(lambda m, b, i: m.log("x", float(i), on_epoch=True))
    with warned(UserWarning, says="3 was taken"):
        quiet().fit(module, DataLoader([0], collate_fn=lambda _: batch))  # type: ignore[arg-type]


def test_unknown_batch_size_is_said_once() -> None:
    module = Logs(lambda m, b, i: m.log("x", 1.0, on_epoch=True))
    odd = [{"a": torch.ones(2, 1), "b": torch.ones(3, 1)}] * 3
    with warned(UserWarning, says="batch_size=") as caught:
        quiet().fit(module, odd)
    assert sum("batch size" in str(w.message) for w in caught) == 1


class LogsItself(L.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.log("started", 1)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"batch": batch_idx}, on_epoch=True, on_step=False, reduce_fx="max")


def test_callbacks_log_by_themselves() -> None:
    callback = LogsItself()
    trainer = quiet(callbacks=callback)
    trainer.fit(Classifier(), loader(12))
    assert trainer.callback_metrics["started"] == 1
    assert trainer.callback_metrics["batch"] == 2
    with refused(RuntimeError, says="LogsItself.log()"):
        callback.log("late", 1)


class Scores(L.Callback):
    """Puts a value among those that callbacks, loggers and bar show, without ``self.log``."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        score = torch.tensor([3.0, 1.0, 2.0][trainer.current_epoch % 3])
        trainer.callback_metrics["score"] = score
        trainer.callback_metrics.update(twice=2 * score, gone=0.0)
        assert trainer.callback_metrics.pop("gone") == 0
        trainer.logged_metrics["score"] = score
        trainer.progress_bar_metrics["score"] = f"{score:.1f}"


def test_values_that_a_callback_sets_are_shown_and_monitored(tmp_path: Path) -> None:
    best = L.callbacks.ModelCheckpoint(tmp_path, "{epoch}-{score:.0f}", monitor="score")
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, callbacks=[Scores(), best], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(8), loader(8))
    assert os.path.basename(best.best_model_path) == "epoch=1-score=1.ckpt"
    assert {"score", "twice", "val_loss"} < trainer.callback_metrics.keys()
    assert (trainer.callback_metrics["twice"], trainer.logged_metrics["score"]) == (4.0, 2.0)
    assert trainer.progress_bar_metrics["score"] == "2.0"
    assert type(pickle.loads(pickle.dumps(trainer.callback_metrics))) is dict
    trainer.validate(dataloaders=loader(8), verbose=False)
    trainer.callback_metrics.clear()
    assert "gone" not in trainer.callback_metrics


class ReadsWhatItLogs(Classifier):
    def on_validation_epoch_end(self) -> None:
        self.log("score", 3.0, prog_bar=True)
        assert self.trainer.callback_metrics["score"] == self.trainer.logged_metrics["score"] == 3

    def on_train_epoch_end(self) -> None:
        self.log("end", torch.tensor(2.0), logger=False)
        assert self.trainer.callback_metrics["end"] == 2
        assert "end" not in self.trainer.logged_metrics


def test_a_hook_reads_what_it_has_logged() -> None:
    trainer = quiet(num_sanity_val_steps=0)
    trainer.fit(ReadsWhatItLogs(), loader(8), loader(8))
    assert trainer.callback_metrics["score"] == 3


class LogsInItsOptimizerStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("empty", 1.0, on_step=False, on_epoch=True, batch_size=0)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.log("before", float(batch_idx))
        optimizer.step(closure=optimizer_closure)
        self.log("after", float(batch_idx))


class AddsAnother(L.Callback):
    """Adds a callback to the Trainer when it is set up."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.callbacks.append(L.callbacks.LambdaCallback(setup=lambda *call: self.set_up.append(call[2])))
        self.set_up: list[str] = []


def test_an_optimizer_step_logs_and_a_mean_over_nothing_is_nan() -> None:
    adds = AddsAnother()
    trainer = quiet(callbacks=adds)
    trainer.fit(LogsInItsOptimizerStep(), loader(8))
    assert trainer.callback_metrics["before"] == trainer.callback_metrics["after"] == 1
    assert torch.isnan(trainer.callback_metrics["empty"])
    assert adds.set_up == ["fit"]


class AnotherMetricEachTime(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metric = torchmetrics.MeanMetric()
        metric.update(1.0)
        self.log("mean", metric)
        return self.loss(batch)


def test_a_metric_made_again_each_step_is_refused() -> None:
    with refused(ValueError, says="MeanMetric"):
        quiet().fit(AnotherMetricEachTime(), loader())


class LogsShared(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = self.global_rank
        self.log("sum", 1.0 + rank, sync_dist=True, reduce_fx="sum", prog_bar=True)
        self.log("most", float(batch_idx + rank), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("own", float(rank))
        return self.loss(batch)


class ReadsOnFirst(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            trainer.progress_bar_metrics  # as the bar does, on the first process alone
        if batch_idx == 2:
            trainer.sync_step_values()
            self.seen = [float(trainer.callback_metrics[name]) for name in ("sum", "most_step", "own")]


@pytest.mark.world_size(2)
def test_step_values_of_several_processes_are_reduced_where_they_are_read() -> None:
    from hasten import logged_values

    logged_values.BAR_INTERVAL_SECONDS = 0.0  # the bar asks for new values each time
    reads = ReadsOnFirst()
    trainer = quiet(devices=2, strategy="ddp", callbacks=reads)
    trainer.fit(LogsShared(), loader(32))
    assert reads.seen == [3.0, 3.0, trainer.global_rank]
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values["sum"] == 3.0
    assert values["most_step"] == values["most_epoch"] == 4.0
    assert values["own"] == trainer.global_rank


class SavesAtTheEnd(Logs):
    """Saves itself at the end of an epoch, when the values of the epoch have been computed."""

    path: Any = None

    def on_train_epoch_end(self) -> None:
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


def test_a_run_resumed_at_the_end_of_an_epoch_that_was_cut_short_logs_the_rest_of_it(tmp_path: Path) -> None:
    def log(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("mean", float(batch_idx), on_epoch=True, on_step=False)
        module.log("largest", torch.tensor(-float(batch_idx)), on_epoch=True, on_step=False, reduce_fx="max")

    batches = [torch.ones(2, 1)] * 5
    cut = SavesAtTheEnd(train=log)
    cut.path = tmp_path / "cut.ckpt"
    quiet(max_steps=2).fit(cut, batches)
    resumed = quiet(max_epochs=1)
    resumed.fit(SavesAtTheEnd(train=log), batches, ckpt_path=cut.path)
    values = {name: value.item() for name, value in resumed.callback_metrics.items()}
    assert (resumed.global_step, values) == (5, {"mean": 3.0, "largest": -2.0})
