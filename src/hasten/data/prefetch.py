"""Batches on their way to a CUDA device while it computes the steps before."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hasten._lib import tree


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: memory freed on a stream is reused on that stream only."""
    return torch.cuda.Stream(device)


class SideStream:
    """Moves batches to a CUDA device on a second stream.

    A copy on the stream that computes begins when all work before it is done, and from memory that is not pinned it
    makes the host wait as long. On a second stream it begins at once, beside the steps that are still being computed.
    No batch is fetched early for that: the host is ahead of the device already. From pinned memory
    (``DataLoader(pin_memory=True)``) the host does not wait either.

    Source: `PyTorch, CUDA streams and record_stream
    <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`_.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)

    def __call__(self, batch: Any) -> Any:
        """Return ``batch`` on the device, ready for whatever the current stream is given next."""
        device, side = self._device, self._stream
        computing = torch.cuda.current_stream(device)
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device == device:
                return tensor
            if tensor.is_cuda or type(tensor) is not Tensor:
                return tensor  # Made on another stream, or a subclass: see below.
            moved = tensor.to(device, non_blocking=True)
            copied.append(moved)
            return moved

        with torch.cuda.stream(side):
            batch = tree.map_tensors(copy, batch)
        if copied:
            computing.wait_stream(side)
            for tensor in copied:
                # Without it, the side stream could reuse the memory as soon as Python frees the tensor.
                tensor.record_stream(computing)
        # Objects that move themselves do so on the stream that computes: their tensors are not known here.
        return tree.move_to(batch, device, non_blocking=True)
