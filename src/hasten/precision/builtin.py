"""The precisions that torch brings: mixed, half and double."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from hasten.precision.base import DefaultType, Precision, to_floating


class DoublePrecision(Precision):
    """Parameters, inputs and computation in 64-bit floats."""

    precision = "64-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with 64-bit parameters."""
        return module.double()

    def convert_input(self, data: Any) -> Any:
        """Return ``data`` with 64-bit floating tensors."""
        return to_floating(data, torch.float64)

    def convert_output(self, data: Any) -> Any:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have 64 bits."""
        return DefaultType(torch.float64)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new parameters have 64 bits."""
        return DefaultType(torch.float64)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have 64 bits."""
        return DefaultType(torch.float64)


class HalfPrecision(Precision):
    """Parameters, inputs and computation in 16-bit floats.

    Args:
        precision: "bf16-true" or "16-true".

    """

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        if precision not in ("bf16-true", "16-true"):
            raise ValueError(f"HalfPrecision(precision={precision!r}): use 'bf16-true' or '16-true'.")
        self.precision = precision
        self._dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with 16-bit parameters."""
        return module.to(dtype=self._dtype)

    def convert_input(self, data: Any) -> Any:
        """Return ``data`` with 16-bit floating tensors."""
        return to_floating(data, self._dtype)

    def convert_output(self, data: Any) -> Any:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have 16 bits."""
        return DefaultType(self._dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new parameters have 16 bits."""
        return DefaultType(self._dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have 16 bits."""
        return DefaultType(self._dtype)


class MixedPrecision(Precision):
    """Parameters in 32-bit floats, computation in 16-bit floats where that is safe.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the kind of device: "cuda", "cpu", "mps".
        scaler: a GradScaler of your own; "16-mixed" makes one by itself.

    Raises:
        ValueError: the precision is another, or cannot be had on the device.

    Source: Micikevicius et al., Mixed Precision Training, 2018; https://pytorch.org/docs/stable/amp.html

    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed",
        device: str = "cuda",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ValueError(f"MixedPrecision(precision={precision!r}): use '16-mixed' or 'bf16-mixed'.")
        device = torch.device(device).type
        if precision == "16-mixed" and device == "cpu":
            raise ValueError(
                "precision='16-mixed', accelerator='cpu': 16-bit floats with a gradient scaler need a GPU. "
                "Use precision='bf16-mixed', which needs no scaler."
            )
        if precision == "bf16-mixed" and scaler is not None:
            raise ValueError(
                "MixedPrecision('bf16-mixed', scaler=...): bfloat16 needs no scaler. Leave it out."
            )
        if precision == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device=device)
        self.precision = precision
        self.device = device
        self.scaler = scaler
        self._dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16

    def convert_input(self, data: Any) -> Any:
        """Return ``data`` with 32-bit floating tensors: autocast takes it from there."""
        return to_floating(data, torch.float32)

    def convert_output(self, data: Any) -> Any:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast."""
        return torch.autocast(self.device, dtype=self._dtype)
