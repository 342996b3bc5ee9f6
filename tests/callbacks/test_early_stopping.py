"""EarlyStopping: after how many checks a run stops, and why."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from hasten.callbacks.early_stopping import EarlyStoppingReason
from tests.callbacks.scripted import Endless, Scripted, run
from tests.models import quiet
from tests.refusals import refused, warned


def fit(values: list[float], epochs: int = 10, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return (trainer, stopper) after a fit that logs ``values`` in validation."""
    stopper = EarlyStopping("val_loss", **options)
    return quick(Scripted(val=values), stopper, **{"max_epochs": epochs, **(trainer or {})}), stopper


def quick(module: Scripted, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    return run(module, *callbacks, enable_checkpointing=False, **arguments)


@pytest.mark.parametrize(
    ("values", "patience", "stopped_after"),
    [
        ([6, 5, 5, 5, 5, 5], 3, 5),
        ([6, 5, 4, 4, 3, 3], 1, 4),
        ([6, 5, 6, 5, 5, 5], 3, 5),
        ([5, 6, 7, 8], 0, 2),
        ([9, 8, 7, 6, 5, 4], 1, 6),
    ],
)
def test_patience_counts_checks_without_improvement(values: list[float], patience: int, stopped_after: int) -> None:
    trainer, stopper = fit(values, epochs=6, patience=patience)
    assert trainer.current_epoch == stopped_after
    if stopped_after < 6:
        assert stopper.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED
        assert stopper.stopped_epoch == stopped_after - 1
        assert "did not improve" in stopper.stopping_reason_message
    else:
        assert stopper.stopping_reason == EarlyStoppingReason.NOT_STOPPED
    assert stopper.best_score == min(values[:stopped_after])


@pytest.mark.parametrize(
    ("values", "options", "trainer", "steps"),
    [
        ([1, 2, 3, 3, 3], {"mode": "max"}, {}, 20),
        # Numbers that floats hold exactly: the second value is better by 1/16.
        *(
            ([1.0, 15 / 16, 15 / 16, 14.5 / 16, 14.5 / 16], {"min_delta": delta}, {"max_epochs": 5}, steps)
            for delta, steps in ((0.0, 20), (1 / 64, 20), (1 / 32, 16), (1 / 16, 12))
        ),
        ([1.0, 2.0, 3.0, 4.0], {"patience": 1}, {"min_epochs": 4}, 16),
        # Validation within the epoch, and epochs without one, which cost no patience.
        ([3.0, 2.0, 2.0, 2.0], {}, {"val_check_interval": 0.25}, 4),
        ([3.0, 2.0, 2.0, 2.0], {}, {"check_val_every_n_epoch": 2}, 32),
        ([3.0, 2.0, 2.0, 2.0], {"check_on_train_epoch_end": True}, {"check_val_every_n_epoch": 2}, 32),
        # Each of two validations an epoch, or the last: the epochs end with 2, 2, 1, 1, 1.
        *(
            ([3, 2, 2, 2, 1, 1, 1, 1], {"check_on_train_epoch_end": when}, {"val_check_interval": 0.5}, steps)
            for when, steps in ((None, 8), (False, 8), (True, 20))
        ),
        ([1.0], {}, {"fast_dev_run": 2}, 2),
        # The sanity check costs no patience.
        ([1.0, 0.5, 0.25], {"patience": 1}, {"max_epochs": 3, "num_sanity_val_steps": 1}, 12),
    ],
)
def test_after_how_many_steps_it_stops(
    values: list[float], options: dict[str, Any], trainer: dict[str, Any], steps: int
) -> None:
    assert fit(values, trainer=trainer, **{"patience": 2, **options})[0].global_step == steps


def test_a_value_that_improves_before_min_epochs_takes_the_request_to_stop_back(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0, 0.5, 0.4, 0.3, 0.4, 0.5, 0.6]
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    stopper = EarlyStopping("val_loss", patience=2)
    trainer = run(Scripted(val=values), stopper, saves, max_epochs=9, min_epochs=5)
    assert (trainer.current_epoch, stopper.stopped_epoch, stopper.best_score) == (8, 7, values[5])
    again = EarlyStopping("val_loss", patience=2)
    resumed = quick(Scripted(val=values), again, max_epochs=9, min_epochs=5, ckpt_path=str(tmp_path / "epoch=2.ckpt"))
    assert (resumed.current_epoch, again.stopped_epoch) == (8, 7)


def test_a_request_to_stop_is_not_taken_back_for_a_value_that_is_no_better() -> None:
    trainer, stopper = fit([1.0, math.nan, 2.0, 2.0, 2.0, 2.0], epochs=6, patience=9, trainer={"min_epochs": 4})
    assert (trainer.current_epoch, stopper.stopping_reason) == (4, EarlyStoppingReason.NON_FINITE_METRIC)


def test_a_request_to_stop_of_the_program_is_not_taken_back() -> None:
    def stop(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 2:
            trainer.should_stop = True

    program, stopper = LambdaCallback(on_train_epoch_end=stop), EarlyStopping("val_loss", patience=1)
    trainer = quick(Scripted(val=[1, 2, 0.5, 0.4, 0.3, 0.2]), program, stopper, max_epochs=6, min_epochs=4)
    assert (trainer.current_epoch, stopper.stopping_reason) == (4, EarlyStoppingReason.NOT_STOPPED)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stops(value: float) -> None:
    trainer, stopper = fit([1.0, value, 0.5])
    assert trainer.current_epoch == 2
    assert stopper.stopping_reason == EarlyStoppingReason.NON_FINITE_METRIC
    trainer, _ = fit([1.0, value, 0.5], epochs=4, check_finite=False)
    assert trainer.current_epoch == 4


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ([3.0, 2.0, 0.5, 0.1], {"stopping_threshold": 1.0}, EarlyStoppingReason.STOPPING_THRESHOLD),
        ([3.0, 2.0, 9.5, 0.1], {"divergence_threshold": 9.0}, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ([3, 2, -9.5], {"mode": "max", "divergence_threshold": -9}, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
    ],
)
def test_thresholds(values: list[float], options: dict[str, Any], reason: EarlyStoppingReason) -> None:
    trainer, stopper = fit(values, **options)
    assert (trainer.current_epoch, stopper.stopping_reason) == (3, reason)


# -- when it checks


@pytest.mark.parametrize(
    ("at_epoch_end", "known"), [(None, [math.inf, 3.0, 2.0]), (True, [math.inf, 3.0, 2.0]), (False, [3.0, 2.0, 1.0])]
)
def test_one_validation_an_epoch_is_checked_when_the_epoch_ends(at_epoch_end: bool | None, known: list[float]) -> None:
    bests: list[float] = []

    looks = LambdaCallback(on_train_epoch_end=lambda *_: bests.append(float(stopper.best_score)))
    stopper = EarlyStopping("val_loss", check_on_train_epoch_end=at_epoch_end)
    quick(Scripted(val=[3.0, 2.0, 1.0]), looks, stopper, max_epochs=3)
    assert bests == known


@pytest.mark.parametrize(
    "arguments", [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}, {"limit_val_batches": 0}]
)
def test_a_value_of_training_epochs_is_checked_when_it_is_new(arguments: dict[str, Any]) -> None:
    stopper = EarlyStopping("train_value", patience=2)
    module = Scripted(val=[1.0], train=[3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    trainer = quick(module, stopper, max_epochs=6, **arguments)
    assert trainer.current_epoch == 4


# -- what is not there


@pytest.mark.parametrize(
    "arguments", [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}, {"limit_val_batches": 0}], ids=str
)
def test_an_absent_value_is_an_error_naming_what_is_there(arguments: dict[str, Any]) -> None:
    with refused(RuntimeError, "monitor", fix="self.log") as caught:
        quick(Scripted(val=[1.0]), EarlyStopping("val_los"), max_epochs=4, **arguments)
    assert isinstance(caught.value, ValueError)


def test_an_absent_value_is_found_out_in_an_endless_epoch() -> None:
    trainer = quiet(callbacks=[EarlyStopping("nothing")], max_steps=50, max_epochs=-1, val_check_interval=5)
    with refused(RuntimeError, "monitor", fix="self.log"):
        trainer.fit(Scripted(val=[1.0]), Endless(), [torch.zeros(2, 1)])
    assert trainer.global_step == 5


def test_an_absent_value_may_be_allowed() -> None:
    stopper = EarlyStopping("nothing", strict=False, verbose=True)
    with warned(RuntimeWarning, fix="'nothing'"):
        trainer = quick(Scripted(val=[1.0]), stopper, max_epochs=2)
    assert trainer.current_epoch == 2


# -- state


@pytest.mark.parametrize("split", [1, 2, 3, 4])
def test_a_resumed_run_stops_when_the_uninterrupted_one_does(tmp_path: Path, split: int) -> None:
    values = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]

    def parts() -> Any:
        return (Scripted(val=values), EarlyStopping("val_loss", patience=3), ModelCheckpoint(tmp_path, save_last=True))

    run(*parts(), max_epochs=split)
    module, stopper, checkpoint = parts()
    trainer = run(module, stopper, checkpoint, max_epochs=7, ckpt_path=tmp_path / "last.ckpt")
    assert trainer.current_epoch == 5
    assert (stopper.best_score, stopper.wait_count, stopper.stopped_epoch) == (4.0, 3, 4)


@pytest.mark.parametrize("epoch", range(4))
@pytest.mark.parametrize("monitor", ["val_loss", "train_value"])
def test_a_run_resumed_before_the_check_of_an_epoch_makes_that_check(tmp_path: Path, epoch: int, monitor: str) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == epoch:
            trainer.save_checkpoint(path)

    # The best is that of the first epoch, or of the second.
    path, values = tmp_path / "a.ckpt", [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5][epoch == 0 :]
    stopper = EarlyStopping(monitor, patience=3)
    whole = quick(Scripted(val=values, train=values), stopper, LambdaCallback(on_train_epoch_end=save), max_epochs=7)
    resumed = EarlyStopping(monitor, patience=3)
    trainer = quick(Scripted(val=values, train=values), resumed, max_epochs=7, ckpt_path=path)
    assert trainer.current_epoch == whole.current_epoch == 4 + (epoch > 0)
    assert (resumed.wait_count, resumed.stopped_epoch) == (stopper.wait_count, stopper.stopped_epoch)


def test_two_of_them_have_states_of_their_own(tmp_path: Path) -> None:
    stoppers = [EarlyStopping("val_loss", patience=9), EarlyStopping("val_loss", patience=9, mode="max")]
    checkpoint = ModelCheckpoint(tmp_path)
    trainer = run(Scripted(val=[1.0, 2.0, 3.0]), *stoppers, checkpoint, max_epochs=3)
    states = torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"]
    assert states[stoppers[0].state_key]["best_score"] == 1.0
    assert states[stoppers[1].state_key]["best_score"] == 3.0
    assert trainer.early_stopping_callbacks == stoppers


def test_it_reports_improvements_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("hasten"), "info", lambda text, *_, **__: said.append(text))
    fit([2.0, 1.0, 1.0], patience=1, verbose=True)
    assert said[:2] == [
        "Metric val_loss improved. New best score: 2.000",
        "Metric val_loss improved by 1.000 >= min_delta = 0.0. New best score: 1.000",
    ]
    assert any("did not improve in the last 1 records. Best score: 1.000." in text for text in said)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_reason_is_said_once(verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hasten")
    _, stopper = fit([2.0, 1.0, 1.0], patience=1, verbose=verbose)
    assert len([text for text in caplog.messages if "did not improve" in text]) == 1
    if not verbose:
        assert caplog.messages[-1].startswith("`Trainer.fit` stopped: ")
    # A limit that is reached as well is the reason that the loop gives; another fit has its own reason.
    caplog.clear()
    run(Scripted(val=[2.0, 1.0, 1.0]), stopper, enable_checkpointing=False, max_epochs=1)
    (said,) = [text for text in caplog.messages if "stopped:" in text]
    assert "max_epochs=1" in said
