"""Every argument of the Trainer is checked before anything starts; the message names it and the fix."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
import hasten.loggers
from hasten.callbacks import ModelCheckpoint
from hasten.utilities.exceptions import MisconfigurationException
from tests.models import Classifier, dataset, loader, quiet
from tests.refusals import refused, warned

# Refused with a message that repeats the argument.
VALUES: dict[str, list[Any]] = {
    "max_epochs": [2.5, True], "max_steps": [-5], "max_time": [90], "limit_train_batches": [1.5],
    "limit_val_batches": [-1], "limit_test_batches": ["all"], "overfit_batches": [2.5], "val_check_interval": [0, 1.5],
    "check_val_every_n_epoch": [0], "num_sanity_val_steps": [-3], "log_every_n_steps": [-1],
    "accumulate_grad_batches": [0, 2.5, {0: 2}], "gradient_clip_val": ["1", -1.0], "deterministic": ["wran"],
    "fast_dev_run": [-1], "enable_progress_bar": ["yes"], "enable_checkpointing": [2], "callbacks": ["checkpoint"],
    "logger": ["csv"], "default_root_dir": [3], "reload_dataloaders_every_n_epochs": [-1],
    "inference_mode": [None],
}  # fmt: skip
BAREBONES: dict[str, Any] = {
    "logger": True, "enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True,
    "num_sanity_val_steps": 3, "log_every_n_steps": 3, "fast_dev_run": True, "detect_anomaly": True,
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{name}={value!r}") for name, values in VALUES.items() for value in values),
    ({"max_epoch": 3}, "max_epochs"), ({"gpus": 1}, "accelerator='gpu'"),
    ({"resume_from_checkpoint": "a.ckpt"}, "ckpt_path"), ({"max_epochs": -2}, "-1 for no limit"),
    ({"min_epochs": 5, "max_epochs": 3}, "min_epochs=5"), ({"min_steps": 5, "max_steps": 3}, "min_steps=5"),
    ({"max_time": "soon"}, "max_time"), ({"max_epochs": "3"}, "max_epochs=...*'3'"),
    ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "check_val_every_n_epoch=None"),
    ({"gradient_clip_algorithm": "norms"}, "Did you mean 'norm'"),
    ({"logger": "tensorboard"}, r"TensorBoardLogger\(\.\.\.\)"), ({"callbacks": [3]}, "Callback"),
    ({"callbacks": [L.Callback]}, r"Callback\(\)"), ({"profiler": "simpel"}, "simple"),
    *(({"barebones": True, name: value}, f"barebones=True, {name}={value}") for name, value in BAREBONES.items()),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        L.Trainer(**{"accelerator": "cpu", **arguments})


class NoStep(L.LightningModule):
    def trainings_step(self, batch: Any, batch_idx: int) -> Any: ...


class NoOptimizer(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Old(Classifier):
    def validation_epoch_end(self, outputs: Any) -> None: ...


MISSING: list[tuple[Any, str]] = [
    (lambda t: t.fit(NoStep(), loader()), r"No `training_step\(\)` method"),
    (lambda t: t.fit(NoOptimizer(), loader()), r"No `configure_optimizers\(\)` method"),
    (lambda t: t.fit(Classifier()), "no data"),
    (lambda t: t.fit(torch.nn.Linear(1, 1), loader()), "LightningModule"),
    (lambda t: t.fit(Classifier, loader()), r"write Classifier\(\)"),
    (lambda t: t.fit(Classifier(), loader(), datamodule=L.LightningDataModule()), "twice"),
    (lambda t: t.test(), "requires a `LightningModule`"),
    (lambda t: t.fit(Classifier(), loader(), ckpt_path="nowhere.ckpt"), r"nowhere\.ckpt"),
    (lambda t: t.fit(Classifier(), loader(), ckpt_path="best"), "best"),
    (lambda t: t.test(Classifier(), loader(), ckpt_path=""), "best_model_path is empty"),
    (lambda t: t.fit(Classifier(), []), r"(?i)no batches|empty"),
    (lambda t: t.fit(Old(), loader()), "on_validation_epoch_end"),
]


@pytest.mark.parametrize(("call", "words"), MISSING, ids=lambda value: value[:30] if isinstance(value, str) else "call")
def test_missing_parts_are_named_before_anything_starts(call: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        call(quiet())


@pytest.mark.parametrize(
    ("call", "argument", "fix"),
    [
        (lambda t: t.fit(Classifier(), loader(), L.LightningDataModule()), "datamodule", "fit(model, datamodule="),
        (lambda t: t.fit(Classifier(), L.LightningDataModule), "datamodule", "fit(model, datamodule="),
        (lambda t: t.fit(Classifier(), [L.LightningDataModule()]), "datamodule", "fit(model, datamodule="),
        (lambda t: t.validate(Classifier(), datamodule=loader()), "datamodule", "validate(model, loader)"),
        (lambda t: t.fit(Classifier(), [dataset(), dataset()]), "", "DataLoader(one, batch_size=...)"),
        (lambda t: t.validate(Classifier(), [dataset(4)]), "", "DataLoader(one, batch_size=...)"),
    ],
)
def test_data_in_the_place_of_other_data_is_refused(call: Any, argument: str, fix: str) -> None:
    with refused(TypeError, argument, fix=fix):
        call(quiet())


class Helped(Classifier):
    """Calls a method that is named like a hook of Lightning 1 itself, and has one for a call that is not made."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step_end({"loss": self.loss(batch)})

    def validation_step_end(self, outputs: Any) -> Any:
        return outputs

    def test_epoch_end(self, outputs: Any) -> None: ...


def test_removed_hooks_are_refused_by_the_calls_that_would_have_called_them() -> None:
    with warned(UserWarning, fix="Rename it to on_validation_batch_end"):
        quiet().fit(Helped(), loader(4), loader(4))
    quiet().predict(Old(), loader(4))
    with refused(NotImplementedError, fix="Rename it to on_test_epoch_end(self)"):
        quiet().test(Helped(), loader(4))


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda loss: {"los": loss}, "the 'loss' key needs to be present"),
        (lambda loss: {"loss": loss.item()}, "must be a tensor"),
        (lambda loss: loss.detach(), "does not require grad"),
        (lambda loss: loss.repeat(3), "scalar"),
        (lambda loss: "loss", "Return the loss"),
    ],
)
def test_wrong_losses_are_refused_by_name(returns: Any, words: str) -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returns(self.loss(batch))

    with pytest.raises((ValueError, RuntimeError)) as caught:
        quiet().fit(Wrong(), loader())
    text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert words in text
    assert "Wrong.training_step" in text


def test_loading_on_an_instance_and_bare_weights_are_refused(tmp_path: Any) -> None:
    model = Classifier()
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with refused(ValueError, says="'state_dict'"):
        Classifier.load_from_checkpoint(tmp_path / "bare.pt")
    with refused(TypeError, says="`Classifier.load_from_checkpoint`"):
        model.load_from_checkpoint(tmp_path / "bare.pt")


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such column")


def test_an_error_in_a_worker_keeps_its_type_and_names_the_dataset() -> None:
    with pytest.raises(KeyError) as caught:
        quiet().fit(Classifier(), torch.utils.data.DataLoader(Broken(), 4, num_workers=1))
    text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "no such column" in text
    assert "Broken" in text


def test_a_share_that_is_less_than_a_batch_says_how_much_is() -> None:
    with refused(ValueError, "limit_train_batches", fix="limit_train_batches=0.1"):
        quiet(limit_train_batches=0.01).fit(Classifier(), loader())


def test_refused_arguments_are_caught_under_each_name_programs_use(caplog: pytest.LogCaptureFixture) -> None:
    misconfigured = MisconfigurationException
    for wrong in (
        {"max_epochs": -2}, {"max_steps": -2}, {"check_val_every_n_epoch": 1.2}, {"gradient_clip_algorithm": "norm2"},
        {"limit_train_batches": 1.5}, {"max_time": "soon"},
        {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
        {"profiler": "slow"}, {"devices": 0}, {"devices": []}, {"plugins": "ddp"}, {"accelerator": "cpus"},
        {"enable_progress_bar": False, "callbacks": L.callbacks.TQDMProgressBar()},
    ):  # fmt: skip
        with pytest.raises(misconfigured) as caught:
            L.Trainer(**{"accelerator": "cpu", **wrong})  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
    for wrong in ({"devices": -1}, {"gradient_clip_val": "1"}, {"strategy": 3}, {"max_epochs": 1.5}):
        with pytest.raises(TypeError) as caught_type:
            L.Trainer(**{"accelerator": "cpu", **wrong})  # type: ignore[arg-type]
        assert isinstance(caught_type.value, misconfigured)
    with refused(RuntimeError, "callbacks", fix="state_key"):
        quiet(callbacks=[L.callbacks.EarlyStopping("loss"), L.callbacks.EarlyStopping("loss")])


def test_numbers_as_config_files_write_them_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(
        max_epochs=2.0, limit_train_batches=3.0, val_check_interval=2.0, accumulate_grad_batches=2.0, detect_anomaly=0,
        fast_dev_run=None, max_steps=float("inf"),
    )  # fmt: skip
    assert (trainer.max_epochs, trainer.max_steps) == (2, -1)
    assert (trainer.limit_train_batches, trainer.val_check_interval, trainer.accumulate_grad_batches) == (3, 2, 2)
    assert quiet(check_val_every_n_epoch=None).check_val_every_n_epoch is None
    with caplog.at_level("INFO"):
        quiet(val_check_interval=1, limit_test_batches=1.0)
    assert "validation will run after every batch" in caplog.text
    assert "(limit_test_batches=1.0)` was configured so 100%" in caplog.text


def test_a_minimum_above_the_maximum_says_both_ways_out() -> None:
    with refused(ValueError, "min_epochs", fix="max_epochs=5 or more, or min_epochs=3 or less"):
        quiet(min_epochs=5, max_epochs=3)


@pytest.mark.parametrize(
    ("arguments", "fits", "fix"),
    [
        ({}, True, "Leave it out"),
        ({"enable_checkpointing": True}, False, "Call fit"),
        ({"callbacks": ModelCheckpoint(save_top_k=0), "enable_checkpointing": True}, True, "save_top_k=1"),
    ],
)
def test_a_best_checkpoint_that_is_not_there_is_answered_by_its_cause(
    arguments: Any, fits: bool, fix: str, tmp_path: Path
) -> None:
    model, trainer = Classifier(), quiet(default_root_dir=tmp_path, **arguments)
    if fits:
        trainer.fit(model, loader(), loader(4))
    with refused(ValueError, "ckpt_path", fix=fix):
        trainer.validate(model, loader(4), ckpt_path="best")


def test_a_best_checkpoint_without_a_monitor_is_said_to_be_the_newest(tmp_path: Path) -> None:
    model, newest = Classifier(), ModelCheckpoint(tmp_path)
    trainer = quiet(callbacks=newest, enable_checkpointing=True)
    trainer.fit(model, loader(), loader(4))
    with warned(UserWarning, fix='monitor="val_loss"', says=newest.best_model_path):
        trainer.validate(model, loader(4), ckpt_path="best")
    ranked = quiet(callbacks=ModelCheckpoint(tmp_path, monitor="val_loss"), enable_checkpointing=True)
    ranked.fit(model, loader(), loader(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranked.validate(model, loader(4), ckpt_path="best")
