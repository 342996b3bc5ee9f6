"""Precisions that replace layers: 8-bit floats, quantized weights, Transformer Engine."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned
from torch import nn

import hasten as L
from hasten._lib.optional import installed
from hasten.callbacks import LambdaCallback
from hasten.plugins import BitsandbytesPrecision, Float8Precision, TransformerEnginePrecision
from hasten.precision.float8 import check_float8

TORCHAO = pytest.mark.skipif(not installed("torchao"), reason="needs torchao")
BITSANDBYTES = pytest.mark.skipif(not installed("bitsandbytes"), reason="needs bitsandbytes")


class Wide(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def made(seed: int = 0) -> Wide:
    torch.manual_seed(seed)
    return Wide()


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "argument"),
    [
        (Float8Precision, {"recipe": "tensorwize"}, ValueError, "recipe"),
        (Float8Precision, {"ignore_modules": "head"}, TypeError, "ignore_modules"),
        (BitsandbytesPrecision, {"mode": "nf8"}, ValueError, "mode"),
        (BitsandbytesPrecision, {"mode": "int8", "dtype": torch.bfloat16}, ValueError,
         "mode"),
        (BitsandbytesPrecision, {"mode": "nf4", "dtype": torch.int8}, ValueError, "dtype"),
        (BitsandbytesPrecision, {"mode": "nf4", "ignore_modules": "head"}, TypeError, "ignore_modules"),
        (TransformerEnginePrecision, {"weights_dtype": "bf16"}, TypeError, "weights_dtype"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(
    kind: Any, arguments: dict[str, Any], error: type[Exception], argument: str
) -> None:
    with refused(error, argument):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "package", "install"),
    [
        (Float8Precision, {}, "torchao", "pip install torchao"),
        (BitsandbytesPrecision, {"mode": "nf4"}, "bitsandbytes", "pip install bitsandbytes"),
        (TransformerEnginePrecision, {"weights_dtype": torch.bfloat16}, "transformer_engine",
         r"pip install 'transformer_engine\[pytorch\]'"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(kind: Any, arguments: dict[str, Any], package: str, install: str) -> None:
    if installed(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ModuleNotFoundError, match=install):
        kind(**arguments)


# -- 8-bit floats


def have_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("check", "capability", "instead"),
    [
        (check_float8, (8, 0), "bf16-mixed"),
        (check_float8, (7, 5), "16-mixed"),
        (L.plugins.MixedPrecision("bf16-mixed").check_device, (7, 0), "16-mixed"),
        (L.plugins.HalfPrecision("bf16-true").check_device, (7, 0), "16-true"),
    ],
    ids=["fp8", "fp8-old", "bf16-mixed", "bf16-true"],
)
def test_gpus_that_are_too_old_are_refused(
    check: Any, capability: tuple[int, int], instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = have_gpu(monkeypatch, capability)
    version = ".".join(map(str, capability))
    with refused(ValueError, "precision", fix=f"precision='{instead}'", says=version):
        check(device)


def test_newer_gpus_have_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_float8(have_gpu(monkeypatch, capability))


@pytest.mark.parametrize("front", [L.Trainer, L.Fabric])
def test_a_cpu_has_no_8_bit_floats(front: Any) -> None:
    for precision in ("fp8", "transformer-engine", "transformer-engine-float16"):
        said = rf"^{front.__name__}\(precision='{precision}'\): CPU cannot.*8\.9.*Use precision='bf16-mixed'"
        with pytest.raises(ValueError, match=said):
            front(accelerator="cpu", precision=precision)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_cpu_that_is_slow_at_bfloat16_is_reported_once(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with warned(UserWarning, says=(precision, "CPU", "bfloat16", "'32-true'")):
        L.Trainer(accelerator="cpu", precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        L.Fabric(accelerator="cpu", precision=precision)


@TORCHAO
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_training_in_8_bit_floats_learns_and_leaves_the_module_as_it_was(recipe: Any, tmp_path: Path) -> None:
    module = made()
    kinds = [type(layer) for layer in module.modules()]
    parameters = list(module.parameters())
    seen: set[str] = set()

    look = LambdaCallback(on_train_start=lambda _, model: seen.update(type(x).__name__ for x in model.layers))
    trainer = quiet(max_epochs=4, plugins=Float8Precision(recipe, emulate=True), callbacks=[look])
    # Batches of five: no side of the products for gradients of weights is a multiple of 16.
    trainer.fit(module, loader(batch_size=5), loader(batch_size=5))
    assert seen == {"Float8Linear", "Linear", "LayerNorm", "ReLU"}
    assert trainer.callback_metrics["val_loss"] < 0.55
    assert [type(layer) for layer in module.modules()] == kinds
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(parameters, module.parameters(), strict=True))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = made(1)
    quiet(max_epochs=5, precision="bf16-mixed").fit(plain, loader(batch_size=5), ckpt_path=tmp_path / "a.ckpt")


@TORCHAO
def test_layers_can_be_left_out_and_names_are_checked() -> None:
    plugin = Float8Precision(emulate=True, ignore_modules={"layers.3"})
    with pytest.raises(ValueError, match="no Linear layer whose in_features"):
        quiet(plugins=plugin).fit(made(), loader())
    with refused(ValueError, "ignore_modules", fix="'layers.3'"):
        quiet(plugins=Float8Precision(emulate=True, ignore_modules={"layer.3"})).fit(made(), loader())


@TORCHAO
def test_fabric_computes_in_8_bit_floats() -> None:
    fabric = L.Fabric(accelerator="cpu", plugins=Float8Precision(emulate=True))
    network = made().layers
    exact = network(torch.ones(3, 8))
    model = fabric.setup(network)
    output = model(torch.ones(3, 8))
    assert output.dtype == torch.float32
    assert 0 < (output - exact).abs().max() < 0.2


@pytest.mark.gpu
@TORCHAO
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit floats"
)
def test_8_bit_floats_on_a_gpu() -> None:
    trainer = quiet(accelerator="cuda", max_epochs=4, precision="fp8")
    trainer.fit(made(), loader(batch_size=5), loader(batch_size=5))
    assert trainer.callback_metrics["val_loss"] < 0.55


# -- quantized weights


@BITSANDBYTES
@pytest.mark.parametrize("mode", ["nf4", "nf4-dq", "fp4", "int8"])
def test_quantized_weights_stay_and_the_rest_trains_and_resumes(mode: Any, tmp_path: Path) -> None:
    def plugin() -> BitsandbytesPrecision:
        return BitsandbytesPrecision(mode, ignore_modules={"layers.5"})

    def fit(seed: int = 0, ckpt_path: Any = None, **arguments: Any) -> L.Trainer:
        trainer = quiet(**{"max_epochs": 2, "plugins": plugin(), **arguments})
        trainer.fit(made(seed), loader(), ckpt_path=ckpt_path)
        return trainer

    whole = fit()
    layers = whole.lightning_module.layers
    assert layers[3].weight.dtype == (torch.int8 if mode == "int8" else torch.uint8)
    assert not layers[3].weight.requires_grad
    assert type(layers[5]) is nn.Linear
    assert not torch.equal(layers[5].weight.float(), made().layers[5].weight)
    exact, quantized = made().layers[3], layers[3]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(plugin().dtype)
    bias = quantized.bias.float() - exact.bias
    error = (quantized(x).float() - exact(x.float()) - bias).abs().mean() / exact(x.float()).abs().mean()
    assert 0 < error < 0.3
    fit(max_steps=13).save_checkpoint(tmp_path / "a.ckpt")
    resumed = fit(seed=1, ckpt_path=tmp_path / "a.ckpt")
    for (name, a), b in zip(
        whole.lightning_module.state_dict().items(), resumed.lightning_module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


@BITSANDBYTES
def test_weights_of_a_model_that_is_not_quantized_can_be_loaded() -> None:
    fabric = L.Fabric(accelerator="cpu", plugins=BitsandbytesPrecision("nf4"))
    one, other = made(0).layers, made(1)
    fabric.setup(one)
    expected = made(1).layers
    fabric.setup(expected)
    one.load_state_dict(other.layers.state_dict())
    assert torch.equal(one[3].weight, expected[3].weight)


@BITSANDBYTES
def test_models_and_devices_that_cannot_be_quantized() -> None:
    with refused(TypeError, says="Conv2d"):
        L.Fabric(accelerator="cpu", plugins=BitsandbytesPrecision("nf4")).setup(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match=r"int8-training.*does not support CPU"):
        L.Fabric(accelerator="cpu", plugins=BitsandbytesPrecision("int8-training"))


@pytest.mark.parametrize("mode", ["nf4", "int8-training"])
def test_a_quantizing_precision_is_no_word(mode: str) -> None:
    with refused(ValueError, "precision", fix=f"plugins=BitsandbytesPrecision('{mode}')"):
        L.Trainer(accelerator="cpu", precision=mode)


# -- Transformer Engine, which only exists for GPUs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a package in place of Transformer Engine; return the recipes that forward was called with."""
    used: list[Any] = []

    class DelayedScaling:
        def __init__(self, **options: Any) -> None:
            self.options = options

    @contextlib.contextmanager
    def autocast(enabled: bool, recipe: Any) -> Any:
        used.append(recipe)
        yield

    recipe: Any = types.ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling, recipe.Format = DelayedScaling, types.SimpleNamespace(HYBRID="hybrid format")
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    for kind in (nn.Linear, nn.LayerNorm):
        setattr(pytorch, kind.__name__, type(kind.__name__, (kind,), {"__module__": pytorch.__name__}))
    pytorch.autocast = autocast
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipe)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(TransformerEnginePrecision, "check_device", lambda self, device: None)
    return used


def test_layers_of_transformer_engine_compute_and_go_again(engine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    plugin = TransformerEnginePrecision(
        weights_dtype=torch.bfloat16, recipe={"fp8_format": "HYBRID", "amax_history_len": 4}
    )
    assert plugin.recipe.options == {"fp8_format": "hybrid format", "amax_history_len": 4}
    module, names = made(), set()

    def look(trainer: L.Trainer, model: Any) -> None:
        names.update(f"{type(layer).__module__}.{type(layer).__name__}" for layer in model.layers)

    with warned(UserWarning, says=("'layers.5'", "32 x")):
        quiet(plugins=plugin, callbacks=[LambdaCallback(on_train_start=look)]).fit(module, loader())
    assert {"transformer_engine.pytorch.Linear", "transformer_engine.pytorch.LayerNorm"} < names
    assert set(engine) == {plugin.recipe}
    assert all(type(layer) in (nn.Linear, nn.LayerNorm, nn.ReLU) for layer in module.layers)
    assert module.layers[0].weight.dtype == torch.bfloat16


def test_replacing_layers_can_be_left_to_the_user(engine: list[Any]) -> None:
    plugin = TransformerEnginePrecision(weights_dtype=torch.float32, replace_layers=False)
    module = made()
    plugin.convert_module(module)
    assert type(module.layers[0]) is nn.Linear
    replacing = TransformerEnginePrecision(weights_dtype=torch.float32, replace_layers=True)
    with replacing.module_init_context():
        assert type(nn.Linear(8, 16)).__module__ == "transformer_engine.pytorch"
    assert type(nn.Linear(8, 16)).__module__ == "torch.nn.modules.linear"
