"""Names that packages import at the top of their modules are there, and work or say why they do not."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
import hasten_lightning
from hasten.machine.cluster import find_free_port
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_each_module_has_the_flags_of_installed_packages() -> None:
    from lightning.fabric.plugins.precision.bitsandbytes import _BITSANDBYTES_AVAILABLE
    from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4_1
    from lightning.pytorch.core.module import _ONNX_AVAILABLE, _TORCH_TRT_AVAILABLE
    from lightning.pytorch.strategies.deepspeed import _DEEPSPEED_AVAILABLE

    assert not _TORCH_TRT_AVAILABLE
    assert "torch_tensorrt" in str(_TORCH_TRT_AVAILABLE)
    for flag, module in ((_BITSANDBYTES_AVAILABLE, "bitsandbytes"), (_DEEPSPEED_AVAILABLE, "deepspeed")):
        assert bool(flag) is (importlib.util.find_spec(module) is not None)
    assert bool(_ONNX_AVAILABLE) is (importlib.util.find_spec("onnx") is not None)
    assert _TORCH_GREATER_EQUAL_2_4_1
    with refused(ImportError, says="_NOTHING_AVAILABLE"):
        exec("from lightning.pytorch.core.module import _NOTHING_AVAILABLE")


def test_tests_are_skipped_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.utilities.testing import _runif_reasons
    from lightning.pytorch.utilities.testing import _runif_reasons as of_trainer

    monkeypatch.delenv("PL_RUN_STANDALONE_TESTS", raising=False)
    assert _runif_reasons() == ([], {})
    assert _runif_reasons(min_torch="2.0", max_torch="99", min_python="3.8", mps=torch.mps.is_available()) == ([], {})
    reasons, marks = of_trainer(min_cuda_gpus=99, min_torch="99", max_torch="2.0", standalone=True, tensorrt=True)
    version = torch.__version__
    assert marks == {"min_cuda_gpus": True, "standalone": True}
    assert reasons == [
        "GPUs>=99", f"torch>=99, {version} installed", f"torch<2.0, {version} installed", "Standalone execution",
        "torch-tensorrt",
    ]  # fmt: skip


def test_a_logger_of_a_hosted_product_can_be_named() -> None:
    from lightning.pytorch.loggers import CSVLogger, LitLogger

    assert not isinstance(CSVLogger("x"), LitLogger)
    with refused(ValueError, says="It belongs to a hosted product", fix="CSVLogger"):
        LitLogger()


def test_modules_have_the_names_that_lightning_s_modules_import() -> None:
    from lightning.pytorch.callbacks import early_stopping
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.trainer.connectors.accelerator_connector import _set_torch_flags

    assert trainer.TrainerFn.FITTING == "fit"
    assert early_stopping.Callback is hasten.Callback
    before = torch.are_deterministic_algorithms_enabled()
    _set_torch_flags(deterministic=not before)
    assert torch.are_deterministic_algorithms_enabled() is not before
    _set_torch_flags(deterministic=before)


def test_programs_ask_for_the_launcher_and_parts_of_a_strategy() -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

    kinds: dict[str, Any] = {"ddp": _SubprocessScriptLauncher, "ddp_spawn": _MultiProcessingLauncher}
    for name, kind in kinds.items():
        strategy: Any = pl.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
        assert [each for each in kinds.values() if isinstance(strategy.launcher, each)] == [kind]
    assert strategy.launcher._start_method == "spawn"
    assert (strategy._layer_sync, strategy._get_process_group_backend(), strategy._num_nodes) == (None, "gloo", 1)
    strategy = pl.strategies.SingleDeviceStrategy()
    strategy._lightning_module = module = torch.nn.Linear(1, 1)
    assert strategy.lightning_module is module


@pytest.mark.parametrize("root", ["lightning.fabric", "pytorch_lightning"])
def test_launchers_work_in_one_process_and_refuse_more(root: str) -> None:
    launchers = importlib.import_module(f"{root}.strategies.launchers")
    cluster = hasten.plugins.LightningEnvironment()

    class Own(launchers._SubprocessScriptLauncher):  # type: ignore[misc]
        is_interactive_compatible = True

    own = Own(cluster, num_processes=1, num_nodes=1)
    assert isinstance(own, launchers._Launcher)
    assert own.launch(lambda number: number + 1, 1) == 2
    strategy = hasten.strategies.DDPStrategy(parallel_devices=[torch.device("cpu")])
    assert launchers._MultiProcessingLauncher(strategy).launch(lambda: 3) == 3
    with refused(ValueError, says="the strategy starts the processes", fix="strategy='ddp'"):
        Own(cluster, num_processes=2, num_nodes=1).launch(print)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    with refused(ValueError, says="the strategy starts the processes"):
        launchers._XLALauncher(strategy).launch(print)


def test_a_strategy_with_a_launcher_of_its_own_trains_in_one_process() -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.strategies.launchers.subprocess_script import (
        _launch_process_observer,
        _SubprocessScriptLauncher,
    )

    class Own(pl.strategies.DDPStrategy):
        def _configure_launcher(self) -> None:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    trainer: Any = pl.Trainer(accelerator="cpu", devices=1, strategy=Own(), fast_dev_run=True, logger=False)
    trainer.fit(BoringModel())
    assert trainer.global_step == 1
    with warned(UserWarning, says=("Own._configure_launcher()", "torchrun")):
        pl.Trainer(accelerator="cpu", devices=2, strategy=Own(), logger=False)
    Own.configure_ddp = lambda self: None  # type: ignore[attr-defined]
    with warned(UserWarning, says="Own.configure_ddp() is not called", fix="setup()"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=Own(), logger=False)
    Own.setup = lambda self, trainer: self.configure_ddp()  # type: ignore[method-assign,misc]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not called")
        pl.Trainer(accelerator="cpu", devices=1, strategy=Own(), logger=False)
    _launch_process_observer([])
    with refused(ValueError, says="_launch_process_observer"):
        _launch_process_observer([object()])


def test_processes_join_and_exchange_tensors_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.utilities import distributed

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(find_free_port()))
    assert distributed._get_default_process_group_backend_for_device(torch.device("cuda")) == "nccl"
    assert distributed._get_default_process_group_backend_for_device(torch.device("meta")) == "gloo"
    tensor = torch.ones(2)
    assert distributed._sync_ddp_if_available(tensor) is tensor
    assert distributed._all_gather_ddp_if_available(tensor) is tensor
    assert not distributed._is_dtensor(tensor)
    cluster = LightningEnvironment()
    distributed._init_dist_connection(cluster, "gloo", 0, 1)
    try:
        distributed._init_dist_connection(cluster, "gloo", 0, 1)
        assert distributed._distributed_is_initialized()
        assert distributed._sync_ddp(tensor, reduce_op="mean").tolist() == [1, 1]
        assert distributed._all_gather_ddp_if_available(tensor).shape == (1, 2)
        assert distributed._gather_all_tensors(tensor)[0].tolist() == [1, 1]
    finally:
        distributed._destroy_dist_connection()
    assert not distributed._distributed_is_initialized()


def test_threads_are_shared_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fabric.utilities.distributed import _set_num_threads_if_needed, _suggested_max_num_threads

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _set_num_threads_if_needed(2)
    assert torch.get_num_threads() == before
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        _set_num_threads_if_needed(10_000)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
    finally:
        torch.set_num_threads(before)
    with refused(ValueError, "num_processes"):
        _suggested_max_num_threads(0)


def test_packages_have_a_file() -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        assert Path(str(importlib.import_module(name).__file__)).is_file()


def test_names_of_fabric_s_parts() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.connector import _Connector, _convert_precision_to_unified_args
    from lightning.fabric.wrappers import _to_compiled, _unwrap_compiled, _unwrap_objects

    assert _convert_precision_to_unified_args(None) is None
    assert _convert_precision_to_unified_args("bf16") == "bf16-mixed"
    with refused(ValueError, "precision", says="17"):
        _convert_precision_to_unified_args(17)
    assert _Connector(accelerator="cpu", precision="64-true").precision.precision == "64-true"
    layer = torch.nn.Linear(1, 1)
    compiled = _to_compiled(layer, {})
    assert _unwrap_compiled(compiled) == (layer, {})
    assert _unwrap_compiled(layer) == (layer, None)
    module = Fabric(accelerator="cpu", devices=1).setup(layer)
    assert _unwrap_objects({"a": [module, 3]}) == {"a": [layer, 3]}


def test_names_of_the_trainer_s_parts() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loops.utilities import _parse_loop_limits
    from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
    from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint, pl_legacy_patch
    from lightning.pytorch.utilities.model_helpers import _ModuleMode

    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False)
    assert _parse_loop_limits(None, -1, None, None, trainer) == (0, 1000)
    assert _parse_loop_limits(5, 10, None, None, trainer) == (1, -1)
    with refused(ValueError, says="hooks"):
        _verify_loop_configurations(trainer)
    with pl_legacy_patch():
        assert _pl_migrate_checkpoint({"state_dict": {}})["state_dict"] == {}
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    modes = _ModuleMode()
    modes.capture(module)
    module.eval()
    modes.restore(module)
    assert [layer.training for layer in module] == [True, False]
