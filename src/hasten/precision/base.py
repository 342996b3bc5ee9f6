"""The base of all precisions, which is also full precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.tree import map_tensors


class Precision:
    """32-bit floats; the base of the others.

    A subclass overrides what it changes. What it does not override costs nothing: the runtime asks once, in
    setup, which methods are overridden.
    """

    precision: str = "32-true"

    # GradScaler for numbers so small that gradients would vanish; None for all others.
    scaler: torch.amp.GradScaler | None = None

    # Whether the module is converted before weights are loaded into it, because they would not fit, or be rounded.
    converts_before_loading: bool = False

    def check_device(self, device: torch.device) -> None:
        """Check that the device can compute in this precision.

        Raises:
            ValueError: it cannot; the message names the nearest precision that it can.

        """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with its parameters in this precision, changed in place."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return what the module is called with, its floating tensors in this precision."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return what the module gave, its floating tensors in torch's default type."""
        return data

    def convert_optimizer(self, optimizer: Any) -> None:
        """Prepare an optimizer, in place, for parameters in this precision; called at least once for each."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which the module computes."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which modules are made in this precision."""
        return nullcontext()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made in this precision."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Give back what the precision holds."""


class DefaultType(AbstractContextManager[None]):
    """Make ``dtype`` torch's default floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous = torch.float32

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._previous)


def to_floating(data: Any, dtype: torch.dtype) -> Any:
    """Return ``data`` with its floating tensors as ``dtype``; the same object where nothing changes."""
    if type(data) is Tensor:
        return data.to(dtype) if data.is_floating_point() else data
    changes = False

    def convert(tensor: Tensor) -> Tensor:
        nonlocal changes
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        changes = True
        return tensor.to(dtype)

    converted = map_tensors(convert, data)
    return converted if changes else data
