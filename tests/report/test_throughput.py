"""Throughput: rates, counted operations, and what devices can do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.precision.base import Precision
from hasten.report.peaks import PEAKS, get_available_flops, peaks_of
from hasten.report.throughput import Throughput, ThroughputMonitor, compute_dtype, measure_flops
from tests.refusals import refused, warned

TF = 1e12


def test_only_totals_until_the_window_is_full_and_then_its_rates() -> None:
    throughput = Throughput(window_size=3, separator="|")
    assert throughput.compute() == {}
    throughput.update(time=2.0, batches=1, samples=4)
    throughput.update(time=3.0, batches=2, samples=8)
    assert throughput.compute() == {"time": 3.0, "batches": 2, "samples": 8}
    throughput.update(time=6.0, batches=3, samples=16)
    rates = {"device|batches_per_sec": 2 / 4, "device|samples_per_sec": 12 / 4}
    assert throughput.compute() == {"time": 6.0, "batches": 3, "samples": 16, **rates}
    throughput.update(time=7.0, batches=7, samples=28)
    assert throughput.compute()["device|batches_per_sec"] == 5 / 4
    throughput.reset()
    assert throughput.compute() == {}
    throughput.update(time=0.5, batches=1, samples=1)
    assert throughput.compute()["time"] == 0.5


@pytest.mark.parametrize("peak", [None, 50.0])
def test_items_operations_and_the_share_of_the_peak(peak: float | None) -> None:
    throughput = Throughput(available_flops=peak, window_size=2)
    throughput.update(time=1.0, batches=1, samples=2, lengths=20, flops=1000)
    throughput.update(time=3.0, batches=2, samples=4, lengths=50, flops=40)
    totals = {"time": 3.0, "batches": 2, "samples": 4, "lengths": 50}
    rates = {"batches_per_sec": 0.5, "samples_per_sec": 1.0, "items_per_sec": 15.0, "flops_per_sec": 20.0}
    expected = {**totals, **{f"device/{name}": rate for name, rate in rates.items()}}
    if peak is not None:
        expected["device/mfu"] = 0.4
    assert throughput.compute() == expected
    several = Throughput(available_flops=peak, window_size=2, world_size=4)
    several.update(time=1.0, batches=1, samples=2, lengths=20, flops=1000)
    several.update(time=3.0, batches=2, samples=4, lengths=50, flops=40)
    assert several.compute() == {**expected, **{name: 4 * rate for name, rate in rates.items()}}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"time": 1.0}, r"update\(time=1.0\): Expected the value to increase, last: 1.0, current: 1.0"),
        ({"batches": 1}, r"update\(batches=1\): Expected the value to increase"),
        ({"samples": 2}, r"update\(samples=2\): Expected the value to increase"),
        ({"lengths": 9}, r"update\(lengths=9\): Expected the value to increase"),
        ({"batches": 5, "samples": 4}, r"Expected samples \(4\) to be greater or equal than batches \(5\)"),
        ({"lengths": 3}, r"Expected lengths \(3\) to be greater or equal than samples \(4\)"),
    ],
)
def test_totals_that_cannot_be(second: dict[str, Any], message: str) -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=1, samples=2, lengths=9)
    with pytest.raises(ValueError, match=message):
        throughput.update(**{"time": 2.0, "batches": 2, "samples": 4, "lengths": 12, **second})
    # Nothing of it was taken.
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 2, "lengths": 9}


@pytest.mark.parametrize("lengths", [(None, 9), (9, None)])
def test_lengths_are_given_each_time_or_never(lengths: tuple[int | None, int | None]) -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=1, samples=2, lengths=lengths[0])
    with pytest.raises(RuntimeError, match="same number of samples"):
        throughput.update(time=2.0, batches=2, samples=4, lengths=lengths[1])


@pytest.mark.parametrize("options", [{"window_size": 1}, {"window_size": 2.5}, {"world_size": 0}, {"world_size": True}])
def test_bad_arguments(options: dict[str, Any]) -> None:
    with refused(ValueError, next(iter(options))):
        Throughput(**options)


def test_operations_of_forward_and_backward() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 32)
    forward = 2 * 8 * 32 * 16 + 2 * 8 * 16 * 4
    assert measure_flops(model, lambda: model(x)) == forward
    # Backward: the gradient of both weights, and of the input of the second layer.
    backward = forward + 2 * 8 * 16 * 4
    assert measure_flops(model, lambda: model(x), torch.Tensor.sum) == forward + backward
    # The attention of a CPU too: two products forward, four backward.
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert measure_flops(model, lambda: attention(q, q, q), torch.Tensor.sum) == 6 * (2 * 4 * 4 * 8)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA A100-PCIE-40GB", torch.int8, 624.0),
        ("NVIDIA A10G", torch.bfloat16, 70.0),
        ("NVIDIA L40S", torch.bfloat16, 362.0),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.2),
        ("NVIDIA GeForce RTX 4080 SUPER", torch.bfloat16, 104.4),
        ("NVIDIA GeForce RTX 2080", torch.float16, 42.4),
        ("NVIDIA GeForce RTX 2080 SUPER", torch.float16, 44.6),
        ("NVIDIA GeForce RTX 2070 SUPER", torch.int8, 145.0),
        ("Tesla T4", torch.float16, 65.0),
        ("Tesla V100-SXM2-16GB", torch.float16, 125.0),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
    ],
)
def test_known_devices(name: str, dtype: Any, peak: float) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks[dtype] == pytest.approx(peak * TF)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Quantum 1",
    ],
)
def test_devices_that_are_not_known(name: str) -> None:
    assert peaks_of(name) is None


def test_faster_types_are_faster_and_older_cards_have_no_bfloat16() -> None:
    for words, peaks in PEAKS.items():
        order = [peaks[dtype] for dtype in (torch.float64, torch.float32, torch.float16) if dtype in peaks]
        assert order == sorted(order)
        older = {"t4", "v100", "v100s", "2080", "titan"} & set(words)
        assert not older or not {torch.bfloat16, "tfloat32"} & set(peaks)


@pytest.fixture
def device_name(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(name: str) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return torch.device("cuda")

    return choose


def test_peaks_by_type(device_name: Any) -> None:
    device, settings = device_name("NVIDIA A100-SXM4-80GB"), torch.backends.cuda.matmul
    assert get_available_flops(device, torch.bfloat16) == 312_000_000_000_000
    before, newer = torch.get_float32_matmul_precision(), settings.fp32_precision
    try:
        torch.set_float32_matmul_precision("highest")
        assert get_available_flops(device, torch.float32) == 19_500_000_000_000
        torch.set_float32_matmul_precision("high")
        assert get_available_flops(device, torch.float32) == 156_000_000_000_000
    finally:
        torch.set_float32_matmul_precision(before)  # type: ignore[arg-type]
    try:
        # Where only the newer setting of torch was used.
        settings.fp32_precision = "tf32"
        assert get_available_flops(device, torch.float32) == 156_000_000_000_000
    finally:
        settings.fp32_precision = newer


def test_what_is_not_known_is_said(device_name: Any) -> None:
    with warned(UserWarning, says=("'Quantum 1'", "available_flops")):
        assert get_available_flops(device_name("Quantum 1"), torch.float32) is None
    with warned(UserWarning, says=("'Tesla T4'", "bfloat16")):
        assert get_available_flops(device_name("Tesla T4"), torch.bfloat16) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_available_flops(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("32-true", torch.float32),
        ("64-true", torch.float64),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("16-true", torch.float16),
        # Products of 8-bit floats are compared with those of 16 bits.
        ("fp8", torch.bfloat16),
        ("transformer-engine", torch.bfloat16),
        ("transformer-engine-float16", torch.float16),
    ],
)
def test_the_type_of_a_precision(name: str, dtype: torch.dtype) -> None:
    precision = Precision()
    precision.precision = name  # type: ignore[assignment]
    assert compute_dtype(precision) is dtype


def test_the_monitor_of_fabric_logs() -> None:
    rows: list[tuple[dict[str, float], int]] = []
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.log_dict = lambda metrics, step=None: rows.append((metrics, step))  # type: ignore[method-assign,assignment]
    monitor = ThroughputMonitor(fabric, window_size=2)
    assert monitor.available_flops is None
    for batches in (1, 2, 3):
        monitor.update(time=float(batches), batches=batches, samples=2 * batches)
        monitor.compute_and_log(step=7 if batches == 3 else None)
    assert [step for _, step in rows] == [0, 1, 7]
    assert rows[0][0] == {"time": 1.0, "batches": 1, "samples": 2}
    assert rows[2][0]["device/samples_per_sec"] == 2.0
