"""The last block of a transformer for the first token of each sequence alone: what a classifier reads of it.

Keys and values are computed of all tokens; queries, the output of attention and the feed-forward layers of the first
ones only, which leaves about a sixth of the products of a usual block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hasten._lib.errors import MisconfigurationException
from hasten.packed.layout import Layout

_HELP = "Use packed=True, which computes the last block for all tokens."


class FirstToken:
    """The last block of a stack, computed for first tokens.

    Args:
        asked: how it was asked for, for the messages.

    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._layers: tuple[nn.Module, nn.Module] | None = None
        # Whether a gradient came for other tokens, on a device that is not asked before it has to wait anyway.
        self._wrong: Tensor | None = None

    def begin(self, row: Tensor, layout: Layout) -> Tensor | None:
        """Return what the last block is given instead of all tokens; None where all are wanted."""
        if layout.first_only is None:
            # Decided once a forward: activation checkpointing may come here again, in another mode of autograd.
            layout.first_only = torch.is_grad_enabled() and row.requires_grad
        return row.index_select(1, layout.firsts) if layout.first_only else None

    def end(self, output: Tensor, layout: Layout) -> Tensor:
        """Return the padded batch: not a number but for the first tokens, so that nothing reads others unnoticed."""
        if not layout.first_only:
            return layout.unpack(output)
        samples, width = layout.shape
        first = output[0].masked_fill(layout.empty[:, None], 0.0)
        flat = first.new_full((samples * width, first.shape[1]), torch.nan)
        batch: Tensor = flat.index_copy(0, layout.first_places, first).unflatten(0, (samples, width))
        if batch.requires_grad:

            def check(gradient: Tensor) -> None:
                flat = gradient.flatten(0, 1)
                others = flat.index_fill(0, layout.first_places, 0.0)
                # A sample without tokens has no first one either.
                nothing = (flat.index_select(0, layout.first_places) != 0) & layout.empty[:, None]
                wrong = (others != 0).any() | nothing.any()
                self._wrong = wrong if self._wrong is None else self._wrong | wrong
                if not waits_for(gradient):
                    self.confirm()

            batch.register_hook(check)
        return batch

    def confirm(self) -> None:
        """Look whether gradients came for first tokens alone. On CUDA the host waits for the answer.

        Raises:
            MisconfigurationException: the loss of a backward since the last look depends on other tokens.

        """
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            raise MisconfigurationException(
                f"{self._asked}: the loss depends on more of the last block than the first token of each sequence, or "
                f"a layer after it computes with all of them. {_HELP}"
            )

    def checked(self, row: Tensor) -> Tensor:
        """Return all tokens, ``(1, real tokens, features)``, where a block may compute with them.

        Raises:
            MisconfigurationException: this is the first pass of a checkpoint of the reentrant kind, which gives no
                gradients to anything but what the block is given.

        """
        if not torch.is_grad_enabled():
            raise MisconfigurationException(
                f"{self._asked}: its blocks are checkpointed in the reentrant way, which gives the tokens left out no "
                "gradients. Checkpoint with use_reentrant=False, or use packed=True."
            )
        return row

    def keys_and_values(
        self, module: nn.Module, row: Tensor, layout: Layout, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens by those of the first ones.

        Args:
            module: whose layers make them.
            row: all tokens, shape ``(1, real tokens, features)``.
            layout: which of them are the first ones.
            key: of the first tokens, shape ``(samples, heads, features)``.
            value: likewise.

        Raises:
            MisconfigurationException: they are not what one layer makes of the block's input.

        """
        if self._layers is None:
            # Apart from what is recorded: selective checkpointing counts the products of a forward, and the second
            # one has no need to look again.
            with torch.no_grad(), _disable_current_modes():
                firsts = row.index_select(1, layout.firsts)
                self._layers = self._maker(module, firsts, key), self._maker(module, firsts, value)
        of_key, of_value = self._layers
        return (
            of_key(row)[0].unflatten(-1, (-1, key.shape[-1])),
            of_value(row)[0].unflatten(-1, (-1, value.shape[-1])),
        )

    def _maker(self, module: nn.Module, firsts: Tensor, product: Tensor) -> nn.Module:
        """Return the layer that made the keys or values: of the same input it makes the same again."""
        found = []
        for layer in module.children():
            weight = getattr(layer, "weight", None)
            # A matrix between features of the block and of all heads, whichever way round.
            if isinstance(weight, Tensor) and weight.dim() == 2 and firsts.shape[-1] in weight.shape:
                made = layer(firsts)[0]
                if made.numel() == product.numel() and torch.equal(made, product.flatten(1)):
                    found.append(layer)
        if len(found) == 1:
            return found[0]
        raise MisconfigurationException(
            f"{self._asked}: the keys and values of its last block are more than one product of what the block is "
            f"given, so they cannot be computed apart from the rest. {_HELP}"
        )


def waits_for(tensor: Tensor) -> bool:
    """Return whether the host waits for all that is queued when it reads a number of this tensor."""
    return tensor.device.type != "cpu"


def attend_first(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, p: float, scale: float
) -> Tensor:
    """Attend with the first token of each sequence to all tokens of that sequence.

    Args:
        query: of the first tokens, shape ``(samples, heads, features)``.
        key: of all real tokens, shape ``(real tokens, heads, features)``; the heads may be fewer.
        value: likewise.
        layout: which token belongs to which sample.
        p: of the dropout of attention weights, 0 to 1.
        scale: of the products.

    Returns:
        shape ``(samples, heads, features)``.

    """
    keys, values = (layout.unpack(each.unsqueeze(0)).transpose(1, 2) for each in (key, value))
    attended: Tensor = nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2),
        keys,
        values,
        attn_mask=layout.seen,
        dropout_p=p,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    # Never a view, as the attention of all tokens is none: what is compiled behind it would be compiled again.
    return attended.squeeze(2).clone()
