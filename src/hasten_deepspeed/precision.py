"""The number format in which DeepSpeed's engine trains."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from hasten._lib import check
from hasten.precision.base import DefaultType, Precision, T, to_floating
from hasten.precision.builtin import check_bfloat16

Name = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
_TYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


class DeepSpeedPrecision(Precision):
    """Parameters and computation in 16-bit floats, with 32-bit copies for the optimizer, which the engine keeps.

    For DeepSpeed "mixed" and "true" compute alike: the module and its inputs are converted, the optimizer steps on
    32-bit copies, divided over the processes, and for "16-..." the engine scales losses. Losses and outputs of
    Fabric's modules come in torch's default type. The difference: ``init_module`` and ``configure_model`` make
    parameters of 16 bits with "true", and of 32 bits, converted afterwards, with "mixed".

    Args:
        precision: "32-true", "16-true", "bf16-true", "16-mixed" or "bf16-mixed".

    Raises:
        ValueError: the precision has another value.

    Example::

        >>> DeepSpeedPrecision("bf16-mixed").convert_module(nn.Linear(2, 1)).weight.dtype
        torch.bfloat16

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.

    """

    can_be_sharded = False

    def __init__(self, precision: Name) -> None:
        check.one_of("DeepSpeedPrecision", "precision", precision, get_args(Name))
        self.precision = precision
        self.dtype = _TYPES[precision.partition("-")[0]]

    def check_device(self, device: torch.device) -> None:
        """Check that the device computes in this precision."""
        if self.dtype is torch.bfloat16:
            check_bfloat16(device, self.precision, instead=self.precision.removeprefix("bf"))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with parameters and buffers in this precision; those that are divided are."""
        if not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
            return module.to(dtype=self.dtype)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and not hasattr(tensor, "ds_id"):
                tensor.data = tensor.data.to(self.dtype)
        return module

    def convert_input(self, data: T) -> T:
        """Return ``data`` with its floating tensors in this precision."""
        return to_floating(data, self.dtype)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with its floating tensors in torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def module_init_context(self) -> DefaultType:
        """Return a context in which modules are made in this precision, with "true"."""
        return DefaultType(self.dtype if self.precision.endswith("-true") else torch.get_default_dtype())

    tensor_init_context = module_init_context
