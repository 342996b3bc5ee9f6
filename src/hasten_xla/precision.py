"""Number formats of XLA devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.precision.base import Precision, T, to_floating
from hasten.precision.builtin import HalfPrecision

if TYPE_CHECKING:
    from torch.optim import Optimizer


class XLAPrecision(Precision):
    """Parameters, inputs and computation in one floating type, on TPUs and other XLA devices.

    With 16 bits, optimizers step in 32 bits and keep the part of each update that 16 bits cannot hold, as with
    ``HalfPrecision``. torch_xla's environment variables ``XLA_USE_BF16`` and ``XLA_USE_F16``, which changed the type
    behind the program's back, are not set: torch_xla 2.9 does not read them.

    Args:
        precision: "32-true", "bf16-true" or "16-true".

    Raises:
        ValueError: the precision has another value.

    Example::

        >>> XLAPrecision("bf16-true").convert_module(nn.Linear(2, 1)).weight.dtype
        torch.bfloat16

    Source: `PyTorch/XLA, Automatic mixed precision <https://docs.pytorch.org/xla/release/r2.9/perf/amp.html>`_.

    """

    can_be_sharded = False

    def __init__(self, precision: Literal["32-true", "bf16-true", "16-true"] = "32-true") -> None:
        check.one_of("XLAPrecision", "precision", precision, ("32-true", "bf16-true", "16-true"))
        self.precision = precision
        self._half = None if precision == "32-true" else HalfPrecision(precision)

    def check_device(self, device: torch.device) -> None:
        """Check that the device is one of XLA's."""
        if device.type != "xla":
            what = f"plugins=[XLAPrecision({self.precision!r})]: it is for TPUs, and the run is on {device.type!r}."
            raise make_error(ValueError, what, fix=f"Use precision={self.precision!r}.", argument="plugins")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with parameters of this type."""
        return module if self._half is None else self._half.convert_module(module)

    def convert_input(self, data: T) -> T:
        """Return ``data`` with floating tensors of this type; XLA computes in 64 bits slowly."""
        return to_floating(data, torch.float32) if self._half is None else self._half.convert_input(data)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with floating tensors of torch's default type."""
        return data if self._half is None else self._half.convert_output(data)

    def convert_optimizer(self, optimizer: Optimizer) -> None:
        """Make the optimizer step in 32 bits."""
        if self._half is not None:
            self._half.convert_optimizer(optimizer)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have this type."""
        return super().forward_context() if self._half is None else self._half.forward_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which modules are made in this type."""
        return self.forward_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made in this type."""
        return self.forward_context()
