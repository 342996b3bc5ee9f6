"""Mocks in place of the parts of a run, as tests of programs for Lightning make them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call, patch

import pytest
import torch
from torch import nn

import hasten_lightning
from hasten.hooks import redefines
from hasten.module import LightningModule
from hasten.utilities.exceptions import MisconfigurationException
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def _alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def _fit(**arguments: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    module = arguments.pop("module", None) or BoringModel()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    limits = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "accelerator": "cpu"}
    trainer = Trainer(**{**off, **limits, **arguments})
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
def test_a_mocked_transfer_hook_is_called(hook: str) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    module: Any = BoringModel()
    setattr(module, hook, Mock(side_effect=getattr(module, hook)))
    _fit(module=module)
    assert getattr(module, hook).call_count == 4


def test_mocks_as_arguments_of_the_trainer() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.profilers import Profiler

    for spec in (None, Logger, CSVLogger):
        logger = Mock(spec=spec, save_dir=None, log_dir=None) if spec else Mock()
        _fit(logger=logger)
        logger.finalize.assert_called_once_with("success")
    profiler = Mock(spec=Profiler, profile=MagicMock())
    _fit(profiler=profiler)
    assert profiler.profile.called
    callback = Mock()
    _fit(callbacks=[callback])
    assert callback.on_train_batch_end.call_count == 2
    precision = Mock(spec=Precision, precision="32-true")
    assert Trainer(plugins=[precision], accelerator="cpu", logger=False).precision_plugin is precision
    with refused(TypeError, "callbacks", says="not a hasten.Callback"):
        Trainer(callbacks=[object()])


def test_hooks_of_callbacks_called_with_a_mock_trainer() -> None:
    from lightning.pytorch.callbacks import (
        BasePredictionWriter,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        SpikeDetection,
        StochasticWeightAveraging,
        Timer,
    )
    from lightning.pytorch.trainer.states import TrainerFn

    trainer = Mock(should_stop=False)
    trainer.strategy.broadcast.side_effect = lambda value: value
    with patch("time.monotonic", side_effect=[0.0, 5.0, 10.0, *[300.0] * 9]):
        timer = Timer(timedelta(seconds=20))
        timer.on_train_start(trainer, Mock())
        assert (timer.start_time(), timer.time_elapsed(), timer.time_remaining()) == (0.0, 5.0, 10.0)
        timer.on_train_batch_end(trainer, Mock(), None, None, 0)
    assert trainer.should_stop
    with patch("lightning.pytorch.callbacks.timer.time") as clock:  # the module that Lightning's imports
        clock.monotonic.return_value = 7.0
        timer.on_train_start(trainer, Mock())
        timer._check_time_remaining(trainer)
        assert timer.start_time() == 7.0
    timer.on_train_start(trainer, Mock())
    assert timer.start_time() > 7.0

    trainer, saved = Mock(), OnExceptionCheckpoint("x")
    saved.on_exception(trainer, Mock(), RuntimeError())
    trainer.save_checkpoint.assert_called_once_with(saved.ckpt_path)
    saved.teardown(trainer, Mock(), "fit")
    trainer.strategy.remove_checkpoint.assert_called_once_with(saved.ckpt_path)

    class Writer(BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, *arguments: Any) -> None:
            found.append(arguments[3])

        def write_on_epoch_end(self, *arguments: Any) -> None:
            found.extend(arguments[2:])

    found: list[Any] = []
    trainer.predict_loop = Mock(current_batch_indices=[1], epoch_batch_indices=[[[1]]], predictions=[4])
    writer = Writer("batch_and_epoch")
    writer.on_predict_batch_end(trainer, None, torch.ones(1), None, 0)
    writer.on_predict_epoch_end(trainer, None)
    assert found == [[1], [4], [[[1]]]]

    trainer = Mock(
        callback_metrics={"loss": torch.tensor(2.0)}, current_epoch=1, global_step=10, fast_dev_run=False, loggers=[],
        sanity_checking=False, ckpt_path=None,
    )  # fmt: skip
    trainer.state.fn, trainer.strategy.broadcast.side_effect = TrainerFn.FITTING, lambda value, *_: value
    trainer.strategy.reduce_boolean_decision.side_effect = lambda value, **_: value
    checkpoint = ModelCheckpoint(dirpath="x", monitor="loss", save_last=True)
    checkpoint.setup(trainer, Mock(), "fit")
    checkpoint.on_train_start(trainer, Mock())
    checkpoint.on_train_epoch_end(trainer, Mock())
    written = [Path(each.args[0]).name for each in trainer.save_checkpoint.call_args_list]
    assert written == ["epoch=1-step=10.ckpt", "last.ckpt"]

    for optimizers, schedulers in (([1, 2], []), ([1], [1, 2])):
        several = Mock(max_epochs=4, optimizers=optimizers, lr_scheduler_configs=schedulers)
        with refused(MisconfigurationException, says="configure_optimizers() gives 2"):
            StochasticWeightAveraging(0.1).on_fit_start(several, nn.Linear(1, 1))

    spikes = SpikeDetection(exclude_batches_path="spikes")
    assert spikes.last_val == 0.0
    for batch_idx, loss in enumerate((1.0, 1.0, 1.0)):
        spikes.on_train_batch_end(Mock(), Mock(), torch.tensor(loss), None, batch_idx)
    assert (spikes.last_val, float(spikes.running_mean.compute())) == (1.0, 1.0)
    state = spikes.state_dict()
    lightning = "last_val mode warmup atol rtol bad_batches bad_batches_path running mean"
    assert set(lightning.split()) <= set(state)
    again = SpikeDetection(rtol=9.0)
    again.load_state_dict(state)
    assert (again.last_val, again.rtol, again.exclude_batches_path) == (1.0, 2.0, "spikes")
    with refused(RuntimeError, says="batch 3"):
        spikes.on_train_batch_end(Mock(), Mock(), torch.tensor(50.0), None, 3)


def test_a_patched_flag_says_that_a_package_is_missing() -> None:
    from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar
    from lightning.pytorch.callbacks.progress import rich_progress

    with patch("lightning.pytorch.callbacks.progress.rich_progress._RICH_AVAILABLE", False):
        for kind in (RichProgressBar, RichModelSummary):
            with refused(ModuleNotFoundError, says=(kind.__name__, "pip install rich")):
                kind()
    RichProgressBar()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rich_progress, "_RICH_AVAILABLE", False)
        with refused(ModuleNotFoundError, says="rich"):
            RichModelSummary()
    RichModelSummary()


def test_a_logger_gets_the_learning_rates_as_from_lightning() -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    logger = Mock(spec=CSVLogger, save_dir=".")
    _fit(callbacks=[LearningRateMonitor()], logger=logger, log_every_n_steps=1)
    assert logger.log_metrics.mock_calls[0] == call({"lr-SGD": 0.1}, step=0)


def test_clipping_calls_torch_with_the_arguments_of_lightning() -> None:
    for algorithm, name, given in (
        ("norm", "clip_grad_norm_", ((0.5,), {})),
        ("value", "clip_grad_value_", ((), {"clip_value": 0.5})),
    ):
        with patch(f"torch.nn.utils.{name}") as clip:
            _fit(max_steps=1, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
        assert (clip.call_args.args[1:], clip.call_args.kwargs) == given


def test_errors_of_precisions_and_of_missing_packages() -> None:
    from lightning.fabric.plugins.environments import XLAEnvironment
    from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, MixedPrecision, XLAPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceXLAStrategy, XLAStrategy

    scaler, layer = torch.amp.GradScaler("cpu"), nn.Linear(1, 1)
    layer(torch.ones(1, 1)).backward()
    optimizer = torch.optim.LBFGS(layer.parameters())
    with refused(MisconfigurationException, "scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler)
    for kind in (MisconfigurationException, TypeError):
        with refused(kind, says="LBFGS"):
            MixedPrecision("16-mixed", "cpu", scaler).optimizer_step(optimizer, layer, lambda: None)
    with refused(MisconfigurationException, fix="clip_gradients_norm"):
        FSDPPrecision("32-true").clip_gradients(optimizer, 1e-9)
    DeepSpeedPrecision("32-true").clip_gradients(optimizer, 1e-9)
    assert float(layer.weight.grad.abs().sum()) > 1e-3  # type: ignore[union-attr]
    assert hasattr(XLAPrecision, "train_step_context")
    if find_spec("torch_xla") is None:
        for make in (XLAEnvironment, XLAPrecision, XLAStrategy, lambda: SingleDeviceXLAStrategy(0)):
            with pytest.raises(ModuleNotFoundError):
                make()
    if find_spec("deepspeed") is None:
        for kind in (MisconfigurationException, ModuleNotFoundError):
            with refused(kind, says="deepspeed"):
                DeepSpeedStrategy()


def test_a_partial_that_wraps_a_hook_of_the_base_overrides_nothing() -> None:
    def watch(hook: Any, *arguments: Any) -> Any:
        return hook(*arguments)

    module = LightningModule()
    own = module.transfer_batch_to_device
    module.transfer_batch_to_device = functools.update_wrapper(functools.partial(watch, own), own)  # type: ignore[method-assign]
    assert not redefines(module, LightningModule, "transfer_batch_to_device")
    module.transfer_batch_to_device = functools.partial(watch, own)  # type: ignore[method-assign]
    assert redefines(module, LightningModule, "transfer_batch_to_device")


def test_pruning_calls_the_methods_of_lightning() -> None:
    from lightning.pytorch.callbacks import ModelPruning

    called: list[Any] = []

    class Watched(ModelPruning):
        def _run_pruning(self, current_epoch: int) -> None:
            called.append(current_epoch)
            super()._run_pruning(current_epoch)

        def _apply_global_pruning(self, amount: Any) -> None:
            called.append(amount)
            super()._apply_global_pruning(amount)

        def make_pruning_permanent(self, module: nn.Module) -> None:
            called.append("permanent")
            super().make_pruning_permanent(module)

    pruning = Watched("l1_unstructured", amount=0.25, resample_parameters=True)
    module = _fit(callbacks=[pruning], max_epochs=2).lightning_module
    assert called == [0, 0.25, 1, 0.25, "permanent"]
    layers: Any = pruning._original_layers
    assert layers[id(module.layer)]["names"] == [(0, "weight"), (1, "bias")]
    with patch.object(nn.Linear, "reset_parameters") as reset, patch.object(pruning, "_copy_param") as copied:
        pruning.apply_lottery_ticket_hypothesis()
    assert (reset.call_count, copied.call_count) == (1, 2)

    class KeepsMasks(ModelPruning):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...

    module = _fit(callbacks=[KeepsMasks("l1_unstructured")], max_epochs=1).lightning_module
    assert hasattr(module.layer, "weight_mask")
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    trainer, layers = Mock(current_epoch=0), nn.Sequential(nn.Linear(2, 2))
    pruning.setup(trainer, layers, "fit")
    pruning.on_train_epoch_end(trainer, layers)
    pruning.on_train_end(trainer, layers)
    assert (layers[0].weight == 0).sum() + (layers[0].bias == 0).sum() == 3


def test_helpers_of_callbacks_with_mocks(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
    from lightning.pytorch.callbacks.progress.rich_progress import Progress

    with patch("lightning.pytorch.callbacks.early_stopping.log.info") as log:
        EarlyStopping._log_info(Mock(global_rank=0), "stops", True)
        EarlyStopping._log_info(Mock(global_rank=1), "stops", True)
    log.assert_called_once_with("[rank: 0] stops")
    (tmp_path / "a.ckpt").touch()
    ModelCheckpoint._link_checkpoint(Mock(is_global_zero=True), str(tmp_path / "a.ckpt"), str(tmp_path / "last.ckpt"))
    assert (tmp_path / "last.ckpt").is_symlink()
    found = ModelCheckpoint()._ModelCheckpoint__resolve_ckpt_dir(Mock(loggers=[], default_root_dir="runs"))  # type: ignore[attr-defined]
    assert found == "runs/checkpoints"
    timer = Timer()
    timer.on_validation_start(Mock(), Mock())
    assert timer.start_time("validate") is not None
    assert timer.start_time("test") is None
    assert Progress.__module__ == "rich.progress"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("pytorch.accelerators.hpu", "HPUAccelerator"), ("pytorch.strategies.single_hpu", "SingleHPUStrategy"),
        ("pytorch.plugins.io.hpu_plugin", "HPUCheckpointIO"), ("pytorch.loggers.neptune", "NeptuneLogger"),
    ],
)  # fmt: skip
def test_classes_that_are_gone_can_be_imported(place: str, name: str) -> None:
    with refused(NotImplementedError, says=name):
        getattr(importlib.import_module(f"lightning.{place}"), name)()


@pytest.mark.parametrize("place", ["fabric.plugins.precision.tpu_bf16", "pytorch.plugins.precision.tpu_bf16"])
def test_older_names_of_classes_warn(place: str) -> None:
    module = importlib.import_module(f"lightning.{place}")
    older = getattr(module, "TPUBf16Precision" + ("Plugin" if "pytorch" in place else ""))
    with warned(DeprecationWarning, says="XLAPrecision"), suppress(ModuleNotFoundError):
        older()
    with warned(DeprecationWarning, says="FSDPPrecision"):
        assert importlib.import_module("lightning.pytorch.plugins").FSDPMixedPrecisionPlugin("bf16-mixed", "cpu")


@pytest.mark.parametrize("package", ["fabric", "pytorch"])
def test_a_patched_number_of_gpus_or_cores_counts_everywhere(package: str) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CUDAAccelerator, find_usable_cuda_devices
    from lightning.fabric.utilities.data import suggested_max_num_workers
    from lightning.fabric.utilities.device_parser import _parse_gpu_ids, _select_auto_accelerator
    from lightning.fabric.utilities.distributed import _suggested_max_num_threads

    with patch(f"lightning.{package}.accelerators.cuda.num_cuda_devices", return_value=2), patch("torch.tensor"):
        assert CUDAAccelerator.is_available()
        assert CUDAAccelerator.auto_device_count() == 2
        assert find_usable_cuda_devices() == _parse_gpu_ids(-1, include_cuda=True) == [0, 1]
        assert _select_auto_accelerator() in ("cuda", "tpu")
        assert Fabric(accelerator="gpu", devices=[1]).device == torch.device("cuda", 1)
    assert CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
    with patch("lightning.fabric.utilities.data._num_cpus_available", return_value=8):
        assert [suggested_max_num_workers(size) for size in (1, 2, 9)] == [7, 3, 1]
    with patch("lightning.fabric.utilities.distributed._num_cpus_available", return_value=8):
        assert _suggested_max_num_threads(2) == 4
