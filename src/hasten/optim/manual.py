"""What goes wrong where a program computes gradients and steps its optimizers itself."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import parameters_of


class FirstGradients:
    """Looks at the gradients of an optimizer after its first two steps.

    Args:
        optimizer: the optimizer.
        owner: the class whose code steps it, for messages.

    """

    def __init__(self, optimizer: Optimizer, owner: str) -> None:
        self._optimizer, self._owner = optimizer, owner
        # A parameter, its gradient in the first step, and the version of that, to which each change in place adds one.
        self._first: tuple[Tensor, Tensor, int] | None = None

    def after_step(self) -> bool:
        """Look at the first step, or warn after the second; return whether to be called after the next step."""
        if self._first is None:
            return self._after_first()
        parameter, gradient, version = self._first
        # One backward has added to it. To set it to zero would be a second change, or make another tensor.
        if parameter.grad is gradient and gradient._version == version + 1:
            rank_zero_warn(
                f"{self._owner}: nothing sets the gradients of {type(self._optimizer).__name__} to zero between its "
                "steps, so each step uses the sum over all batches before it.",
                PossibleUserWarning,
                fix="Call optimizer.zero_grad() before self.manual_backward(loss).",
            )
        return False

    def _after_first(self) -> bool:
        for parameter in parameters_of(self._optimizer):
            if (gradient := parameter.grad) is not None:
                self._first = parameter, gradient, gradient._version
                return True
        rank_zero_warn(
            f"{self._owner}: the first {type(self._optimizer).__name__}.step() found no gradients, so it changed "
            "nothing.",
            PossibleUserWarning,
            fix="Call optimizer.zero_grad(), then self.manual_backward(loss), then optimizer.step().",
        )
        return False
