"""The base class of all precisions, which computes in 32-bit floats."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from hasten._lib.tree import map_tensors

T = TypeVar("T")


class Precision:
    """Full precision, and the base class of all others.

    A subclass overrides what it changes. Methods that are not overridden cost nothing: the runtime finds out once, in
    setup, which ones are.
    """

    precision: str = "32-true"

    # For types in which small gradients would become zero; None for all others.
    scaler: torch.amp.GradScaler | None = None

    # Whether to convert the module before loading weights, because they would otherwise be rounded or not fit.
    converts_before_loading: bool = False

    def check_device(self, device: torch.device) -> None:
        """Check that the device can compute in this precision.

        Raises:
            ValueError: it cannot; the message names the nearest supported precision.

        """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with its parameters in this precision, changed in place."""
        return module

    def convert_input(self, data: T) -> T:
        """Return the inputs of the module with floating tensors in this precision."""
        return data

    def convert_output(self, data: T) -> T:
        """Return the outputs of the module with floating tensors in torch's default type."""
        return data

    def convert_optimizer(self, optimizer: object) -> None:
        """Prepare an optimizer in place for parameters in this precision; may be called more than once."""

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
        """Return the state for a checkpoint."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Undo changes to the module and free resources."""


class DtypePrecision(Precision):
    """The base of precisions whose parameters, inputs and computation have one floating type.

    Args:
        dtype: the type.

    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def convert_input(self, data: T) -> T:
        """Return ``data`` with its floating tensors in the precision's type."""
        return to_floating(data, self._dtype)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with its floating tensors in torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors have the precision's type."""
        return DefaultType(self._dtype)

    module_init_context = tensor_init_context = forward_context


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


def to_floating(data: T, dtype: torch.dtype) -> T:
    """Return ``data`` with its floating tensors as ``dtype``; the same object where nothing changes."""
    converted: T = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)
    return converted
