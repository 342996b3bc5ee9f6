"""A Trainer's arguments as attributes, and what one call leaves to the next."""

from __future__ import annotations

import copy
import math
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten.strategies import Strategy
from tests.fakes import RowLogger, watching
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned

SETTINGS: dict[str, Any] = {
    "limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1, "limit_predict_batches": 2,
    "val_check_interval": 0.25, "check_val_every_n_epoch": 3, "log_every_n_steps": 7, "num_sanity_val_steps": 0,
    "gradient_clip_val": 1.5, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2, "overfit_batches": 4,
    "reload_dataloaders_every_n_epochs": 1, "fast_dev_run": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_arguments_can_be_assigned_and_are_those_of_a_new_trainer(name: str) -> None:
    trainer = quiet()
    setattr(trainer, name, SETTINGS[name])
    assert getattr(trainer, name) == getattr(trainer.with_arguments(), name) == SETTINGS[name]


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "barebones", "default_root_dir", "enable_autolog_hparams"])
def test_other_arguments_cannot_be_assigned(name: str) -> None:
    with refused(AttributeError, says=name):
        setattr(quiet(), name, 1)


def test_texts_and_special_values() -> None:
    trainer = quiet()
    for name, given, shown in (
        ("num_sanity_val_steps", -1, math.inf), ("num_sanity_val_steps", math.inf, math.inf),
        ("val_check_interval", "90min", timedelta(minutes=90)), ("val_check_interval", "2ep", 1.0),
        ("check_val_every_n_epoch", "4ep", 4), ("log_every_n_steps", "9st", 9), ("limit_val_batches", None, 1.0),
    ):  # fmt: skip
        setattr(trainer, name, given)
        assert getattr(trainer, name) == shown
    trainer.overfit_batches = 3
    assert (trainer.limit_train_batches, trainer.limit_val_batches) == (3, 3)
    trainer.overfit_batches = 0
    assert trainer.limit_train_batches == 1.0


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("limit_train_batches", 1.5, "limit_train_batches"),
        ("accumulate_grad_batches", 0, "accumulate_grad_batches"),
        ("gradient_clip_algorithm", "nrm", "gradient_clip_algorithm"),
    ],
)
def test_wrong_values_are_refused_when_assigned(name: str, value: Any, argument: str) -> None:
    trainer = quiet()
    before = getattr(trainer, name)
    with refused(ValueError, argument):
        setattr(trainer, name, value)
    assert getattr(trainer, name) == before


def test_unknown_argument_through_a_subclass() -> None:
    class Mine(L.Trainer):
        def __init__(self, mine: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.mine = mine

    assert Mine(3, max_epochs=2, logger=False).mine == 3
    with refused(TypeError, "max_epoch", fix="'max_epochs'"):
        Mine(3, max_epoch=1)


def test_trainer_can_be_copied_and_pickled_before_and_after_a_run() -> None:
    trainer = quiet()
    pickle.loads(pickle.dumps(trainer)).fit(Classifier(), loader(8))
    trainer.fit(Classifier(), loader(8))
    again = copy.deepcopy(trainer)
    assert again.global_step == pickle.loads(pickle.dumps(trainer)).global_step == 2


def test_what_is_logged_when_training_starts_is_published_with_the_first_epoch() -> None:
    class LogsAtStart(Classifier):
        def on_train_start(self) -> None:
            self.log("started", 3.0, prog_bar=True)

    trainer = quiet(logger=RowLogger(), log_every_n_steps=1)
    trainer.fit(LogsAtStart(), loader(8))
    for values in (trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics):
        assert values["started"] == 3.0


class Stateful(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


def test_callbacks_of_the_checkpoint_that_are_missing_are_named(tmp_path: Any) -> None:
    path = tmp_path / "a.ckpt"
    trainer = quiet(callbacks=[Stateful(), ModelCheckpoint(tmp_path, monitor="train_loss")], enable_checkpointing=True)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(path)
    with warned(UserWarning, says="Trainer(callbacks") as caught:
        # Other arguments of a callback that is there are no reason to warn.
        quiet(max_epochs=2, callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True).fit(
            Classifier(), loader(), ckpt_path=path
        )
    assert len([warning for warning in caught if "holds the state" in str(warning.message)]) == 1


def test_the_strategy_is_called_with_an_exception() -> None:
    error = KeyError("on purpose")
    model = Classifier()
    model.on_fit_start = mock.Mock(side_effect=error)  # type: ignore[method-assign]
    with mock.patch.object(Strategy, "on_exception") as heard, pytest.raises(KeyError):
        quiet().fit(model, loader())
    heard.assert_called_once_with(error)


def test_with_arguments_makes_another_trainer_on_the_same_callbacks_and_loggers(tmp_path: Path) -> None:
    added, logger = L.Callback(), CSVLogger(tmp_path)
    trainer = quiet(logger=logger, max_epochs=1, enable_progress_bar=True)
    trainer.callbacks.append(added)
    trainer.limit_train_batches = 2
    trainer.fit(Classifier(), loader())
    other = trainer.with_arguments(max_epochs=3, precision="bf16-mixed", enable_progress_bar=False)
    assert other.callbacks == [added]
    assert other.loggers == [logger]
    assert (other.max_epochs, other.precision, other.limit_train_batches) == (3, "bf16-mixed", 2)
    assert (other.global_step, other.callback_metrics) == (0, {})
    other.fit(Classifier(), loader())
    assert (other.global_step, trainer.global_step) == (6, 2)
    assert (trainer.max_epochs, trainer.precision) == (1, "32-true")
    assert trainer.progress_bar_callback is not None


def test_with_arguments_keeps_the_class_and_attributes_of_a_subclass() -> None:
    class Own(L.Trainer):
        def __init__(self, name: str) -> None:
            super().__init__(accelerator="cpu", logger=False, enable_checkpointing=False)
            self.name = name

    other = Own("run").with_arguments(max_steps=7)
    assert (type(other), other.name, other.max_steps) == (Own, "run", 7)


def test_changed_arguments_count_from_the_next_call_on() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.change_arguments(max_epochs=2, precision="bf16-mixed", gradient_clip_val=1.0, packed=True)
    assert trainer.given_arguments["precision"] == "bf16-mixed"
    assert (trainer.precision, trainer.max_epochs, trainer.gradient_clip_val) == ("bf16-mixed", 2, 1.0)
    assert trainer.current_epoch == 1
    trainer.change_arguments(packed=False)
    trainer.fit(Classifier(), loader())
    assert trainer.current_epoch == 2


@pytest.mark.parametrize(
    ("changes", "error", "argument"),
    [
        ({"max_epoch": 3}, TypeError, "max_epoch"),
        ({"max_epochs": 1.5}, TypeError, "max_epochs"),
        ({"min_epochs": 5, "max_epochs": 3}, ValueError, "min_epochs"),
        ({"callbacks": []}, TypeError, "callbacks"),
    ],
)
def test_a_refused_change_leaves_the_trainer_as_it_was(
    changes: dict[str, Any], error: type[Exception], argument: str
) -> None:
    trainer = quiet(max_epochs=1)
    with refused(error, argument):
        trainer.change_arguments(**changes)
    assert trainer.max_epochs == 1


def test_arguments_are_not_changed_while_a_call_runs() -> None:
    changes = watching(lambda _, trainer: trainer.change_arguments(max_epochs=2), "on_train_start")
    with refused(RuntimeError, says="Trainer.change_arguments()"):
        quiet(callbacks=[changes]).fit(Classifier(), loader())
