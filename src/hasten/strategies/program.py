"""What a program may call and override in a strategy and a precision, under Lightning's names.

``ProgramMethods`` has those methods of a strategy. ``ProgramEngine`` computes a step with the ones that a program has
overridden; ``detect_overrides`` finds them once a run, and a run without any never meets this module again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.names import defined_by_program, has_parameter
from hasten._lib.tree import move_to
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from typing import Protocol

    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.devices import Accelerator
    from hasten.runtime import Runtime
    from hasten.strategies.base import StateIO, StepEngine
    from hasten.types import Group, PathLike, ReduceOperation, StorageOptions, Tensors

    class Trains(Protocol):
        """Whoever has the optimizers and schedulers of a run: a Trainer."""

        optimizers: list[Any]

        @property
        def lightning_module(self) -> Any:
            """The module."""

        @property
        def lr_scheduler_configs(self) -> list[Any]:
            """The schedulers and when they step."""


T = TypeVar("T")


class ProgramMethods:
    """Methods that a strategy has under Lightning's names: loops call those that a program overrides."""

    if TYPE_CHECKING:
        accelerator: Accelerator | None
        state: StateIO
        checkpoint_io: CheckpointIO
        precision_plugin: Precision

        @property
        def root_device(self) -> torch.device: ...

        @property
        def is_global_zero(self) -> bool: ...

        def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any: ...

    # Whether a Trainer calls ``setup`` before it reads a checkpoint to resume from.
    restore_checkpoint_after_setup: bool = False
    # Whether a Trainer restores optimizers and schedulers when it resumes.
    lightning_restore_optimizer: bool = True
    # The module as the last ``wrap`` returned it.
    model: nn.Module | None = None
    # The Trainer that runs with this strategy.
    _trainer: Trains | None = None
    # A module that a program has given it outside of a run.
    connected_module: Any = None
    # With which the methods of a step compute; None for a strategy that a program drives itself.
    _runtime: Runtime | None = None

    def join_run(self, runtime: Runtime | None = None, trainer: Trains | None = None) -> None:
        """Take the Runtime and the Trainer of a run, for methods that a program calls."""
        if runtime is not None:
            self._runtime = runtime
        if trainer is not None:
            self._trainer = trainer

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the Trainer's run; a list that is assigned counts from the next batch on."""
        return [] if self._trainer is None else self._trainer.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._with_trainer("optimizers").optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of the Trainer's run; a list that is assigned counts from the next batch on."""
        return [] if self._trainer is None else self._trainer.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._with_trainer("lr_scheduler_configs").lr_scheduler_configs[:] = configs

    @property
    def lightning_module(self) -> Any:
        """The module of the Trainer's run; None with Fabric."""
        if self.connected_module is not None:
            return self.connected_module
        return None if self._trainer is None else self._trainer.lightning_module

    def connect(self, model: nn.Module | None) -> None:
        """Have ``Trainer.save_checkpoint`` save a module that takes part in no run yet.

        Args:
            model: the module; None for that of the run, as when a run begins.

        """
        self.connected_module = model

    def _with_trainer(self, name: str) -> Trains:
        if self._trainer is None:
            raise AttributeError(f"{type(self).__name__}.{name} = ...: only during a Trainer's fit.")
        return self._trainer

    @property
    def precision(self) -> Precision:
        """The number format of the run; ``precision_plugin`` under the name that it has in Fabric."""
        return self.precision_plugin

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.precision_plugin = precision

    def reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Same as ``all_reduce``."""
        return self.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def setup(self, trainer: Trains) -> None:
        """Called by a Trainer when the module is on the device, before the first hook of a fit."""

    def batch_to_device(self, batch: T, device: torch.device | None = None, dataloader_idx: int = 0) -> T:
        """Return a batch with its tensors on ``device``, by default that of this process."""
        moved: T = move_to(batch, self.root_device if device is None else device)
        return moved

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Call ``training_step`` of the Trainer's module."""
        return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: object, **kwargs: object) -> object:
        """Call ``validation_step`` of the Trainer's module."""
        return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> object:
        """Call ``test_step`` of the Trainer's module."""
        return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> object:
        """Call ``predict_step`` of the Trainer's module."""
        return self.lightning_module.predict_step(*args, **kwargs)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Delete a checkpoint, from the first process."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    # -- a step

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | nn.Module | None = None, *args: object, **kwargs: object
    ) -> object:
        """Compute the gradients of a loss.

        Args:
            closure_loss: the loss.
            optimizer: a Trainer gives the optimizer, None with manual optimization; Fabric gives the module.
            args: for ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.

        """
        if self._runtime is not None:
            _backward_by_precision(self._runtime.engine, self, closure_loss, optimizer, *args, **kwargs)
            return closure_loss
        precision: Any = self.precision_plugin
        precision.pre_backward(closure_loss, optimizer)
        precision.backward(closure_loss, optimizer, *args, **kwargs)
        precision.post_backward(closure_loss, optimizer)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Step an optimizer.

        Args:
            optimizer: the optimizer.
            closure: what computes loss and gradients and clips them, if that is still to be done.
            model: the module; a Trainer's module by default.
            kwargs: for ``optimizer.step``.

        """
        engine = None if self._runtime is None else self._runtime.engine
        if isinstance(engine, ProgramEngine) and not kwargs and (step := engine.step_of(optimizer)) is not None:
            return step(closure)
        if engine is not None and (module := self.lightning_module) is not None:
            kwargs["model"] = module if model is None else model
        if closure is not None:
            kwargs["closure"] = closure
        step_by_precision: Callable[..., object] = self.precision_plugin.optimizer_step
        return step_by_precision(optimizer, **kwargs)

    # -- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write a checkpoint; all processes call it.

        Args:
            checkpoint: its contents.
            filepath: the file, or the folder where the strategy saves folders.
            storage_options: for ``checkpoint_io``.

        """
        if self._runtime is not None:
            self.state.write(filepath, checkpoint, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint.

        Args:
            checkpoint_path: the file or folder.
            weights_only: False also reads Python objects, which can run code: only for files you trust.

        """
        if self._runtime is not None:
            return self.state.read(checkpoint_path, weights_only=weights_only)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the Trainer's module, as a checkpoint holds them."""
        return self.state.state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the weights of the Trainer's module.

        Args:
            checkpoint: a checkpoint of a Trainer.
            strict: raise for missing and unexpected names.

        """
        weights = checkpoint["state_dict"]
        self.state.load_state_dict(self.lightning_module, weights, strict=strict, source="the checkpoint")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers of the Trainer's run from a checkpoint of a Trainer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.state.load_optimizer_state(optimizer, state)


# -- which methods a program has overridden

_OF_PRECISION = ("pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients")
_OF_STRATEGY = ("backward", "optimizer_step", "reduce", "save_checkpoint", "load_checkpoint")


def detect_overrides(strategy: ProgramMethods, precision: Precision) -> tuple[bool, ...]:
    """Return which methods of a step a program has overridden; equal results need the same engine."""
    return (
        *(defined_by_program(precision, name) for name in _OF_PRECISION),
        *(defined_by_program(strategy, name) for name in _OF_STRATEGY),
    )


def with_overrides(engine: StepEngine, strategy: ProgramMethods, precision: Precision) -> StepEngine:
    """Return an engine that calls the methods that a program has overridden; ``engine`` itself if there are none."""
    clips = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
    steps = defined_by_program(precision, "optimizer_step") or defined_by_program(strategy, "optimizer_step")
    if steps or defined_by_program(precision, *_OF_BACKWARD, *clips) or defined_by_program(strategy, "backward"):
        made = ProgramEngine(engine, strategy, precision)
        made.steps_by_program, made.clips_by_program = steps, defined_by_program(precision, *clips)
        return made
    return engine


_OF_BACKWARD = ("pre_backward", "backward", "post_backward")


if TYPE_CHECKING:
    _Engine = StepEngine
else:
    _Engine = object


class ProgramEngine(_Engine):
    """An engine that calls methods of a program's strategy or precision; the rest is that of another engine.

    Args:
        inner: what computes where nothing is overridden.
        strategy: the strategy of the run.
        precision: the precision of the run.

    """

    def __init__(self, inner: StepEngine, strategy: ProgramMethods, precision: Precision) -> None:
        self._inner, self._owner, self._precision = inner, strategy, precision
        # What computes gradients if neither strategy nor precision does.
        self.inner_backward: Callable[..., None] = inner.backward
        self.overrides_precision = defined_by_program(precision, *_OF_BACKWARD)
        self._overrides_backward = self.overrides_precision or defined_by_program(strategy, "backward")
        self.backward = self._backward if self._overrides_backward else inner.backward
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

    def with_backward(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return what computes gradients with ``function`` inside of the overridden methods."""
        if not self._overrides_backward:
            return function
        self.inner_backward = function
        return self._backward

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return ``step(closure=None)``, which calls ``optimizer_step`` of the strategy if a program has one."""
        step = self._inner.make_step(optimizer)
        if not self.steps_by_program:
            return step
        self._steps[id(optimizer)] = step
        strategy, unscaled = self._owner, self._inner.unscaled

        def step_of_program(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None and strategy.lightning_module is not None:
                closure = _nothing
            result = (
                strategy.optimizer_step(optimizer) if closure is None else strategy.optimizer_step(optimizer, closure)
            )
            unscaled.clear()
            return result

        return step_of_program

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the step of the inner engine; None where the precision steps."""
        return None if defined_by_program(self._precision, "optimizer_step") else self._steps.get(id(optimizer))


def _nothing() -> None:
    """Do nothing."""


def _backward_by_precision(
    engine: StepEngine, strategy: ProgramMethods, tensor: Tensor, target: object, *args: object, **kwargs: object
) -> None:
    """Compute gradients by the methods of the precision where a program overrides them, else by the engine."""
    if not isinstance(engine, ProgramEngine):
        engine.backward(tensor, *args, **kwargs)
        return
    if not engine.overrides_precision:
        engine.inner_backward(tensor, *args, **kwargs)
        return
    precision: Any = strategy.precision_plugin
    module = strategy.lightning_module
    model = target if module is None else module
    changed = precision.pre_backward(tensor, model)
    if isinstance(changed, Tensor):
        tensor = changed
    if has_parameter(precision.backward, "optimizer"):
        args = (target, *args)
    precision.backward(tensor, model, *args, **kwargs)
    precision.post_backward(tensor, model)
