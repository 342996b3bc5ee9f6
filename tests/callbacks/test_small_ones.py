"""Timer, LambdaCallback, ModelSummary and RichModelSummary through a Trainer."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import hasten as L
from hasten.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from hasten.hooks import overrides
from tests.callbacks.scripted import Scripted, python_calls, run
from tests.models import Classifier, loader, quiet
from tests.programs import fork_python
from tests.refusals import refused

# -- Timer


@pytest.mark.parametrize("duration", ["00:00:00:30", "30s", timedelta(seconds=30), {"seconds": 30}, {"minutes": 0.5}])
def test_durations(duration: Any) -> None:
    assert Timer(duration).time_remaining() == 30.0


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
    options = {"enable_checkpointing": False, "ckpt_path": tmp_path / "model.ckpt"}
    trainer = run(Slow(), Timer(timedelta(seconds=0.05)), max_epochs=9, **options)
    assert trainer.global_step == 4
    assert run(Scripted(), Timer(timedelta(0)), max_epochs=5, enable_checkpointing=False).global_step <= 1


def test_a_second_fit_with_the_same_timer_counts_no_time_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_hours(trainer: L.Trainer, *_: Any) -> None:
        clock.hours += 1.0
        if trainer.global_step == stop_at:
            raise ZeroDivisionError

    clock = SimpleNamespace(hours=0.0, monotonic=lambda: clock.hours * 3600, perf_counter=time.perf_counter)
    monkeypatch.setattr("hasten.callbacks.timer.time", clock)
    timer, stop_at = Timer("7h"), 0
    trained = [LambdaCallback(on_train_batch_end=pass_hours), timer]
    run(Scripted(), *trained, ModelCheckpoint(tmp_path, "model"))
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, "ckpt_path": tmp_path / "model.ckpt"}
    assert run(Scripted(), *trained, **options).global_step == 7
    stop_at = 6
    with pytest.raises(ZeroDivisionError):
        run(Scripted(), *trained, **options)
    clock.hours += 100.0
    assert run(Scripted(), *trained, enable_checkpointing=False).global_step == 4


def test_a_step_is_one_look_at_the_clock_or_free() -> None:
    for timer in (Timer(), Timer("1h", interval="epoch"), copy.deepcopy(Timer()), pickle.loads(pickle.dumps(Timer()))):
        run(Scripted(), timer, enable_checkpointing=False)
        assert not overrides(timer, L.Callback, "on_train_batch_end")
    timer = Timer("1h")
    run(Scripted(), timer, enable_checkpointing=False)
    assert python_calls(timer.on_train_batch_end, None, None, None, None, 3) == ["on_train_batch_end"]


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


def test_the_table_its_depth_and_that_it_can_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[str, Any] = {}

    class Mine(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total_parameters: int, *_: Any, **summarize_kwargs: Any) -> None:
            seen.update(summarize_kwargs, columns=dict(summary_data), total=total_parameters)

    text = summary_of(caplog, enable_model_summary=True)
    assert "0 | layers | Sequential | 178" in text
    assert "layers.0" not in text
    assert "layers.0" in summary_of(caplog, ModelSummary(max_depth=2), enable_model_summary=True)
    caplog.clear()
    summary_of(caplog, Mine(max_depth=-1, color="red"), enable_model_summary=True)
    assert "Total params" not in summary_of(caplog, ModelSummary(max_depth=0), enable_model_summary=True)
    assert (seen["total"], seen["color"], seen["columns"]["Name"][0]) == (178, "red", "layers")


# -- RichModelSummary

rich = pytest.importorskip("rich")


@pytest.mark.parametrize("kind", [RichProgressBar, RichModelSummary])
def test_without_rich(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", *(each for each in sys.modules if each.startswith("rich."))):
        monkeypatch.setitem(sys.modules, name, None)
    with refused(ModuleNotFoundError, says=f"{kind.__name__}"):
        kind()


@pytest.mark.parametrize("kind", [RichProgressBar, RichModelSummary])
def test_rich_draws_no_random_numbers_of_the_program(kind: Any, tmp_path: Path) -> None:
    program = f"""
import random, sys
import hasten as L
from hasten.demos.boring_classes import BoringModel

assert "rich.style" not in sys.modules
random.seed(3)
expected = random.random()
random.seed(3)
callback = L.callbacks.{kind.__name__}()
L.Trainer(max_steps=2, callbacks=[callback], logger=False, enable_checkpointing=False).fit(BoringModel())
assert "rich.style" in sys.modules
assert random.random() == expected
"""
    done = fork_python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_table_of_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    def table(model: L.LightningModule, **options: Any) -> list[list[str]]:
        """Return the cells of each row of the table, and the lines below it."""
        monkeypatch.setattr(rich, "_console", None)
        quiet(callbacks=[RichModelSummary(**options)], enable_model_summary=True).fit(model, loader(4))
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in re.split(r"[│┃]", line.strip("│┃ "))] for line in lines if line.strip()]

    model = Classifier()
    assert ["0", "layers", "Sequential", "178", "train"] in table(model, header_style="red")
    model.layers[3].requires_grad_(False)
    model.example_input_array = torch.zeros(3, 8)
    rows = table(model)
    assert ["Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"] in rows
    assert ["0", "layers", "Sequential", "178", "train", "960", "[3, 8]", "[3, 2]"] in rows
    for line in ("Trainable params: 144", "Non-trainable params: 34", "Total params: 178", "Modules in eval mode: 0"):
        assert [line] in rows
    assert table(model, max_depth=0) == []
    with mock.patch("rich.console.Console.print") as drawn:
        table(model)
    assert {type(call.args[0]).__name__ for call in drawn.call_args_list} == {"Table"}


def test_the_table_goes_with_the_bar() -> None:
    def kinds(**arguments: Any) -> list[type]:
        trainer = quiet(**{"enable_model_summary": True, **arguments})
        return [type(callback) for callback in trainer.callbacks if isinstance(callback, ModelSummary)]

    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True) == [RichModelSummary]
    assert kinds(callbacks=[TQDMProgressBar()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar(), ModelSummary()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True, enable_model_summary=False) == []
