"""The base class of all precisions, which computes in 32-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hasten._lib import torch_private
from hasten._lib.errors import WrongType, make_error
from hasten._lib.tree import map_tensors

T = TypeVar("T")


class Precision:
    """Full precision, and the base class of all others.

    A subclass overrides the methods that it changes. Methods that are not overridden cost nothing: the runtime finds
    out once, in setup, which ones are. The methods of a step (``backward``, ``optimizer_step``, ``clip_gradients``,
    ...) may also be called directly.
    """

    precision: str = "32-true"

    # A gradient scaler for types in which small gradients would become zero; None for all others.
    scaler: torch.amp.GradScaler | None = None

    # Whether to convert the module before loading weights, because they would otherwise be rounded or not fit.
    converts_before_loading: bool = False

    # Whether a strategy may divide parameters in this precision over processes.
    can_be_sharded: bool = True

    # The type into which parameters that are divided are converted when they are gathered; None for their own.
    param_dtype: torch.dtype | None = None
    # Whether ``backward`` gets the optimizer after the module, as that of Lightning's Trainer does.
    backward_takes_optimizer: bool = False

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

    def convert_optimizer(self, optimizer: Optimizer) -> None:
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

    # -- a step

    def pre_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> object:
        """Called with a loss and its module before ``backward``; may return another loss."""
        return tensor

    def backward(self, tensor: torch.Tensor, model: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, scaled if there is a scaler.

        Args:
            tensor: the loss.
            model: the module that computed it.
            args: for ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.

        """
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> object:
        """Called with a loss and its module after ``backward``."""

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> object:
        """Step an optimizer; a scaler leaves steps out whose gradients are not finite.

        Args:
            optimizer: the optimizer.
            model: the module that it trains.
            closure: computes loss and gradients, if that is still to be done. If it returns None, no gradients were
                computed, and a scaler does not step.
            kwargs: for ``optimizer.step``.

        """
        if self.scaler is None:
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise WrongType(
                "AMP and the LBFGS optimizer are not compatible: it computes the loss several times in a step, which a "
                "scaler does not allow."
            )
        if closure is not None and closure() is None and getattr(model, "automatic_optimization", False):
            return None
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def main_params(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """Yield the parameters of an optimizer."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the factor of the scaler, if there is one.

        Raises:
            NotImplementedError: the optimizer does that itself in its step, as fused ones do.

        """
        if self.scaler is None:
            return
        if torch_private.unscales_itself(optimizer):
            raise make_error(
                NotImplementedError,
                f"Gradient clipping is not implemented: {type(optimizer).__name__} unscales its gradients in its step.",
                fix="Use one without fused=True.",
            )
        self.scaler.unscale_(optimizer)

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip the gradients of an optimizer.

        Args:
            optimizer: the optimizer.
            clip_val: the largest norm or absolute value; 0 for no clipping.
            gradient_clip_algorithm: "norm" or "value".

        Raises:
            RuntimeError: there is a scaler, and the optimizer unscales its gradients itself, in its step.

        """
        if clip_val <= 0:
            return
        if self.scaler is not None and torch_private.unscales_itself(optimizer):
            raise make_error(
                RuntimeError,
                f"The current optimizer, {type(optimizer).__qualname__}, does not allow for gradient clipping because "
                "it performs unscaling of gradients internally.",
                fix="Use one without fused=True.",
            )
        clip = self.clip_grad_by_value if gradient_clip_algorithm == "value" else self.clip_grad_by_norm
        clip(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Limit each element of the gradients of an optimizer to ``clip_val`` in size."""
        nn.utils.clip_grad_value_(list(self.main_params(optimizer)), clip_value=clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale the gradients of an optimizer so that their norm is at most ``clip_val``."""
        nn.utils.clip_grad_norm_(list(self.main_params(optimizer)), clip_val)

    # -- state

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
    """The base of precisions whose parameters, inputs and computation have one floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
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
