"""Names from inside Lightning that packages import work as they do there."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

import hasten
import hasten_lightning
from hasten.demos import BoringModel
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_a_file_is_read_when_its_tensors_are_used(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _lazy_load, _NotYetLoadedTensor

    torch.save({"weight": torch.arange(3.0)}, tmp_path / "a.pt")
    read = _lazy_load(tmp_path / "a.pt")
    assert read["weight"].tolist() == [0, 1, 2]
    assert not isinstance(read["weight"], _NotYetLoadedTensor)
    with refused(FileNotFoundError, says="b.pt"):
        _lazy_load(tmp_path / "b.pt")
    with refused(TypeError, says="NotYetLoadedTensor"):
        _NotYetLoadedTensor()


def test_modules_without_storage_get_their_initial_values() -> None:
    from lightning.fabric.utilities.init import _has_meta_device_parameters_or_buffers, _materialize_meta_tensors

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))

        def reset_parameters(self) -> None:
            torch.nn.init.constant_(self.weight, 2.0)

    model = torch.nn.Sequential(Two(), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    assert _has_meta_device_parameters_or_buffers(model)
    assert not _has_meta_device_parameters_or_buffers(model, recurse=False)
    kept = model[2].weight.clone()
    _materialize_meta_tensors(model, "cpu")
    assert not _has_meta_device_parameters_or_buffers(model)
    assert model[0].weight.item() == 2
    assert torch.equal(model[2].weight, kept)
    bare = torch.nn.Module()
    bare.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
    with refused(TypeError, says="reset_parameters"):
        _materialize_meta_tensors(bare, "cpu")


def test_a_class_that_overrides_loading_reaches_the_loading_of_the_base(tmp_path: Path) -> None:
    from lightning.pytorch.core.saving import _load_from_checkpoint

    class Own(BoringModel):
        @classmethod
        def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return _load_from_checkpoint(cls, checkpoint_path, None, None, False, **kwargs)

    model = Own()
    trainer = quiet(fast_dev_run=True)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(Own.load_from_checkpoint(tmp_path / "a.ckpt").layer.weight, model.layer.weight)


def test_a_checkpoint_io_around_another_one(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    seen = []

    class Own(_WrappingCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    trainer = quiet(fast_dev_run=True, plugins=Own())
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert seen == ["a.ckpt"]
    quiet(max_epochs=2, limit_train_batches=1, plugins=Own()).fit(BoringModel(), ckpt_path=tmp_path / "a.ckpt")
    inner, other = Own(), TorchCheckpointIO()
    _WrappingCheckpointIO(mocked := mock.Mock(spec=CheckpointIO)).load_checkpoint("a", "cpu")
    mocked.load_checkpoint.assert_called_once_with("a", "cpu")
    outer = Own(inner)
    outer.checkpoint_io = other
    assert outer.checkpoint_io is inner
    assert inner.checkpoint_io is other
    outer.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert isinstance(AsyncCheckpointIO(), _WrappingCheckpointIO)
    assert not isinstance(other, _WrappingCheckpointIO)


def test_what_loggers_write_of_hyper_parameters_and_checkpoints(tmp_path: Path) -> None:
    from lightning.fabric.utilities.logger import _flatten_dict, _sanitize_callable_params
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.utilities import _scan_checkpoints

    def fails(x: int) -> int:
        return x

    params = {"lr": 1, "kind": dict, "made": lambda: 2, "fails": fails, "twice": lambda: len}
    assert _sanitize_callable_params(params) == {
        "lr": 1, "kind": "dict", "made": 2, "fails": "fails", "twice": "<lambda>",
    }  # fmt: skip
    assert _flatten_dict({"a": {"b": 1}}, parent_key="m", delimiter=".") == {"m.a.b": 1}
    assert _flatten_dict({"a": {"b": 1}}) == {"a/b": 1}
    callback = ModelCheckpoint(tmp_path)
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    for time, path in enumerate((best, last), 100):
        path.write_text("x")
        os.utime(path, (time, time))
    callback.best_model_path, callback.last_model_path = str(best), str(last)
    assert [(file[1], file[3]) for file in _scan_checkpoints(callback, {})] == [
        (str(best), "best"), (str(last), "latest"),
    ]  # fmt: skip
    assert [file[1] for file in _scan_checkpoints(callback, {str(best): 100.0})] == [str(last)]


def test_which_gpus_a_value_means(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.utilities import device_parser
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from hasten.machine.devices import CUDAAccelerator

    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 3))
    parse = device_parser._parse_gpu_ids
    cases = ((0, None), ("0", None), ([], None), (2, [0, 1]), ("1, 2", [1, 2]), (-1, [0, 1, 2]), ("-1", [0, 1, 2]))
    assert [parse(given, include_cuda=True) for given, _ in cases] == [wanted for _, wanted in cases]
    for wrong in (4, [0, 0], "0,5"):
        with pytest.raises(MisconfigurationException):
            parse(wrong, include_cuda=True)
    with refused(MisconfigurationException, "gpus"):
        parse(-1, include_mps=True)
    for wrong_type in (None, True, 1.5, [0, "1"]):
        with refused(TypeError, says="IDs"):
            parse(wrong_type, include_cuda=True)
    with refused(ValueError, says="include_cuda=True"):
        device_parser._sanitize_gpu_ids([0])
    assert device_parser._normalize_parse_gpu_input_to_list(0, True, False) is None
    assert device_parser._determine_root_gpu_device([2, 1]) == 2
    assert device_parser._select_auto_accelerator() in ("cuda", "mps", "tpu")


def test_older_names_of_classes_make_the_class_and_warn() -> None:
    from lightning.pytorch.accelerators import TPUAccelerator, XLAAccelerator
    from lightning.pytorch.plugins import HalfPrecision, HalfPrecisionPlugin
    from lightning.pytorch.plugins.precision import PrecisionPlugin
    from lightning.pytorch.utilities.rank_zero import LightningDeprecationWarning

    with warned(LightningDeprecationWarning, says="HalfPrecision"):
        plugin = HalfPrecisionPlugin("bf16-true")
    assert isinstance(plugin, HalfPrecision)
    assert issubclass(TPUAccelerator, XLAAccelerator)
    assert not isinstance(plugin, PrecisionPlugin)
    assert not isinstance(HalfPrecision("bf16-true"), HalfPrecisionPlugin)


def test_trainers_have_the_callbacks_that_installed_packages_offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Timer

    info = tmp_path / "offers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1\n")
    groups = ("lightning.pytorch.callbacks_factory", "lightning.fabric.callbacks_factory")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\nown = offers:offered\n" for group in groups))
    (tmp_path / "offers.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n"
        "class Own(Callback): pass\n"
        "def offered(): return [Own(), Own()]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=Timer("00:00:01:00"), enable_model_summary=False)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert sorted(names) == ["ModelCheckpoint", "Own", "Own", "TQDMProgressBar", "Timer"]
    assert names[-1] == "ModelCheckpoint"
    fabric = Fabric(accelerator="cpu", callbacks=[object()])
    assert len(fabric._callbacks) == 3
    assert fabric._strategy is fabric.strategy
    assert fabric._precision.precision == "32-true"


def test_small_things(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    from lightning.fabric.plugins.environments.slurm import _is_slurm_interactive_mode
    from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
    from lightning.fabric.utilities.registry import _load_external_callbacks, _register_classes
    from lightning.pytorch.core.module import _jit_is_scripting
    from lightning.pytorch.core.optimizer import _MockOptimizer
    from lightning.pytorch.trainer.setup import _log_device_info

    class Parent:
        @classmethod
        def register(cls, registry: list[str]) -> None:
            raise AssertionError

    class Registers(Parent):
        @classmethod
        def register(cls, registry: list[str]) -> None:
            registry.append(cls.__name__)

    module = types.ModuleType("kinds")
    module.__dict__.update(Parent=Parent, Registers=Registers, Leaves=type("Leaves", (Parent,), {}))
    registry: list[str] = []
    _register_classes(registry, "register", module, Parent)
    assert registry == ["Registers"]
    assert _load_external_callbacks("hasten.no_such_group") == []
    optimizer = _MockOptimizer()
    assert (optimizer.step(lambda: 2.0), optimizer.step(), optimizer.state_dict()) == (2.0, None, {})
    model = BoringModel()
    with _jit_is_scripting():
        assert model.trainer is None
    with pytest.raises(RuntimeError):
        model.trainer
    _log_device_info(quiet())
    assert not _is_slurm_interactive_mode()
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert _is_slurm_interactive_mode()
    kept, converted = torch.ones(1, dtype=torch.long), torch.ones(1)
    assert _convert_fp_tensor(kept, torch.half) is kept
    assert _convert_fp_tensor(converted, torch.half).dtype is torch.half


def test_a_rich_bar_that_makes_its_own_display(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich
    from lightning.pytorch.callbacks.progress.rich_progress import (
        BatchesProcessedColumn,
        CustomBarColumn,
        CustomProgress,
        CustomTimeColumn,
        MetricsTextColumn,
        ProcessingSpeedColumn,
        RichProgressBar,
    )

    class Own(RichProgressBar):  # type: ignore[misc]
        def _init_progress(self, trainer: Any) -> None:
            if self.is_enabled and (self.progress is None or self._progress_stopped):
                self._reset_progress_bar_ids()
                self._metric_component = MetricsTextColumn(trainer, "", " and ", ".1f")
                columns = ["{task.description}", CustomBarColumn(), BatchesProcessedColumn(""), CustomTimeColumn("")]
                columns += [ProcessingSpeedColumn(""), self._metric_component]
                self.progress = CustomProgress(*columns, auto_refresh=False, console=self._console)
                self.progress.start()
                self._progress_stopped = False
                self.endless = self.progress.add_task("endless", total=float("inf"), visible=False)

        def _get_train_description(self, current_epoch: int) -> str:
            return f"stage {current_epoch}"

    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.25, prog_bar=True)
            return super().training_step(batch, batch_idx)

    terminal = io.StringIO()
    console = {"file": terminal, "force_terminal": True, "width": 120, "color_system": None, "legacy_windows": False}
    monkeypatch.setattr(rich.get_console(), "__dict__", dict(vars(rich.get_console())))
    bar = Own(console_kwargs=console)
    quiet(max_epochs=1, limit_train_batches=2, enable_progress_bar=True, callbacks=[bar]).fit(Logs())
    assert re.search(r"stage 0 .*2/2 .*it/s .*x: 1\.2", terminal.getvalue())
    assert bar._progress_stopped


def test_callbacks_whose_inner_methods_are_overridden(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
    from lightning.pytorch.trainer import call

    class Warm(EarlyStopping):  # type: ignore[misc]
        def _should_skip_check(self, trainer: Any) -> bool:
            return super()._should_skip_check(trainer) or trainer.current_epoch < 2

    class Rates(LearningRateMonitor):  # type: ignore[misc]
        def _get_optimizer_stats(self, *args: Any) -> dict[str, float]:
            return {f"{name}/own": 2 * value for name, value in super()._get_optimizer_stats(*args).items()}

    class Unfreezes(BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.extra)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            for index, optimizer in enumerate(trainer.optimizers):
                groups = len(optimizer.param_groups)
                if trainer.current_epoch == 1:
                    self.unfreeze_and_add_param_group(pl_module.extra, optimizer)
                self._store(pl_module, index, groups, optimizer.param_groups)

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(1, 1)

        def on_train_epoch_end(self) -> None:
            self.log("score", 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

        def own_hook(self, by: int) -> int:
            return 3 * by

    stops, unfreezes = Warm("score", patience=1), Unfreezes()
    callbacks = [stops, Rates(), unfreezes]
    logger = CSVLogger(tmp_path, name="")
    trainer = quiet(max_epochs=9, limit_train_batches=1, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    model = Model()
    trainer.fit(model)
    assert trainer.current_epoch == 4  # Two epochs that are not checked, the best one, and one that is not better.
    assert trainer.callback_metrics["lr-SGD/pg1/own"] == 0.2
    recorded = unfreezes._internal_optimizer_metadata[0]
    assert [group["params"] for group in recorded] == [["layer.weight", "layer.bias"], ["extra.weight", "extra.bias"]]
    assert call._call_lightning_module_hook(trainer, "own_hook", 2, pl_module=model) == 6
    assert logger._fs.isdir(logger._root_dir)

    class Appends(ExperimentWriter):  # type: ignore[misc]
        def _check_log_dir_exists(self) -> None:
            assert self._fs.exists(self.log_dir)

    appends = Appends(logger.log_dir)
    appends.metrics_keys = table = list(appends.metrics_keys)
    assert "score" in table == appends.metrics_keys


def test_programs_replace_loggers_and_their_parts(tmp_path: Path) -> None:
    from lightning.fabric import loggers as of_fabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.utilities import _log_hyperparams, _version
    from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector

    saves: list[str] = []

    class Writer:
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            saves.append("row")

        def log_hparams(self, params: Any) -> None:
            pass

        def save(self) -> None:
            pass

    class Own(CSVLogger):  # type: ignore[misc]
        @property
        def experiment(self) -> Any:
            self._experiment = self._experiment or Writer()
            return self._experiment

        def save(self) -> None:
            super().save()
            saves.append("saved")

    class Sets(hasten.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer._loggers = [Own(tmp_path), rows]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer._logger_connector.reset_results()
            trainer._logger_connector.reset_metrics()
            assert trainer.callback_metrics == {}
            _log_hyperparams(trainer)
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    rows = RowLogger()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=2, limit_val_batches=0, log_every_n_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Sets()],
    )  # fmt: skip
    trainer.fit(Classifier(), loader(32))
    assert (saves.count("row"), saves[-1]) == (2, "saved")
    assert ([step for step, _ in rows.rows], len(rows.graphs)) == ([0, 1], 2)
    connector = trainer._logger_connector
    assert isinstance(connector, _LoggerConnector)
    for given, kinds in ((iter([rows]), [RowLogger]), (rows, [RowLogger]), (False, []), (True, [TensorBoardLogger])):
        connector.configure_logger(given)
        assert [type(each) for each in trainer.loggers] == kinds
    assert quiet(logger={"a": rows}.values()).loggers == [rows]
    assert _version([CSVLogger(tmp_path, version=3), rows, TensorBoardLogger(tmp_path, version=4)]) == "3_4"

    class Texts(TensorBoardLogger):  # type: ignore[misc]
        @staticmethod
        def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
            assert params == {"a/b": 1}
            return {name: str(value) for name, value in params.items()}

    Texts(tmp_path).log_hyperparams({"a": {"b": 1}})
    assert isinstance(Texts(tmp_path), of_fabric.TensorBoardLogger)
    assert isinstance(CSVLogger(tmp_path), of_fabric.CSVLogger)
    assert not isinstance(CSVLogger(tmp_path), of_fabric.TensorBoardLogger)
    assert not isinstance(of_fabric.CSVLogger(tmp_path), type("Mine", (of_fabric.CSVLogger,), {}))
    wandb = WandbLogger(name="a", save_dir=tmp_path, id="b")
    wandb._project, wandb._id, wandb._save_dir = "c", "d", "e"
    assert (wandb._name, wandb.name, wandb.version, wandb.save_dir) == ("a", "c", "d", "e")


def test_a_callback_reads_the_parts_of_a_trainer_that_lightning_keeps_to_itself(tmp_path: Path) -> None:
    from lightning.pytorch import LightningDataModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    seen: dict[str, Any] = {"due": [], "validated": [], "moved": []}

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return BoringModel().train_dataloader()

        def val_dataloader(self) -> Any:
            return BoringModel().val_dataloader()

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen["moved"].append(dataloader_idx)
            return batch

    class Reads(hasten.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.fit_loop.epoch_loop.val_loop.run()[0].keys() == {"x"}
            assert trainer.training
            pl_module._apply_batch_transfer_handler(pl_module._on_before_batch_transfer(torch.ones(1)), None, 7)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            assert trainer._active_loop is trainer.fit_loop
            assert (trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop.total_batch_idx) == (batch_idx, batch_idx)
            seen["due"].append(trainer._logger_connector.should_update_logs)
            assert trainer._results == {}
            trainer._logger_connector.log_metrics({"own": torch.tensor(float(batch_idx))})

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            seen["validated"].append((loop._should_check_val_epoch(), loop._should_check_val_fx(None)))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            assert trainer._evaluation_loop is trainer.fit_loop.epoch_loop.val_loop
            assert trainer._results["validation_step.x"].meta.on_epoch
            assert trainer._logger_connector.metrics["callback"].keys() == trainer.callback_metrics.keys()

    options = {"accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    logger = CSVLogger(tmp_path, name="")
    trainer = Trainer(**options, logger=logger, callbacks=Reads(), log_every_n_steps=2, enable_model_summary=False)
    assert trainer._active_loop is None
    with refused(RuntimeError, says="no call evaluates"):
        trainer._evaluation_loop
    trainer.callbacks = trainer._callback_connector._reorder_callbacks(trainer.callbacks)
    trainer._callback_connector._attach_model_logging_functions()
    model = Logs()
    trainer.fit(model, datamodule=Data())
    assert trainer.strategy.model is model
    assert trainer.strategy.strategy_name == "single_device"
    assert seen["due"] == [False, True, False, True]
    assert seen["validated"] == [(True, False)] * 3 + [(True, True)]
    assert seen["moved"][1] == 7
    assert quiet()._logger_connector.should_update_logs  # Also of a Trainer under its own name.
    table = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert table[0] == "epoch,own,step,x"
    assert [row for row in table[1:] if row.split(",")[1]] == [f"0,{i}.0,{i}," for i in range(4)]


class Logs(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", 1.0)


def test_a_run_is_saved_and_restored_in_its_middle(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    class Back(hasten.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            connector = trainer._checkpoint_connector
            if trainer.global_step == 1 and not hasattr(self, "before"):
                self.before = {name: value.clone() for name, value in pl_module.state_dict().items()}
                assert connector.dump_checkpoint(weights_only=True).keys() < connector.dump_checkpoint().keys()
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            elif trainer.global_step == 3 and not hasattr(self, "after"):
                assert not torch.equal(pl_module.layer.weight, self.before["layer.weight"])
                connector.restore(tmp_path / "a.ckpt")
                self.after = {name: value.clone() for name, value in pl_module.state_dict().items()}
                assert trainer.global_step == 1
                assert connector._loaded_checkpoint == {}

    back, model = Back(), BoringModel()
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**options, callbacks=[back], max_steps=4, enable_model_summary=False)
    assert isinstance(trainer._checkpoint_connector, _CheckpointConnector)
    trainer.fit(model)
    assert torch.equal(back.after["layer.weight"], back.before["layer.weight"])


def test_a_run_resumes_from_what_a_program_has_dumped_to_a_file(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    class Dumps(hasten.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            torch.save(trainer._checkpoint_connector.dump_checkpoint(), tmp_path / f"{trainer.current_epoch}.pt")

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    whole, resumed = Classifier(), Classifier()
    Trainer(**options, callbacks=[Dumps()], max_epochs=2).fit(whole, loader(8))
    Trainer(**options, max_epochs=2).fit(resumed, loader(8), ckpt_path=tmp_path / "0.pt")
    assert same_weights(resumed, whole)
    assert same_weights(Classifier.load_from_checkpoint(tmp_path / "1.pt"), whole)


def test_optimizers_and_schedulers_are_restored_without_the_counters(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    class Back(hasten.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            (optimizer,), connector = trainer.optimizers, trainer._checkpoint_connector
            if trainer.global_step == 1:
                self.rate = optimizer.param_groups[0]["lr"]
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            elif trainer.global_step == 3:
                optimizer.param_groups[0]["lr"] = 7.0
                connector.resume_start(tmp_path / "a.ckpt")
                connector.restore_precision_plugin_state()
                connector.restore_optimizers_and_schedulers()
                assert (trainer.global_step, optimizer.param_groups[0]["lr"]) == (3, self.rate)
                connector.restore_loops()
                assert trainer.global_step == 1
                connector.resume_start(tmp_path / "weights.ckpt")
                with pytest.raises(KeyError):
                    connector.restore_optimizers_and_schedulers()
                trainer.should_stop = True

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(**options, callbacks=[Back()], max_steps=4, enable_model_summary=False).fit(BoringModel())


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("callbacks.EarlyStopping", ("x",)),
        ("callbacks.GradientAccumulationScheduler", ({0: 1},)),
        ("callbacks.ModelCheckpoint", ()),
        ("callbacks.OnExceptionCheckpoint", (".",)),
        ("callbacks.Timer", ()),
        ("loggers.CSVLogger", (".",)),
        ("loggers.TensorBoardLogger", (".",)),
        ("loggers.WandbLogger", ()),
        ("plugins.AsyncCheckpointIO", ()),
        ("plugins.DoublePrecision", ()),
    ],
)
def test_a_class_beside_one_of_lightning_is_initialized(kind: str, arguments: tuple[Any, ...]) -> None:
    class Beside:
        def __init__(self) -> None:
            super().__init__()
            self.connected: list[str] = []

    module, _, name = kind.rpartition(".")
    base = getattr(importlib.import_module(f"lightning.pytorch.{module}"), name)
    assert type(name, (base, Beside), {})(*arguments).connected == []


def test_packages_keep_attributes_of_their_own_at_the_loops() -> None:
    from lightning.pytorch import Trainer

    loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    for value in (1, 2):
        loop.phase = value
    assert loop.phase == 2
    with refused(AttributeError, says="state_dict cannot be assigned"):
        loop.state_dict = dict


def test_a_module_that_was_not_trained_is_saved(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    model = BoringModel()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with refused(AttributeError, says="Trainer.save_checkpoint()"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.connect(model)
    assert trainer.strategy.lightning_module is model
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    read = BoringModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(read.layer.weight, model.layer.weight)
    other = BoringModel()
    trainer.test(other, verbose=False)
    assert trainer.strategy.lightning_module is other


def test_a_compiled_module_is_the_module_with_compiled_steps() -> None:
    from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized, to_uncompiled

    model = BoringModel()
    compiled = torch.compile(model, backend="eager")
    assert _maybe_unwrap_optimized(model) is model
    assert _maybe_unwrap_optimized(compiled) is model
    assert model._compiler_ctx["compiler"] == "dynamo"
    assert "training_step" in vars(model)
    assert to_uncompiled(model) is model
    assert model._compiler_ctx is None
    with refused(ValueError, says="LightningModule"):
        to_uncompiled(model)
    with refused(TypeError, says="`LightningModule`"):
        _maybe_unwrap_optimized(object())


def test_hyper_parameters_that_are_set_directly() -> None:
    model = BoringModel()
    model._set_hparams({"width": 3})
    assert model.hparams.width == 3
    with refused(ValueError, says=("Namespace", "str")):
        model._set_hparams("width")


PRODUCTS = {
    "import lightning.app": "lightning.app. It belongs to a hosted product. Start programs with hasten run",
    "import lightning.store": "lightning.store. It belongs to a hosted product. Write weights with",
    "from pytorch_lightning.utilities import model_registry": "It belongs to a hosted product. Write weights",
    "import lightning_sdk": "lightning_sdk is the client of a hosted product, and is not installed. Start programs",
    "import litmodels.integrations": "litmodels is the client of a hosted product",
    "from pytorch_lightning.strategies import DDPFullyShardedStrategy": "DDPFullyShardedStrategy. Use FSDPStrategy",
    "from pytorch_lightning.utilities.cli import LightningCLI": "utilities.cli. It is lightning.pytorch.cli now.",
}


@pytest.mark.parametrize(("line", "says"), PRODUCTS.items())
def test_hosted_products_and_older_versions_fail_at_the_import(line: str, says: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        exec(line)
    assert says in str(error.value)


def test_clients_of_hosted_products_that_are_installed_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert importlib.util.find_spec("litmodels") is None
    (tmp_path / "litmodels.py").write_text("here = True")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("litmodels").here
    del sys.modules["litmodels"]


def test_internals_that_programs_read_before_and_outside_of_runs() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Timer

    linear = torch.nn.Linear(2, 2)
    wrapped = Fabric(accelerator="cpu", devices=1).setup(linear)
    assert wrapped._original_module is wrapped._forward_module is linear
    assert "training_step" in wrapped._forward_methods
    paths = {"a": True, "file://a": True, Path("a"): True, "s3://a": False}
    assert {path: _is_local_file_protocol(path) for path in paths} == paths

    timer = Timer("00:00:01:00")
    trainer = Trainer(accelerator="cpu", logger=False)
    timer.on_train_start(trainer, BoringModel())
    assert timer.time_remaining() <= 60
    assert not trainer.should_stop

    class OwnSteps(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return []

    model = OwnSteps()
    with warned(UserWarning, says="empty list"):
        quiet(max_epochs=1, limit_train_batches=1).fit(model)
    assert model.optimizers() == []


# -- helpers that packages take from Lightning


def test_hyper_parameters_are_flattened_and_made_plain() -> None:
    from lightning.fabric.utilities.logger import _flatten_dict, _sanitize_params

    nested = {"a": argparse.Namespace(b=1), "c": [], "d": [{"e": 1}], "f": [1]}
    assert _flatten_dict(nested, delimiter=".") == {"a.b": 1, "d/0.e": 1, "f": [1]}
    ones = torch.ones(1)
    params = {"n": numpy.float32(1), "flag": numpy.bool_(True), "tensor": ones, "kind": dict, "none": None}
    assert _sanitize_params(params) is params
    assert params == {"n": 1.0, "flag": True, "tensor": ones, "kind": "<class 'dict'>", "none": "None"}
    assert type(params["n"]) is float


def test_the_step_of_an_optimizer_stays_where_it_is() -> None:
    from lightning.fabric.utilities.optimizer import _optimizer_to_device

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    _optimizer_to_device(optimizer, "meta")
    state = optimizer.state[weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_wrapped_sampler_learns_the_epoch() -> None:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    class Rotates(torch.utils.data.Sampler[int]):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return ((index + self.epoch) % 4 for index in range(4))

        def __len__(self) -> int:
            return 4

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = DistributedSamplerWrapper(Rotates(), num_replicas=2, rank=0, shuffle=False)
    assert list(sampler) == [0, 2]
    sampler.set_epoch(1)
    assert list(sampler) == [1, 3]


def test_functions_of_modules_that_lightning_imports_can_be_replaced_through_it() -> None:
    with mock.patch("lightning.fabric.plugins.environments.slurm.shutil.which", return_value="/bin/srun"):
        assert shutil.which("nothing") == "/bin/srun"
    with pytest.raises(AttributeError):
        importlib.import_module("lightning.fabric.utilities.seed").numpy
    # Several modules of hasten have what Lightning has in this one: each gets back its own.
    names = ("loggers.mlflow", "callbacks.checkpoint")
    users: list[Any] = [importlib.import_module(f"hasten.{name}") for name in names]
    before = [module.time for module in users]
    with mock.patch("lightning.pytorch.loggers.mlflow.time", return_value=1.5) as replaced:
        assert users[0].time is replaced
    assert [module.time for module in users] == before


def test_a_checkpoint_io_may_be_a_mock(tmp_path: Path) -> None:
    from lightning.fabric.plugins.io import CheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    io = mock.MagicMock(spec=CheckpointIO)
    saves = ModelCheckpoint(dirpath=tmp_path, save_top_k=1)
    trainer = quiet(plugins=[io], callbacks=[saves], enable_checkpointing=True)
    trainer.fit(BoringModel())
    assert io.save_checkpoint.called
    io.teardown.assert_called_once_with()


def test_warnings_come_in_each_run() -> None:
    class Forgets(BoringModel):
        def predict_step(self, batch: Any, batch_idx: int) -> None: ...

    for _ in range(2):
        with warned(UserWarning, says="Forgets.predict_step"):
            quiet(limit_predict_batches=1).predict(Forgets())
        with warned(UserWarning, says="not attached"):
            Forgets().log("a", 1.0)


def test_a_loop_of_a_package_prints_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.trainer.connectors.logger_connector.result import _OUT_DICT
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn

    class Prints(_EvaluationLoop):  # type: ignore[misc]
        @staticmethod
        def _print_results(results: list[_OUT_DICT], stage: str) -> None:
            shown.append((stage, results[0]["test_loss"].item()))

    class Runs(_EvaluationLoop):  # type: ignore[misc]
        def run(self) -> None:
            pass

    class Model(Classifier):
        def on_validation_end(self) -> None:
            seen.append((self.trainer._evaluation_loop.verbose, self.trainer._evaluation_loop.inference_mode))

        on_test_end = on_validation_end

    shown: list[Any] = []
    seen: list[Any] = []
    of_test = (TrainerFn.TESTING, RunningStage.TESTING)
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with refused(RuntimeError, says="no call evaluates"):
        trainer._evaluation_loop
    for loop in (None, Runs(trainer, *of_test)):
        with refused(AttributeError, says="test_loop cannot be replaced"):
            trainer.test_loop = loop
    with refused(ValueError, says="inference_mode=False): the Trainer has inference_mode=True"):
        Prints(trainer, *of_test, inference_mode=False)
    trainer.test_loop = Prints(trainer, *of_test, inference_mode=True)
    model = Model()
    trainer.fit(model, loader(), loader())
    assert trainer._evaluation_loop is trainer.fit_loop.epoch_loop.val_loop
    trainer.test(model, loader(), verbose=False)
    result = trainer.test(model, loader())
    assert trainer._evaluation_loop is trainer.test_loop
    assert shown == [("test", result[0]["test_loss"])]
    trainer.validate_loop._print_results = lambda results, stage: shown.append(stage)
    trainer.validate(model, loader())
    assert shown[1:] == ["validate"]
    assert seen == [(False, False), (False, False), (False, True), (True, True), (True, True)]
    assert "metric" not in capsys.readouterr().out


@pytest.mark.parametrize("when", ["before fit", "in a hook"])
def test_a_program_decides_when_validation_is_due(when: str) -> None:
    validated: list[int] = []

    def assign(trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        ours = loop._should_check_val_fx
        loop._should_check_val_fx = lambda fetcher: ours(fetcher) or loop.batch_idx == trainer.val_check_batch // 2 - 1

    class Watches(hasten.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if when == "in a hook":
                assign(trainer)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            validated.append(trainer.global_step)

    trainer = quiet(max_epochs=2, callbacks=[Watches()], num_sanity_val_steps=0)
    if when == "before fit":
        assign(trainer)
    trainer.fit(Classifier(), loader(24), loader(8))
    assert validated == [3, 6, 9, 12]
    if when == "before fit":
        del trainer.fit_loop.epoch_loop._should_check_val_fx
        trainer.fit_loop.max_epochs = 3
        trainer.fit(Classifier(), loader(24), loader(8))
        assert validated == [3, 6, 9, 12, 18]


def test_methods_of_loops_that_a_run_does_not_call_cannot_be_replaced() -> None:
    trainer = quiet()
    with refused(AttributeError, says="TrainingEpochLoop._should_accumulate cannot be assigned"):
        trainer.fit_loop.epoch_loop._should_accumulate = lambda: True
    with refused(AttributeError, says="FitLoop.setup_data cannot be assigned"):
        trainer.fit_loop.setup_data = lambda: None


def test_an_evaluation_loop_within_fit_and_the_values_of_the_epoch() -> None:
    from lightning.pytorch import Trainer

    seen: list[Any] = []

    class Watches(hasten.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.fit_loop.epoch_loop.val_loop._has_run)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            values, steps = trainer._results.metrics(False), trainer._results.metrics(True)
            assert set(values["callback"]) == {"mean", "mean_epoch"}
            assert set(values["log"]) == set(values["pbar"]) == {"mean_epoch"}
            assert set(steps["log"]) == {"mean_step", "train_loss"}
            (result,) = trainer.fit_loop.epoch_loop.val_loop.run()
            assert result["val_loss"].item() == trainer.callback_metrics["val_loss"].item()

    class Model(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            seen.append(torch.is_inference_mode_enabled())

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    model, trainer = Model(), Trainer(**options, callbacks=[Watches()], max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(model, loader(8), loader(4))
    assert seen == [False, False, False, True, False, True]
    trainer.validate_loop.inference_mode = False
    trainer.validate(model, loader(4), verbose=False)
    assert seen[6] is trainer.validate_loop.inference_mode is False


def test_a_module_reads_the_datamodule_of_the_data_connector() -> None:
    from lightning.pytorch import LightningDataModule, Trainer

    class Data(LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(8)

    class Model(Classifier):
        def configure_optimizers(self) -> Any:
            connector = self.trainer._data_connector
            assert connector.trainer is self.trainer
            assert connector._datahook_selector == (self, self.trainer.datamodule)
            return super().configure_optimizers()

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**options, max_epochs=1)
    trainer.fit(Model(), datamodule=Data())
    assert trainer.global_step == 2


def test_a_subclass_gives_a_property_of_the_trainer_a_setter() -> None:
    class Sets(hasten.Trainer):
        @hasten.Trainer.current_epoch.setter
        def current_epoch(self, epoch: int) -> None:
            self.fit_loop.epoch_progress.current.completed = epoch

    trainer = Sets(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.current_epoch = 3
    assert trainer.current_epoch == 3


def test_what_a_loop_reads_and_what_it_predicted() -> None:
    from lightning.pytorch import Callback, Trainer

    class Empties(Callback):
        def on_predict_batch_end(self, trainer: Any, *_: Any) -> None:
            loop = trainer.predict_loop
            seen.append([len(predictions) for predictions in loop._predictions])
            loop._predictions = [[] for _ in range(loop.num_dataloaders)]

    class Model(Classifier):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:
            return batch_idx

        def train_dataloader(self) -> Any:
            return loader()

        def on_fit_start(self) -> None:
            seen.append(type(self.trainer.fit_loop._data_source.instance))

    seen: list[Any] = []
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Empties()])
    model = Model()
    trainer.fit(model)
    trainer.fit(model, given := loader())
    assert seen == [Model, type(given)]
    seen.clear()
    assert trainer.predict(model, loader(12)) == [2]
    assert trainer.predict(model, [loader(8), loader(4)]) == [[], [0]]
    assert seen == [[0], [1], [1], [0, 0], [1, 0], [1, 0]]


def test_a_program_knows_that_it_is_in_a_search_for_a_learning_rate() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.tuner import Tuner
    from lightning.pytorch.tuner.lr_finder import _LRCallback

    class Model(Classifier):
        lr = 0.1

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append([each.num_training for each in self.trainer.callbacks if type(each) is _LRCallback])
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    found = Tuner(trainer).lr_find(Model(), loader(8), num_training=2, update_attr=False)
    assert len(found.results["lr"]) == 2
    trainer.fit(Model(), loader(4))
    assert seen == [[2], [2], []]


def test_a_program_decides_itself_when_to_validate() -> None:
    from types import MethodType

    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    class Model(Classifier):
        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking:
                validated.append(self.global_step)

    def decide(self: _TrainingEpochLoop, data_fetcher: _DataFetcher) -> bool:
        assert not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        assert self.trainer.val_check_batch == 3
        asked.append((self.batch_idx, self.batch_progress.is_last_batch))
        return self._should_check_val_epoch() and self.global_step in (1, 2, 5)

    asked: list[tuple[int, bool]] = []
    validated: list[int] = []
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop
    by_interval = loop._should_check_val_fx
    loop._should_check_val_fx = MethodType(decide, loop)
    trainer.fit(Model(), loader(12), loader(4))
    assert validated == [1, 2, 5]
    assert asked == [(0, False), (1, False), (2, True)] * 2
    # In a new fit, and what the arguments say can be asked for.
    loop._should_check_val_fx = lambda data_fetcher: by_interval(data_fetcher) or loop.global_step == 7
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Model(), loader(12), loader(4))
    assert validated == [1, 2, 5, 7, 9]


def test_a_program_knows_whether_a_command_line_for_fabric_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.connector import _is_using_cli as of_connector
    from lightning.fabric.fabric import _is_using_cli

    assert not _is_using_cli()
    monkeypatch.setenv("LT_CLI_USED", "1")
    assert _is_using_cli()
    assert of_connector()


def test_a_program_makes_its_own_registries() -> None:
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.accelerators.registry import _AcceleratorRegistry
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    assert isinstance(STRATEGY_REGISTRY, _StrategyRegistry)
    assert isinstance(StrategyRegistry, _StrategyRegistry)
    own = _StrategyRegistry()
    own.register("mine", DDPStrategy, start_method="spawn")
    assert (str(own), own["mine"]["init_params"]) == ("Registered Strategies: mine", {"start_method": "spawn"})
    assert isinstance(own.get("mine"), DDPStrategy)
    assert "mine" not in STRATEGY_REGISTRY
    devices = _AcceleratorRegistry()
    devices.register("mine", CPUAccelerator)
    assert devices.available_accelerators() == {"mine"}


def test_a_strategy_that_a_connector_chose_has_what_programs_read() -> None:
    from lightning.fabric import strategies as of_fabric
    from lightning.fabric.connector import _Connector
    from lightning.pytorch import strategies as of_trainer
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    for connector, kind in ((_Connector, of_fabric.DDPStrategy), (_AcceleratorConnector, of_trainer.DDPStrategy)):
        strategy = connector(accelerator="cpu", devices=2, strategy="ddp_spawn").strategy
        assert (type(strategy), strategy._start_method) == (kind, "spawn")


def test_names_that_strategies_of_programs_import(tmp_path: Path) -> None:
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies.strategy import TBroadcast, TReduce
    from lightning.fabric.utilities.throughput import _plugin_to_compute_dtype
    from lightning.pytorch.core.saving import save_hparams_to_tags_csv
    from lightning.pytorch.strategies.strategy import TBroadcast as OfTrainer
    from lightning.pytorch.utilities.types import LRScheduler

    assert (TBroadcast.__name__, TReduce.__name__, OfTrainer.__name__) == ("TBroadcast", "TReduce", "TBroadcast")
    assert LRScheduler is torch.optim.lr_scheduler.LRScheduler
    assert _plugin_to_compute_dtype(Precision()) == torch.float32
    with refused(RuntimeError, says="Missing folder"):
        save_hparams_to_tags_csv(tmp_path / "absent" / "hparams.csv", {"lr": 1})
