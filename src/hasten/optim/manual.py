"""What goes wrong where a program computes gradients and steps its optimizers itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import parameters_of


class FirstGradients:
    """Looks at the gradients of an optimizer in its first two steps.

    Args:
        optimizer: the optimizer.
        owner: the class whose code steps it, for messages.
        backward: the call that computes the gradients, for messages.

    """

    def __init__(self, optimizer: Any, owner: str, backward: str) -> None:
        self._optimizer, self._owner, self._backward = optimizer, owner, backward
        # The first gradient after the first step, and its version: every change in place adds one.
        self._kept: tuple[Tensor, int] | None = None
        self._adds = False

    def after_step(self) -> Callable[[], None] | None:
        """Warn if the first step has found no gradient; return what to call after the second step."""
        parameter = next((each for each in parameters_of(self._optimizer) if each.grad is not None), None)
        if parameter is None:
            rank_zero_warn(
                f"{self._owner}: the first {type(self._optimizer).__name__}.step() found no gradients, so it changed "
                "nothing.",
                PossibleUserWarning,
                fix=f"Call optimizer.zero_grad(), then {self._backward}, then optimizer.step().",
            )
            return None
        self._kept = parameter.grad, parameter.grad._version
        handle = parameter.register_post_accumulate_grad_hook(self._added)

        def after_second_step() -> None:
            handle.remove()
            if self._adds and self._kept is not None and parameter.grad is self._kept[0]:
                rank_zero_warn(
                    f"{self._owner}: nothing sets the gradients of {type(self._optimizer).__name__} to zero between "
                    "its steps, so each step uses the sum over all batches before it.",
                    PossibleUserWarning,
                    fix=f"Call optimizer.zero_grad() before {self._backward}.",
                )

        return after_second_step

    def _added(self, parameter: Tensor) -> None:
        if self._kept is not None:
            gradient, version = self._kept
            same = parameter.grad is gradient and gradient._version == version + 1
            self._kept, self._adds = (gradient, version + 1) if same else None, True
