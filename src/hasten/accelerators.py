"""Accelerators under their public names; they live in ``hasten.machine.devices``."""

from __future__ import annotations

from typing import Any

import torch

from hasten._lib.errors import absent
from hasten.machine.devices import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator

__all__ = [
    "Accelerator", "CPUAccelerator", "CUDAAccelerator", "HPUAccelerator", "IPUAccelerator",
    "MPSAccelerator", "TPUAccelerator", "XLAAccelerator", "find_usable_cuda_devices",
]  # fmt: skip


def _absent(name: str) -> Any:
    return absent(name, Accelerator, home="hasten.accelerators", instead="Write Trainer(accelerator='auto').")


HPUAccelerator = _absent("HPUAccelerator")
IPUAccelerator = _absent("IPUAccelerator")
TPUAccelerator = _absent("TPUAccelerator")
XLAAccelerator = _absent("XLAAccelerator")


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of CUDA devices on which this process can allocate memory.

    Args:
        num_devices: how many; -1 for all.

    Raises:
        ValueError: this machine has fewer devices.
        RuntimeError: some are in use by other processes (exclusive compute mode).

    Example::

        >>> find_usable_cuda_devices(0)
        []

    """
    if num_devices == 0:
        return []
    present = torch.cuda.device_count()
    if num_devices > present or not present:
        wanted = "all" if num_devices == -1 else num_devices
        raise ValueError(
            f"find_usable_cuda_devices({num_devices}): {wanted} asked for, and this machine has {present} CUDA "
            f"device{'' if present == 1 else 's'}."
        )
    usable: list[int] = []
    for index in range(present):
        try:
            torch.tensor(0.0, device=torch.device("cuda", index))
        except RuntimeError:
            continue
        usable.append(index)
        if len(usable) == num_devices:
            break
    if num_devices != -1 and len(usable) < num_devices:
        raise RuntimeError(
            f"find_usable_cuda_devices({num_devices}): only {usable} of {present} CUDA devices can be used; the others "
            "are in use by other processes. Ask for fewer, or wait."
        )
    return usable
