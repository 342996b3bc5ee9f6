"""The internal precision of 32-bit matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from hasten._lib import torch_private
from hasten._lib.device import is_cuda, is_host

MatmulPrecision = Literal["highest", "high", "medium"]


def set_matmul_precision(precision: str) -> None:
    """Set the internal precision of 32-bit matrix products for this process.

    Args:
        precision: "highest" for full 32-bit floats; "high" for TF32 (CUDA, compute capability 8.0 and newer);
            "medium" for bfloat16 inside the product if the device supports it (CPUs with bf16 instructions),
            otherwise as "high".

    Source: `torch.set_float32_matmul_precision
    <https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html>`_.

    """
    torch.set_float32_matmul_precision(precision)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the internal precision of 32-bit matrix products inside the block; see ``set_matmul_precision``.

    It applies to the whole process with all threads; weights, gradients and optimizer states stay in 32 bits.

    Example::

        >>> with matmul_precision("medium"):
        ...     torch.get_float32_matmul_precision()
        'medium'
        >>> torch.get_float32_matmul_precision()
        'highest'

    """
    # What torch.set_float32_matmul_precision changes of each backend; a program may set them separately.
    backends: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    own = [backend.fp32_precision for backend in backends]
    before = None
    with suppress(RuntimeError):  # The backends have different settings.
        before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for backend, setting in zip(backends, own, strict=True):
            backend.fp32_precision = setting


def without_effect(precision: str, device: torch.device) -> str | None:
    """Return why a setting has no effect on a device; None if it has one."""
    if precision == "highest":
        return None
    if is_cuda(device):
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0):
            return None
        return "this GPU has no TF32, which begins with compute capability 8.0"
    if is_host(device):
        is_medium = precision == "medium"
        kind = "bfloat16" if is_medium else "TF32"
        works = torch_private.cpu_multiplies_bfloat16() if is_medium else torch_private.cpu_multiplies_tf32()
        return None if works else f"this CPU has no {kind} instructions"
    return f"{device.type.upper()} has one way to multiply 32-bit matrices"
