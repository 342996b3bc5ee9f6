"""Compute the blocks of a transformer on real tokens only: what ``Trainer(packed=True)`` does.

The padded batch enters the first block as one row of its real tokens and leaves the last block as a padded batch
again, zero where there is padding. Everything before and after (embeddings, heads, losses) sees what it always saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from hasten._lib.errors import MisconfigurationException
from hasten.packed.of_torch import packed_encoder
from hasten.packed.of_transformers import is_packable, packed_model
from hasten.packed.stack import HELP


@contextmanager
def packed_blocks(
    module: nn.Module, *, first_token: bool = False, asked: str = "packed_blocks(module)"
) -> Iterator[int]:
    """Compute the transformer blocks inside a module on real tokens only, for a while; yields how many blocks.

    Args:
        module: holds one or several transformers. Its weights, classes and outputs stay as they are.
        first_token: while gradients are computed, compute the last block for the first token of each sequence only.
            For classifiers that read nothing else: their losses and gradients are the same. All others hold nan.
        asked: how it was asked for, for the messages.

    Raises:
        MisconfigurationException: there is no transformer in it whose blocks can be packed; with ``first_token``, in
            the backward: the loss depends on other tokens.

    Example::

        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> with packed_blocks(encoder) as count:
        ...     out = encoder(torch.ones(2, 3, 8), src_key_padding_mask=torch.tensor([[0, 0, 1], [0, 0, 0]]).bool())
        >>> count, out.shape, bool((out[0, 2] == 0).all())
        (2, torch.Size([2, 3, 8]), True)

    Source: Zeng et al., Boosting Distributed Training Performance of the Unpadded BERT Model,
    https://arxiv.org/abs/2208.08124

    """
    with ExitStack() as stack:
        count = 0
        for child in module.modules():
            if isinstance(child, nn.TransformerEncoder):
                count += stack.enter_context(packed_encoder(child, asked, first_token))
            elif is_packable(child):
                count += stack.enter_context(packed_model(child, asked, first_token))
        if not count:
            raise MisconfigurationException(
                f"{asked}: {type(module).__name__} holds no transformer that can compute on real tokens "
                f"only. {HELP}"
            )
        yield count
