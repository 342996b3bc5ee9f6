"""Which tokens of a padded batch are real, and how they move between the batch and one row."""

from __future__ import annotations

from functools import cached_property
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
        # True where a token is real; None where all are.
        self.real = None if mask is None else mask.to(torch.bool)
        # Whether the last block computes first tokens only; None until it is reached.
        self.first_only: bool | None = None
        # Where the real tokens are among all; None where there is no padding.
        self.places: Tensor | None = None
        if self.real is None:
            self.bounds = torch.arange(0, samples * width + 1, width, dtype=torch.int32, device=device)
        else:
            ends = self.real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.bounds = torch.nn.functional.pad(ends, (1, 0))
            self.places = self.real.flatten().nonzero().flatten()
        # Tensors that came along with the batch, by identity; kept so that no other takes their place.
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, batch: Tensor) -> Tensor:
        """Return the real tokens of ``(samples, tokens, ...)`` as ``(1, real tokens, ...)``."""
        # Never a view, as what one block gives to the next is none: a compiled block would be compiled again.
        row = batch.flatten(0, 1).unsqueeze(0)
        return row.clone() if self.places is None else row.index_select(1, self.places)

    def unpack(self, row: Tensor) -> Tensor:
        """Return ``(1, real tokens, ...)`` as ``(samples, tokens, ...)``, zero where there is padding."""
        samples, width = self.shape
        flat = row[0]
        if self.places is not None:
            flat = flat.new_zeros(samples * width, *flat.shape[1:]).index_copy(0, self.places, flat)
        batch: Tensor = flat.unflatten(0, (samples, width))
        return batch

    @cached_property
    def empty(self) -> Tensor:
        """Which samples have no real token; shape ``(samples,)``."""
        return self.bounds[1:] == self.bounds[:-1]

    @cached_property
    def firsts(self) -> Tensor:
        """Where in the row the first token of each sample is; anywhere, for a sample without any."""
        # How many there are the host knows: it has waited for their places already.
        samples, width = self.shape
        tokens = samples * width if self.places is None else self.places.numel()
        return self.bounds[:-1].clamp(max=max(tokens - 1, 0)).long()

    @cached_property
    def first_places(self) -> Tensor:
        """Where among all places of the batch the first real token of each sample is."""
        samples, width = self.shape
        begins = torch.arange(0, samples * width, width, device=self.bounds.device)
        return begins if self.places is None else torch.where(self.empty, begins, self.places[self.firsts])

    @cached_property
    def seen(self) -> Tensor | None:
        """What the first token of each sample attends to, shape ``(samples, 1, 1, tokens)``; None for all."""
        if self.real is None:
            return None
        # Attending to nothing gives no number: a sample without tokens sees the zeros of its padding.
        return (self.real | self.empty[:, None])[:, None, None, :]

    @property
    def has_padding(self) -> bool:
        """Whether any place of the batch is padding."""
        # As many as there are places the host knows: it has waited for them already.
        return self.places is not None and self.places.numel() < self.shape[0] * self.width

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
