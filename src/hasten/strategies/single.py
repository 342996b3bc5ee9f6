"""Strategies with one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hasten._lib.device import as_device
from hasten.machine.collectives import operation_name
from hasten.strategies.base import Strategy

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.precision.base import Precision
    from hasten.types import Group, ReduceOperation, Tensors

T = TypeVar("T")


class OneProcess(Strategy):
    """The base of strategies with one process, which exchanges nothing."""

    # Whether the process computes on all devices of the run, and not on one.
    takes_all_devices: bool = False
    # The device that a program names; None for the first one of the run.
    _device: torch.device | None = None

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        devices = devices if self._device is None else [self._device]
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)

    def all_reduce(self, tensor: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        operation_name(reduce_op)  # Refuses unknown ones.
        return tensor

    def all_gather(self, tensor: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        return tensor

    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    def barrier(self, name: str | None = None) -> None:
        pass


class SingleDeviceStrategy(OneProcess):
    """One process that computes on one device.

    Args:
        device: where; the first device of the run by default.
        accelerator: in place of ``Trainer(accelerator=...)``.
        checkpoint_io: in place of ``Trainer(plugins=...)``.
        precision_plugin: in place of ``Trainer(precision=...)``.

    """

    name = "single_device"

    def __init__(
        self,
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self._device = as_device(type(self).__name__, device)
        self.parallel_devices = [self._device or torch.device("cpu")]

    def simulate_one_process(self) -> None:
        """Do nothing: there is one process."""
