"""Errors for lack of memory, and what frees memory."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Parameters of this size are worth a full pass: their gradients and the optimizer's state may come back with them.
_LARGE_BYTES = 100_000_000

_trained: list[weakref.ref[nn.Module]] = []


def collect_earlier_models(module: nn.Module) -> None:
    """Collect garbage before ``module`` is trained if models trained before it may hold much memory.

    A module and its Trainer refer to each other, so those of an earlier training stay in memory until a full pass.
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
