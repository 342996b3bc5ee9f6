"""What each precision does to modules, inputs, outputs and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned
from torch import nn

import hasten as L
from hasten.callbacks import LambdaCallback
from hasten.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from hasten.resolve import runtime

TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Notes(nn.Module):
    """A linear layer that notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        self.seen = {"x": x.dtype, "ids": ids.dtype, "out": out.dtype, "new": torch.zeros(1).dtype}
        return {"out": out, "ids": ids}


def call(precision: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Notes, dict[str, torch.Tensor]]:
    run = runtime(accelerator="cpu", precision=precision)
    module = Notes()
    run.place(module)
    forward = run.bind(module, module=module, wrapped=run.wrap(module), training=True, **options)
    return module, forward(torch.ones(3, 4, dtype=dtype), ids=torch.arange(3))


@pytest.mark.parametrize("precision", TYPES)
def test_true_precisions_convert_weights_inputs_and_new_tensors(precision: str) -> None:
    dtype = TYPES[precision]
    module, output = call(precision)
    assert module.layer.weight.dtype == dtype
    assert module.seen == {"x": dtype, "ids": torch.int64, "out": dtype, "new": dtype}
    assert output["out"].dtype == dtype
    _, output = call(precision, convert_outputs=True)
    assert (output["out"].dtype, output["ids"].dtype) == (torch.float32, torch.int64)

    def breaks() -> None:
        raise KeyError("broken")

    run = runtime(accelerator="cpu", precision=precision)
    with pytest.raises(KeyError):
        run.bind(breaks)()
    assert torch.get_default_dtype() == torch.float32
    with run.init_module():
        assert nn.Linear(2, 2).weight.dtype == dtype
    with run.init_tensor():
        assert torch.zeros(1).dtype == dtype
    assert torch.zeros(1).dtype == torch.float32


def test_mixed_precision_computes_in_bfloat16_on_full_weights() -> None:
    module, output = call("bf16-mixed", torch.float32)
    assert module.layer.weight.dtype == torch.float32
    assert module.seen == {"x": torch.float32, "ids": torch.int64, "out": torch.bfloat16, "new": torch.float32}
    assert output["out"].dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert call("bf16-mixed", torch.float32, convert_outputs=True)[1]["out"].dtype == torch.float32


def test_batches_keep_64_bits_in_mixed_precision() -> None:
    class Sees(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch[0].dtype == torch.float64
            return super().training_step([batch[0].float(), batch[1]], batch_idx)

    x, y = next(iter(loader(4)))
    quiet(precision="bf16-mixed").fit(Sees(), [[x.double(), y]])


class Scaled:
    """A run on the CPU that believes it needs a scaler, which torch's works for as well."""

    def __init__(self) -> None:
        precision = MixedPrecision("16-mixed", device="cuda", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        precision.device = "cpu"
        self.run = runtime(accelerator="cpu", plugins=precision)
        torch.manual_seed(0)
        self.module = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.step = self.run.engine.make_step(self.optimizer)


def test_the_scaler_scales_unscales_and_steps_as_in_a_plain_loop() -> None:
    x = torch.ones(2, 4)
    scaled = Scaled()
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    scaler, optimizer = (torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(plain(x).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

        scaled.run.engine.make_zero_grad(scaled.optimizer)()
        scaled.run.engine.backward(scaled.module(x).pow(2).mean())
        assert scaled.run.engine.unscale is not None
        scaled.run.engine.unscale(scaled.optimizer)
        scaled.run.engine.unscale(scaled.optimizer)  # A second time does nothing.
        assert torch.equal(scaled.run.engine.clip_norm(scaled.module.parameters(), 0.5), norm)
        scaled.step()
    assert torch.equal(plain.weight, scaled.module.weight)


def test_a_scaled_step_without_gradients_is_none() -> None:
    scaled = Scaled()
    assert scaled.run.engine.unscale is not None
    before = scaled.module.weight.clone()
    for batch in (None, torch.ones(2, 4), None):
        scaled.run.engine.make_zero_grad(scaled.optimizer)()
        if batch is not None:
            scaled.run.engine.backward(scaled.module(batch).sum())
        scaled.run.engine.unscale(scaled.optimizer)
        scaled.step()
        assert torch.equal(before, scaled.module.weight) == (batch is None)
        before = scaled.module.weight.clone()


def test_a_step_with_infinite_gradients_is_left_out_and_the_scale_halved() -> None:
    scaled = Scaled()
    before = scaled.module.weight.clone()
    scaled.run.engine.backward(scaled.module(torch.full((1, 4), float("inf"))).sum())
    scaled.step()
    assert torch.equal(before, scaled.module.weight)
    assert scaled.run.scaler is not None
    assert scaled.run.scaler.get_scale() == 4.0
    assert scaled.run.precision.state_dict()["scale"] == 4.0


def test_the_scaler_and_lbfgs_do_not_go_together() -> None:
    with refused(ValueError, "precision", fix="precision='bf16-mixed'"):
        Scaled().run.engine.make_step(torch.optim.LBFGS(nn.Linear(1, 1).parameters()))


def test_what_a_precision_cannot_be() -> None:
    with refused(ValueError, "precision", fix="'bf16-true'"):
        HalfPrecision("16")  # type: ignore[arg-type]
    with refused(ValueError, "precision", fix="'16-mixed'"):
        MixedPrecision("32")  # type: ignore[arg-type]
    with refused(TypeError, "keep_small_updates"):
        HalfPrecision("bf16-true", keep_small_updates="no")  # type: ignore[arg-type]
    with refused(ValueError, "scaler"):
        MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def test_a_resumed_run_in_64_bits_keeps_all_of_them(tmp_path: Path) -> None:
    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.save_checkpoint(tmp_path / "half.ckpt")

    model, resumed = Classifier(), Classifier()
    quiet(precision="64-true", callbacks=[LambdaCallback(on_train_batch_end=save)]).fit(model, loader())
    quiet(precision="64-true").fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert all(parameter.dtype == torch.float64 for parameter in resumed.parameters())
    assert same_weights(model, resumed)


def test_what_a_step_calls_can_be_called_by_itself() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    weights = model.weight.detach().clone()
    for precision, factor in ((scaled, 8.0), (Precision(), 1.0), (FSDPPrecision("32-true"), 1.0)):
        assert precision.pre_backward(weights, model) is weights
        assert precision.post_backward(weights, model) is None
        precision.backward(model(torch.ones(3, 2)).sum(), model)
        assert model.weight.grad.tolist() == [[3 * factor, 3 * factor]]
        precision.unscale_gradients(optimizer)
        precision.clip_gradients(optimizer, 2.0, "value")
        assert model.weight.grad.tolist() == [[2, 2]]
        precision.clip_gradients(optimizer)
        precision.clip_gradients(optimizer, 1.0)
        assert sum(p.grad.square().sum() for p in precision.main_params(optimizer)) == pytest.approx(1, abs=1e-3)
        precision.optimizer_step(optimizer)
        assert not torch.equal(model.weight, weights)
        optimizer.zero_grad()
    # Nothing was computed, and nothing is stepped.
    assert scaled.optimizer_step(optimizer, model=L.LightningModule(), closure=lambda: None) is None
    fused = torch.optim.SGD(model.parameters(), lr=0.1)
    fused._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    with refused(RuntimeError, says="SGD"):
        scaled.clip_gradients(fused, 1.0)
    with refused(NotImplementedError, fix="fused=True"):
        scaled.unscale_gradients(fused)


def test_a_method_that_is_assigned_to_a_precision_is_called() -> None:
    trainer = quiet(max_epochs=1)
    trainer.precision_plugin.convert_input = convert = Mock(side_effect=lambda data: data)  # type: ignore[method-assign]
    trainer.fit(Classifier(), loader(8))
    assert convert.call_count == trainer.global_step == 2


@pytest.mark.parametrize("name", ["16-true", "bf16-true", "32-true", "bf16-mixed"])
def test_formats_of_sharded_parameters(name: Any) -> None:
    precision = FSDPPrecision(name, device="cpu")
    dtype = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(name, torch.float32)
    with precision.module_init_context():
        assert torch.nn.Linear(2, 1).weight.dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    assert precision.convert_module(torch.nn.Linear(2, 1)).weight.dtype == dtype
    assert precision.convert_input(torch.ones(1, dtype=torch.float64)).dtype == dtype
    assert precision.convert_output(torch.ones(1, dtype=dtype)).dtype == torch.float32
    with precision.forward_context():
        assert torch.is_autocast_enabled("cpu") == (name == "bf16-mixed")


@pytest.mark.parametrize("precision", [16, "16", "16-mixed"])
def test_16_bit_floats_on_the_processor(precision: Any) -> None:
    with warned(UserWarning, says=("GPU", "precision='bf16-mixed'")):
        L.Fabric(precision=precision, accelerator="cpu")
    with warned(UserWarning, says=("GPU", "precision='bf16-mixed'")):
        trainer = L.Trainer(precision=precision, accelerator="cpu", logger=False)
    assert trainer.precision == "bf16-mixed"
    assert trainer.scaler is None


def test_the_tests_of_a_program_may_pass_mocks() -> None:
    precision = MixedPrecision("bf16-mixed", device=Mock())
    assert precision.scaler is None
    scaler = Mock()
    assert MixedPrecision("16-mixed", device="cuda:0", scaler=scaler).scaler is scaler
    with refused(TypeError, "device"):
        MixedPrecision("bf16-mixed", device=3)  # type: ignore[arg-type]
