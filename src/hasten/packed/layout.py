"""Move the real tokens of a padded batch into one row and back."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException

INSTEAD = "Use batching='length' instead: it pads less, for any model."
HELP = (
    "packed=True works with the encoders and decoders of transformers that take an attention_mask, and with "
    f"torch.nn.TransformerEncoder(batch_first=True). {INSTEAD}"
)


def refusal(asked: str, problem: str, instead: str = INSTEAD) -> MisconfigurationException:
    """Return the error for what cannot be packed: what ``asked``, with the class of the model, and the problem."""
    return MisconfigurationException(f"{asked}: {problem}.", fix=instead, argument="packed")


class Layout:
    """The real tokens of one padded batch.

    Args:
        shape: (samples, tokens) of the batch.
        mask: 1 where a token is real, in the shape of the batch; None if all tokens are.
        device: of the tokens.

    """

    def __init__(self, shape: tuple[int, int], mask: Tensor | None, device: torch.device) -> None:
        samples, width = shape
        self.shape, self.width = shape, width
        # True where a token is real; None if all are.
        self.real = None if mask is None else mask.to(torch.bool)
        # Whether the last block computes first tokens only; None until the forward reaches it.
        self.first_only: bool | None = None
        # The indices of the real tokens in the flattened batch; None without padding.
        self.places: Tensor | None = None
        if self.real is None:
            self.bounds = torch.arange(0, samples * width + 1, width, dtype=torch.int32, device=device)
        else:
            ends = self.real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.bounds = torch.nn.functional.pad(ends, (1, 0))
            self.places = self.real.flatten().nonzero().flatten()
        # Packed copies of other tensors by id; the tensors are kept so that no id is reused.
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, batch: Tensor) -> Tensor:
        """Return the real tokens of ``(samples, tokens, ...)`` as ``(1, real tokens, ...)``."""
        # Never a view, because the outputs of blocks are none: a compiled block would be compiled again.
        row = batch.flatten(0, 1).unsqueeze(0)
        return row.clone() if self.places is None else row.index_select(1, self.places)

    def unpack(self, row: Tensor) -> Tensor:
        """Return ``(1, real tokens, ...)`` as ``(samples, tokens, ...)``, with zeros for padding."""
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
        """The index in the row of each sample's first token; arbitrary for a sample without tokens."""
        # Known on the host, which has waited for their indices already.
        samples, width = self.shape
        tokens = samples * width if self.places is None else self.places.numel()
        return self.bounds[:-1].clamp(max=max(tokens - 1, 0)).long()

    @cached_property
    def first_places(self) -> Tensor:
        """The index in the flattened batch of each sample's first real token."""
        samples, width = self.shape
        begins = torch.arange(0, samples * width, width, device=self.bounds.device)
        return begins if self.places is None else torch.where(self.empty, begins, self.places[self.firsts])

    @cached_property
    def seen(self) -> Tensor | None:
        """The mask of the tokens that first tokens attend to, shape ``(samples, 1, 1, tokens)``; None for all."""
        if self.real is None:
            return None
        # Attending to nothing gives nan: a sample without tokens attends to the zeros of its padding.
        return (self.real | self.empty[:, None])[:, None, None, :]

    @property
    def has_padding(self) -> bool:
        """Whether the batch has padding."""
        # Known on the host, which has waited for the indices already.
        return self.places is not None and self.places.numel() < self.shape[0] * self.width

    def pack_like(self, value: object) -> Any:
        """Return ``value`` with every tensor of the batch's shape packed, such as positions."""
        if isinstance(value, tuple):
            return tuple(self.pack_like(each) for each in value)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != self.width:
            return value
        if value.shape[0] not in (1, self.shape[0]):
            return value
        known = self._moved.get(id(value))
        if known is None:
            known = self._moved[id(value)] = value, self.pack(value.expand(self.shape[0], *value.shape[1:]))
        return known[1]
