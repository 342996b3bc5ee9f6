"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from hasten.machine.collectives import operation_name
from hasten.strategies.base import Strategy

if TYPE_CHECKING:
    from hasten.types import Group, ReduceOperation, Tensors

T = TypeVar("T")


@final
class SingleDeviceStrategy(Strategy):
    """One process that computes on one device.

    Args:
        device: where; the first device of the run by default.

    """

    name = "single_device"

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._device = None if device is None else torch.device(device)

    @property
    def root_device(self) -> torch.device:
        """The device."""
        return self._device if self._device is not None else self.parallel_devices[0]

    def launch(self, function: Callable[..., T], *args: object, owner: object = None, **kwargs: object) -> T:
        """Return what ``function`` returns."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
        return function(*args, **kwargs)

    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Return ``tensor``."""
        operation_name(reduce_op)
        return tensor

    def all_gather(self, tensor: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return ``tensor``."""
        return tensor

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return ``obj``."""
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: there is nobody to wait for."""

    def gather_objects(self, obj: T) -> list[T]:
        """Return ``[obj]``."""
        return [obj]
