"""The share of the peak: every product counted, and divided by the peak of its own type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.demo import arithmetic
from hasten.demo.arithmetic import Arithmetic
from hasten.demo.task import Switches
from hasten.demo.vit import Vit
from hasten.speed import look
from hasten.speed.figures import _mfu

PEAKS = {"float32": 1e10, "tf32": 4e10, "bfloat16": 8e10}


@pytest.mark.parametrize(
    ("switches", "share"),
    [
        (Switches(), 0.8),
        (Switches(tf32=True), 0.2),
        (Switches(tf32=True, precision="bf16-mixed"), 0.1),
    ],
)
def test_a_row_is_compared_with_the_peak_of_its_own_type(switches: Switches, share: float) -> None:
    assert Arithmetic(8e10, PEAKS).mfu(switches, seconds=10.0) == pytest.approx(share)


@pytest.mark.parametrize(
    ("levers", "given", "share"),
    [
        ([], {}, 0.8),
        ([{"matmul_precision": "high"}], {}, 0.2),
        ([], {"matmul_precision": "'high'"}, 0.2),
        ([{"matmul_precision": "medium"}], {}, 0.1),
        ([], {"matmul_precision": "'highest'"}, 0.8),
        ([{"matmul_precision": "high"}, {"precision": "bf16-mixed"}], {}, 0.1),
    ],
)
def test_the_advisor_does_so_too(levers: list[dict[str, str]], given: dict[str, str], share: float) -> None:
    variant: Any = SimpleNamespace(levers=[SimpleNamespace(arguments=each) for each in levers])
    facts = {"flops_per_step": 8e9, "samples_counted": 1, "peak_flops": PEAKS}
    assert _mfu(variant, facts, given, samples_per_second=1.0) == pytest.approx(share)


def test_the_peak_is_measured_in_the_precision_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[str] = []

    def seconds(a: torch.Tensor) -> float:
        within.append(torch.get_float32_matmul_precision())
        return 1.0

    monkeypatch.setattr(look, "_seconds_of_product", seconds)
    before = torch.get_float32_matmul_precision()
    look.peak_flops(torch.device("cpu"), torch.float32, matmul_precision="high")
    look.peak_flops(torch.device("cpu"), torch.float32)
    assert set(within[: len(within) // 2]) == {"high"}
    assert set(within[len(within) // 2 :]) == {"highest"}
    assert torch.get_float32_matmul_precision() == before
    assert set(look.measured_peaks(torch.device("cpu"))) == {"float32", "bfloat16"}


def test_attention_of_a_transformer_counts() -> None:
    options = {"random_images": True, "limit": 60, "width": 64, "depth": 1, "say": lambda line: None}
    narrow, wide = (Vit(side=side, **options) for side in (64, 128))  # type: ignore[arg-type]
    (few, more) = ((task.side // 16) ** 2 for task in (narrow, wide))
    one, other = (arithmetic._counted(task, 0) for task in (narrow, wide))
    # Two products of (tokens, tokens, width), and twice as many backward; the rest grows with the tokens alone.
    extra = [3 * 2 * 2 * 64 * tokens**2 for tokens in (few, more)]
    assert other - extra[1] < 1.1 * (one - extra[0]) * more / few
    assert one > extra[0]
    assert other / one > more / few


def test_memory_on_a_gpu_is_all_that_other_processes_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2**30)
    assert look.peak_memory_bytes(torch.device("cuda")) == 2**30 + 600 * 2**20


def test_a_peak_is_measured_where_only_the_newer_setting_of_torch_was_used() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert look.peak_flops(torch.device("cpu"), torch.float32)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
