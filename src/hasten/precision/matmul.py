"""How exactly 32-bit matrices are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

MatmulPrecision = Literal["highest", "high", "medium"]


def set_matmul_precision(precision: str) -> None:
    """Set how exactly this process multiplies 32-bit matrices, from now on.

    Args:
        precision: "highest" for full 32-bit floats; "high" for TF32 (CUDA, compute capability 8.0 and newer);
            "medium" for bfloat16 inside of the product where the device can (CPUs with bf16 instructions), else
            as "high".

    Source: `torch.set_float32_matmul_precision
    <https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html>`_.

    """
    torch.set_float32_matmul_precision(precision)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set how exactly 32-bit matrices are multiplied, and set it back.

    It holds for the whole process, also for other threads; weights, gradients and optimizer states stay 32-bit.

    Args:
        precision: "highest", "high" or "medium"; see ``set_matmul_precision``.

    Example::

        >>> with matmul_precision("medium"):
        ...     torch.get_float32_matmul_precision()
        'medium'
        >>> torch.get_float32_matmul_precision()
        'highest'

    """
    before = _Backends()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        before.restore()


class _Backends:
    """The settings that ``set_float32_matmul_precision`` changes, one by one: a program may set them apart."""

    def __init__(self) -> None:
        self._cuda: str = torch.backends.cuda.matmul.fp32_precision
        self._cpu: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        self._name: str | None
        try:
            self._name = torch.get_float32_matmul_precision()
        except RuntimeError:  # The backends were set apart, which the common name cannot say.
            self._name = None

    def restore(self) -> None:
        if self._name is not None:
            torch.set_float32_matmul_precision(self._name)
        torch.backends.cuda.matmul.fp32_precision = self._cuda
        torch.backends.mkldnn.matmul.fp32_precision = self._cpu  # type: ignore[attr-defined]


def without_effect(precision: str, device: torch.device) -> str | None:
    """Say why a setting changes nothing on a device; None where it does change something.

    Args:
        precision: "highest", "high" or "medium".
        device: where the matrices are multiplied.

    """
    if precision == "highest":
        return None
    if device.type == "cuda":
        if torch.version.hip is not None:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return None
        return f"this GPU has the compute capability {major}.{minor}, and TF32 begins with 8.0"
    if device.type == "cpu":
        has_bf16 = cpu_has_bfloat16()
        if precision == "medium" and has_bf16:
            return None
        if precision == "high" and torch.ops.mkldnn._is_mkldnn_fp16_supported() and _tf32_on_cpu():
            return None
        nearest = "; 'medium' multiplies in bfloat16" if precision == "high" and has_bf16 else ""
        return f"this CPU has no {'TF32' if precision == 'high' else 'bfloat16'} instructions{nearest}"
    return f"{device.type.upper()} multiplies 32-bit matrices in one way only"


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies in bfloat16; others take tens of times as long for it as for 32 bits."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _tf32_on_cpu() -> bool:
    """Return whether oneDNN may multiply in TF32: its CPUs have half-precision tiles (AMX-FP16)."""
    return bool(getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)())
