"""Peaks of devices: dense floating-point operations a second, by dtype.

Dense: without the structured sparsity that doubles the figures on data sheets, which no training uses. For
cards whose tensor cores are slower with sums in float32, as torch keeps them, that speed. Sources: NVIDIA's data
sheets and architecture papers (V100, T4, A100, A10, A40, H100, H200, B200, L4, L40S, GA102, AD102, GB202), and
AMD's data sheets of the Instinct series.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten._lib.device import is_cuda, synchronize
from hasten._lib.rank_zero import rank_zero_warn
from hasten.precision.matmul import matmul_precision as matmul_precision_set

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

F64, F32, BF16, F16, I8 = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8
TF32 = "tfloat32"


def _row(f64: float, f32: float, tf32: float, half: float, int8: float) -> dict[Any, float]:
    """Return one device's peaks, given in 10**12 a second; 0 if it lacks the unit."""
    peaks = {F64: f64, F32: f32, TF32: tf32, BF16: half if tf32 else 0, F16: half, I8: int8}
    return {dtype: peak * 1e12 for dtype, peak in peaks.items() if peak}


_H100_SXM = _row(33.5, 66.9, 494.7, 989.4, 1978.9)
_HOPPER_NVL = _row(30.0, 60.0, 417.5, 835.5, 1670.5)
_H100_PCIE = _row(25.6, 51.2, 378.0, 756.0, 1513.0)
_A100 = _row(9.7, 19.5, 156.0, 312.0, 624.0)

# Words that must be in the device's name; where several rows fit, the one with most words counts.
PEAKS: dict[tuple[str, ...], dict[Any, float]] = {
    ("b200",): _row(37.0, 75.0, 1125.0, 2250.0, 4500.0),
    ("gb200",): _row(40.0, 80.0, 1250.0, 2500.0, 5000.0),
    ("h200",): _H100_SXM,
    ("h200", "nvl"): _HOPPER_NVL,
    ("gh200",): _H100_SXM,
    ("h100", "hbm3"): _H100_SXM,
    ("h100", "sxm5"): _H100_SXM,
    ("h100", "nvl"): _HOPPER_NVL,
    ("h100", "pcie"): _H100_PCIE,
    ("h100", "hbm2e"): _H100_PCIE,
    ("h20",): _row(1.0, 44.0, 74.0, 148.0, 296.0),
    ("a100",): _A100,
    ("a800",): _A100,
    ("a30",): _row(5.2, 10.3, 82.0, 165.0, 330.0),
    ("a40",): _row(0, 37.4, 74.8, 149.7, 299.3),
    ("a10",): _row(0, 31.2, 62.5, 125.0, 250.0),
    ("a10g",): _row(0, 31.5, 35.0, 70.0, 140.0),
    ("rtx", "a6000"): _row(0, 38.7, 77.4, 154.8, 309.7),
    ("l4",): _row(0, 30.3, 60.0, 121.0, 242.0),
    ("l40",): _row(0, 90.5, 90.5, 181.0, 362.0),
    ("l40s",): _row(0, 91.6, 183.0, 362.0, 733.0),
    ("rtx", "6000", "ada"): _row(0, 91.1, 182.1, 364.2, 728.5),
    ("rtx", "5090"): _row(0, 104.8, 104.8, 209.5, 838.0),
    ("rtx", "5080"): _row(0, 56.3, 56.3, 112.6, 450.2),
    ("rtx", "4090"): _row(0, 82.6, 82.6, 165.2, 660.6),
    ("rtx", "4080"): _row(0, 48.7, 48.7, 97.5, 389.9),
    ("rtx", "4080", "super"): _row(0, 52.2, 52.2, 104.4, 417.6),
    ("rtx", "3090"): _row(0, 35.6, 35.6, 71.0, 284.0),
    ("rtx", "3090", "ti"): _row(0, 40.0, 40.0, 80.0, 320.0),
    ("rtx", "3080"): _row(0, 29.8, 29.8, 59.5, 238.0),
    ("rtx", "3080", "ti"): _row(0, 34.1, 34.1, 68.2, 272.8),
    ("rtx", "3070"): _row(0, 20.3, 20.3, 40.6, 162.6),
    ("t4",): _row(0, 8.1, 0, 65.0, 130.0),
    ("quadro", "rtx", "5000"): _row(0, 11.2, 0, 89.2, 178.4),
    ("titan", "rtx"): _row(0, 16.3, 0, 130.5, 261.0),
    ("rtx", "2080"): _row(0, 10.6, 0, 42.4, 169.6),
    ("rtx", "2080", "super"): _row(0, 11.2, 0, 44.6, 178.4),
    ("rtx", "2080", "ti"): _row(0, 14.2, 0, 56.9, 227.7),
    ("rtx", "2070", "super"): _row(0, 9.1, 0, 36.3, 145.0),
    ("v100", "sxm2"): _row(7.8, 15.7, 0, 125.0, 0),
    ("v100", "sxm3"): _row(7.8, 15.7, 0, 125.0, 0),
    ("v100", "pcie"): _row(7.0, 14.0, 0, 112.0, 0),
    ("v100s", "pcie"): _row(8.2, 16.4, 0, 130.0, 0),
    ("mi300x",): _row(81.7, 163.4, 653.7, 1307.4, 2614.9),
    ("mi325x",): _row(81.7, 163.4, 653.7, 1307.4, 2614.9),
    # One of the two dies of a card, as torch counts devices.
    ("mi250x",): _row(23.9, 23.9, 0, 191.5, 191.5),
}
# Words that make another device of one whose other words fit; a MIG slice is a part of its device.
_VARIANTS = frozenset({"ti", "super", "laptop", "mobile", "max", "mig", "d"})


def peaks_of(device_name: str) -> dict[Any, float] | None:
    """Return the peaks of a device by its name, in operations a second by type; None if it is not known.

    Example::

        >>> peaks_of("NVIDIA A100-SXM4-80GB")[torch.bfloat16]
        312000000000000.0

    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    fitting = [key for key in PEAKS if words.issuperset(key) and not (words & _VARIANTS) - set(key)]
    return PEAKS[max(fitting, key=len)] if fitting else None


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak of a device in dense operations a second; None if it is unknown.

    "tfloat32" stands for float32 products on tensor cores.

    Example::

        >>> get_available_flops(torch.device("cpu"), torch.float32) is None
        True

    """
    if not is_cuda(device):
        return None
    name = torch.cuda.get_device_name(device)
    peaks = peaks_of(name)
    if peaks is None:
        rank_zero_warn(
            f"The peak of {name!r} is not known: FLOPs not found, so MFU is not logged.",
            fix="Pass Throughput(available_flops=...).",
        )
        return None
    dtype = _multiplied(dtype, peaks)
    if dtype not in peaks:
        rank_zero_warn(f"{name!r} does not support {dtype} in hardware: MFU is not logged.")
        return None
    return round(peaks[dtype])


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a device in dense operations a second; None, without a warning, if it is unknown.

    Example::

        >>> known_peak(torch.device("cpu"), torch.float32) is None
        True

    """
    peaks = peaks_of(torch.cuda.get_device_name(device)) if is_cuda(device) else None
    return None if peaks is None else peaks.get(_multiplied(dtype, peaks))


def _multiplied(dtype: Any, peaks: dict[Any, float]) -> Any:
    """Return the type in which products of a type are computed."""
    is_fast = dtype is torch.float32 and TF32 in peaks and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32 if is_fast else dtype


# -- measured

# Large enough that a matrix product reaches the peak of its device, small enough to be quick.
_SMALLEST_MATRIX = 128
# Smaller ones say more of how busy the machine is than of the device.
_LARGE_ENOUGH_MATRIX = 512
_LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192, "mps": 4096}
_LONG_ENOUGH_SECONDS = 0.02
_MEASURED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def flop_counter(*, by_module: bool = False) -> FlopCounterMode:
    """Return a context that counts floating-point operations, including attention on the CPU.

    ``by_module`` also counts the operations of each module. This hangs hooks on the inputs of modules, with which
    ``torch.autograd.grad`` with respect to such an input raises an error.

    Example::

        >>> q = torch.ones(1, 1, 4, 8, requires_grad=True)
        >>> with flop_counter() as counter:
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        >>> counter.get_total_flops() == 3 * 2 * (2 * 4 * 4 * 8)
        True

    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    # Defines the operations of this library that are counted.
    import hasten.packed.products  # noqa: F401

    def forward(q: Any, k: Any, v: Any, *args: object, **kwargs: object) -> int:
        return int(sdpa_flop_count(q, k, v))

    def backward(gradient: Any, q: Any, k: Any, v: Any, *args: object, **kwargs: object) -> int:
        # Two products for each of forward's; computing the scores again does not count.
        return 2 * int(sdpa_flop_count(q, k, v))

    def grouped(rows: Any, matrices: Any, *args: object, **kwargs: object) -> int:
        # Products of experts: rows in groups with a matrix each, or groups of columns with groups of rows.
        return int(2 * math.prod(rows) * matrices[-1])

    def products(pairs: Any, q: Any, v: Any) -> int:
        # Two products: of queries and keys, and of weights and values.
        return int(2 * math.prod(pairs) * (q[-1] + v[-1]))

    # torch has formulas for the kernels of other devices only.
    aten, ours = torch.ops.aten, torch.ops.hasten
    formulas = {
        ours.attention: forward,
        ours.attention_backward: backward,
        ours.packed_attention: lambda q, k, v, *_, out_shape: products(out_shape[4], q, v),
        ours.packed_attention_backward: lambda g, q, k, v, weights, *_, **__: 2 * products(weights, q, v),
        aten._grouped_mm: grouped,
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    if not by_module:
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules:
    """Takes the place of torch's ModuleTracker, whose hooks end a program that takes second derivatives."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def measured_peaks(device: torch.device) -> dict[str, float | None]:
    """Return the operations a second of a large matrix product, by the type of its numbers.

    On a GPU also in ``"tf32"``: float32 under ``matmul_precision="high"``.
    """
    peaks = {name: peak_flops(device, dtype) for name, dtype in _MEASURED.items()}
    if is_cuda(device):
        peaks["tf32"] = peak_flops(device, torch.float32, matmul_precision="high")
    return peaks


def peak_flops(device: torch.device, dtype: torch.dtype, *, matmul_precision: str = "highest") -> float | None:
    """Return the operations a second that a large matrix product reaches here; None if it cannot be computed."""
    size, best = _SMALLEST_MATRIX, 0.0
    try:
        with torch.no_grad(), matmul_precision_set(matmul_precision):
            while True:
                a = torch.randn(size, size, device=device).to(dtype)
                fastest = min(_seconds_of_product(a) for _ in range(6))
                best = max(best, 2.0 * size**3 / fastest)
                # Where a type is only emulated, one large product would take seconds.
                if size >= _LARGEST_MATRIX.get(device.type, 2048) or (
                    fastest > _LONG_ENOUGH_SECONDS and size >= _LARGE_ENOUGH_MATRIX
                ):
                    return best
                size *= 2
    except (RuntimeError, NotImplementedError):
        return None


def _seconds_of_product(a: Tensor) -> float:
    synchronize(a.device)
    began = time.perf_counter()
    torch.mm(a, a)
    synchronize(a.device)
    return time.perf_counter() - began
