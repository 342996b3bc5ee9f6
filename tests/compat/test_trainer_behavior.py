"""What a program written for Lightning relies on in the Trainer, where hasten does something else on purpose."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
import hasten.seed
import hasten_lightning
from hasten.loggers import CSVLogger
from hasten.tuner import Tuner
from hasten.utilities.exceptions import MisconfigurationException
from hasten.utilities.warnings import PossibleUserWarning
from tests.fakes import RowLogger
from tests.models import Classifier, Manual, loader, quiet
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_empty_loaders_are_a_warning() -> None:
    nothing: Any = DataLoader(TensorDataset(torch.empty(0, 8), torch.empty(0, dtype=torch.long)), 4)
    trainer = quiet()
    with warned(UserWarning, says="train dataloader"):
        trainer.fit(Classifier(), nothing)
    assert trainer.global_step == 0
    with warned(UserWarning, says="validate dataloader"):
        quiet().fit(Classifier(), loader(), nothing)
    with warned(UserWarning, says="validate dataloader"):
        assert quiet().validate(Classifier(), nothing) == []
    with warned(UserWarning, says="test dataloader"):
        assert quiet().test(Classifier(), []) == []
    with warned(UserWarning, says="predict dataloader"):
        assert quiet().predict(Classifier(), nothing) is None
    with refused(TypeError, fix="train_dataloaders="):
        quiet().fit(Classifier())


def test_advice_about_loaders_has_the_type_that_programs_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.machine.host.usable_cores", lambda: 8)
    few: Any = loader(8)
    shuffled: Any = DataLoader(few.dataset, 4, shuffle=True)
    kept: Any = DataLoader(few.dataset, 4, num_workers=2, persistent_workers=True, pin_memory=True)
    spawned: Any = DataLoader(few.dataset, 4, num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(PossibleUserWarning) as record:
        quiet().validate(Classifier(), shuffled)
    texts = "\n".join(str(one.message) for one in record if one.category is PossibleUserWarning)
    assert "'val_dataloader' does not have many workers" in texts
    assert "Your `val_dataloader`'s sampler has shuffling enabled" in texts
    with warned(PossibleUserWarning, says="shuffling") as record:
        quiet().predict(Classifier(), shuffled)
    assert sum("shuffling" in str(one.message) for one in record) == 1
    with warned(PossibleUserWarning, fix="pin_memory=False"):
        quiet(reload_dataloaders_every_n_epochs=1, max_epochs=0).fit(Classifier(), kept)
    with warned(UserWarning, says="persistent_workers=True"):
        quiet(max_epochs=0).fit(Classifier(), spawned)


def test_last_means_the_file_of_that_name(tmp_path: Path) -> None:
    trainer = quiet(default_root_dir=tmp_path, callbacks=L.callbacks.ModelCheckpoint(), enable_checkpointing=True)
    model = Classifier()
    trainer.fit(model, loader(8), loader(8))
    with warned(UserWarning, says="ckpt_path="):
        trainer.validate(model, loader(8), ckpt_path="last")
    assert trainer.ckpt_path is None
    again = quiet(default_root_dir=tmp_path, enable_checkpointing=True)
    with warned(UserWarning, says="ckpt_path="):
        again.fit(Classifier(), loader(8), ckpt_path="last")
    assert again.global_step == 2


def test_a_missing_hparams_file_is_a_warning(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Classifier(width=4), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warned(RuntimeWarning, says=("hparams_file=", "hparams.yaml")):
        loaded = Classifier.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "hparams.yaml", width=4)
    assert loaded.hparams.width == 4
    with refused(ValueError, "hparams_file", says=("h.txt", ".yaml")):
        Classifier.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "h.txt")


def test_a_metric_that_is_no_part_of_the_module_is_refused() -> None:
    class Forgotten(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            metric = torchmetrics.MeanMetric()
            metric(1.0)
            self.log("mean", metric)
            return self.loss(batch)

    with refused(MisconfigurationException, fix="__init__()"):
        quiet().fit(Forgotten(), loader(8))


def test_what_manual_optimization_returns_is_checked() -> None:
    class Returns(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return 0.5

    with refused(MisconfigurationException, says=("Returns.training_step", "float")):
        quiet().fit(Returns(), loader(8))


def test_a_short_epoch_and_no_limit_of_epochs_are_possible_oversights(tmp_path: Path) -> None:
    trainer = quiet(logger=True, default_root_dir=tmp_path)
    with warned(PossibleUserWarning, says="Trainer(log_every_n_steps=50)"):
        trainer.fit(Classifier(), loader(8))
    endless = quiet(max_epochs=None)
    model = Classifier()
    model.on_train_batch_end = lambda *_: setattr(endless, "should_stop", True)  # type: ignore[method-assign]
    with warned(PossibleUserWarning, says="`max_epochs`"):
        endless.fit(model, loader(8))


def test_an_error_in_copies_of_this_process_reaches_callbacks_here() -> None:
    class Fails(Classifier):
        def on_train_start(self) -> None:
            assert self.trainer.model is not self
            assert self.trainer.model.training  # type: ignore[union-attr]

        def on_validation_start(self) -> None:
            # The wrapper of DDP shows eval mode, too.
            assert not self.trainer.model.training  # type: ignore[union-attr]

        def on_train_epoch_end(self) -> None:
            raise ArithmeticError("on purpose")

    class Counts(L.Callback):
        def __init__(self) -> None:
            self.errors: list[BaseException] = []

        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            self.errors.append(exception)

    counts = Counts()
    trainer = quiet(strategy="ddp_fork", callbacks=counts)
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.fit(Fails(), loader(8), loader(8))
    assert len(counts.errors) == 1
    assert trainer.interrupted


def test_rows_that_copies_of_this_process_wrote_stay_when_others_test(tmp_path: Path) -> None:
    trainer = quiet(devices=2, strategy="ddp_fork", max_epochs=1, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    model = Classifier()
    trainer.fit(model, loader(16))
    trainer.test(model, loader(16))
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text(encoding="utf-8").splitlines()
    names = rows[0].split(",")
    assert {"test_loss", "train_loss"} <= {*names}
    assert len(rows) == 4


def test_workers_draw_the_numbers_that_lightning_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return random.getrandbits(30)

    with L.seed.isolate_rng():
        torch.manual_seed(102)
        L.seed.seed_worker(2, rank=1)
        drawn = random.getrandbits(32), int(torch.randint(2**31, (1,))), int(np.random.randint(2**31))
        assert drawn == (3856821048, 1826927507, 1097172413)
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    trainer = quiet(limit_predict_batches=1)
    trainer.predict(Classifier(), loader(8))
    assert trainer.predict_dataloaders.worker_init_fn.func is L.seed.seed_worker
    own: Any = DataLoader(loader(8).dataset, 4, worker_init_fn=print)
    trainer.predict(Classifier(), own)
    assert trainer.predict_dataloaders.worker_init_fn is print
    fabric = L.Fabric(accelerator="cpu")
    fabric.seed_everything(1, workers=cast("bool", 0), verbose=False)
    assert fabric.setup_dataloaders(loader(8)).worker_init_fn is None
    fabric.seed_everything(1, verbose=False)
    seeded = fabric.setup_dataloaders(loader(8)).worker_init_fn
    assert getattr(seeded, "func", None) is L.seed.seed_worker
    assert fabric.setup_dataloaders(own).worker_init_fn is print


def test_loaders_show_in_the_structure_they_were_given_in() -> None:
    class TwoLoaders(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("batch", batch_idx, on_step=True, on_epoch=False)

    first, second = loader(8), loader(4)
    rows = RowLogger()
    trainer = quiet(logger=rows, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(TwoLoaders(), loader(8), {"a": first, "b": second})
    assert trainer.val_dataloaders == {"a": first, "b": second}
    trainer.validate(TwoLoaders(), [first], verbose=False)
    assert trainer.val_dataloaders == [first]
    # Within a fit, the x axis of validation goes on from one validation to the next.
    assert [step for step, row in rows.rows if "batch/dataloader_idx_0" in row] == [0, 1, 2, 3]
    assert [step for step, row in rows.rows if "batch" in row] == [0, 1]


def test_the_module_does_not_give_what_the_datamodule_does_not_have() -> None:
    class HasLoader(Classifier):
        def val_dataloader(self) -> Any:
            return loader(8)

    class OnlyTraining(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

    trainer = quiet()
    with warned(PossibleUserWarning, fix="train_dataloaders"):
        trainer.fit(HasLoader(), datamodule=OnlyTraining())
    assert "val_loss" not in trainer.callback_metrics
    with refused(MisconfigurationException, says="test_dataloader"):
        trainer.test(HasLoader(), datamodule=OnlyTraining())


def test_arguments_that_lightning_refuses() -> None:
    class ClipsTwice(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)

    class StepsText(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step(closure="closure")  # type: ignore[arg-type, union-attr]

    class Indexed(Classifier):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
            return self.loss(batch)

    quiet(gradient_clip_val=0.5).fit(ClipsTwice(), loader(8))
    with refused(MisconfigurationException, "gradient_clip_val"):
        quiet(gradient_clip_val=1.0).fit(ClipsTwice(), loader(8))
    with pytest.raises(MisconfigurationException, match="use a function"):
        quiet().fit(StepsText(), loader(8))
    with refused(RuntimeError, fix="training_step"):
        quiet().fit(Indexed(), loader(8))


def test_a_step_that_fetches_its_batches_is_a_possible_oversight() -> None:
    class Fetches(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            next(dataloader_iter)

    trainer = quiet()
    with warned(PossibleUserWarning, says=("Found `dataloader_iter` argument in the", "training_step")):
        trainer.fit(Fetches(), loader(8))
    assert trainer.global_step == 2
    with warned(PossibleUserWarning, says=("Found `dataloader_iter` argument in the", "validation_step")):
        trainer.validate(Fetches(), loader(8))


def test_what_a_trainer_says_without_a_run() -> None:
    model, trainer = Classifier(), quiet()
    model.trainer = trainer
    with refused(MisconfigurationException, says="not running", fix="from a step"):
        model.log("a", 1.0)

    class Copies(L.Callback):
        def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.trainer = None
            copy.deepcopy(pl_module)
            pl_module.trainer = trainer

    trainer = quiet(callbacks=[Copies()])
    assert trainer.validate(model, loader(8), verbose=False)[0]
    model.trainer = None
    with warned(UserWarning, says="not attached to a Trainer"):
        model.log("a", 1.0)
    trainer = quiet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer.optimizers = [optimizer]
    assert trainer.optimizers == [optimizer]
    assert quiet(max_epochs=-1, max_steps=5).estimated_stepping_batches == 5
    pl = importlib.import_module("lightning.pytorch")
    off: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with warned(UserWarning, says="historical reasons"):
        pl.Trainer(precision="bf16", **off)
    with (
        mock.patch.object(pl.accelerators.MPSAccelerator, "is_available", return_value=True),
        warned(PossibleUserWarning, says="GPU available but not used"),
    ):
        pl.Trainer(**off)
    with (
        mock.patch.object(pl.accelerators.XLAAccelerator, "is_available", return_value=True),
        warned(UserWarning, says="TPU available but not used"),
    ):
        pl.Trainer(**off)


def test_a_batch_size_in_two_places_is_warned_of() -> None:
    class Sized(Classifier):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(loader(8).dataset, self.batch_size)

    model = Sized()
    with warned(UserWarning, says="mutually exclusive", fix="Keep one"):
        size = Tuner(quiet()).scale_batch_size(model, max_trials=2, steps_per_trial=1)
    assert size == model.batch_size == model.hparams["batch_size"]


def test_a_method_that_is_patched_on_a_base_class_is_called() -> None:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    trainer = importlib.import_module("lightning.pytorch").Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with mock.patch.object(strategies.Strategy, "backward", wraps=trainer.strategy.backward) as backward:
        trainer.fit(Manual(), loader(8))
    assert backward.call_count == 2
    assert "backward" not in vars(strategies.Strategy)
    assert L.strategies.Strategy.backward.__module__ == "hasten.strategies.program"


def test_no_value_is_logged_where_gradients_are_cleared_for_a_validation() -> None:
    class Logs(Classifier):
        def on_validation_model_zero_grad(self) -> None:
            self.log("a", 1.0)

    with refused(MisconfigurationException, says="'a'"):
        quiet(max_epochs=1).fit(Logs(), loader(8), loader(8))


def test_limits_and_clipping_show_as_lightnings_values() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities import GradClipAlgorithmType

    seen: list[Any] = []

    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            seen.append((options["gradient_clip_algorithm"], self.trainer.min_epochs, self.trainer.val_check_batch))

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(gradient_clip_val=1.0, gradient_clip_algorithm="value", **options)
    assert (trainer.min_epochs, trainer.val_check_batch) == (None, None)
    trainer.fit(Clips(), loader(8))
    assert {type(algorithm) for algorithm, *_ in seen} == {GradClipAlgorithmType}
    assert seen[0] == ("value", 0, len(seen))
    trainer.val_check_batch = 2
    assert trainer.val_check_interval == 2
    trainer.val_check_interval = {"hours": 1}
    trainer.fit(Clips(), loader(8))
    assert trainer.val_check_batch is None
    trainer.gradient_clip_algorithm = "norm"
    assert trainer.gradient_clip_algorithm is GradClipAlgorithmType.NORM


def test_ddp_of_one_process_draws_the_order_that_lightning_draws() -> None:
    from lightning.pytorch import Trainer
    from torch.utils.data import DistributedSampler

    seen: list[int] = []

    class Notes(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(int(batch[0][0, 0]))

    data = TensorDataset(torch.arange(6.0).repeat(8, 1).T, torch.zeros(6, dtype=torch.long))
    hasten.seed.seed_everything(3, verbose=False)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    Trainer(strategy="ddp", devices=1, **options).fit(Notes(), DataLoader(data))
    order = list(DistributedSampler(data, 1, 0, seed=3))
    assert seen == order
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    assert list(fabric.setup_dataloaders(DataLoader(data, shuffle=True)).sampler) == order
