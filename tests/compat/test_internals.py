"""Names from inside Lightning that packages import work as they do there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten.compat
from hasten.demos import BoringModel
from tests.models import quiet


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten.compat.install()
    yield
    hasten.compat.uninstall()


def test_a_file_is_read_when_its_tensors_are_used(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _lazy_load, _NotYetLoadedTensor

    torch.save({"weight": torch.arange(3.0)}, tmp_path / "a.pt")
    read = _lazy_load(tmp_path / "a.pt")
    assert read["weight"].tolist() == [0, 1, 2]
    assert not isinstance(read["weight"], _NotYetLoadedTensor)
    with pytest.raises(FileNotFoundError, match="does not exist, or is not a file"):
        _lazy_load(tmp_path / "b.pt")
    with pytest.raises(TypeError, match="there are no such objects"):
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
    with pytest.raises(TypeError, match="write its reset_parameters"):
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
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
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
    with pytest.raises(MisconfigurationException, match="none are available"):
        parse(-1, include_mps=True)
    for wrong_type in (None, True, 1.5, [0, "1"]):
        with pytest.raises(TypeError, match="Device IDs"):
            parse(wrong_type, include_cuda=True)
    with pytest.raises(ValueError, match="At least one gpu type"):
        device_parser._sanitize_gpu_ids([0])
    assert device_parser._normalize_parse_gpu_input_to_list(0, True, False) is None
    assert device_parser._determine_root_gpu_device([2, 1]) == 2
    assert device_parser._select_auto_accelerator() in ("cuda", "mps", "tpu")


def test_older_names_of_classes_make_the_class_and_warn() -> None:
    from lightning.pytorch.accelerators import TPUAccelerator, XLAAccelerator
    from lightning.pytorch.plugins import HalfPrecision, HalfPrecisionPlugin
    from lightning.pytorch.plugins.precision import PrecisionPlugin
    from lightning.pytorch.utilities.rank_zero import LightningDeprecationWarning

    with pytest.warns(LightningDeprecationWarning, match="its name is HalfPrecision now"):
        plugin = HalfPrecisionPlugin("bf16-true")
    assert isinstance(plugin, HalfPrecision)
    assert issubclass(TPUAccelerator, XLAAccelerator)
    assert not isinstance(plugin, PrecisionPlugin)
    assert not isinstance(HalfPrecision("bf16-true"), HalfPrecisionPlugin)


def test_small_things(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

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


PRODUCTS = {
    "from lightning.pytorch.loggers import LitLogger": "LitLogger. It belongs to a hosted product. Use CSVLogger",
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
