"""Methods that a program may call and override in a strategy and a precision, under Lightning's names.

``ProgramMethods`` has those methods of a strategy. ``detect_overrides`` finds, once a run, which ones a program has
overridden; a run with such methods has another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.names import defined_by_program, has_parameter
from hasten._lib.tree import move_to
from hasten.extend.entry_points import load
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
    """Methods of a strategy under Lightning's names: loops call the ones that a program overrides."""

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
    # The module that the last ``wrap`` returned.
    model: nn.Module | None = None
    # The Trainer that runs with this strategy.
    _trainer: Trains | None = None
    # A module that a program has connected outside of a run.
    connected_module: Any = None
    # The engine with which the methods of a step compute; None for a strategy that a program drives itself.
    _runtime: Runtime | None = None

    def join_run(self, runtime: Runtime | None = None, trainer: Trains | None = None) -> None:
        """Receive the Runtime and the Trainer of a run, for methods that a program calls."""
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
        """Let ``Trainer.save_checkpoint`` save a module that is not in a run yet.

        Without ``model`` it is that of the run; a run passes its own when it begins.
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
        """Return a batch with its tensors on ``device``, by default the device of this process."""
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

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called before gradients are computed."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called when gradients have been computed."""

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | nn.Module | None = None, *args: object, **kwargs: object
    ) -> object:
        """Compute the gradients of a loss.

        A Trainer passes the optimizer, or None with manual optimization; Fabric passes the module. The rest is for
        ``Tensor.backward``.
        """
        self.pre_backward(closure_loss)
        if self._runtime is not None:
            self._runtime.engine.backward_for(optimizer, closure_loss, *args, **kwargs)
        else:
            self.backward_by_precision(optimizer, closure_loss, *args, **kwargs)
        self.post_backward(closure_loss)
        return closure_loss

    def backward_by_precision(
        self, target: Optimizer | nn.Module | None, tensor: Tensor, *args: object, **kwargs: object
    ) -> None:
        """Compute gradients with the methods of the precision; ``target`` is what ``backward`` gets as optimizer."""
        precision: Any = self.precision_plugin
        model = target if (module := self.lightning_module) is None else module
        changed = precision.pre_backward(tensor, model)
        if isinstance(changed, Tensor):
            tensor = changed
        if precision.backward_takes_optimizer or has_parameter(precision.backward, "optimizer"):
            args = (target, *args)
        precision.backward(tensor, model, *args, **kwargs)
        precision.post_backward(tensor, model)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Step an optimizer.

        ``closure`` computes loss and gradients and clips them, if that has not been done.
        """
        engine = None if self._runtime is None else self._runtime.engine
        if engine is not None and (step := engine.step_of(optimizer)) is not None:
            return step(closure, **kwargs)
        if (module := self.lightning_module) is not None:
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

        It is a file, or a folder where the strategy saves folders. ``storage_options`` are for ``checkpoint_io``.
        """
        if self._runtime is not None:
            self.state.write(filepath, checkpoint, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint.

        ``weights_only=False`` also reads Python objects, which can run code: only for files you trust.
        """
        if self._runtime is not None:
            return self.state.read(checkpoint_path, weights_only=weights_only)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the Trainer's module, as a checkpoint holds them."""
        return self.state.state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the weights of the Trainer's module; ``strict`` raises for missing and unexpected names."""
        weights = checkpoint["state_dict"]
        self.state.load_state_dict(self.lightning_module, weights, strict=strict, source="the checkpoint")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, as a checkpoint holds it."""
        return self.state.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers of the Trainer's run from a checkpoint of a Trainer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.state.load_optimizer_state(optimizer, state)


# -- which methods a program has overridden

_OF_BACKWARD = ("pre_backward", "backward", "post_backward")
# Of a step; ``with_overrides`` calls them.
_STEP_OF_STRATEGY = {*_OF_BACKWARD, "optimizer_step"}
_STEP_OF_PRECISION = {*_STEP_OF_STRATEGY, "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"}
# What gives a state for checkpoints.
_OF_CHECKPOINT = {"lightning_module_state_dict", "optimizer_state"}
_OF_STRATEGY = (*_STEP_OF_STRATEGY, *_OF_CHECKPOINT, "reduce", "save_checkpoint", "load_checkpoint")
_OF_PRECISION = (*_STEP_OF_PRECISION, "state_dict", "connect")


class Overrides(NamedTuple):
    """The methods that a program has overridden, by name."""

    of_strategy: list[str]
    of_precision: list[str]


def detect_overrides(strategy: ProgramMethods, precision: Precision) -> Overrides:
    """Return which methods a program has overridden; equal results need the same engine."""
    return Overrides(defined_by_program(strategy, *_OF_STRATEGY), defined_by_program(precision, *_OF_PRECISION))


def own_methods(strategy: ProgramMethods, precision: Precision, found: Overrides) -> dict[str, Callable[..., Any]]:
    """Return the methods of a program that give states for checkpoints, and ``connect`` of its precision, by name."""
    own: dict[str, Callable[..., Any]] = {
        name: getattr(strategy, name) for name in _OF_CHECKPOINT.intersection(found.of_strategy)
    }
    return own | {name: getattr(precision, name) for name in ("state_dict", "connect") if name in found.of_precision}


def with_overrides(engine: StepEngine, strategy: ProgramMethods, precision: Precision, found: Overrides) -> StepEngine:
    """Return an engine that calls the methods that a program has overridden; ``engine`` itself if there are none.

    The engine that calls them is found by an entry point.
    """
    if _STEP_OF_STRATEGY.isdisjoint(found.of_strategy) and _STEP_OF_PRECISION.isdisjoint(found.of_precision):
        return engine
    purpose = f"A step with methods of {type(strategy).__name__} or {type(precision).__name__}"
    make: Callable[..., StepEngine] = load("hasten.trainer", "program_engine", purpose=purpose)
    return make(engine, strategy, precision)
