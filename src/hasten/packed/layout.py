"""Which tokens of a padded batch are real, and how they move between the batch and one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Layout:
    """The real tokens of one padded batch.

    Args:
        shape: of the batch, (samples, tokens).
        mask: 1 where a token is real, the shape of the batch; None where all are.
        device: where the tokens are.

    """

    def __init__(self, shape: tuple[int, int], mask: Tensor | None, device: torch.device) -> None:
        samples, width = shape
        self.shape, self.width = shape, width
        # Where the real tokens are among all; None where there is no padding.
        self.places: Tensor | None = None
        if mask is None:
            self.bounds = torch.arange(0, samples * width + 1, width, dtype=torch.int32, device=device)
        else:
            real = mask.to(torch.bool)
            ends = real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.bounds = torch.nn.functional.pad(ends, (1, 0))
            self.places = real.flatten().nonzero().flatten()
        # Tensors that came along with the batch, by identity; kept so that no other takes their place.
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, batch: Tensor) -> Tensor:
        """Return the real tokens of ``(samples, tokens, ...)`` as ``(1, real tokens, ...)``."""
        flat = batch.flatten(0, 1)
        return (flat if self.places is None else flat.index_select(0, self.places)).unsqueeze(0)

    def unpack(self, row: Tensor) -> Tensor:
        """Return ``(1, real tokens, ...)`` as ``(samples, tokens, ...)``, zero where there is padding."""
        samples, width = self.shape
        flat = row[0]
        if self.places is not None:
            flat = flat.new_zeros(samples * width, *flat.shape[1:]).index_copy(0, self.places, flat)
        batch: Tensor = flat.unflatten(0, (samples, width))
        return batch

    def alike(self, value: Any) -> Any:
        """Return ``value`` with every tensor of the batch's shape packed: positions and the like."""
        if isinstance(value, tuple):
            return tuple(self.alike(each) for each in value)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != self.width:
            return value
        if value.shape[0] not in (1, self.shape[0]):
            return value
        known = self._moved.get(id(value))
        if known is None:
            known = self._moved[id(value)] = value, self.pack(value.expand(self.shape[0], *value.shape[1:]))
        return known[1]
