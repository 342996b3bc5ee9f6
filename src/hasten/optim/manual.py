"""What goes wrong where a program computes gradients and steps its optimizers itself."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import parameters_of


class FirstGradients:
    """Looks at the gradients of an optimizer in its first two steps.

    Args:
        optimizer: the optimizer.
        owner: the class whose code steps it, for messages.

    """

    def __init__(self, optimizer: Optimizer, owner: str) -> None:
        self._optimizer, self._owner = optimizer, owner
        # A parameter, its gradient in the first step, and the version of that, to which each change in place adds one.
        self._parameter: Tensor | None = None
        self._gradient: Tensor | None = None
        self._version = 0
        self._adds = False
        self._handle: RemovableHandle | None = None

    def after_step(self) -> bool:
        """Look at the first step, or warn after the second; return whether to be called after the next step."""
        if self._parameter is None:
            return self._after_first()
        assert self._handle is not None
        self._handle.remove()
        if self._adds and self._gradient is not None and self._parameter.grad is self._gradient:
            rank_zero_warn(
                f"{self._owner}: nothing sets the gradients of {type(self._optimizer).__name__} to zero between its "
                "steps, so each step uses the sum over all batches before it.",
                PossibleUserWarning,
                fix="Call optimizer.zero_grad() before self.manual_backward(loss).",
            )
        return False

    def _after_first(self) -> bool:
        parameter = next((each for each in parameters_of(self._optimizer) if each.grad is not None), None)
        if parameter is None:
            rank_zero_warn(
                f"{self._owner}: the first {type(self._optimizer).__name__}.step() found no gradients, so it changed "
                "nothing.",
                PossibleUserWarning,
                fix="Call optimizer.zero_grad(), then self.manual_backward(loss), then optimizer.step().",
            )
            return False
        gradient = parameter.grad
        assert gradient is not None
        self._parameter, self._gradient, self._version = parameter, gradient, gradient._version
        self._handle = parameter.register_post_accumulate_grad_hook(self._added)
        return True

    def _added(self, parameter: Tensor) -> None:
        self._adds, self._version = True, self._version + 1
        gradient = self._gradient
        if gradient is None or parameter.grad is not gradient or gradient._version != self._version:
            # Another gradient, or one that was set to zero in between.
            self._gradient = None
