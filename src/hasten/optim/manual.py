"""What goes wrong where a program computes gradients and steps its optimizers itself."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import parameters_of
from hasten.extend.origin import functions_reached, names_in


class FirstGradients:
    """Looks at the gradients of an optimizer before its first two steps."""

    def __init__(self, optimizer: Optimizer, owner: nn.Module) -> None:
        self._optimizer, self._owner = optimizer, owner
        # A parameter, its gradient in the first step, and the version of that, to which each change in place adds one.
        self._first: tuple[Tensor, Tensor, int] | None = None

    def before_step(self) -> FirstGradients | None:
        """Warn of a first step without gradients, or of a second that adds to them; return what looks at the next."""
        if self._first is not None:
            self._compare(*self._first)
            return None
        found = [parameter for parameter in parameters_of(self._optimizer) if parameter.grad is not None]
        if not found:
            self._warn(
                "the first step() found no gradients.",
                "Call zero_grad(), then manual_backward(loss), then step(). If they are called in this order, "
                "the loss reaches none of its parameters: look for detach(), or for another optimizer that is toggled. "
                "If it is to begin later, do not call its step() before.",
            )
            return None
        # Its gradient is kept until the next step.
        smallest = min(found, key=Tensor.numel)
        gradient = smallest.grad
        if gradient is None or gradient.is_inference() or self._clears():
            return None
        self._first = smallest, gradient, gradient._version
        return self

    def _compare(self, parameter: Tensor, gradient: Tensor, version: int) -> None:
        # One backward has added to it. To set it to zero would be a second change, or make another tensor.
        if parameter.grad is gradient and gradient._version == version + 1:
            self._warn(
                "nothing sets the gradients to zero between the first two steps, so the second uses both.",
                "Call optimizer.zero_grad() before self.manual_backward(loss).",
            )

    def _clears(self) -> bool:
        """Return whether code of the program zeroes a tensor: ``grad.data.zero_()`` leaves the version of ``grad``."""
        kind = type(self._owner)
        functions = functions_reached(getattr(kind, name, None) for name in dir(kind))
        return any("zero_" in name for function in functions for name in names_in(function))

    def _warn(self, problem: str, fix: str) -> None:
        name = f"{type(self._owner).__name__}.training_step, {type(self._optimizer).__name__}"
        rank_zero_warn(f"{name}: {problem}", PossibleUserWarning, fix=fix)
