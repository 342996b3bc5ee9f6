"""The protocol of strategies for devices that record operations and run them once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class RecordedSteps(Protocol):
    """Runs what a device has recorded, once a step, and moves batches, modules and totals to it and back.

    A total or a parameter that is made on such a device becomes part of the recorded graph: the first step would be
    compiled to another graph than the second one. Values from the host are data.
    """

    def end_step(self, stage: str, batch: object = None, is_last: bool = False) -> None:
        """Run what was recorded since the last step of "train", "validate", "test" or "predict".

        The batch is by default the last one of ``feed``; ``is_last`` says whether it is the last one of its epoch.
        """

    def feed(self, batches: Iterable[Any], device: torch.device | None) -> Iterator[Any]:
        """Yield batches on the device; what a batch has recorded runs before the next one, unless a step has run it."""

    def to_device(self, data: T, device: torch.device) -> T:
        """Return ``data`` on the device."""

    def to_host(self, data: T) -> T:
        """Return ``data`` with its tensors on the CPU; one that occurs several times stays shared."""

    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of the host on the device, as data."""

    def place(self, module: nn.Module, device: torch.device | str) -> nn.Module:
        """Move ``module`` to the device, or back to the CPU: its parameters stay the same objects, tied ones tied."""
