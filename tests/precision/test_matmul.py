"""How exactly 32-bit matrices are multiplied is set for a run, and set back."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader, quiet
from tests.refusals import refused
from torch import nn

import hasten as L
from hasten.precision.matmul import matmul_precision, without_effect

CPU = torch.device("cpu")


class Notes(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(torch.get_float32_matmul_precision())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(torch.get_float32_matmul_precision())


def test_a_run_multiplies_as_asked_and_the_program_as_before() -> None:
    class Broken(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("broken")

    module, trainer = Notes(), quiet(matmul_precision="medium", limit_train_batches=1)
    trainer.fit(module, loader(), loader(4))
    assert module.seen == ["medium"] * 3
    assert torch.get_float32_matmul_precision() == "highest"
    trainer.validate(module, loader(4), verbose=False)
    assert module.seen == ["medium"] * 4
    with pytest.raises(KeyError):
        quiet(matmul_precision="medium").fit(Broken(), loader())
    assert torch.get_float32_matmul_precision() == "highest"
    with matmul_precision("medium"):
        module = Notes()
        quiet(limit_train_batches=1).fit(module, loader())
        quiet(limit_train_batches=1, matmul_precision="highest").fit(module, loader())
        assert module.seen == ["medium", "highest"]
        assert torch.get_float32_matmul_precision() == "medium"


def test_settings_of_single_backends_come_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_in_fabric_it_holds_within_launch_or_from_setup_on() -> None:
    def work(fabric: L.Fabric) -> str:
        fabric.setup(nn.Linear(1, 1))
        return torch.get_float32_matmul_precision()

    fabric = L.Fabric(accelerator="cpu", matmul_precision="medium")
    assert torch.get_float32_matmul_precision() == "highest"
    assert fabric.launch(work) == "medium"
    assert torch.get_float32_matmul_precision() == "highest"
    for begin in (L.Fabric.launch, lambda fabric: fabric.setup(nn.Linear(1, 1))):
        try:
            begin(L.Fabric(accelerator="cpu", matmul_precision="high"))
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("front", [L.Trainer, L.Fabric])
def test_other_words_are_refused(front: Any) -> None:
    with refused(ValueError, "matmul_precision", fix="'high'"):
        front(accelerator="cpu", matmul_precision="hihg")
    with refused(TypeError, "matmul_precision", fix="'highest'"):
        front(accelerator="cpu", matmul_precision=True)


def test_where_it_changes_nothing_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with caplog.at_level(logging.INFO, logger="hasten"):
        quiet(matmul_precision="medium", limit_train_batches=1).fit(Notes(), loader())
    assert "Trainer(matmul_precision='medium') changes nothing here: this CPU has no bfloat16" in caplog.text
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert without_effect("medium", CPU) is None
    assert without_effect("highest", CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "no TF32, which begins with compute capability 8.0" in str(without_effect("high", torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert without_effect("high", torch.device("cuda")) is None


@pytest.mark.gpu
def test_on_a_gpu_products_are_rounded_to_tf32() -> None:
    a, b = torch.randn(2, 512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    exact = a @ b
    with matmul_precision("high"):
        rounded = a @ b
    assert 1e-4 < (exact - rounded).abs().max() < 1.0
    assert torch.equal(a @ b, exact)
