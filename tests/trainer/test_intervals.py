"""Epochs, steps and times as texts, wherever an interval is asked for."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.callbacks import ModelCheckpoint, Timer
from tests.fakes import watching
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": "2ep"}, 20),
        ({"max_epochs": "7st"}, 7),
        ({"max_steps": "7 steps", "max_epochs": None}, 7),
        ({"max_steps": "1 epoch", "max_epochs": None}, 10),
        ({"max_time": "3ep", "max_epochs": None}, 30),
        ({"max_time": "13st", "max_epochs": None}, 13),
        ({"max_time": {"hours": 2}, "max_steps": "4st", "max_epochs": None}, 4),
    ],
)
def test_limits(options: Any, steps: int) -> None:
    trainer = quiet(**options)
    trainer.fit(Classifier(), loader(40))
    assert trainer.global_step == steps


def test_time_in_the_place_of_epochs_is_a_time_limit() -> None:
    for given in ("00:12:00:00", "720min", timedelta(hours=12), {"hours": 12}):
        trainer = quiet(max_epochs=given)
        timer = next(callback for callback in trainer.callbacks if type(callback).__name__ == "Timer")
        assert timer.time_remaining() == pytest.approx(12 * 3600, abs=1)
        assert trainer.max_epochs == -1


@pytest.mark.parametrize(("timer", "max_epochs"), [(Timer("12h"), -1), (Timer(), 1000)])
def test_a_timer_with_a_duration_takes_the_place_of_the_assumed_limit_of_epochs(timer: Timer, max_epochs: int) -> None:
    trainer = quiet(max_epochs=None, limit_train_batches=1)
    trainer.callbacks.append(timer)
    trainer.callbacks.append(watching(lambda _, trainer: setattr(trainer, "should_stop", True), "on_train_epoch_end"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader(4))
    assert trainer.max_epochs == max_epochs
    assert any("1000 epochs" in str(each.message) for each in caught) == (max_epochs == 1000)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"val_check_interval": "4st"}, [4, 8, 12, 16, 20]),
        # Five steps an epoch, the last of each with two batches of three: counted in steps, over epochs.
        ({"val_check_interval": "4st", "accumulate_grad_batches": 3}, [4, 8]),
        ({"val_check_interval": "2ep"}, [20]),
        ({"check_val_every_n_epoch": "2ep"}, [20]),
        ({"check_val_every_n_epoch": "1ep"}, [10, 20]),
    ],
)
def test_validations(options: Any, at: list[int]) -> None:
    seen: list[int] = []
    validations = watching(lambda _, trainer: seen.append(trainer.global_step), "on_validation_end")
    trainer = quiet(max_epochs=2, callbacks=validations, num_sanity_val_steps=0, **options)
    trainer.fit(Classifier(), loader(40), loader(8))
    assert seen == at


def test_other_arguments(tmp_path: Any) -> None:
    assert quiet(log_every_n_steps="5st").log_every_n_steps == 5
    assert quiet(val_check_interval="90min").val_check_interval == timedelta(minutes=90)
    trainer = quiet(min_epochs="2ep", max_epochs="3ep")
    assert (trainer.min_epochs, trainer.max_epochs) == (2, 3)
    assert quiet(min_epochs="5st").min_steps == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_every_n_steps": "2ep"}, r"log_every_n_steps='2ep'.*counts steps.*'500st'"),
        ({"check_val_every_n_epoch": "9st"}, r"counts epochs.*'2ep'"),
        ({"reload_dataloaders_every_n_epochs": "90min"}, r"counts epochs.*'2ep'"),
        ({"max_epochs": "2ep", "max_time": "3ep"}, r"max_epochs='2ep', max_time='3ep'.*both say how many epochs"),
        ({"max_epochs": "0ep"}, r"got '0ep': it must be more than zero"),
        ({"max_epochs": "two"}, r"max_epochs=\.\.\.\) got 'two': write a whole number, 'DD:HH:MM:SS'.*'2ep', '500st'"),
        ({"min_epochs": "90min"}, r"min_epochs='90min'.*a time cannot be given here"),
        ({"val_check_interval": "2ep", "check_val_every_n_epoch": 3}, r"both say after how many epochs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(**options)


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"every_n_train_steps": "5st"}, [5, 10, 15, 20]),
        ({"every_n_epochs": "2ep"}, [20]),
        ({"train_time_interval": "2ep"}, [20]),
        ({"every_n_epochs": "8st"}, [8, 16]),
    ],
)
def test_checkpoints(options: Any, saved: list[int], tmp_path: Any) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **options)
    quiet(max_epochs=2, enable_checkpointing=True, callbacks=checkpoint).fit(Classifier(), loader(40))
    assert sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.iterdir()) == saved


def test_the_time_before_training_does_not_count_for_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, validated_after = [0.0], list[int]()
    monkeypatch.setattr("hasten.loops.schedule.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(Classifier):
        def setup(self, stage: str) -> None:
            clock[0] += 100

        def on_train_batch_end(self, *_: Any) -> None:
            clock[0] += 4

        def on_validation_start(self) -> None:
            if self.trainer.sanity_checking:
                clock[0] += 100
            else:
                validated_after.append(self.trainer.global_step)

    options = {"max_epochs": 1, "val_check_interval": timedelta(seconds=10), "num_sanity_val_steps": 1}
    quiet(**options).fit(Slow(), loader(32), loader(4))
    assert validated_after == [3, 6]


def test_checkpoint_intervals_that_contradict_each_other() -> None:
    assert ModelCheckpoint(every_n_epochs="90min")._train_time_interval == timedelta(minutes=90)
    with refused(ValueError, "every_n_train_steps"):
        ModelCheckpoint(every_n_epochs="2ep", every_n_train_steps=5)
    with refused(TypeError, "train_time_interval", fix="datetime.timedelta"):
        ModelCheckpoint(train_time_interval=5)


class Scheduled(Classifier):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


@pytest.mark.parametrize(("interval", "times"), [("5st", 4), ("2ep", 1), ("epoch", 2), ("step", 20)])
def test_schedulers(interval: str, times: int) -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(Scheduled(interval=interval), loader(40))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**times


def test_schedulers_that_do_not_fit_are_refused() -> None:
    with refused(ValueError, "interval", fix="'2ep'"):
        quiet().fit(Scheduled(interval="90min"), loader())
    with refused(ValueError, "interval"):
        quiet().fit(Scheduled(interval="2ep", frequency=3), loader())
