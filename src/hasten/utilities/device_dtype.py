"""Where a module is, in which numbers it computes, and what CUDA devices there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def num_cuda_devices() -> int:
    """Return how many CUDA devices this machine has."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Return whether this machine has a CUDA device."""
    return torch.cuda.device_count() > 0


class DeviceDtypeMixin(nn.Module):
    """A module that says where it is and in which numbers it computes, read from its first parameter or buffer.

    Example::

        >>> DeviceDtypeMixin().device
        device(type='cpu')

    """

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU without one."""
        first = self._first()
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating parameter or buffer; torch's default without one."""
        first = self._first(floating=True)
        return torch.get_default_dtype() if first is None else first.dtype

    def _first(self, *, floating: bool = False) -> Any:
        tensors = [*self.parameters(), *self.buffers()]
        return next((tensor for tensor in tensors if not floating or tensor.is_floating_point()), None)
