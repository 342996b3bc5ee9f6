"""What programs written for Lightning see of Trainer, Fabric, plugins and callbacks is what Lightning 2.6 shows."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import hasten_lightning
from tests.refusals import refused, warned

QUIETLY: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def trainer(**given: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(**{**QUIETLY, **given})


def model_with(**attributes: Any) -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


# -- clusters

LAUNCHED = {
    "KubeflowEnvironment": ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
    "TorchElasticEnvironment": ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "SLURMEnvironment": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}
READS = {
    "MASTER_ADDR": lambda cluster: cluster.main_address,
    "MASTER_PORT": lambda cluster: cluster.main_port,
    "WORLD_SIZE": lambda cluster: cluster.world_size(),
    "RANK": lambda cluster: cluster.global_rank(),
    "LOCAL_RANK": lambda cluster: cluster.local_rank(),
    "SLURM_NTASKS": lambda cluster: cluster.world_size(),
    "SLURM_PROCID": lambda cluster: cluster.global_rank(),
    "SLURM_LOCALID": lambda cluster: cluster.local_rank(),
}


@pytest.mark.parametrize("kind", LAUNCHED)
def test_a_cluster_does_not_guess_what_its_launcher_sets(kind: str, caplog: Any, monkeypatch: Any) -> None:
    from lightning.fabric.plugins import environments

    for name in READS:
        monkeypatch.delenv(name, raising=False)
    cluster = getattr(environments, kind)()
    for name in LAUNCHED[kind]:
        with pytest.raises(KeyError, match=name):
            READS[name](cluster)
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="lightning.fabric.plugins.environments"):
        cluster.set_global_rank(100)
        cluster.set_world_size(100)
    assert "setting global rank is not allowed" in caplog.text
    assert "setting world size is not allowed" in caplog.text
    # A program for the cluster runs alone on a laptop, too.
    trainer(plugins=cluster, max_steps=1)


def test_kubeflow_is_not_detected_by_its_class() -> None:
    from lightning.fabric.plugins.environments import KubeflowEnvironment

    with refused(NotImplementedError, says="detected automatically"):
        KubeflowEnvironment.detect()


# -- tuner


class Sized:
    """Hooks with loaders of ``batch_size``."""

    batch_size = 2

    def _loader(self) -> Any:
        return DataLoader(torch.randn(64, 32), batch_size=self.batch_size)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


@pytest.mark.parametrize("in_datamodule", [False, True])
@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_after_a_search_the_trainer_shows_the_data_with_the_size_found(method: str, in_datamodule: bool) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.tuner import Tuner

    kinds = (BoringModel, pl.LightningDataModule)
    owner = type("Owner", (Sized, kinds[in_datamodule]), {})()
    model = BoringModel() if in_datamodule else owner
    run = trainer()
    data = {"datamodule": owner} if in_datamodule else {}
    assert Tuner(run).scale_batch_size(model, method=method, init_val=4, max_trials=2, **data) == 8
    shown = {
        "fit": ["train_dataloader", "val_dataloaders"], "validate": ["val_dataloaders"], "test": ["test_dataloaders"],
        "predict": ["predict_dataloaders"],
    }  # fmt: skip
    assert [getattr(run, name).batch_size for name in shown[method]] == [8] * len(shown[method])
    assert run.datamodule is (owner if in_datamodule else None)
    assert run.lightning_module is model
    assert run.state.finished
    assert run.global_step == 0
    run.fit(model, **data)
    assert run.train_dataloader.batch_size == 8


def test_after_a_sweep_the_trainer_shows_its_training_data() -> None:
    from lightning.pytorch.tuner import Tuner

    run, model = trainer(), model_with(lr=0.1)
    Tuner(run).lr_find(model, num_training=3, early_stop_threshold=None)
    assert run.train_dataloader.batch_size == 1
    assert (run.val_dataloaders, run.num_training_batches) == (None, 2)
    assert run.estimated_stepping_batches == 2


# -- data


@pytest.mark.parametrize(
    ("reload", "every", "sanity", "validations"),
    [
        (1, 1, 0, "0 1 2 3 4"), (1, 2, 0, "1 3"), (2, 2, 0, "1 3"), (3, 2, 0, "1"), (2, 3, 0, "2"), (2, 1, 1, "0 2 4"),
        (2, 2, 1, "0 1 3"), (3, 2, 1, "0 1"), (3, 3, 1, "0 2"), (1, 3, 0, "2"), (0, 2, 1, "0"),
    ],
)  # fmt: skip
def test_epochs_in_which_validation_loaders_are_asked_for(
    reload: int, every: int, sanity: int, validations: str
) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    asked = []

    class Model(BoringModel):
        def val_dataloader(self) -> Any:
            asked.append(str(self.trainer.current_epoch))
            return super().val_dataloader()

    run = trainer(
        reload_dataloaders_every_n_epochs=reload, check_val_every_n_epoch=every, num_sanity_val_steps=sanity,
        max_epochs=5,
    )  # fmt: skip
    run.fit(Model())
    assert " ".join(asked) == validations


def test_a_look_at_numbers_of_batches_makes_no_loaders() -> None:
    model = model_with()
    run = trainer()
    run.fit(model)
    with mock.patch.object(type(model), "test_dataloader") as asked:
        assert (run.num_test_batches, run.num_predict_batches, run.num_val_batches) == ([], [], [1])
    asked.assert_not_called()


@pytest.mark.parametrize("interval", [100, 0.5, 2])
def test_an_interval_of_validation_says_nothing_where_validation_is_off(interval: float) -> None:
    run = trainer(val_check_interval=interval, limit_val_batches=0)
    run.fit(model_with())
    assert run.global_step == 2
    with refused(ValueError, "val_check_interval", says="`val_check_interval` (100)"):
        trainer(val_check_interval=100).fit(model_with())


# -- arguments and objects


@pytest.mark.parametrize(("given", "shown"), [(True, True), (1, True), (False, False), (3, 3)])
def test_fast_dev_run_of_one_batch_is_true(given: Any, shown: Any) -> None:
    assert trainer(fast_dev_run=given).fast_dev_run is shown


def test_the_folder_of_tensorboard_has_no_slash_at_its_end(tmp_path: Path) -> None:
    from lightning.fabric.loggers import TensorBoardLogger as OfFabric
    from lightning.pytorch.loggers import TensorBoardLogger

    for kind in (TensorBoardLogger, OfFabric):
        given = {"root_dir" if kind is OfFabric else "save_dir": tmp_path}
        assert kind(**given, version=2).log_dir == str(tmp_path / "lightning_logs" / "version_2")
        assert kind(**given, version=2, sub_dir="a").log_dir == str(tmp_path / "lightning_logs" / "version_2" / "a")


def test_the_tensorboard_logger_of_fabric_writes_events_alone(tmp_path: Path) -> None:
    from lightning.fabric.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"a": 1}, {"b": 2.0})
    logger.finalize("success")
    assert "events.out" in "".join(os.listdir(logger.log_dir))
    assert not Path(logger.log_dir, "hparams.yaml").exists()


def test_classes_are_annotated_with_types() -> None:
    from lightning.pytorch import LightningDataModule, Trainer, callbacks
    from lightning.pytorch.loggers import CSVLogger

    for kind in (
        callbacks.ModelCheckpoint, callbacks.EarlyStopping, callbacks.Timer, callbacks.TQDMProgressBar,
        callbacks.LearningRateMonitor, Trainer, LightningDataModule, CSVLogger,
    ):  # fmt: skip
        found = inspect.signature(kind).parameters.values()
        assert not [each.name for each in found if isinstance(each.annotation, str)], kind
    assert inspect.signature(callbacks.ModelCheckpoint).parameters["verbose"].annotation is bool


def test_two_pruning_callbacks_keep_their_masks(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelPruning
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(8, 8)

    def fitted(**given: Any) -> tuple[Any, Any]:
        model = Model()
        pruning = [
            ModelPruning("l1_unstructured", [(layer, "weight")], amount=0.5, make_pruning_permanent=False)
            for layer in (model.layer, model.other)
        ]
        run = trainer(callbacks=pruning, max_epochs=given.pop("max_epochs", 1))
        run.fit(model, **given)
        return run, model

    run, model = fitted()
    run.save_checkpoint(tmp_path / "last.ckpt")
    again = fitted(max_epochs=1, ckpt_path=str(tmp_path / "last.ckpt"))[1]
    for name in ("layer", "other"):
        mask, restored = getattr(model, name).weight_mask, getattr(again, name).weight_mask
        assert torch.equal(mask, restored)
        assert int(mask.sum()) == mask.numel() // 2


# -- precision and strategies


def test_deepspeeds_engine_converts_the_module_and_computes_gradients() -> None:
    from lightning.fabric.plugins import DeepSpeedPrecision
    from lightning.pytorch.plugins import DeepSpeedPrecision as OfTrainer

    types = {"16-mixed": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
    for kind in (DeepSpeedPrecision, OfTrainer):
        for precision, dtype in types.items():
            assert kind(precision).convert_module(torch.nn.Linear(2, 1)).weight.dtype == dtype
    engine, loss = mock.Mock(), torch.tensor(1.0, requires_grad=True)
    DeepSpeedPrecision("32-true").backward(loss, engine, 1, retain_graph=True)
    engine.backward.assert_called_once_with(loss, 1, retain_graph=True)


@pytest.mark.parametrize("name", ["SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"])
def test_modules_are_made_empty_where_a_program_asks_for_it(name: str) -> None:
    import lightning.fabric.strategies as of_fabric
    import lightning.pytorch.strategies as of_trainer

    device = torch.device("cpu")
    given: dict[str, Any] = {"SingleDeviceStrategy": {"device": device}, "ModelParallelStrategy": {}}.get(
        name, {"parallel_devices": [device] * 2}
    )
    place = "meta" if name in ("FSDPStrategy", "ModelParallelStrategy") else "cpu"
    for home, method in ((of_fabric, "module_init_context"), (of_trainer, "tensor_init_context")):
        also = {"parallelize_fn": lambda module, mesh: module} if given == {} and home is of_fabric else {}
        strategy = getattr(home, name)(**given, **also)
        for empty in (True, False, None):
            with mock.patch("torch.Tensor.uniform_") as initialize, getattr(strategy, method)(empty_init=empty):
                made = torch.nn.Linear(2, 2).weight
            assert made.device.type == (place if empty else "cpu")
            # Values of the meta device are drawn, and cost nothing.
            assert initialize.called is (not empty or place == "meta")


# -- Fabric


def test_a_module_under_fabric_logs_numbers_and_has_no_trainer() -> None:
    import lightning as L

    logger = mock.Mock()
    fabric = L.Fabric(accelerator="cpu", loggers=[logger])
    module = L.LightningModule()
    module.layer = torch.nn.Linear(2, 1)
    fabric.setup(module)
    assert module.logger is logger
    for value, kind in (([], "list"), ({"b": 1}, "dict"), ("s", "str")):
        with refused(ValueError, says=kind):
            module.log("a", value)
        with refused(ValueError, says=kind):
            module.log_dict({"a": value})
    module.log("hidden", 1, logger=False)
    module.log("shown", 2)
    logger.log_metrics.assert_called_once_with(metrics={"shown": 2}, step=None)
    assert not hasattr(module.trainer, "global_step")
    with refused(AttributeError, says="`self.trainer.anything`"):
        _ = module.trainer.anything


def test_torchscript_is_deprecated() -> None:
    from lightning.pytorch.utilities.rank_zero import LightningDeprecationWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with warned(LightningDeprecationWarning, says="to_torchscript"):
            model_with().to_torchscript()


# -- progress bars, without a terminal


def test_bars_of_rich_have_their_tasks_in_a_pipe(capsys: Any) -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import RichProgressBar

    bar, seen = RichProgressBar(), {}

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            task = bar.train_progress_bar
            seen["train"] = bar.train_progress_bar_id, task.id, task.total, task.description.strip()

        def on_validation_batch_start(self, *_: Any) -> None:
            seen["validation"] = bar.val_progress_bar.total

    run = trainer(enable_progress_bar=True, callbacks=[bar, Look()], num_sanity_val_steps=0)
    run.fit(model_with())
    own = seen["train"][0]
    assert seen == {"train": (own, own, 2, "Epoch 0/0"), "validation": 1}
    assert len(bar.progress.columns) == 6
    assert "2/2" in capsys.readouterr().out


def test_bars_show_totals_where_nothing_is_drawn() -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import TQDMProgressBar

    seen = []

    class Look(Callback):
        def on_validation_start(self, trainer: Any, *_: Any) -> None:
            seen.append((trainer.sanity_checking, bar.train_progress_bar.disable, bar.total_val_batches))

    for rate, train_is_off in ((1, False), (0, True)):
        bar = TQDMProgressBar(refresh_rate=rate)
        seen.clear()
        trainer(enable_progress_bar=True, callbacks=[bar, Look()], limit_val_batches=3).fit(model_with())
        assert seen == [(True, True, 3), (False, train_is_off, 3)]
        assert (bar.train_progress_bar.total, bar.train_progress_bar.desc) == (2, "Epoch 0: ")


# -- programs and packages


def test_any_sequence_is_a_list() -> None:
    """Lists of OmegaConf, which hydra makes, are sequences of a class of their own."""
    from collections import UserList, deque

    import lightning as L
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import AsyncCheckpointIO

    callback, logger, plugin = Callback(), CSVLogger("."), AsyncCheckpointIO()
    for kind in (UserList, deque, tuple):
        run = trainer(callbacks=kind([callback]), logger=kind([logger]), plugins=kind([plugin]))
        assert callback in run.callbacks
        assert run.loggers == [logger]
        assert run.strategy.checkpoint_io is plugin
        fabric = L.Fabric(accelerator="cpu", callbacks=kind([callback]), loggers=kind([logger]), plugins=kind([plugin]))
        assert fabric.loggers == [logger]


def test_the_default_logger_is_tensorboards_where_it_is_installed(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Model(BoringModel):
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_image("image", torch.zeros(3, 4, 4), 0)

    run = trainer(logger=True, default_root_dir=tmp_path)
    run.fit(Model())
    assert type(run.logger) is TensorBoardLogger
    assert run.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert list((tmp_path / "lightning_logs" / "version_0").glob("events.*"))
    monkeypatch.setattr("hasten.trainer.parts.installed", lambda name: False)
    assert type(trainer(logger=None).logger) is CSVLogger
    # A job that is queued again continues in its folder.
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name, version in (("train", 4711), ("bash", 1)):
        monkeypatch.setenv("SLURM_JOB_NAME", name)
        assert trainer(logger=True, default_root_dir=tmp_path).logger.version == version


def test_a_quick_run_has_a_checkpoint_callback_that_writes_nothing(tmp_path: Path) -> None:
    run = trainer(fast_dev_run=True, enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(model_with())
    assert run.checkpoint_callback.best_model_path == ""
    assert list(tmp_path.iterdir()) == []


def test_what_was_logged_can_be_listed() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    seen = []

    class Model(BoringModel):
        def training_step(self, *args: Any) -> Any:
            self.log("synced", 1.0, sync_dist=True)
            self.log("own", 1.0)
            return super().training_step(*args)

        def on_train_epoch_end(self) -> None:
            seen.extend(self.trainer._results.result_metrics)

    trainer(limit_val_batches=0).fit(Model())
    assert all(isinstance(each, _ResultMetric) and each.is_tensor for each in seen)
    assert {each.meta.name: each.meta.sync.should for each in seen} == {"synced": True, "own": False}


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    from lightning.pytorch import cli_lightning_logo
    from lightning.pytorch.demos.mnist_datamodule import MNIST, MNISTDataModule

    cli_lightning_logo()
    folder = tmp_path / "MNIST" / "processed"
    folder.mkdir(parents=True)
    for name, count in (("training.pt", 40), ("test.pt", 8)):
        digits = torch.arange(count) % 10
        torch.save((torch.full((count, 28, 28), 255, dtype=torch.uint8), digits), folder / name)
    image, digit = MNIST(str(tmp_path), normalize=None)[3]
    assert (image.shape, float(image.mean()), digit) == ((1, 28, 28), 1.0, 3)
    data = MNISTDataModule(str(tmp_path), val_split=10, num_workers=0, batch_size=8, normalize=True)
    data.prepare_data()
    data.setup("fit")
    counts = [
        len(loader.dataset) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    assert (counts, data.num_classes) == ([30, 10, 8], 10)
    images, digits = next(iter(data.test_dataloader()))
    assert (images.shape, digits.tolist()) == ((8, 1, 28, 28), list(range(8)))
    with refused(RuntimeError, "root", says="download=True"):
        MNIST(str(tmp_path / "elsewhere"), download=False)


def test_hooks_get_the_call_as_an_object_that_is_its_name() -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning.pytorch.trainer.states import TrainerFn

    seen = []

    class Model(BoringModel):
        def setup(self, stage: str) -> None:
            seen.append(stage)

        def teardown(self, stage: str) -> None:
            seen.append(stage)

    class Data(BoringDataModule):
        def setup(self, stage: str) -> None:
            seen.append(stage)
            super().setup(stage)

    run = trainer()
    run.fit(Model(), datamodule=Data())
    run.validate(Model(), verbose=False)
    assert all(isinstance(stage, TrainerFn) for stage in seen)
    assert seen == ["fit"] * 3 + ["validate"] * 3
    assert (str(seen[0]), f"{seen[0]}", seen[0].value) == ("TrainerFn.FITTING", "fit", "fit")


def test_fabric_detects_spikes(tmp_path: Path) -> None:
    import lightning as L
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    detection = SpikeDetection(exclude_batches_path=tmp_path)
    fabric = L.Fabric(accelerator="cpu", callbacks=detection)
    with refused(TrainingSpikeException, says="batch 3"):
        for batch_idx, loss in enumerate((1.0, 1.1, 0.9, 30.0)):
            fabric.call("on_train_batch_end", fabric, torch.tensor(loss), None, batch_idx)
    assert detection.bad_batches == [2, 3]
    assert (tmp_path / "skip_batches.json").read_text().split() == ["[", "2,", "3", "]"]
