"""``Trainer(speed="auto")`` with a verdict that is remembered: what is switched on, and what is off again after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.speed import look, remembered
from hasten.speed.advice import Advice, Line, Row
from hasten.speed.safety import Safety
from tests.models import Classifier, loader, quiet


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def remember(winners: list[str], model: Any) -> None:
    """Keep a verdict for the Trainer and the model of these tests."""
    key = look.key_of(quiet(speed="auto")._given, model, torch.device("cpu"))
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
    lines = [Line(Safety.ROUNDING, "all of it", winners, 3.0)]
    assert (
        remembered.remember(key, Advice("train.py", unchanged, [], lines=lines, winners=winners)) is not None
    )


class Watches(Classifier):
    """Notes the number of threads, and the class of what it reads."""

    def on_train_start(self) -> None:
        self.threads = torch.get_num_threads()
        self.arguments = self.trainer._run.arguments.speed


def test_arguments_are_those_a_user_would_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    remember(["fused optimizer", "resident data"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert (model.arguments.fused_optimizer, model.arguments.resident) == (True, True)
    assert "3.00x with L.Trainer(..., fused_optimizer=True, resident=True) (remembered)" in caplog.text


def test_words_are_checked_as_those_of_a_user() -> None:
    from hasten.compile.settings import CompileSettings
    from hasten.speed import auto
    from hasten.speed.levers import choose

    trainer = quiet(speed="auto")
    auto._set_arguments(trainer, choose(["compile"]))
    assert isinstance(trainer._arguments.speed.compile, CompileSettings)


def test_threads_are_as_before_after_each_training() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        remember(["one thread"], model := Watches())
        trainer = quiet(speed="auto")
        for _ in range(2):
            # The second training goes on with what the first one chose.
            trainer.fit(model, loader())
            assert (model.threads, torch.get_num_threads()) == (1, 2)
            trainer.fit_loop.max_epochs += 1
    finally:
        torch.set_num_threads(before)


def test_what_needs_consent_or_another_process_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    remember(["fused optimizer", "tcmalloc", "no attention dropout", "gone since"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert model.arguments.allocator is None
    # The speed was measured with all of them: it is not claimed.
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text


# -- trainings that are too short to measure


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("arguments", [{"max_steps": 3}, {"fast_dev_run": True}])
def test_a_training_of_few_steps_starts_at_once(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.speed import auto

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("measured")

    caplog.set_level("INFO")
    monkeypatch.setattr(auto, "measure", never)
    trainer = quiet(**{"max_epochs": None, "speed": "auto", **arguments})
    trainer.fit(Small(), loader())
    assert trainer.global_step == (1 if "fast_dev_run" in arguments else 3)
    assert "ends before anything could be measured: it goes on unchanged" in caplog.text
