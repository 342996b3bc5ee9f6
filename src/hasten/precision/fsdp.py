"""The number formats of sharded parameters: with "mixed", ``fully_shard`` converts them when it gathers them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.device import as_device
from hasten.precision.base import DefaultType, Precision, T, to_floating
from hasten.precision.builtin import check_bfloat16, scaler_for

Name = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
_TYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


class FSDPPrecision(Precision):
    """The number format in which ``FSDPStrategy`` trains.

    With "mixed", parameters and gradients are 32-bit floats. The parameters are converted when they are gathered, and
    inputs with them. Gradients are reduced in 32 bits. Autocast converts what is left: a buffer of 32 bits may meet a
    converted parameter. With "true", parameters, inputs and computation have one type. Losses and outputs of Fabric's
    modules come in torch's default type.

    Args:
        precision: "32-true", "16-true", "bf16-true", "16-mixed" or "bf16-mixed".
        scaler: your own GradScaler; "16-mixed" creates one by default.
        device: the kind of device: "cuda", "cpu".

    Raises:
        ValueError: the precision has another value, or it is given a scaler that it does not need.

    Example::

        >>> FSDPPrecision("bf16-mixed").param_dtype
        torch.bfloat16

    Source: `PyTorch, MixedPrecisionPolicy
    <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`_.

    """

    def __init__(self, precision: Name, scaler: torch.amp.GradScaler | None = None, *, device: str = "cuda") -> None:
        check.declared(FSDPPrecision.__init__, locals())
        check.one_of("FSDPPrecision", "precision", precision, get_args(Name))
        self.precision = precision
        named = as_device("FSDPPrecision", device)
        self.device = device if named is None else named.type
        self.scaler = scaler_for("FSDPPrecision", precision, scaler, self.device)
        dtype = _TYPES[precision.partition("-")[0]]
        self._mixed = precision.endswith("-mixed")
        # In what gathered parameters compute, where that is not their own type.
        self.param_dtype = dtype if self._mixed else None
        self._dtype = torch.float32 if self._mixed else dtype

    def check_device(self, device: torch.device) -> None:
        """Check that the device supports bfloat16 if the precision needs it."""
        if self.precision.startswith("bf16"):
            check_bfloat16(device, self.precision, instead=self.precision.removeprefix("bf"))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with parameters of the precision's type, with "true"."""
        return module if self._mixed else module.to(dtype=self._dtype)

    def convert_input(self, data: T) -> T:
        """Return ``data`` with its floating tensors in the type of the parameters."""
        return to_floating(data, self._dtype)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast; with "true", a context in which new floating tensors have the precision's type."""
        if self._mixed:
            return torch.autocast(self.device, dtype=self.param_dtype, cache_enabled=False)
        return DefaultType(self._dtype)

    def module_init_context(self) -> DefaultType:
        """Return a context in which modules are made with parameters of the precision's type."""
        return DefaultType(self._dtype)

    tensor_init_context = module_init_context
