"""Callbacks, loggers and the tuner under Lightning's names do what Lightning does where programs rely on it."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import hasten as L
from hasten.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from hasten.checkpoint import TorchCheckpointIO
from hasten.data import CombinedLoader
from hasten.demos.boring_classes import BoringModel, RandomDataset
from hasten.loggers import CSVLogger, TensorBoardLogger
from hasten.report.throughput import Throughput
from hasten.tuner import Tuner
from hasten.tuner.lr_find import LRFinder
from hasten.utilities.data import has_len_all_ranks
from hasten.utilities.model_helpers import is_overridden
from hasten.utilities.warnings import PossibleUserWarning, disable_if_requested
from hasten_lightning.conventions import LIGHTNING
from tests.models import quiet
from tests.refusals import refused, warned


@pytest.fixture
def under_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.elsewhere.conventions._current", LIGHTNING)


class Model(BoringModel):
    def __init__(self, lr: float = 0.1, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_a_program_that_replaces_torch_save_writes_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def save(contents: Any, file: Any) -> None:
        written.append(contents["global_step"])
        file.write(b"another format")

    monkeypatch.setattr(torch, "save", save)
    trainer = quiet(max_epochs=2, limit_train_batches=3, limit_val_batches=0)
    trainer.callbacks.append(ModelCheckpoint(tmp_path, save_last=True))
    trainer.fit(BoringModel())
    assert written == [3, 3, 6, 6]
    assert (tmp_path / "last.ckpt").read_bytes() == b"another format"


def test_callbacks_that_were_pickled_are_equal_and_the_hooks_of_a_callback_can_be_listed() -> None:
    for callback in (EarlyStopping("loss"), ModelCheckpoint(monitor="loss")):
        assert vars(pickle.loads(pickle.dumps(callback))) == vars(callback)
    hooks = {name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name[0] != "_"}
    assert "log" not in hooks
    assert LambdaCallback(**dict.fromkeys(hooks - {"state_dict", "load_state_dict"}, print)).on_fit_end is print

    class Logs(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            Callback.log(self, "a", 1.0)
            self.log_dict({"b": 2.0})

    trainer = quiet(max_steps=1, limit_val_batches=0, callbacks=[Logs()])
    trainer.fit(BoringModel())
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"a": 1.0, "b": 2.0}


def test_accumulation_schedules_warn_of_overridden_hooks() -> None:
    class Steps(BoringModel):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    with warned(UserWarning, says="optimizer_step"):
        quiet(max_steps=1, limit_val_batches=0, callbacks=[GradientAccumulationScheduler({0: 2})]).fit(Steps())
    # Also for a subclass that has its own on_fit_start.
    model = BoringModel()
    model.automatic_optimization = False
    with refused(RuntimeError, says=("GradientAccumulationScheduler", "BoringModel")):
        GradientAccumulationScheduler({0: 2}).on_train_start(quiet(), model)


def test_swa_says_which_scheduler_it_replaces(under_alias: None) -> None:
    class Stepped(BoringModel):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = quiet(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    trainer.callbacks.append(StochasticWeightAveraging(swa_lrs=0.02))
    with warned(UserWarning, says="SWA"):
        trainer.fit(Stepped())
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.02
    with refused(ValueError, "swa_lrs"):
        StochasticWeightAveraging(swa_lrs=[0.2, 1])


def test_a_group_added_during_the_run_renames_the_learning_rate(tmp_path: Path) -> None:
    class Deep(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            return self.layer(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    monitor = LearningRateMonitor("epoch")
    trainer = quiet(max_epochs=2, limit_train_batches=1, limit_val_batches=0, logger=CSVLogger(tmp_path))
    trainer.callbacks.extend([BackboneFinetuning(unfreeze_backbone_at_epoch=1), monitor])
    trainer.fit(Deep())
    assert {name: len(rates) for name, rates in monitor.lrs.items()} == {"lr-SGD/pg1": 2, "lr-SGD/pg2": 1}


def test_sweeps_give_lightnings_numbers(under_alias: None) -> None:
    # Computed with Lightning 2.6.6: the first loss is divided by the weight of two, the slope is that by the rate.
    found = LRFinder("exponential", 1e-4, 1.0, 5)
    found.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [3.0, 2.99, 2.5, 1.0, 9.0]}
    assert found.suggestion(skip_begin=0) == 1e-2

    class Constant(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch).mean() * 0 + 1

    trainer, model = quiet(max_epochs=1, limit_train_batches=3), Constant()
    found = Tuner(trainer).lr_find(model, num_training=10, min_lr=1.0, max_lr=1e-3, early_stop_threshold=None)
    assert found.results["loss"] == pytest.approx([(1 - 0.98**n) / (1 - 0.98 ** (n + 1)) for n in (1, 2, 3)])
    assert found.results["lr"][0] == 1.0
    assert found.suggestion() is None
    assert model.trainer is trainer
    with refused(AttributeError, fix="configure_optimizers()"):
        Tuner(quiet()).lr_find(BoringModel())
    with refused(ValueError, says="BatchSizeFinder"):
        Tuner(quiet(callbacks=[L.callbacks.BatchSizeFinder()])).scale_batch_size(Model())


def test_a_loader_that_does_not_follow_the_batch_size_is_a_warning(under_alias: None) -> None:
    model = Model()
    with warned(UserWarning, says=("batch_size", "is 2", "loader's", "is 1")):
        assert Tuner(quiet(max_epochs=1)).scale_batch_size(model, max_trials=2, steps_per_trial=1) == 4
    model.train_dataloader = lambda: DataLoader(RandomDataset(32, 64), batch_size=model.hparams.batch_size)
    assert Tuner(quiet(max_epochs=1)).scale_batch_size(model, max_trials=0, init_val=8) == 8


def test_one_file_name_for_all_checkpoints_means_one_file(under_alias: None, tmp_path: Path) -> None:
    trainer = quiet(max_epochs=2, limit_train_batches=1, limit_val_batches=0)
    trainer.callbacks.append(ModelCheckpoint(tmp_path, "model", save_top_k=-1))
    trainer.fit(BoringModel())
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"]


def test_csv_files_of_an_existing_version_start_over(under_alias: None, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger = CSVLogger(tmp_path, version=0)
            logger.log_metrics({"loss": value}, step=0)
            logger.save()
    assert Path(logger.experiment.metrics_file_path).read_text().split() == ["loss,step", "2.0,0"]
    logger.log_metrics({"loss": 3.0}, step=1)
    for twin in (copy.deepcopy(logger), pickle.loads(pickle.dumps(copy.copy(logger)))):
        twin.log_metrics({"loss": 4.0}, step=2)
        twin.save()
    rows = ["loss,step", "2.0,0", "3.0,1", "4.0,2", "4.0,2"]
    assert Path(logger.experiment.metrics_file_path).read_text().split() == rows


def test_helpers_answer_as_in_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet()
    with warned(UserWarning, says="DataLoader"):
        assert has_len_all_ranks(DataLoader([]), trainer.strategy)  # type: ignore[arg-type]
    assert not is_overridden("no_such_hook", BoringModel())
    trainer.datamodule = datamodule = L.LightningDataModule()
    assert trainer.datamodule is datamodule
    loaders = CombinedLoader([[0], [[1], [[2]]]])
    loaders.flattened = [[3], [2], [1]]
    assert loaders.iterables == [[3], [[2], [[1]]]]

    class Started:
        count = 0

        def __iter__(self) -> Any:
            Started.count += 1
            return iter([1])

    for mode, started in (("sequential", 1), ("min_size", 2)):
        Started.count = 0
        iter(CombinedLoader({"a": Started(), "b": Started()}, mode))  # type: ignore[arg-type]
        assert Started.count == started
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")
    with warnings.catch_warnings(record=True) as caught:
        disable_if_requested()
        warnings.warn("maybe", PossibleUserWarning, stacklevel=1)
    assert not caught


@pytest.mark.usefixtures("under_alias")
def test_where_no_validation_runs_what_it_would_have_logged_is_not_monitored(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_loss_of_no_run")
    options = {"limit_train_batches": 1, "limit_val_batches": 0, "callbacks": best, "enable_checkpointing": True}
    with warned(UserWarning, says="'val_loss_of_no_run'"):
        quiet(**options).fit(BoringModel())
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_for_the_bars_of_tqdm_is_called(under_alias: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.callbacks.progress.Tqdm", bars := mock.MagicMock())
    bars.return_value.disable = False
    quiet(max_epochs=1, limit_train_batches=2, callbacks=[TQDMProgressBar()], enable_progress_bar=True).fit(Model())
    bars.return_value.reset.assert_any_call(2)


def test_a_validation_does_not_count_a_batch_that_is_not_shown(under_alias: None) -> None:
    shown: list[int] = []

    class Bar(TQDMProgressBar):
        def on_validation_end(self, *args: Any) -> None:
            super().on_validation_end(*args)
            shown.append(self.train_progress_bar.n)

    trainer = quiet(max_epochs=1, limit_train_batches=6, val_check_interval=3, limit_val_batches=1)
    trainer.with_arguments(callbacks=[Bar(refresh_rate=2)], enable_progress_bar=True).fit(Model())
    assert shown == [0, 2, 6]  # The first is the sanity check.


def test_averaging_that_never_starts_is_a_warning(under_alias: None) -> None:
    with warned(UserWarning, says="max_epochs=1"):
        quiet(max_epochs=1, callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=10)]).fit(Model())


def test_errors_have_the_classes_that_programs_expect(tmp_path: Path) -> None:
    class Silent(BasePredictionWriter):
        pass

    with refused(NotImplementedError, "write_interval", says="write_on_batch_end"):
        quiet(callbacks=[Silent("batch")]).predict(Model(), DataLoader(RandomDataset(32, 2)))
    for wrong in ({"window_size": 1}, {"world_size": 0}):
        with refused(AssertionError, next(iter(wrong))):
            Throughput(**wrong)  # type: ignore[arg-type]
    with refused(KeyError, says="zz"):
        Model().save_hyperparameters("zz")
    torch.save({"object": Model}, tmp_path / "object.ckpt")
    with refused(pickle.UnpicklingError, says="object.ckpt"):
        TorchCheckpointIO().load_checkpoint(tmp_path / "object.ckpt", weights_only=True)
    with refused(RuntimeError, says="three"):
        TensorBoardLogger(tmp_path).log_metrics({"three": torch.ones(3)})


def test_dicts_among_hyperparameters_stay_dicts_in_files_with_objects(under_alias: None, tmp_path: Path) -> None:
    class Nested(BoringModel):
        def __init__(self, nested: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = quiet(max_epochs=1, limit_train_batches=1)
    trainer.fit(Nested({"a": [1, {"b": 2}]}))
    trainer.save_checkpoint(tmp_path / "nested.ckpt")
    nested = Nested.load_from_checkpoint(tmp_path / "nested.ckpt").hparams.nested
    assert (type(nested), type(nested["a"][1])) == (dict, dict)
