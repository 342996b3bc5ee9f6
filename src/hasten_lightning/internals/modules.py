"""Classes that register themselves, docstrings, modes of modules, and an optimizer that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from inspect import getmembers, isclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hasten._lib.optional import need
from hasten_lightning.utilities import rank_zero_warn

if TYPE_CHECKING:
    from hasten import Callback


class MockOptimizer(Optimizer):
    """An optimizer without parameters, whose step runs the closure alone.

    Example::

        >>> MockOptimizer().step(lambda: 3.0)
        3.0

    """

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool | None = True) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


class ModuleMode:
    """Which layers of a module are in training mode."""

    def __init__(self) -> None:
        self.mode: dict[str, bool] = {}

    def capture(self, module: torch.nn.Module) -> None:
        """Keep the modes that the layers have now."""
        self.mode = {name: layer.training for name, layer in module.named_modules()}

    def restore(self, module: torch.nn.Module) -> None:
        """Set the modes that were kept; layers that are new since then stay as they are."""
        for name, layer in module.named_modules():
            layer.training = self.mode.get(name, layer.training)


def get_short_description(component: object) -> str | None:
    """Return the first sentence of a docstring; None if there is none."""
    if component.__doc__ is None:
        return None
    parser = need("docstring_parser", purpose="the help of a command line")
    try:
        description: str | None = parser.parse(component.__doc__).short_description
    except (ValueError, parser.ParseError) as error:
        rank_zero_warn(f"The docstring of {component} cannot be parsed: {error}")
        return None
    return description


def register_classes(registry: object, method: str, module: ModuleType, parent: type) -> None:
    """Let the classes of a module register themselves in a registry, by a classmethod of theirs.

    Classes that do not override that ``method`` of their ``parent`` are not registered.
    """
    for _, kind in getmembers(module, isclass):
        if issubclass(kind, parent) and _function(kind, method) is not _function(parent, method):
            getattr(kind, method)(registry)


def _function(kind: type, method: str) -> Any:
    found = getattr(kind, method, None)
    return getattr(found, "__func__", found)


def load_external_callbacks(group: str) -> list[Any]:
    """Return the callbacks that installed packages offer."""
    found: list[Any] = []
    for entry in entry_points(group=group):
        made = entry.load()()
        found += made if isinstance(made, list) else [made]
    return found


def with_external_callbacks(callbacks: Callback | list[Any] | None, group: str) -> Any:
    """Return the callbacks of a Trainer or Fabric, and after them those that installed packages offer, if any."""
    found = load_external_callbacks(group)
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    return [callback for callback in given if callback is not None] + found if found else callbacks


def cli_lightning_logo() -> None:
    """Print a line where Lightning's examples print its logo."""
    print("\nhasten, under the names of Lightning\n")


def full_state_dict_context(
    module: torch.nn.Module, world_size: int, rank0_only: bool = True
) -> AbstractContextManager[Any]:
    """Return a context in which a module of torch's first FSDP has whole tensors in its ``state_dict``, on the CPU."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    options = {"offload_to_cpu": True, "rank0_only": rank0_only}
    context: AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
    )
    return context


def setup_activation_checkpointing(module: torch.nn.Module, activation_checkpointing_kwargs: dict[str, Any]) -> None:
    """Recompute activations of parts of a module, unless there are no arguments or it does so already."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    if not activation_checkpointing_kwargs:
        return
    if any(isinstance(part, CheckpointWrapper) for part in module.modules()):
        rank_zero_warn(
            "Activation checkpointing is configured, but the model already contains checkpointed layers. "
            "Checkpointing will be ignored."
        )
        return
    apply_activation_checkpointing(module, checkpoint_wrapper_fn=checkpoint_wrapper, **activation_checkpointing_kwargs)


def get_human_readable_count(number: int) -> str:
    """Return a count with a unit, whose place is empty below 1000.

    Example::

        >>> get_human_readable_count(123), get_human_readable_count(1234), get_human_readable_count(123_456)
        ('123  ', '1.2 K', '123 K')

    """
    assert number >= 0, "a count"
    power = min((len(str(number)) - 1) // 3, 4)
    value, unit = number / 1000**power, " KMBT"[power]
    return f"{value:,.1f} {unit}" if power and value < 100 else f"{int(value):,d} {unit}"
