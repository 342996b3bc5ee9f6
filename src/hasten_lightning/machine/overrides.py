"""Compute a step with the methods that a program has overridden in a strategy or a precision.

The core finds the engine by an entry point, when a run has such methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.names import defined_by_program
from hasten.hooks import nothing
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from hasten.strategies.base import StepEngine
    from hasten.strategies.program import ProgramMethods

    _Engine = StepEngine
else:
    _Engine = object

_OF_BACKWARD = ("pre_backward", "backward", "post_backward")


class ProgramEngine(_Engine):
    """An engine that calls methods of a program's strategy or precision, and another engine for everything else."""

    def __init__(self, inner: StepEngine, strategy: ProgramMethods, precision: Precision) -> None:
        self._inner, self._owner, self._precision = inner, strategy, precision
        self._precision_steps = bool(defined_by_program(precision, "optimizer_step"))
        self.steps_by_program = self._precision_steps or bool(defined_by_program(strategy, "optimizer_step"))
        clips = defined_by_program(precision, "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
        self.clips_by_program = bool(clips)
        # Computes gradients if neither strategy nor precision does.
        self._inner_backward: Callable[..., None] = inner.backward
        self._overrides_precision = defined_by_program(precision, *_OF_BACKWARD)
        self.backward_by_program = bool(self._overrides_precision or defined_by_program(strategy, *_OF_BACKWARD))
        self.backward = self._backward if self.backward_by_program else inner.backward
        self._steps: dict[int, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        strategy = self._owner
        module = strategy.lightning_module
        target = strategy.optimizers[0] if module is not None and module.automatic_optimization else None
        self.in_backward = True
        try:
            strategy.backward(tensor, target, *args, **kwargs)
        finally:
            self.in_backward = False

    def backward_for(
        self, target: Optimizer | nn.Module | None, tensor: Tensor, *args: object, **kwargs: object
    ) -> None:
        """Compute gradients by the methods of the precision if a program overrides them, else by the inner engine."""
        if not self._overrides_precision:
            self._inner_backward(tensor, *args, **kwargs)
            return
        self._owner.backward_by_precision(target, tensor, *args, **kwargs)

    def with_backward(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that computes gradients with ``function`` inside the overridden methods."""
        if not self.backward_by_program:
            return function
        self._inner_backward = function
        return self._backward

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return ``step(closure=None)``, which calls ``optimizer_step`` of the strategy if a program has one."""
        step = self._inner.make_step(optimizer)
        if not self.steps_by_program:
            return step
        self._steps[id(optimizer)] = step
        strategy, unscaled = self._owner, self._inner.unscaled

        def step_of_program(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if closure is None and strategy.lightning_module is not None:
                closure = nothing
            given = () if closure is None else (closure,)
            result = strategy.optimizer_step(optimizer, *given, **kwargs)
            unscaled.discard(id(optimizer))
            return result

        return step_of_program

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the step of the inner engine; None if the precision steps."""
        return None if self._precision_steps else self._steps.get(id(optimizer))
