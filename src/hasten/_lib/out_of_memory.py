"""Errors for lack of memory, and the garbage collector around a training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Parameters of this size are worth a full pass: their gradients and the optimizer's state may come back with them.
_LARGE_BYTES = 100_000_000

_trained: list[weakref.ref[nn.Module]] = []
_frozen = False


@contextmanager
def full_passes_once() -> Iterator[None]:
    """Let automatic collections examine all objects at most once while the context is open.

    Later ones skip what survived the first: a full pass takes 100 to 250 ms once torch is imported, which may be longer
    than the training.
    """
    if _after_pass in gc.callbacks or gc.get_freeze_count() > 0:
        # Inside another training, or the program has frozen objects itself.
        yield
        return
    gc.callbacks.append(_after_pass)
    try:
        yield
    finally:
        gc.callbacks.remove(_after_pass)
        _thaw()


def collect_all() -> None:
    """Collect all garbage, including objects that ``full_passes_once`` skips."""
    _thaw()
    gc.collect()


def collect_earlier_models(module: nn.Module) -> None:
    """Collect garbage before ``module`` is trained if models trained before it may hold much memory.

    A module and its Trainer refer to each other, so those of an earlier training stay in memory until a full pass.
    """
    earlier = [model for model in (ref() for ref in _trained) if model not in (None, module)]
    size_bytes = sum(p.numel() * p.element_size() for model in earlier for p in model.parameters() if not is_lazy(p))
    _trained[:] = [weakref.ref(module)]
    if size_bytes >= _LARGE_BYTES:
        del earlier
        collect_all()


def _after_pass(phase: str, info: dict[str, int]) -> None:
    global _frozen
    if phase == "stop" and info["generation"] == 2 and not _frozen:
        gc.freeze()
        _frozen = True


def _thaw() -> None:
    global _frozen
    if _frozen:
        _frozen = False
        gc.unfreeze()


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
    collect_all()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
