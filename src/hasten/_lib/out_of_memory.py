"""Memory: what ran out of it, and how to give it back."""

from __future__ import annotations

import torch

from hasten._lib.garbage import collect_all


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on a device or on the host."""
    return is_out_of_device_memory(error) or is_out_of_host_memory(error)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory of a device ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    # Libraries report it in words of their own.
    known = (
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_NOT_SUPPORTED",
        "MPS backend out of memory",
    )
    return isinstance(error, RuntimeError) and any(words in text for words in known)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory of the host ran out."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def free_cached_memory() -> None:
    """Collect garbage, and give cached memory of the device back."""
    collect_all()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
