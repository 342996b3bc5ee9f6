"""What users write becomes a Runtime, or an error that says what to write."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_only
from hasten.accelerators import Accelerator, CPUAccelerator
from hasten.plugins import (
    DoublePrecision,
    HalfPrecision,
    LightningEnvironment,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
)
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy, SingleDeviceStrategy
from tests.refusals import refused, warned


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_the_defaults_are_one_device_in_full_precision() -> None:
    run = runtime(accelerator="cpu")
    assert type(run.strategy) is SingleDeviceStrategy
    assert type(run.precision) is Precision
    assert run.device == torch.device("cpu")
    assert (run.world_size, run.global_rank, run.local_rank, run.node_rank, run.num_nodes) == (1, 0, 0, 0, 1)
    assert run.is_global_zero
    assert run.scaler is None
    assert run.distributed_sampler_kwargs is None


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda", "CUDA"])
def test_two_gpus_are_found_and_used(accelerator: str) -> None:
    run = runtime(accelerator=accelerator)
    assert type(run.strategy) is DDPStrategy
    assert run.strategy.process_group_backend == "nccl"
    assert (run.world_size, run.num_devices, run.device_ids) == (2, 2, [0, 1])
    assert run.device == torch.device("cuda", 0)
    assert run.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


@pytest.mark.usefixtures("two_gpus")
def test_one_gpu_by_its_index() -> None:
    run = runtime(accelerator="gpu", devices=[1])
    assert type(run.strategy) is SingleDeviceStrategy
    assert run.device == torch.device("cuda", 1)
    run = runtime(accelerator="gpu", strategy="single_device")
    assert type(run.strategy) is SingleDeviceStrategy
    assert (run.device, run.world_size) == (torch.device("cuda", 0), 1)


@pytest.mark.parametrize(
    ("name", "start_method", "options"),
    [
        ("ddp", "popen", {}),
        ("ddp_spawn", "spawn", {}),
        ("ddp_fork", "fork", {}),
        ("ddp_notebook", "fork", {}),
        ("ddp_find_unused_parameters_true", "popen", {"find_unused_parameters": True}),
        ("ddp_spawn_find_unused_parameters_false", "spawn", {"find_unused_parameters": False}),
    ],
)
def test_strategies_by_name(name: str, start_method: str, options: dict[str, Any]) -> None:
    strategy = runtime(accelerator="cpu", devices=2, strategy=name).strategy
    assert type(strategy) is DDPStrategy
    assert strategy._ddp_kwargs == options
    assert getattr(strategy._launcher, "start_method", "popen") == start_method


def test_several_machines() -> None:
    run = runtime(accelerator="cpu", devices=2, num_nodes=3)
    assert type(run.strategy) is DDPStrategy
    assert (run.world_size, run.num_nodes) == (6, 3)


@pytest.mark.parametrize(
    ("written", "means", "kind"),
    [
        (None, "32-true", Precision), (32, "32-true", Precision), ("32", "32-true", Precision),
        (64, "64-true", DoublePrecision), ("64-true", "64-true", DoublePrecision),
        ("bf16", "bf16-mixed", MixedPrecision), ("bf16-mixed", "bf16-mixed", MixedPrecision),
        ("16-true", "16-true", HalfPrecision), ("bf16-true", "bf16-true", HalfPrecision),
    ],
)  # fmt: skip
def test_precisions_as_users_write_them(written: Any, means: str, kind: type) -> None:
    precision = runtime(accelerator="cpu", precision=written).precision
    assert type(precision) is kind
    assert precision.precision == means


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("written", [16, "16", "fp16", "16-mixed"])
def test_sixteen_bits_bring_a_scaler(written: Any) -> None:
    run = runtime(accelerator="gpu", devices=1, precision=written)
    assert type(run.precision) is MixedPrecision
    assert run.scaler is not None
    assert run.engine.unscale is not None


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_before_a_fork_nothing_is_asked_of_a_gpu(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def capability(*_: Any) -> tuple[int, int]:
        asked.append(1)
        return (7, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old")
    runtime(accelerator="gpu", devices=2, strategy="ddp_notebook", precision=precision)
    assert not asked
    with refused(ValueError, "precision"):
        runtime(accelerator="gpu", devices=2, strategy="ddp", precision=precision)


def test_plugins_take_their_places() -> None:
    io, cluster, precision = TorchCheckpointIO(), LightningEnvironment(), HalfPrecision("bf16-true")
    run = runtime(accelerator="cpu", plugins=[io, cluster, precision])
    assert run.checkpoint_io is io
    assert run.cluster is cluster
    assert run.precision is precision


def test_a_subclass_of_an_accelerator_chooses_the_devices() -> None:
    class Mine(CPUAccelerator):
        @staticmethod
        def auto_device_count() -> int:
            return 2

    mine = Mine()
    run = runtime(accelerator=mine)
    assert run.accelerator is mine
    assert run.world_size == 2
    assert isinstance(mine, Accelerator)


@pytest.mark.parametrize("owner", ["Trainer", "Fabric"])
@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"accelerator": "cdua"}, ValueError, "(accelerator='cdua'): 'cdua' is unknown. Did you mean 'cuda'?"),
        ({"accelerator": "cqu"}, ValueError, "'cqu' is unknown. Did you mean 'cpu'?"),
        ({"accelerator": "abacus"}, ValueError, "use one of 'auto', 'cpu'"),
        ({"accelerator": "mps"}, MisconfigurationException, "Use one of 'auto', 'cpu'"),
        ({"accelerator": 1}, TypeError, "not int"),
        ({"accelerator": CPUAccelerator}, TypeError, "Write CPUAccelerator()"),
        ({"devices": 0}, ValueError, "(devices=0): a run needs a device. Use at least 1"),
        ({"devices": 1.0}, TypeError, "(devices=1.0): use a number"),
        ({"devices": True}, TypeError, "(devices=True): use a number"),
        ({"devices": "cpu"}, TypeError, "write accelerator='cpu', and leave devices out"),
        ({"devices": [0.0]}, TypeError, "The CPU has no indices"),
        ({"devices": [1, 1]}, TypeError, "The CPU has no indices"),
        ({"num_nodes": 0}, ValueError, "at least 1"),
        ({"num_nodes": 1.5}, TypeError, "not float"),
        ({"strategy": "dpp"}, ValueError, "Did you mean 'ddp'?"),
        ({"strategy": "fsdb"}, ValueError, "'fsdb' is unknown. Did you mean 'fsdp'?"),
        ({"strategy": "horse"}, ValueError, "use one of 'auto', 'single_device', 'ddp'"),
        ({"precision": "float16"}, ValueError, "Did you mean '16-mixed'?"),
        ({"strategy": "deepspeed_stage_4"}, ValueError, "Did you mean 'deepspeed_stage_"),
        ({"strategy": "zero1"}, ValueError, "'ddp_sharded'"),
        ({"strategy": "model_parallel"}, ValueError, "ModelParallelStrategy` and devices=2, strategy="),
        ({"strategy": "tp", "devices": 4}, ValueError, "ModelParallelStrategy(tensor_parallel_size=4, plan='auto')"),
        ({"strategy": "hsdp"}, ValueError, "Write `from hasten.strategies import FSDPStrategy` and strategy=FSDP"),
        ({"strategy": "single_device", "devices": 2}, ValueError, "Use devices=1, or strategy='auto'"),
        ({"strategy": DDPStrategy}, TypeError, "Write DDPStrategy()"),
        ({"strategy": 3}, TypeError, "not int"),
        ({"strategy": SingleDeviceStrategy(), "devices": 2}, ValueError, "one device cannot be 2"),
        ({"precision": "bf17"}, ValueError, "Did you mean 'bf16'?"),
        ({"precision": 8}, ValueError, "use one of '64-true'"),
        ({"precision": "nf4"}, ValueError, "plugins=BitsandbytesPrecision('nf4')"),
        ({"precision": "fp8"}, ValueError, "CPU cannot multiply 8-bit floats"),
        ({"precision": "transformer-engine"}, ValueError, "Use precision='bf16-mixed'"),
        ({"precision": 16.0}, TypeError, "not float"),
        ({"precision": torch.bfloat16}, TypeError, "use a string, 'bf16-mixed' or 'bf16-true'"),
        ({"precision": torch.float32}, TypeError, "use a string, '32-true'"),
        ({"precision": 32, "plugins": [DoublePrecision()]}, ValueError, "Leave one out"),
        ({"plugins": [DoublePrecision(), DoublePrecision()]}, ValueError, "two Precision objects"),
        ({"plugins": 3}, TypeError, "3 is not a plugin"),
        ({"plugins": [TorchCheckpointIO]}, TypeError, "Write TorchCheckpointIO()"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(
    owner: str, arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        runtime(**{"accelerator": "cpu", **arguments}, owner=owner)
    assert str(caught.value).startswith(f"{owner}(")
    assert said in str(caught.value)


@pytest.mark.parametrize(("devices", "count"), [([1], 1), ([0, 3], 2), ("0,", 1), ((2,), 1), ("1, 2", 2)])
def test_indices_of_gpus_are_a_number_of_processes_on_a_cpu(devices: Any, count: int) -> None:
    with warned(UserWarning, says=("CPU", f"devices={count}")):
        run = runtime(accelerator="cpu", devices=devices)
    assert run.world_size == count


@pytest.mark.usefixtures("two_gpus")
def test_near_names_are_those_of_this_machine() -> None:
    with refused(ValueError, "accelerator", fix="'cuda'"):
        runtime(accelerator="cdua")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refused(MisconfigurationException, "accelerator", fix="'auto'"):
        runtime(accelerator="gpu")


def test_mps_has_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert runtime(accelerator="mps").device.type == "mps"
    with refused(ValueError, "strategy", fix="strategy='auto'"):
        runtime(accelerator="mps", strategy="ddp")


def test_a_process_beyond_the_devices_of_the_run_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    for name, value in {**started, "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    with refused(RuntimeError, fix="LOCAL_RANK", says=("rank 3", "ranks 0 to 1")):
        _ = runtime(accelerator="cpu", strategy="ddp", devices=2).strategy.root_device


def test_torchrun_decides_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4",
                        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run = runtime(accelerator="cpu")
    assert type(run.strategy) is DDPStrategy
    assert (run.world_size, run.num_nodes, run.global_rank, run.local_rank) == (4, 2, 3, 1)
    with refused(ValueError, "devices", fix="devices='auto'"):
        runtime(accelerator="cpu", devices=3)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with warned(UserWarning, says="2 processes were started, and each of them computes the whole run alone."):
        assert runtime(accelerator="cpu", devices=1).world_size == 1
    # A run on all of them has been before: what follows may be an evaluation on one device.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime(accelerator="cpu", devices=1).world_size == 1
    monkeypatch.undo()
