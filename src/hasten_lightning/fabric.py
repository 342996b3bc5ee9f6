"""Fabric under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten._lib.names import defined_by_program
from hasten.fabric import fabric
from hasten.fabric.wrappers import FabricOptimizer, unwrapped
from hasten.precision import MixedPrecision
from hasten.strategies.base import Strategy
from hasten.types import PathLike, Scheduler
from hasten_lightning import environment
from hasten_lightning._classes.fabric_strategies import FACADES
from hasten_lightning._classes.strategies import as_facade
from hasten_lightning.facades import Facade, exactly
from hasten_lightning.internals.modules import with_external_callbacks

T = TypeVar("T")
_STARTED = "a command line for Fabric has started the processes already, as LT_CLI_USED=1 says."


class Fabric(fabric.Fabric, metaclass=Facade):
    """Run your own training loop: ``hasten.Fabric``, with the parameters of Lightning's Fabric.

    Environment variables set the arguments that only hasten has (``HASTEN_COMPILE=1``;
    ``hasten run --compile program.py`` is the same).

    Raises:
        TypeError: an argument does not exist or has a wrong type.
        ValueError: an argument names something unavailable, or two contradict each other.

    Example::

        >>> isinstance(fabric.Fabric(accelerator="cpu"), Fabric)
        True

    """

    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        given.update(environment.of_fabric(given))
        given["callbacks"] = with_external_callbacks(given["callbacks"], "lightning.fabric.callbacks_factory")
        super().__init__(**given, **environment.of("Fabric"))
        if not isinstance(given["strategy"], Strategy):
            as_facade(self._runtime.strategy, FACADES)
        if isinstance(self._runtime.precision, MixedPrecision):
            self._runtime.precision.convert_inputs(to_16_bits=True)
        if environment.started_by_command_line():
            if defined_by_program(self, "run"):
                raise make_error(TypeError, f"{type(self).__name__}.run(): {_STARTED}", fix="Do its steps without it.")
            super().launch()

    def launch(self, function: Callable[..., Any] | None = None, *args: object, **kwargs: object) -> Any:
        """Start the other processes, as ``hasten.Fabric.launch``, unless a command line for Fabric has."""
        if environment.started_by_command_line():
            raise make_error(RuntimeError, f"Fabric.launch(): {_STARTED}", fix="Leave it out.")
        return super().launch(function, *args, **kwargs)

    def _own(self, *methods: str) -> Any:
        """Return the strategy if a program has methods in it for what hasten's Fabric does itself; else None."""
        return self.strategy if defined_by_program(self.strategy, *methods) else None

    def _wrapped_module(self, module: Any, method: str, move_to_device: bool, *rest: Any) -> Any:
        if move_to_device and isinstance(module, nn.Module) and (own := self._own("module_to_device")):
            own.module_to_device(unwrapped(module))
            move_to_device = False
        return super()._wrapped_module(module, method, move_to_device, *rest)

    def _by_strategy(
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Scheduler | None
    ) -> tuple[nn.Module, Sequence[Optimizer]]:
        own = self._own("setup_module_and_optimizers", "setup_optimizer")
        if not optimizers or own is None:
            return super()._by_strategy(module, optimizers, scheduler)
        made: tuple[Any, Any, Any] = own.setup_module_and_optimizers(module, list(optimizers), scheduler)
        return made[:2]

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Make optimizers ready, as ``hasten.Fabric.setup_optimizers``, after a program's ``setup_optimizer``."""
        if own := self._own("setup_optimizer"):
            optimizers = tuple(map(own.setup_optimizer, optimizers))
        return super().setup_optimizers(*optimizers)

    def _wrapped_optimizers(self, optimizers: Sequence[Optimizer]) -> list[FabricOptimizer]:
        made = super()._wrapped_optimizers(optimizers)
        if own := self._own("get_optimizer_state"):
            for each in made:
                each.__dict__["state_dict"] = functools.partial(own.get_optimizer_state, each.optimizer)
        return made

    def setup_dataloaders(self, *dataloaders: Any, **options: bool) -> Any:
        """Make loaders ready, as ``hasten.Fabric.setup_dataloaders``, with ``process_dataloader`` of a strategy."""
        made: Any = super().setup_dataloaders(*dataloaders, **options)
        if own := self._own("process_dataloader"):
            for each in made if isinstance(made, list) else [made]:
                each._dataloader = own.process_dataloader(each._dataloader)
        return made

    def to_device(self, obj: T) -> T:
        """Return ``obj`` on the device, as ``hasten.Fabric.to_device``, or with a strategy's ``module_to_device``."""
        if not isinstance(obj, nn.Module) or (own := self._own("module_to_device")) is None:
            return super().to_device(obj)
        own.module_to_device(obj)
        return obj

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context, as ``hasten.Fabric.init_tensor``, or that of a program's strategy."""
        own = self._own("tensor_init_context")
        context: AbstractContextManager[Any] = own.tensor_init_context() if own else super().init_tensor()
        return context

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context, as ``hasten.Fabric.init_module``, or that of a program's strategy."""
        context = super().init_module(empty_init)
        if own := self._own("module_init_context"):
            context = own.module_init_context(empty_init=empty_init)
        return context

    def save(
        self, path: PathLike, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write a checkpoint, as ``hasten.Fabric.save``, or with ``save_checkpoint`` of a program's strategy."""
        own = self._own("save_checkpoint", "get_module_state_dict", "get_optimizer_state")
        if own is None:
            super().save(path, state, filter)
            return
        own.save_checkpoint(path=path, state=unwrapped(state), filter=filter)
        self.barrier()

    def load(
        self,
        path: PathLike,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, as ``hasten.Fabric.load``, or with ``load_checkpoint`` of a program's strategy."""
        if (own := self._own("load_checkpoint")) is None:
            return super().load(path, state, strict, weights_only=weights_only)
        given = None if state is None else unwrapped(state)
        rest: dict[str, Any] = own.load_checkpoint(path=path, state=given, strict=strict, weights_only=weights_only)
        self.barrier()
        for name, value in (given or {}).items():
            if state is not None and not hasattr(value, "load_state_dict"):
                state[name] = value
        return rest

    def load_raw(
        self, path: PathLike, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Read one state, as ``hasten.Fabric.load_raw``, or with ``load_checkpoint`` of a program's strategy."""
        if own := self._own("load_checkpoint"):
            own.load_checkpoint(path=path, state=unwrapped(obj), strict=strict, weights_only=weights_only)
        else:
            super().load_raw(path, obj, strict, weights_only=weights_only)

    def _load_into(self, target: Any, saved: Any, *, strict: bool, path: PathLike) -> None:
        if isinstance(target, nn.Module) and (own := self._own("load_module_state_dict")):
            own.load_module_state_dict(unwrapped(target), saved, strict=strict)
        else:
            super()._load_into(target, saved, strict=strict, path=path)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Limit gradients, as ``hasten.Fabric.clip_gradients``, or with the methods of a program's strategy."""
        strategy: Any = self.strategy
        own = "clip_gradients_value" if max_norm is None else "clip_gradients_norm"
        by_program = defined_by_program(strategy, own)
        by_program = by_program or defined_by_program(strategy.precision, "main_params", "unscale_gradients")
        if (clip_val is None) == (max_norm is None) or not by_program:
            return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
        inner, optimizer = unwrapped(module), unwrapped(optimizer)
        if max_norm is None:
            strategy.clip_gradients_value(inner, optimizer, clip_val=clip_val)
            return None
        norm: Tensor = strategy.clip_gradients_norm(
            inner, optimizer, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return norm
