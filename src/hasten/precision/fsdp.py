"""Mixed precision of sharded parameters: ``fully_shard`` converts them when it gathers them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from hasten._lib import check
from hasten.precision.base import Precision, T, to_floating
from hasten.precision.builtin import check_bfloat16, scaler_for


class FSDPPrecision(Precision):
    """Parameters and gradients in 32-bit floats, computation in 16-bit floats, for ``FSDPStrategy``.

    The parameters are converted when they are gathered, and inputs with them. Gradients are reduced in 32 bits.
    Autocast converts what is left: a buffer of 32 bits may meet a converted parameter. Losses and outputs of Fabric's
    modules come in torch's default type.

    Args:
        precision: "16-mixed" or "bf16-mixed". For others, write ``precision=`` alone.
        scaler: your own GradScaler; "16-mixed" creates one by default.

    Raises:
        ValueError: the precision has another value.

    Example::

        >>> FSDPPrecision("bf16-mixed").param_dtype
        torch.bfloat16

    Source: `PyTorch, MixedPrecisionPolicy
    <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`_.

    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        scaler: torch.amp.GradScaler | None = None,
        *,
        device: str = "cuda",
    ) -> None:
        check.one_of("FSDPPrecision", "precision", precision, ("16-mixed", "bf16-mixed"))
        self.precision = precision
        self.scaler = scaler_for("FSDPPrecision", precision, scaler, device)
        self.device = torch.device(device).type
        self.param_dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16

    def check_device(self, device: torch.device) -> None:
        """Check that the device supports bfloat16 if the precision needs it."""
        if self.precision == "bf16-mixed":
            check_bfloat16(device, self.precision, instead="16-mixed")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast."""
        return torch.autocast(self.device, dtype=self.param_dtype)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())
