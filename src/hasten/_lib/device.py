"""What differs between devices, out-of-memory errors, and functions that free memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException


def as_device(owner: str, device: torch.device | str | int | None) -> torch.device | None:
    """Return the device that an argument names; None stays None.

    Raises:
        MisconfigurationException: it names none.

    """
    given: Any = device
    if device is None or isinstance(device, torch.device) or check.is_mock(device):
        named: torch.device | None = given
        return named
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is not a device")
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as cause:
        allowed, error = "a device such as 'cpu' or 'cuda:0', or None", MisconfigurationException
        raise check.wrong(owner, "device", device, allowed, error=error) from cause


def is_host(device: torch.device) -> bool:
    """Return whether a device is the CPU: nothing has to be copied to it, and it has the memory of the machine."""
    return device.type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is a GPU of CUDA or ROCm, which counts its memory and runs asynchronously."""
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
    """Wait until a device has completed its work."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# -- memory

# Parameters of this size are worth a full pass: their gradients and the optimizer's state may come back with them.
_LARGE_BYTES = 100_000_000

_trained: list[weakref.ref[nn.Module]] = []


def collect_earlier_models(module: nn.Module) -> None:
    """Collect garbage before ``module`` is trained if models trained before it may hold much memory.

    A module and its Trainer refer to each other, so they stay in memory after a training until a full collection.
    """
    earlier = [model for model in (ref() for ref in _trained) if model not in (None, module)]
    size_bytes = sum(p.numel() * p.element_size() for model in earlier for p in model.parameters() if not is_lazy(p))
    _trained[:] = [weakref.ref(module)]
    if size_bytes >= _LARGE_BYTES:
        del earlier
        gc.collect()


# Libraries have their own messages.
_OF_DEVICE = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "MPS backend out of memory",
)
_OF_HOST = ("DefaultCPUAllocator: can't allocate memory",)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on a device or on the host."""
    return is_out_of_device_memory(error) or is_out_of_host_memory(error)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory of a device ran out."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _OF_DEVICE)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory of the host ran out."""
    return isinstance(error, MemoryError) or _says(error, _OF_HOST)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def free_cached_memory() -> None:
    """Collect garbage and free the cached memory of the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
