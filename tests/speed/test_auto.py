"""``Trainer(speed="auto")``: what is measured, remembered and switched on, and what is off again after training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.loggers import CSVLogger
from hasten.record.read import read_run
from hasten.speed import auto, levers
from hasten.speed.advice import Advice, Line, Row, recall, remember
from hasten.speed.advisor import TooShortError
from hasten.speed.inspect_run import key_of
from hasten.speed.levers import Lever
from hasten.speed.races import Plan
from hasten.speed.safety import Safety
from tests.models import Classifier, loader, quiet, same_weights
from tests.speed import planted


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def keep(winners: list[str], model: Any, **more: Any) -> str:
    """Keep a verdict for the Trainer and the model of these tests; return its key."""
    key = key_of(quiet(speed="auto").given_arguments, model, torch.device("cpu"))
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
    lines = [Line(Safety.ROUNDING, "all of it", winners, 3.0)]
    advice = Advice("train.py", unchanged, **{"rows": [], "lines": lines, "winners": winners, **more})
    assert remember(key, advice) is not None
    assert recall(key) == advice
    return key


class Watches(Classifier):
    """Notes the number of threads, and the class of what it reads."""

    def on_train_start(self) -> None:
        self.threads = torch.get_num_threads()
        self.arguments = self.trainer.given_arguments


def test_arguments_are_those_a_user_would_write(caplog: pytest.LogCaptureFixture) -> None:
    keep(["fused optimizer", "resident data"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert (model.arguments["fused_optimizer"], model.arguments["resident"]) == (True, True)
    assert "3.0x with L.Trainer(..., fused_optimizer=True, resident=True) (remembered)" in caplog.text


def test_auto_takes_of_a_full_verdict_what_it_promises(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lines = [
        Line(Safety.ROUNDING, "fused()", ["fused optimizer"], 1.5),
        Line(Safety.OTHER_BATCHES, "fused() and length()", ["fused optimizer", "batches by length"], 3.0),
    ]
    # As an older version, or somebody by hand, may have written it.
    winners = ["fused optimizer", "batches by length", "bf16 autocast"]
    row = Row("fused optimizer", "fused()", Safety.ROUNDING, "wins", speed=1.5)
    keep(winners, model := Classifier(), lines=lines, facts={"step_draws": True}, rows=[row])
    trainer = quiet(speed="auto", logger=CSVLogger(tmp_path))
    trainer.fit(model, loader())
    given = trainer.given_arguments
    assert (given["fused_optimizer"], given["batching"], given["precision"]) == (True, None, None)
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text
    assert "Measured were 3.0x with fused() and length() (same samples in other batches)" in caplog.text
    written = read_run(tmp_path).advice
    assert written is not None
    assert (written["line"], written["rows"]) == (
        "fused()", [{"name": "fused optimizer", "factor": 1.5, "low": None, "high": None, "verdict": "wins"}]
    )  # fmt: skip


def test_threads_are_as_before_after_each_training() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        keep(["one thread"], model := Watches())
        trainer = quiet(speed="auto")
        for _ in range(2):
            # The second training goes on with what the first one chose.
            trainer.fit(model, loader())
            assert (model.threads, torch.get_num_threads()) == (1, 2)
            trainer.fit_loop.max_epochs += 1
    finally:
        torch.set_num_threads(before)


def test_what_needs_consent_or_another_process_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    keep(["fused optimizer", "tcmalloc", "no attention dropout", "gone since"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert model.arguments["allocator"] is None
    # The speed was measured with all of them: it is not claimed.
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text


# -- trainings that are too short to measure


@pytest.mark.parametrize("arguments", [{"max_steps": 3}, {"fast_dev_run": True}])
def test_a_training_of_few_steps_starts_at_once(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "measure", never)
    trainer = quiet(**{"max_epochs": None, "speed": "auto", **arguments})
    trainer.fit(planted.Sleeper(0.0), loader())
    assert trainer.global_step == (1 if "fast_dev_run" in arguments else 3)
    assert "ends before anything could be measured: it goes on unchanged" in caplog.text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TooShortError("it takes about 3 s"), "this training goes on unchanged: it takes about 3 s"),
        (TypeError("Trainer.advise: the model cannot be sent"), "goes on unchanged: the model cannot be sent"),
    ],
)
def test_what_is_not_measured_trains_unchanged(
    error: Exception,
    text: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(auto, "measure", fails)
    model = planted.Sleeper(0.0)
    quiet(speed="auto", max_epochs=10).fit(model, loader())
    assert model.layer.weight.grad is not None
    assert "measuring for at most 20% of the time it takes" in caplog.text
    assert text in caplog.text + "".join(str(warning.message) for warning in recwarn)


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured")


# -- measured in processes


@pytest.fixture
def _planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    length = Lever("by length", 'L.Trainer(..., batching="length")', Safety.OTHER_BATCHES, change=planted.sleep_never)
    for lever in (planted.LIAR, Lever("halved", "halved()", Safety.ROUNDING, change=planted.halve), length):
        levers.register(lever)
    added = [levers.choose([name])[0] for name in ("liar", "halved", "by length")]
    monkeypatch.setattr(auto, "PLAN", Plan(rounds=1, steps=2, warm_up=1, consent=False))
    monkeypatch.setattr(auto, "known_levers", lambda: added)
    yield
    for lever in added:
        levers.unregister(lever.name)


@pytest.mark.slow
@pytest.mark.usefixtures("_planted", "one_fork_server")
def test_auto_switches_on_what_wins_remembers_it_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = planted.Sleeper()
    model = copy.deepcopy(plain)
    for each, arguments in ((plain, {}), (model, {"speed": "auto"})):
        L.seed_everything(1, verbose=False)
        quiet(max_epochs=1, **arguments).fit(each, loader())
    # Only the right one is on, and measuring changed nothing else.
    assert model.nap_seconds == planted.NAP_SECONDS / 2
    assert same_weights(plain, model)
    assert "which of 2 levers pay" in caplog.text
    assert "with halved() (measured in" in caplog.text
    assert (
        "speed='auto' leaves out what changes more than rounding: batching=\"length\" (same samples in other batches)"
    ) in caplog.text

    with monkeypatch.context() as patch:
        patch.setattr(auto, "measure", never)
        caplog.clear()
        quiet(speed="auto").fit(model := planted.Sleeper(), loader())
        assert model.nap_seconds == planted.NAP_SECONDS / 2
        assert "with halved() (remembered)" in caplog.text
        (kept,) = (tmp_path / "cache" / "advice").iterdir()
        kept.write_text("{half")
        # What is damaged is measured again.
        with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(AssertionError, match="measured"):
            quiet(speed="auto").fit(planted.Sleeper(), loader())
