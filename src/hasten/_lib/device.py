"""Facts about devices, by what depends on them."""

from __future__ import annotations

import torch


def is_host(device: torch.device) -> bool:
    """Return whether a device is the CPU: nothing has to be copied to it, and it has the memory of the machine."""
    return device.type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is a GPU of CUDA or ROCm, which counts its memory and runs beside the host."""
    return device.type == "cuda"


def copies_in_background(device: torch.device) -> bool:
    """Return whether copies from pinned memory to a device return before they are done."""
    return is_cuda(device)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type that holds every float and every count below 2**53; MPS has none, and there it is float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for other devices."""
    return torch.cuda.get_device_capability(device) if is_cuda(device) else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
