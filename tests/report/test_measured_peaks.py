"""Peaks measured with matrix products, and operations counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.report import peaks


def test_the_peak_is_measured_in_the_precision_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[str] = []

    def seconds(a: torch.Tensor) -> float:
        within.append(torch.get_float32_matmul_precision())
        return 1.0

    monkeypatch.setattr(peaks, "_seconds_of_product", seconds)
    before = torch.get_float32_matmul_precision()
    peaks.peak_flops(torch.device("cpu"), torch.float32, matmul_precision="high")
    peaks.peak_flops(torch.device("cpu"), torch.float32)
    assert set(within[: len(within) // 2]) == {"high"}
    assert set(within[len(within) // 2 :]) == {"highest"}
    assert torch.get_float32_matmul_precision() == before
    assert set(peaks.measured_peaks(torch.device("cpu"))) == {"float32", "bfloat16"}


def test_a_peak_is_measured_where_only_the_newer_setting_of_torch_was_used() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert peaks.peak_flops(torch.device("cpu"), torch.float32)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
