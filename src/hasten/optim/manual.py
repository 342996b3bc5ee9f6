"""What goes wrong where a program computes gradients and steps its optimizers itself."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import parameters_of
from hasten.extend.origin import functions_reached, names_in
from hasten.optim.fast_step import KEPT, KeptGradient, keep_gradient


class FirstGradients:
    """Looks at the gradients of an optimizer before its first two steps."""

    def __init__(self, optimizer: Optimizer, owner: nn.Module) -> None:
        self._optimizer, self._owner = optimizer, owner
        self._first: KeptGradient | None = None

    def before_step(self) -> FirstGradients | None:
        """Warn of a first step without gradients, or of a second that adds to them; return what looks at the next."""
        if self._first is not None:
            if self._first.was_added_to():
                self._warn(KEPT, "Call optimizer.zero_grad() before self.manual_backward(loss).")
            return None
        if all(parameter.grad is None for parameter in parameters_of(self._optimizer)):
            self._warn(
                "the first step() found no gradients.",
                "Call zero_grad(), then manual_backward(loss), then step(). If they are called in this order, "
                "the loss reaches none of its parameters: look for detach(), or for another optimizer that is toggled. "
                "If it is to begin later, do not call its step() before.",
            )
            return None
        kind = type(self._owner)
        functions = functions_reached(getattr(kind, name, None) for name in dir(kind))
        if any("zero_" in name for function in functions for name in names_in(function)):
            # ``grad.data.zero_()`` leaves the version of ``grad``.
            return None
        self._first = keep_gradient(self._optimizer)
        return None if self._first is None else self

    def _warn(self, problem: str, fix: str) -> None:
        name = f"{type(self._owner).__name__}.training_step, {type(self._optimizer).__name__}"
        rank_zero_warn(f"{name}: {problem}", PossibleUserWarning, fix=fix)
