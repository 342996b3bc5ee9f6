"""Accelerators under their public names; they live in ``hasten.machine.devices``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.errors import absent, make_error
from hasten._lib.lazy import attach
from hasten.machine import devices
from hasten.machine.devices import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator

if TYPE_CHECKING:
    from hasten_xla.devices import XLAAccelerator as XLAAccelerator

__all__ = [
    "Accelerator", "CPUAccelerator", "CUDAAccelerator", "HPUAccelerator", "IPUAccelerator",
    "MPSAccelerator", "TPUAccelerator", "XLAAccelerator", "find_usable_cuda_devices",
]  # fmt: skip

# The class of a backend is imported when it is used; ``extend.moved`` says where its module is.
__getattr__, __dir__, _ = attach(__name__, {"hasten.xla.devices": "XLAAccelerator"}, also=__all__)


def _absent(name: str, **why: str) -> Any:
    return absent(name, Accelerator, home="hasten.accelerators", instead="Write Trainer(accelerator='auto').", **why)


HPUAccelerator = _absent("HPUAccelerator", why="is discontinued")
IPUAccelerator = _absent("IPUAccelerator", why="is discontinued")
TPUAccelerator = absent(
    "TPUAccelerator", Accelerator, home="hasten.accelerators", instead="Its name is XLAAccelerator now."
)


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
    present = devices.num_cuda_devices()
    wanted = present if num_devices == -1 else num_devices
    if wanted > present or (num_devices == -1 and not present):
        raise ValueError(f"find_usable_cuda_devices({num_devices}): this machine has {present} CUDA devices.")
    usable: list[int] = []
    for index in range(present):
        if len(usable) == wanted:
            break
        with suppress(RuntimeError):
            torch.tensor(0.0, device=torch.device("cuda", index))
            usable.append(index)
    if num_devices != -1 and len(usable) < wanted:
        raise make_error(
            RuntimeError,
            f"find_usable_cuda_devices({num_devices}): only {usable} of {present} CUDA devices can be used; other "
            "processes use the rest.",
            fix="Pass a smaller number, or wait.",
        )
    return usable
