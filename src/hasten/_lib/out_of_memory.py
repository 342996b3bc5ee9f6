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
    size_bytes = sum(_size_bytes(ref(), unless=module) for ref in _trained)
    _trained[:] = [weakref.ref(module)]
    if size_bytes >= _LARGE_BYTES:
        collect_all()


def _size_bytes(module: nn.Module | None, *, unless: nn.Module) -> int:
    """Return the size of the parameters; 0 for a module that is gone or is ``unless``."""
    if module is None or module is unless:
        return 0
    return sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on a device or on the host."""
    return is_out_of_device_memory(error) or is_out_of_host_memory(error)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory of a device ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    # Libraries have their own messages.
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
    """Collect garbage and free the cached memory of the device."""
    collect_all()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
