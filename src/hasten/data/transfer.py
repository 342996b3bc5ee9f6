"""Batches on their way to a device."""

from __future__ import annotations

from typing import Any

import torch

from hasten._lib import tree


def move(batch: Any, device: torch.device | str) -> Any:
    """Return ``batch`` on ``device``; the same object where nothing moves.

    Copies to an accelerator do not make the host wait when the tensors are in pinned memory, as those of
    ``DataLoader(pin_memory=True)`` are.

    Args:
        batch: tensors, in dicts, lists, tuples, dataclasses; objects with a ``to`` method move themselves.
        device: where to.

    Example::

        >>> move({"x": torch.ones(2), "name": "a"}, "cpu")["x"].device
        device(type='cpu')

    Source: `PyTorch, pin_memory and non_blocking
    <https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html>`_.

    """
    device = torch.device(device)
    return tree.move_to(batch, device, non_blocking=device.type != "cpu")
