"""Compute the last block of a transformer for the first token of each sequence only, which is what a classifier reads.

Keys and values are computed for all tokens; queries, the output of attention and the feed-forward layers only for first
tokens, which leaves about a sixth of the products of a usual block.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten.packed.document_attention import on_host
from hasten.packed.layout import Layout, refusal

_HELP = "Use packed=True, which computes the last block for all tokens."
CAUSAL = "it is causal, so the first token depends on no other token"


class LossCheck:
    """Raises an error if a gradient shows that a loss reads what packing leaves out; see ``refusal``."""

    def __init__(self, asked: str, problem: str, instead: str) -> None:
        self._asked, self._problem, self._instead = asked, problem, instead
        # Whether any gradient did; read only when the host has to wait for the device anyway.
        self._wrong: Tensor | None = None

    def note(self, wrong: Tensor, *, at_once: bool = False) -> None:
        """Record whether a gradient is wrong; raise the error when that is known, with ``at_once`` now."""
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        if at_once or not would_wait(wrong):
            self.confirm()

    def confirm(self) -> None:
        """Raise the error if a gradient since the last call showed it. On CUDA the host waits for the device."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            raise refusal(self._asked, self._problem, self._instead)


class FirstToken(LossCheck):
    """The last block of a stack, computed for first tokens."""

    def __init__(self, asked: str) -> None:
        problem = (
            "the loss depends on more of the last block than the first token of each sequence, a layer after it "
            "computes with all of them, or a sample has no real token (its mask is all 0)"
        )
        super().__init__(asked, problem, _HELP)
        self._layers: tuple[nn.Module, nn.Module] | None = None

    def begin(self, row: Tensor, layout: Layout) -> Tensor | None:
        """Return the first tokens, the input of the last block; None if it computes all tokens."""
        if layout.first_only is None:
            # Decided once per forward: activation checkpointing comes here again, in another mode of autograd.
            layout.first_only = torch.is_grad_enabled() and row.requires_grad
        return row.index_select(1, layout.firsts) if layout.first_only else None

    def end(self, output: Tensor, layout: Layout) -> Tensor:
        """Return the padded batch, with nan for all tokens but the first, so that no loss reads others unnoticed."""
        if not layout.first_only:
            return layout.unpack(output)
        samples, width = layout.shape
        first = output[0].masked_fill(layout.empty[:, None], 0.0)
        flat = first.new_full((samples * width, first.shape[1]), torch.nan)
        batch: Tensor = flat.index_copy(0, layout.first_places, first).unflatten(0, (samples, width))
        if batch.requires_grad:

            def check(gradient: Tensor) -> None:
                flat = gradient.flatten(0, 1)
                firsts = flat.index_select(0, layout.first_places)
                # A sample without tokens has no first token.
                nothing = (firsts != 0) & layout.empty[:, None]
                # Counts need no copy of the whole gradient.
                self.note((flat.count_nonzero() != firsts.count_nonzero()) | nothing.any())

            batch.register_hook(check)
        return batch

    def checked(self, row: Tensor) -> Tensor:
        """Return all tokens, ``(1, real tokens, features)``, if the block may compute with them.

        Raises:
            MisconfigurationException: the block is checkpointed with ``use_reentrant=True``, which gives gradients only
                to the arguments of the block.

        """
        if not torch.is_grad_enabled():
            what = "its blocks are checkpointed with use_reentrant=True, which gives other tokens no gradients"
            raise refusal(self._asked, what, "Checkpoint with use_reentrant=False, or use packed=True.")
        return row

    def keys_and_values(
        self, module: nn.Module, row: Tensor, layout: Layout, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, computed by the layers in ``module`` as for the first tokens.

        ``row`` has all tokens, ``(1, real tokens, features)``; key and value those of first tokens, ``(samples, heads,
        features)``.

        Raises:
            MisconfigurationException: keys or values are not the output of one layer for the block's input.

        """
        if self._layers is None:
            # Outside of dispatch modes: selective checkpointing counts the products of a forward, and the recomputed
            # forward does not come here.
            with torch.no_grad(), torch_private.without_modes():
                firsts = row.index_select(1, layout.firsts)
                self._layers = self._layer_of(module, firsts, key), self._layer_of(module, firsts, value)
        of_key, of_value = self._layers
        return (
            of_key(row)[0].unflatten(-1, (-1, key.shape[-1])),
            of_value(row)[0].unflatten(-1, (-1, value.shape[-1])),
        )

    def _layer_of(self, module: nn.Module, firsts: Tensor, product: Tensor) -> nn.Module:
        """Return the layer that computed the keys or values: its output for the same input is equal."""
        found = []
        for layer in module.children():
            weight = getattr(layer, "weight", None)
            # A matrix between the features of the block and of all heads, in either order.
            if isinstance(weight, Tensor) and weight.dim() == 2 and firsts.shape[-1] in weight.shape:
                output = layer(firsts)[0]
                if output.numel() == product.numel() and torch.equal(output, product.flatten(1)):
                    found.append(layer)
        if len(found) == 1:
            return found[0]
        raise refusal(
            self._asked,
            "the keys and values of its last block are not products of the block's input with one matrix, so they "
            "cannot be computed separately",
            _HELP,
        )


def would_wait(tensor: Tensor) -> bool:
    """Return whether reading this tensor makes the host wait for the device."""
    return not tensor.is_cpu


def attend_first(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, p: float, scale: float) -> Tensor:
    """Attend from the first token of each sequence to all tokens of that sequence; see ``Stack.attend``."""
    if query.is_cpu and layout.has_padding:
        lengths = layout.bounds.diff().tolist()
        return on_host(partial(_by_document, lengths=lengths, p=p, scale=scale), query, key, value)
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
    # Never a view, because the attention of all tokens is none: compiled layers behind it would be compiled again.
    return attended.squeeze(2).clone()


def _by_document(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], p: float, scale: float) -> Tensor:
    """Call attention once for each sequence. On the CPU this is much faster than a mask over the padded width."""
    parts = []
    for one, keys, values in zip(query.split(1), key.split(lengths), value.split(lengths), strict=True):
        if not len(keys):
            parts.append(one.new_zeros(1, query.shape[1], value.shape[2]))
            continue
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (one, keys, values))
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=p, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        parts.append(attended[:, :, 0])
    return torch.cat(parts)
