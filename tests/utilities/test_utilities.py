"""Helpers under the names of Lightning."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hasten
import hasten.utilities as utilities
from hasten import Trainer, accelerators
from hasten.accelerators import CPUAccelerator
from hasten.callbacks.prediction_writer import WriteInterval
from hasten.callbacks.timer import Interval
from hasten.demos import BoringDataModule, BoringModel
from hasten.strategies import SingleDeviceStrategy
from hasten.types import RunningStage, TrainerFn, TrainerStatus
from hasten.utilities import data, enums, memory, model_helpers, parsing, rank_zero, saving
from hasten.utilities.data import DistributedSamplerWrapper, UnrepeatedDistributedSampler
from hasten.utilities.model_helpers import DeviceDtypeMixin
from tests.refusals import refused, warned


def test_epsilons() -> None:
    for bits in (16, 32, 64):
        assert torch.finfo(getattr(torch, f"float{bits}")).eps == getattr(utilities, f"FLOAT{bits}_EPSILON")


def test_rank_zero_functions_take_what_the_field_s_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "hasten"):
        rank_zero.rank_zero_info("an %s", "info", stacklevel=5)
        rank_zero.rank_zero_debug("a %s", "debug", extra={"x": 1})
    assert [record.getMessage() for record in caplog.records] == ["an info", "a debug"]
    with pytest.warns(FutureWarning, match="look out"):
        rank_zero.rank_zero_warn("look out", category=FutureWarning, stacklevel=2)
    with pytest.warns(DeprecationWarning, match="goes away"):
        rank_zero.rank_zero_deprecation("goes away")
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert rank_zero._get_rank() is None
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_zero._get_rank() == 1
    monkeypatch.setattr(rank_zero.rank_zero_only, "rank", 1)
    assert rank_zero.rank_zero_only(lambda: 1)() is None
    assert rank_zero.rank_zero_only(lambda: 1, default=2)() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_zero.rank_zero_warn("not said here")


def test_warning_cache_says_each_thing_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cache = rank_zero.WarningCache()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        utilities.disable_possible_user_warnings()
        for _ in range(2):
            cache.warn("slow")
            cache.deprecation("old")
            cache.warn("maybe", category=utilities.PossibleUserWarning)
    deprecation = rank_zero.LightningDeprecationWarning
    assert [(one.category, str(one.message)) for one in seen] == [(UserWarning, "slow"), (deprecation, "old")]
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    with caplog.at_level(logging.INFO, "hasten"):
        cache.info("said")
        cache.info("said")
    assert caplog.messages == ["said"]
    assert cache == {"slow", "old", "said", "maybe"}
    assert rank_zero.rank_prefixed_message("x", None) == "x"


def test_enumerations() -> None:
    kind = enums.GradClipAlgorithmType
    assert kind.NORM == "NORM"
    assert kind.NORM not in (kind.VALUE, 1)
    assert {kind.NORM: str(kind.NORM)} == {"norm": "GradClipAlgorithmType.NORM"}
    assert kind.from_str("NORM") is kind.NORM
    for source in ("value", "any"):
        assert kind.from_str("value", source=source) is kind.VALUE
    with refused(ValueError, says=("'x'", "GradClipAlgorithmType", "'value'", "'norm'")):
        kind.from_str("x")
    with warned(UserWarning, says="'x'"):
        assert kind.try_from_str("x") is None
    assert kind.supported_type("Norm")
    assert not kind.supported_type("max")
    assert kind.supported_types() == ["value", "norm"]


class Endless(IterableDataset[Any]):
    """No length."""

    def __iter__(self) -> Any:
        return iter([1])


def test_batches_and_loaders() -> None:
    assert utilities.move_data_to_device([torch.zeros(1)], torch.device("meta"))[0].device.type == "meta"
    assert data.extract_batch_size({"x": torch.zeros(3, 2)}) == 3
    with refused(ValueError, says="`self.log(..., batch_size=batch_size)`"):
        data.extract_batch_size("x")
    with warned(UserWarning, says="we found is 2"):
        assert data.extract_batch_size([torch.zeros(2), torch.zeros(3)]) == 2
    assert data.extract_batch_size({"x": torch.zeros(())}) == 1
    assert data.convert_tensors_to_scalars({"a": [torch.tensor([2])], "b": "x"}) == {"a": [2], "b": "x"}
    with refused(ValueError, says="(2,)"):
        data.convert_tensors_to_scalars(torch.zeros(2))
    import numpy as np

    tensors = data.convert_to_tensors({"a": 1, "b": np.ones(2), "c": "x"}, torch.device("cpu"))
    assert (tensors["a"].item(), tensors["b"].tolist(), tensors["c"]) == (1, [1.0, 1.0], "x")
    endless = DataLoader(Endless())
    assert data.has_iterable_dataset(endless)
    assert not data.has_iterable_dataset(DataLoader([1]))  # type: ignore[arg-type]
    assert data.sized_len(endless) is None
    assert not data.has_len(endless)
    assert data.has_len_all_ranks([1], hasten.Trainer(logger=False, enable_checkpointing=False).strategy)
    with pytest.warns(UserWarning, match="returned 0 length"):
        assert data.has_len([])

    class Counted(Endless):
        def __len__(self) -> int:
            return 3

    with warned(UserWarning, says="`IterableDataset` has `__len__` defined"):
        assert data.has_len(DataLoader(Counted()))
    with refused(ValueError, "local_world_size", fix="1"):
        utilities.suggested_max_num_workers(0)
    cores = len(os.sched_getaffinity(0))
    assert utilities.suggested_max_num_workers(1) == max(1, cores - 1)
    assert data.merge_dicts([{"a": 1.0}, {"a": 3.0}], {"a": min}) == {"a": 1.0}
    assert data.merge_dicts([{"a": 1.0}, {"a": 3.0}]) == {"a": 2.0}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    data.optimizer_to_device(optimizer, "meta")
    assert next(iter(optimizer.state.values()))["momentum_buffer"].device.type == "meta"


class OtherFiles:
    """A strategy of two processes, of which this one sees the files and the folder that it is told to see."""

    world_size, is_global_zero = 2, True

    def __init__(self, of_first: Path | None = None, *decisions: bool) -> None:
        self.of_first, self.decisions = of_first, list(decisions)

    def broadcast(self, found: Any) -> Any:
        return self.of_first or found

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        assert all
        return decision and (self.decisions.pop(0) if self.decisions else True)


def test_shared_file_systems(tmp_path: Path) -> None:
    shared = utilities.is_shared_filesystem
    (tmp_path / "there").write_text("")
    assert shared(OtherFiles(), tmp_path)
    assert shared(OtherFiles(), tmp_path / "there")
    assert not shared(OtherFiles(tmp_path / "nowhere"), tmp_path, timeout=0)
    other = OtherFiles()
    other.is_global_zero = False  # The file of the first process does not appear.
    assert not shared(other, tmp_path, timeout=0)
    assert not shared(OtherFiles(None, True, True, False), tmp_path)
    assert shared(OtherFiles(Path("x")), "s3://bucket")
    assert shared(type("One", (), {"world_size": 1})())
    assert shared(object())
    # Of the first process, as all raise together.
    with refused(FileNotFoundError, "path"):
        shared(OtherFiles(), tmp_path / "no")
    with refused(OSError, "path", says="another process"):
        shared(OtherFiles(None, True, False), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_memory() -> None:
    assert memory.is_oom_error(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert memory.is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert memory.is_cudnn_snafu(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. x"))
    assert not memory.is_cudnn_snafu(ValueError("CUDNN_STATUS_NOT_SUPPORTED"))
    assert not memory.is_oom_error(RuntimeError("other"))
    memory.garbage_collection_cuda()
    both = memory.recursive_detach({"a": torch.ones(1, requires_grad=True), "b": 1}, to_cpu=True)
    assert not both["a"].requires_grad
    assert both["b"] == 1


def test_grad_norms() -> None:
    module = nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert {key: float(value) for key, value in utilities.grad_norm(module, 2, ".").items()} == {
        "grad_2.0_norm.weight": 5.0,
        "grad_2.0_norm_total": 5.0,
    }
    module.bias.grad = torch.tensor([12.0])
    assert float(utilities.grad_norm(module, 2)["grad_2.0_norm_total"]) == 13.0
    assert float(utilities.grad_norm(module, "inf")["grad_inf_norm_total"]) == 12.0
    assert utilities.grad_norm(nn.Linear(1, 1), 1) == {}
    for wrong in (0, -1):
        with refused(ValueError, "norm_type", says=f"Got {wrong}"):
            utilities.grad_norm(module, wrong)


def test_shared_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert utilities.find_shared_parameters(module) == []
    module[1][0].weight = module[0].weight
    module[2].bias = module[0].bias
    shared = utilities.find_shared_parameters(module)
    assert shared == [["0.weight", "1.0.weight"], ["0.bias", "2.bias"]]
    module[1][0].weight = nn.Parameter(torch.zeros(2, 2))
    assert utilities.set_shared_parameters(module, shared) is module
    assert module[1][0].weight is module[0].weight
    whole_twice = nn.Sequential(module[0], module[0])
    assert utilities.find_shared_parameters(whole_twice) == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_questions_about_modules() -> None:
    assert utilities.is_overridden("train_dataloader", BoringDataModule())
    assert not utilities.is_overridden("on_fit_end", hasten.Callback())
    assert not utilities.is_overridden("x", None)
    assert utilities.is_overridden("forward", nn.Linear(1, 1), parent=nn.Module)
    with refused(ValueError, says="parent="):
        utilities.is_overridden("forward", nn.Linear(1, 1))
    with refused(ValueError, says="list"):
        utilities.is_overridden("dtype", BoringModel(), parent=list)
    takes = model_helpers.is_param_in_hook_signature
    assert takes(lambda *args: None, "batch")
    assert not takes(lambda *args: None, "batch", explicit=True)
    assert not takes(lambda self, a: None, "batch", min_args=2)
    assert takes(lambda a, b: None, "batch", min_args=2)
    assert model_helpers.do_nothing_closure() is None
    divided = model_helpers.DeepSpeedSummary(nn.Sequential(nn.Linear(1, 1)))
    assert dict(divided.columns())["Params per Device"] == ["2"]


class Parent:
    """Collects the arguments of itself and its subclass."""

    def __init__(self, a: int, **kwargs: Any) -> None:
        frame = sys._getframe()
        self.given = parsing.get_init_args(frame)
        self.all = parsing.collect_init_args(frame, [])
        self.some = parsing.collect_init_args(frame, [], classes=(str,))


class Child(Parent):
    def __init__(self, b: int) -> None:
        super().__init__(b + 1, extra=b)


def test_arguments_of_init() -> None:
    child = Child(2)
    assert child.given == {"a": 3, "extra": 2}
    assert (child.all, child.some) == ([{"a": 3, "extra": 2}, {"b": 2}], [])
    assert parsing.get_init_args(sys._getframe()) == {}


def test_attributes_wherever_they_are() -> None:
    model = BoringModel()
    model.save_hyperparameters({"lr": 0.1, "width": 3})
    assert parsing.lightning_hasattr(model, "lr")
    assert not parsing.lightning_hasattr(model, "depth")
    assert parsing.lightning_getattr(model, "lr") == 0.1
    parsing.lightning_setattr(model, "lr", 0.2)
    assert model.hparams.lr == 0.2
    model.width = 4
    parsing.lightning_setattr(model, "width", 5)
    assert (model.width, model.hparams.width) == (5, 5)
    for function in (parsing.lightning_getattr, lambda m, a: parsing.lightning_setattr(m, a, 1)):
        with refused(AttributeError, says=("BoringModel", "'depth'")):
            function(model, "depth")
    hparams = {"a": 1, "b": lambda: 1}
    with warned(UserWarning, says="'b' removed from hparams"):
        parsing.clean_namespace(hparams)
    assert list(hparams) == ["a"]


def test_files_of_hyper_parameters(tmp_path: Path) -> None:
    path = tmp_path / "h.yaml"
    saving.save_hparams_to_yaml(path, argparse.Namespace(lr=0.1, layers=[1, 2]))
    assert saving.load_hparams_from_yaml(path) == {"lr": 0.1, "layers": [1, 2]}
    path.write_text("sizes: !!python/tuple [3, !!python/tuple [4]]")  # as Lightning writes them
    assert saving.load_hparams_from_yaml(path) == {"sizes": (3, (4,))}
    for load, name in ((saving.load_hparams_from_yaml, "no.yaml"), (saving.load_hparams_from_tags_csv, "no.csv")):
        with warned(RuntimeWarning, says=f"{name}."):
            assert load(tmp_path / name) == {}
    with refused(RuntimeError, says="save_hparams_to_yaml"):
        saving.save_hparams_to_yaml(tmp_path / "no" / "h.yaml", {})
    saving.save_hparams_to_tags_csv(tmp_path / "h.csv", {"lr": 0.1, "name": "adam", "flag": True})
    assert saving.load_hparams_from_tags_csv(tmp_path / "h.csv") == {"lr": 0.1, "name": "adam", "flag": True}
    saving.write({"x": torch.ones(1)}, tmp_path / "a.ckpt")
    assert saving.read(tmp_path / "a.ckpt")["x"].item() == 1
    with open(tmp_path / "a.ckpt", "rb") as file:
        assert saving.read(file, map_location="cpu")["x"].item() == 1
    system = saving.get_filesystem(tmp_path, auto_mkdir=True)
    assert saving.is_local(tmp_path)
    assert not saving.is_local("memory://x")
    assert saving.is_folder(system, tmp_path)
    assert not saving.is_folder(system, tmp_path / "a.ckpt")
    assert not saving.is_folder(system, tmp_path / "no", strict=True)


def test_devices_types_samplers_and_names() -> None:
    module = type("Own", (DeviceDtypeMixin,), {})()
    assert module.dtype == torch.float32
    module.register_buffer("count", torch.zeros(1, dtype=torch.long, device="meta"))
    module.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64, device="meta"))
    assert module.device.type == "meta"
    assert module.dtype == torch.float64
    parts = [list(UnrepeatedDistributedSampler(range(7), 3, rank, shuffle=True, seed=1)) for rank in range(3)]
    assert sorted(index for part in parts for index in part) == list(range(7))
    assert [len(part) for part in parts] == [3, 2, 2]
    wrapped = [DistributedSamplerWrapper([5, 3, 1, 0], 2, rank, shuffle=False) for rank in range(2)]
    assert [list(one) for one in wrapped] == [[5, 1], [3, 0]]
    assert "ddp_spawn" in enums.StrategyRegistry.available_strategies()
    assert list(enums.AcceleratorRegistry) == ["cpu", "cuda", "mps", "tpu"]
    assert len(enums.AcceleratorRegistry) == 4
    strategies, accelerators = enums.StrategyRegistry, enums.AcceleratorRegistry
    strategies.register("Own", SingleDeviceStrategy, "mine", device="cpu", accelerator=CPUAccelerator())
    accelerators.register("own")(CPUAccelerator)
    try:
        assert type(Trainer(strategy="own", accelerator="own", logger=False).strategy) is SingleDeviceStrategy
        assert strategies.get("Own").root_device.type == "cpu"
        assert strategies["Own"]["init_params"].keys() == {"device", "accelerator"}
        with refused(ValueError, says="override=True"):
            strategies.register("Own", SingleDeviceStrategy)
        with refused(TypeError, says="ABCMeta"):
            strategies.register(SingleDeviceStrategy)
    finally:
        strategies.remove("Own")
        accelerators.remove("own")
    with refused(KeyError, says="'Own'"):
        strategies.get("Own")
    assert type(strategies.get("ddp_spawn")).__name__ == "DDPStrategy"
    assert strategies["ddp_spawn"]["init_params"] == {"start_method": "spawn"}
    assert strategies.get("Own", "default") == "default"
    assert {name: strategies[name]["strategy"].__name__ for name in ("fsdp", "deepspeed_stage_2", "xla")} == {
        "fsdp": "FSDPStrategy", "deepspeed_stage_2": "DeepSpeedStrategy", "xla": "XLAStrategy"
    }  # fmt: skip
    assert strategies["deepspeed_stage_2"]["init_params"] == {"stage": 2}
    assert type(accelerators.get("cpu")) is CPUAccelerator
    assert accelerators.available_accelerators() == {"cpu", "cuda", "mps", "tpu"}
    with refused(ValueError, "strategy"):
        Trainer(strategy="own", logger=False)
    types = importlib.import_module("hasten.utilities.types")
    assert [name for name in types.__all__ if not hasattr(types, name)] == []
    assert isinstance(torch.optim.SGD([nn.Parameter(torch.ones(1))]), types.Optimizable)
    assert isinstance(nn.Linear(1, 1), types._Stateful)


def test_usable_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    find = accelerators.find_usable_cuda_devices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refused(ValueError, says=("0 CUDA", "CUDA")):
        find()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def only_odd(value: float, device: torch.device) -> None:
        if device.index % 2 == 0:
            raise RuntimeError("busy")

    monkeypatch.setattr(accelerators.torch, "tensor", only_odd)
    assert find() == [1]
    assert find(1) == [1]
    with refused(RuntimeError, says=("[1]", "3 CUDA", "CUDA")):
        find(2)
    with refused(ValueError, says=("3 CUDA", "CUDA")):
        find(4)


def test_named_strings_show_their_class_and_compare_in_any_case() -> None:
    for kind in (Interval, WriteInterval, TrainerFn, RunningStage, TrainerStatus, enums.GradClipAlgorithmType):
        assert issubclass(kind, enums.LightningEnum)
        for member in kind:
            assert (f"{member}", str(member)) == (member.value, f"{kind.__name__}.{member.name}")
            assert member == member.value.upper()
            assert member.value in list(kind)
            assert {member: 1}[member.value] == 1  # type: ignore[index]
            assert kind.from_str(member.name) is kind(member.value) is member
            assert json.dumps(member) == f'"{member.value}"'
