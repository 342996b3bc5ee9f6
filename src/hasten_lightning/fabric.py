"""Fabric under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.names import defined_by_program
from hasten.fabric import fabric
from hasten.fabric.wrappers import unwrapped
from hasten.precision import MixedPrecision
from hasten.strategies.base import Strategy
from hasten.types import PathLike
from hasten_lightning import environment
from hasten_lightning._classes.fabric_strategies import FACADES
from hasten_lightning._classes.strategies import as_facade
from hasten_lightning.facades import Facade, exactly
from hasten_lightning.internals.modules import with_external_callbacks


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
        given["callbacks"] = with_external_callbacks(given["callbacks"], "lightning.fabric.callbacks_factory")
        super().__init__(**given, **environment.of("Fabric"))
        if not isinstance(given["strategy"], Strategy):
            as_facade(self._runtime.strategy, FACADES)
        if isinstance(self._runtime.precision, MixedPrecision):
            self._runtime.precision.convert_inputs(to_16_bits=True)

    # A program's strategy may have methods for files and clipping, which hasten's Fabric does itself.

    def save(
        self, path: PathLike, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write a checkpoint, as ``hasten.Fabric.save``, or with ``save_checkpoint`` of a program's strategy."""
        strategy: Any = self.strategy
        if not defined_by_program(strategy, "save_checkpoint"):
            super().save(path, state, filter)
            return
        strategy.save_checkpoint(path=path, state=unwrapped(state), filter=filter)
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
        strategy: Any = self.strategy
        if not defined_by_program(strategy, "load_checkpoint"):
            return super().load(path, state, strict, weights_only=weights_only)
        given = None if state is None else unwrapped(state)
        rest: dict[str, Any] = strategy.load_checkpoint(
            path=path, state=given, strict=strict, weights_only=weights_only
        )
        self.barrier()
        for name, value in (given or {}).items():
            if state is not None and not hasattr(value, "load_state_dict"):
                state[name] = value
        return rest

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
        if (clip_val is None) == (max_norm is None) or not defined_by_program(strategy, own):
            return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
        inner, optimizer = unwrapped(module), unwrapped(optimizer)
        if max_norm is None:
            strategy.clip_gradients_value(inner, optimizer, clip_val=clip_val)
            return None
        norm: Tensor = strategy.clip_gradients_norm(
            inner, optimizer, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return norm
