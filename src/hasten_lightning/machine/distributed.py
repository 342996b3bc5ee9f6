"""Join processes and exchange tensors without a Trainer or Fabric, for strategies that packages write."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.machine import collectives, host

if TYPE_CHECKING:
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.types import Group, ReduceOperation


def init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Join the process group, unless that has happened; ``kwargs`` are for ``torch.distributed.init_process_group``.

    The cluster environment has the address of the first process, and the rank and the number that are left out.

    Raises:
        RuntimeError: this build of torch has no ``torch.distributed``.

    """
    if not dist.is_available():
        raise make_error(RuntimeError, "torch.distributed is not available here:", fix="use devices=1.")
    if collectives.joined():
        return
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = world_size or cluster_environment.world_size()
    os.environ.update(MASTER_ADDR=cluster_environment.main_address, MASTER_PORT=str(cluster_environment.main_port))
    dist.init_process_group(torch_distributed_backend, rank=rank, world_size=size, **kwargs)
    if torch_distributed_backend == "nccl":
        # NCCL warns of a group that is still there when the program ends.
        atexit.register(collectives.leave)


def default_process_group_backend_for_device(device: torch.device) -> str:
    """Return the backend that torch takes for a device; "gloo" for devices that it does not know.

    Example::

        >>> default_process_group_backend_for_device(torch.device("cuda"))
        'nccl'

    """
    backends: dict[str, str] = dist.Backend.default_device_backend_map
    return backends.get(device.type, "gloo")


def sync_ddp(result: Tensor, group: Group = None, reduce_op: ReduceOperation | None = None) -> Tensor:
    """Reduce a tensor over the processes, in place, and return it; without a process group, return it unchanged.

    ``reduce_op`` is that of ``hasten.Fabric.all_reduce``, "sum" by default. A mean of whole numbers is cut to one.

    """
    reduced: Tensor = collectives.all_reduce(result, reduce_op or "sum", device=result.device, group=group)
    return reduced


def all_gather_ddp_if_available(tensor: Tensor, group: Group = None, sync_grads: bool = False) -> Tensor:
    """Return the tensors of all processes, stacked; without a process group, return the tensor unchanged.

    With ``sync_grads``, gradients flow back to the processes that the tensors came from.

    """
    gathered: Tensor = collectives.all_gather(tensor, device=tensor.device, group=group, sync_grads=sync_grads)
    return gathered


def suggested_max_num_threads(num_processes: int = 1) -> int:
    """Return the threads with which the processes of this machine together use each core once.

    Raises:
        ValueError: ``num_processes`` is less than 1.

    """
    check.whole("_suggested_max_num_threads", "num_processes", num_processes, at_least=1)
    return max(1, host.usable_cores() // num_processes)


def set_num_threads_if_needed(num_processes: int = 1) -> None:
    """Set the threads of torch and of processes started from here, unless ``OMP_NUM_THREADS`` does."""
    if "OMP_NUM_THREADS" not in os.environ:
        threads = suggested_max_num_threads(num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


__all__ = [
    "all_gather_ddp_if_available", "default_process_group_backend_for_device", "init_dist_connection",
    "set_num_threads_if_needed", "suggested_max_num_threads", "sync_ddp",
]  # fmt: skip
