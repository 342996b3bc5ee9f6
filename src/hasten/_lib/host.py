"""Move a handful of scalars from the device to the host in one copy, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Arrival:
    """Scalars on their way to the host."""

    def __init__(
        self, scalars: list[Any], places: list[int], buffer: Tensor | None, event: torch.cuda.Event | None
    ) -> None:
        self._scalars = scalars
        self._places = places
        self._buffer = buffer
        self._event = event

    def ready(self) -> bool:
        """Return whether ``values`` would return at once; never waits."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """Return the values as floats, in the order given. This is a sync point if not ``ready``."""
        if self._buffer is not None:
            if self._event is not None:
                self._event.synchronize()
            for place, value in zip(self._places, self._buffer.tolist(), strict=True):
                self._scalars[place] = value
            self._buffer = None
        return [float(value) for value in self._scalars]


def send_to_host(values: Sequence[Any]) -> Arrival:
    """Start moving 0-d tensors (numbers pass through) to the host with one copy a device."""
    scalars = list(values)
    places = [i for i, value in enumerate(scalars) if isinstance(value, Tensor)]
    if not places:
        return Arrival(scalars, [], None, None)
    devices = {scalars[i].device for i in places}
    if len(devices) > 1:
        # Rare: metrics kept on the CPU beside losses on the device. The few CPU ones are read at once.
        for i in [i for i in places if scalars[i].device.type == "cpu"]:
            scalars[i] = float(scalars[i])
        return send_to_host(scalars) if len(devices) == 2 else _one_by_one(scalars)
    (device,) = devices
    # Doubles hold every float and every count below 2**53; MPS has none.
    wide = torch.float32 if device.type == "mps" else torch.float64
    stacked = torch.stack([scalars[i].detach().reshape(()).to(wide) for i in places])
    if device.type != "cuda":
        return Arrival(scalars, places, stacked.cpu(), None)
    buffer = torch.empty(len(places), dtype=wide, pin_memory=True)
    buffer.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Arrival(scalars, places, buffer, event)


def _one_by_one(scalars: list[Any]) -> Arrival:
    return Arrival([float(value) for value in scalars], [], None, None)
