"""Detect out-of-memory errors and free cached memory."""

from __future__ import annotations

from hasten._lib.device import free_cached_memory as garbage_collection_cuda
from hasten._lib.device import is_out_of_device_memory as is_cuda_out_of_memory
from hasten._lib.device import is_out_of_host_memory as is_out_of_cpu_memory
from hasten._lib.device import is_out_of_memory as is_oom_error
from hasten._lib.tree import map_tensors
from hasten.types import Batch

__all__ = [
    "garbage_collection_cuda", "is_cuda_out_of_memory", "is_cudnn_snafu", "is_oom_error",
    "is_out_of_cpu_memory", "recursive_detach",
]  # fmt: skip


def recursive_detach(in_dict: Batch, to_cpu: bool = False) -> Batch:
    """Return a nested collection with its tensors detached, and on the CPU with ``to_cpu``."""
    return map_tensors(lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach(), in_dict)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether an exception is the one that cuDNN raises when memory runs out."""
    return isinstance(exception, RuntimeError) and "CUDNN_STATUS_NOT_SUPPORTED" in str(exception)
