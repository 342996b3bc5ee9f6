"""What each argument of the Trainer does."""

from __future__ import annotations

import copy
import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateFinder, LearningRateMonitor, ModelCheckpoint, Timer
from hasten.checkpoint.files import TorchCheckpointIO
from hasten.loggers import CSVLogger
from hasten.plugins import LayerSync, TorchSyncBatchNorm
from hasten.utilities.exceptions import MisconfigurationException
from tests.models import Classifier, Several, loader, quiet, same_weights
from tests.refusals import refused, warned


def test_fast_dev_run_runs_programs_that_write_to_their_logger(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger(tmp_path / "mine")

    class Writes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.logger is not logger
            self.logger.experiment.add_scalar("x", 1.0)
            self.logger.experiment.log({"x": 1.0})
            self.logger.log_metrics({"x": 1.0}, step=0)
            self.logger.watch(self)
            return super().training_step(batch, batch_idx)

    callbacks = [LearningRateMonitor(), EarlyStopping("never"), ModelCheckpoint(monitor="never"), Timer()]
    for given in (True, logger, [logger]):
        trainer = L.Trainer(
            accelerator="cpu", fast_dev_run=2, logger=given, callbacks=callbacks, max_epochs=7, overfit_batches=3,
            num_sanity_val_steps=5, val_check_interval=3, check_val_every_n_epoch=4, min_epochs=3, min_steps=9,
            enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(Writes(), loader(), loader())
        assert len(trainer.loggers) == 1
        assert trainer.log_dir is None
    assert list(tmp_path.iterdir()) == []
    assert (trainer.global_step, trainer.max_epochs, trainer.max_steps) == (2, 1, 2)
    assert (trainer.min_epochs, trainer.min_steps, trainer.overfit_batches) == (None, None, 0.0)
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (1.0, 1)
    limits = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    assert [getattr(trainer, name) for name in limits] == [2] * 4
    assert (trainer.num_training_batches, trainer.num_val_batches) == (2, [2])
    assert trainer.num_sanity_val_steps == 0
    assert trainer.fast_dev_run == 2
    assert len(trainer.predict(Classifier(), loader()) or ()) == 2
    assert quiet(fast_dev_run=True, logger=False).logger is None
    assert quiet(fast_dev_run=True).fast_dev_run == 1
    with refused(TypeError, "logger"):
        L.Trainer(fast_dev_run=True, logger=3)


def test_barebones_trains_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    bare, plain = Classifier(), Classifier()
    plain.load_state_dict(bare.state_dict())
    trainer = L.Trainer(accelerator="cpu", barebones=True, max_epochs=2, enable_progress_bar=False, logger=False)
    trainer.fit(bare, loader(8), loader(8))
    quiet(max_epochs=2).fit(plain, loader(8), loader(8))
    assert same_weights(bare, plain)
    assert trainer.barebones
    assert (trainer.loggers, trainer.callbacks) == ([], [])
    assert (trainer.num_sanity_val_steps, trainer.log_every_n_steps) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_barebones_logs_nothing_and_says_so_once() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True)
            self.log_dict({"other": loss})
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

    trainer = L.Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Logs(), loader(8), loader(8))
    assert sum("does nothing with Trainer(barebones=True)" in str(one.message) for one in told) == 1
    assert (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics) == ({}, {}, {})


class Modes(Several):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, *_: Any) -> Any:
        self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))
        return 1

    test_step = predict_step = validation_step

    def on_validation_start(self) -> None:
        assert not torch.is_grad_enabled()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_validation_start


def test_a_barebones_trainer_can_be_sent_to_the_processes_that_it_starts() -> None:
    assert isinstance(pickle.loads(pickle.dumps(L.Trainer(accelerator="cpu", barebones=True))), L.Trainer)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(inference_mode: bool) -> None:
    model = Modes()
    trainer = quiet(inference_mode=inference_mode, num_sanity_val_steps=0)
    trainer.fit(model, loader(4), loader(4))
    trainer.validate(model, loader(4), verbose=False)
    trainer.test(model, loader(4), verbose=False)
    trainer.predict(model, loader(4))
    # Not within fit: a tensor that validation keeps may be needed by training.
    assert model.seen == [(False, False, False)] + [(inference_mode, False, False)] * 3
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_detect_anomaly_is_on_during_fit_alone() -> None:
    seen: list[bool] = []

    class Looks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_anomaly_enabled())
            return self.loss(batch)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(torch.is_anomaly_enabled())

    trainer, model = quiet(detect_anomaly=True), Looks()
    trainer.fit(model, loader(4))
    trainer.test(model, loader(4), verbose=False)
    quiet().fit(model, loader(4))
    assert seen == [True, False, False]
    assert not torch.is_anomaly_enabled()

    class NotANumber(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            zero = self.layers[0].weight.sum() * 0
            return torch.sqrt(zero) * 0 + self.loss(batch)

    with refused(RuntimeError, says="nan"), pytest.warns(UserWarning, match="Error detected"):
        quiet(detect_anomaly=True).fit(NotANumber(), loader(4))
    assert not torch.is_anomaly_enabled()


@pytest.fixture
def _torchs_own_settings() -> Any:
    before = torch.backends.cudnn.benchmark
    workspace = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)  # A program of another test may have chosen them.
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


@pytest.mark.usefixtures("_torchs_own_settings")
def test_deterministic_and_benchmark_are_torchs_own_settings() -> None:
    """They hold from the Trainer's making on; one that says nothing leaves them as they are."""

    def settings(**arguments: Any) -> tuple[bool, bool, bool, str | None]:
        quiet(**arguments)
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    torch.backends.cudnn.benchmark = False
    assert settings() == (False, False, False, None)
    assert settings(benchmark=True) == (False, False, True, None)
    assert settings() == (False, False, True, None)
    assert settings(deterministic=False) == (False, False, True, None)
    # Timings differ from run to run.
    assert settings(deterministic=True) == (True, False, False, ":4096:8")
    assert settings() == (True, False, False, ":4096:8")
    with warned(UserWarning, says="benchmark=True", fix="Leave benchmark out"):
        assert settings(deterministic="warn", benchmark=True) == (True, True, True, ":4096:8")
    assert settings(deterministic=False, benchmark=False)[:3] == (False, False, False)
    assert settings(deterministic=0, benchmark=False)[:3] == (False, False, False)  # As from a command line.


@pytest.mark.filterwarnings("ignore:overfit_batches reads the same")
@pytest.mark.parametrize(("overfit", "batches"), [(2, 2), (0.4, 2), (1.0, 5)])
def test_overfitting_trains_and_validates_on_the_same_few(overfit: Any, batches: int) -> None:
    seen: list[Any] = []

    class Looks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(("train", batch[0].sum().item()))
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(("val", batch[0].sum().item()))

    trainer = quiet(overfit_batches=overfit, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Looks(), loader(20, shuffle=True), loader(20))
    sums = [batch[0].sum().item() for batch in loader(20)][:batches]
    assert seen == ([("train", s) for s in sums] + [("val", s) for s in sums]) * 2
    assert (trainer.num_training_batches, trainer.num_val_batches) == (batches, [batches])
    assert trainer.overfit_batches == trainer.limit_train_batches == trainer.limit_val_batches == overfit


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 3), (1.0, 6), (99, 6), (None, 6), (0, 0), (1, 1)])
def test_limits_of_evaluations(limit: Any, batches: int) -> None:
    model = Modes()
    trainer = quiet(limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit)
    results = trainer.validate(model, loader(24), verbose=False)
    assert results == ([{}] if batches else [])
    assert len(model.seen) == batches
    assert trainer.num_val_batches == ([batches] if batches else [])
    trainer.test(model, loader(24), verbose=False)
    assert trainer.num_test_batches == ([batches] if batches else [])
    assert len(trainer.predict(model, loader(24)) or ()) == batches
    assert trainer.num_predict_batches == ([batches] if batches else [])
    assert len(model.seen) == 3 * batches


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (None, 2), (99, 3), (-1, 3)])
def test_sanity_check(steps: Any, batches: int) -> None:
    checked: list[Any] = []

    class Looks(L.Callback):
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.sanity_checking:
                checked.append(trainer.num_sanity_val_batches)

        def on_sanity_check_end(self, trainer: Any, *_: Any) -> None:
            assert trainer.callback_metrics.keys() == {"val_loss"}

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            assert trainer.callback_metrics == {}

    trainer = quiet(num_sanity_val_steps=steps, callbacks=[Looks()])
    trainer.fit(Classifier(), loader(4), loader(12))
    assert checked == [[batches]] * batches
    assert trainer.num_sanity_val_steps == (math.inf if steps == -1 else 2 if steps is None else steps)


def test_enable_arguments(tmp_path: Path) -> None:
    def kinds(**arguments: Any) -> set[str]:
        options: dict[str, Any] = {"accelerator": "cpu", "default_root_dir": tmp_path, **arguments}
        return {type(callback).__name__ for callback in L.Trainer(**options).callbacks}

    everything = {"TQDMProgressBar", "ModelSummary", "ModelCheckpoint"}
    assert kinds() == everything
    assert kinds(enable_progress_bar=True, enable_model_summary=True, enable_checkpointing=True) == everything
    assert kinds(enable_progress_bar=False) == everything - {"TQDMProgressBar"}
    assert kinds(enable_model_summary=False) == everything - {"ModelSummary"}
    assert kinds(enable_checkpointing=False) == everything - {"ModelCheckpoint"}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path)
    assert type(trainer.progress_bar_callback).__name__ == "TQDMProgressBar"
    assert trainer.early_stopping_callback is None
    with refused(ValueError, "enable_checkpointing"):
        L.Trainer(accelerator="cpu", enable_checkpointing=False, callbacks=[ModelCheckpoint()])


def test_callbacks_by_kind() -> None:
    stops = [EarlyStopping("a"), EarlyStopping("b")]
    saves = [ModelCheckpoint(monitor="a"), ModelCheckpoint(monitor="b")]
    trainer = quiet(callbacks=[*saves, *stops], enable_checkpointing=True)
    assert trainer.early_stopping_callbacks == stops
    assert trainer.early_stopping_callback is stops[0]
    assert trainer.checkpoint_callbacks == saves
    assert trainer.checkpoint_callback is saves[0]
    assert trainer.callbacks == [*stops, *saves]
    assert type(quiet(callbacks=[*stops, LearningRateFinder()]).callbacks[0]) is LearningRateFinder
    drawn = quiet(enable_progress_bar=True, max_time="1h").callbacks
    assert [type(each).__name__ for each in drawn] == ["Timer", "TQDMProgressBar"]
    trainer.callbacks = stops
    assert trainer.checkpoint_callbacks == []
    assert trainer.checkpoint_callback is None
    assert trainer.progress_bar_callback is None


class Writes(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved.append(str(path))
        super().save_checkpoint(checkpoint, path, storage_options)


def test_a_given_checkpoint_io_writes_all_checkpoints(tmp_path: Path) -> None:
    writes = Writes()
    trainer = quiet(
        plugins=[writes], enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, "{step}")], max_epochs=2
    )
    trainer.fit(Classifier(), loader(8))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert [Path(path).name for path in writes.saved] == ["step=2.ckpt", "step=4.ckpt", "end.ckpt"]


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.layers(self.norm(x))


class NoStatistics(LayerSync):
    """Has all batch normalizations compute without a batch's statistics."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append("apply")
        model.norm = nn.Identity()
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append("revert")
        return model


@pytest.mark.world_size(2)
def test_sync_batchnorm_on_two_processes() -> None:
    model = Normed()
    trainer = quiet(sync_batchnorm=True, devices=2, strategy="ddp")
    # torch has it for accelerators alone, where training is concerned.
    with refused(ValueError, "sync_batchnorm"):
        trainer.fit(model, loader(8))
    trainer.test(model, loader(8), verbose=False)
    assert type(model.norm) is nn.BatchNorm1d
    sync = NoStatistics()
    trainer = quiet(plugins=sync, devices=2, strategy="ddp")
    trainer.test(model, loader(8), verbose=False)
    assert sync.calls == []
    trainer.fit(model, loader(8))
    assert sync.calls == ["apply", "revert"]
    assert type(model.norm) is nn.Identity


def test_sync_batchnorm_in_one_process() -> None:
    model, sync = Normed(), NoStatistics()
    for trainer in (quiet(plugins=[sync]), quiet(sync_batchnorm=True, plugins=TorchSyncBatchNorm())):
        trainer.fit(model, loader(8))
    assert sync.calls == []
    assert type(model.norm) is nn.BatchNorm1d
    with refused(MisconfigurationException, "sync_batchnorm"):
        quiet(sync_batchnorm=True, plugins=sync)


def test_layers_that_are_synchronized_come_back_as_they_were() -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Own(3)), nn.SyncBatchNorm(4))
    names, own = [name for name, _ in model.named_parameters()], model[1][0]
    sync = TorchSyncBatchNorm()
    assert sync.apply(model) is model
    assert {type(part) for part in (model[0], model[1][0], model[2])} == {nn.SyncBatchNorm}
    assert [name for name, _ in model.named_parameters()] == names
    model.eval().double()
    with torch.no_grad():
        model[1][0].weight.fill_(7)
    assert sync.revert(copy.deepcopy(model))[1][0].weight[0] == 7
    assert sync.revert(model) is model
    assert model[1][0] is own
    assert own.weight[0] == 7
    assert own.running_mean.dtype == torch.float64
    assert not own.training
    assert type(model[2]) is nn.SyncBatchNorm
    # Which layer that was before is not known: any shape may follow.
    sync.revert(model)
    assert type(model[2]) is not nn.SyncBatchNorm
    assert model[2](torch.ones(2, 4, 3, dtype=torch.float64)).shape == (2, 4, 3)


def test_default_root_dir_is_where_everything_goes(tmp_path: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu", default_root_dir=tmp_path, max_epochs=1, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader(8))
    assert trainer.default_root_dir == str(tmp_path)
    assert str(trainer.log_dir).startswith(str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=0-step=2.ckpt"]
    assert [path.name for path in tmp_path.rglob("metrics.csv")] == ["metrics.csv"]
    assert quiet(default_root_dir=tmp_path).log_dir == str(tmp_path)
