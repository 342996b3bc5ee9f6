"""LearningRateMonitor, Timer, LambdaCallback and ModelSummary through a Trainer."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint, ModelSummary, Timer
from hasten.hooks import overrides
from tests.callbacks.scripted import BATCHES, Scripted, run
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet


class Tuned(Scripted):
    """A module with the optimizers it is given."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Any], automatic: bool = True) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(()))
        self.make, self.automatic_optimization = make, automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.weight + self.extra
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return self.make([self.weight, self.extra])


def logged(
    make: Callable[[list[nn.Parameter]], Any], monitor: LearningRateMonitor, **arguments: Any
) -> RowLogger:
    rows = RowLogger()
    trainer = quiet(
        callbacks=[monitor], logger=rows, **{"max_epochs": 2, "log_every_n_steps": 2, **arguments}
    )
    trainer.fit(Tuned(make, automatic=arguments.get("accumulate_grad_batches", 1) >= 1), BATCHES)
    return rows


def halving(interval: str, name: str | None = None) -> Callable[[list[nn.Parameter]], Any]:
    def make(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "name": name}]

    return make


def test_a_scheduler_by_steps_is_logged_by_steps() -> None:
    rows = logged(halving("step"), monitor := LearningRateMonitor())
    assert rows.of("lr-SGD") == [(1, 0.5), (3, 0.125), (5, 0.5**5), (7, 0.5**7)]
    assert len(monitor.lrs["lr-SGD"]) == 4


def test_a_scheduler_by_epochs_is_logged_by_epochs() -> None:
    assert logged(halving("epoch"), LearningRateMonitor()).of("lr-SGD") == [(0, 1.0), (4, 0.5)]


def test_other_callbacks_can_use_a_learning_rate(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{lr-SGD:.3f}")
    callbacks = [LearningRateMonitor(), checkpoint]
    trainer = quiet(callbacks=callbacks, logger=RowLogger(), enable_checkpointing=True, log_every_n_steps=1)
    trainer.fit(Tuned(halving("step")), BATCHES)
    assert trainer.callback_metrics["lr-SGD"] == 0.125
    assert [path.name for path in tmp_path.iterdir()] == ["lr-SGD=0.125.ckpt"]


@pytest.mark.parametrize(("interval", "steps"), [("step", [1, 3, 5, 7]), ("epoch", [0, 4])])
def test_the_interval_can_be_chosen(interval: Any, steps: list[int]) -> None:
    rows = logged(
        halving("step", "rate"), LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)
    )
    assert [step for step, _ in rows.of("rate")] == steps
    assert rows.of("rate-momentum")[0][1] == 0.9
    assert rows.of("rate-weight_decay")[0][1] == 0.01


def test_accumulation_logs_a_step_once() -> None:
    rows = logged(
        halving("step"), LearningRateMonitor("step"), accumulate_grad_batches=2, log_every_n_steps=1
    )
    assert [step for step, _ in rows.of("lr-SGD")] == [0, 1, 2, 3]


def test_names_of_groups_and_several_optimizers() -> None:
    def groups(parameters: list[nn.Parameter]) -> Any:
        return torch.optim.Adam(
            [{"params": parameters[:1]}, {"params": parameters[1:], "name": "bias"}], lr=0.1
        )

    rows = logged(groups, LearningRateMonitor()).rows
    assert {name for _, row in rows for name in row if "lr" in name} == {"lr-Adam/pg1", "lr-Adam/bias"}

    def several(parameters: list[nn.Parameter]) -> Any:
        return [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.2)]

    rows = RowLogger()
    trainer = quiet(callbacks=[LearningRateMonitor()], logger=rows, log_every_n_steps=1)
    trainer.fit(Tuned(several, automatic=False), BATCHES)
    assert rows.of("lr-SGD")[0] == (0, 0.1)
    assert rows.of("lr-SGD-1")[0] == (0, 0.2)

    def twice(parameters: list[nn.Parameter]) -> Any:
        return torch.optim.SGD([{"params": [parameter], "name": "same"} for parameter in parameters], lr=0.1)

    with pytest.raises(ValueError, match="several parameter groups named 'same'"):
        logged(twice, LearningRateMonitor())


def test_what_the_monitor_needs() -> None:
    with pytest.raises(ValueError, match="no logger"):
        run(Scripted(), LearningRateMonitor(), enable_checkpointing=False)
    with pytest.raises(ValueError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="Adagrad has no momentum"):
        logged(
            lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), LearningRateMonitor(log_momentum=True)
        )


# -- Timer


@pytest.mark.parametrize(
    "duration", ["00:00:00:30", "30s", timedelta(seconds=30), {"seconds": 30}, {"minutes": 0.5}]
)
def test_durations(duration: Any) -> None:
    assert Timer(duration).time_remaining() == 30.0


def test_no_time_left_stops_at_once() -> None:
    trainer = run(Scripted(), Timer(timedelta(0)), max_epochs=5, enable_checkpointing=False)
    assert trainer.global_step <= 1


class Slow(Scripted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("interval", "whole_epochs"), [("step", False), ("epoch", True)])
def test_the_time_is_up(interval: str, whole_epochs: bool) -> None:
    timer = Timer(timedelta(seconds=0.1), interval=interval)
    trainer = run(Slow(), timer, max_epochs=1000, enable_checkpointing=False)
    assert trainer.current_epoch < 1000
    assert timer.time_elapsed() >= 0.1
    assert timer.time_remaining() <= 0
    if whole_epochs:
        assert trainer.global_step % 4 == 0


def test_stages_are_measured() -> None:
    timer = Timer()
    assert timer.time_elapsed() == 0
    assert timer.time_remaining() is None
    trainer = run(Slow(val=[1.0]), timer, enable_checkpointing=False)
    assert timer.time_elapsed("train") >= 0.08
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")
    assert timer.end_time() - timer.start_time() == timer.time_elapsed()
    assert timer.start_time("test") is None
    assert trainer.global_step == 4


def test_a_resumed_run_has_the_time_that_is_left(tmp_path: Path) -> None:
    first = Timer(timedelta(hours=1))
    run(Slow(), first, ModelCheckpoint(tmp_path, "model"))
    again = Timer(timedelta(hours=1))
    run(Slow(), again, max_epochs=2, enable_checkpointing=False, ckpt_path=tmp_path / "model.ckpt")
    assert again.time_elapsed() >= 0.16
    used_up = Timer(timedelta(seconds=0.05))
    trainer = run(
        Slow(), used_up, max_epochs=9, enable_checkpointing=False, ckpt_path=tmp_path / "model.ckpt"
    )
    assert trainer.global_step == 4


def test_without_a_duration_a_step_costs_nothing() -> None:
    assert not overrides(Timer(), L.Callback, "on_train_batch_end")
    assert not overrides(Timer("1h", interval="epoch"), L.Callback, "on_train_batch_end")
    assert overrides(Timer("1h"), L.Callback, "on_train_batch_end")
    assert not overrides(copy.deepcopy(Timer()), L.Callback, "on_train_batch_end")
    sent = pickle.loads(pickle.dumps(Timer()))
    run(Scripted(), sent, enable_checkpointing=False)
    assert not overrides(sent, L.Callback, "on_train_batch_end")


def test_with_time_left_a_step_is_one_look_at_the_clock() -> None:
    timer = Timer("1h")
    run(Scripted(), timer, enable_checkpointing=False)
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    hook = timer.on_train_batch_end
    sys.setprofile(count)
    try:
        hook(None, None, None, None, 3)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert calls == ["on_train_batch_end"]


# -- LambdaCallback


def test_functions_are_called() -> None:
    called: list[str] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: called.append("start"),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: called.append(str(batch_idx)),
        on_train_end=None,
    )
    run(Scripted(), callback, enable_checkpointing=False)
    assert called == ["start", "0", "1", "2", "3"]
    assert not overrides(callback, L.Callback, "on_train_end")


def test_every_hook_can_be_a_function() -> None:
    hooks = [name for name in dir(L.Callback) if name.startswith("on_")] + ["setup", "teardown"]
    callback = LambdaCallback(**{name: lambda *_: None for name in hooks})
    assert all(overrides(callback, L.Callback, name) for name in hooks)


# -- ModelSummary


def summary_of(caplog: pytest.LogCaptureFixture, *callbacks: L.Callback, **arguments: Any) -> str:
    logger = logging.getLogger("hasten")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="hasten"):
            quiet(callbacks=list(callbacks), **arguments).fit(Classifier(), loader(8))
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


def test_the_table_is_written_when_fit_begins(caplog: pytest.LogCaptureFixture) -> None:
    text = summary_of(caplog, enable_model_summary=True)
    assert "0 | layers | Sequential | 178" in text
    assert "Total params" in text


def test_depth_of_the_table(caplog: pytest.LogCaptureFixture) -> None:
    assert "layers.0" in summary_of(caplog, ModelSummary(max_depth=2), enable_model_summary=True)
    caplog.clear()
    assert "Total params" not in summary_of(caplog, ModelSummary(max_depth=0), enable_model_summary=True)


def test_the_table_can_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[str, Any] = {}

    class Mine(ModelSummary):
        @staticmethod
        def summarize(
            summary_data: Any,
            total_parameters: int,
            trainable_parameters: int,
            model_size: float,
            total_training_modes: dict[str, int],
            **summarize_kwargs: Any,
        ) -> None:
            seen.update(summarize_kwargs, columns=dict(summary_data), total=total_parameters)
            seen["modes"] = total_training_modes

    summary_of(caplog, Mine(max_depth=-1, colour="red"), enable_model_summary=True)
    assert seen["total"] == 178
    assert seen["columns"]["Name"][0] == "layers"
    assert seen["colour"] == "red"
    assert seen["modes"] == {"train": 5, "eval": 0}
