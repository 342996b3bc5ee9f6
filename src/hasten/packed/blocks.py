"""Compute the blocks of a transformer on real tokens only, as ``Trainer(packed=True)`` does.

The first block receives the real tokens of the padded batch as one row, and the output of the last block becomes a
padded batch again, with zeros for padding (until the first backward has been checked, with other tokens: a loss that
reads padding then shows). Everything before and after (datasets, loaders, embeddings, heads, losses) does not change.
Rows that a loader joins from several samples are something else: ``batching/packing.py``.

Where it acts, from ``fit`` to a step:

- ``change_module`` of ``loops/prepare.py`` enters ``packed_blocks`` once, in ``fit`` only, and the end of the run
  leaves it. The loop itself is the same.
- ``packed_encoder`` (``adapters_torch.py``) and ``packed_model`` (``adapters_transformers.py``) patch the attention.
  The calls of the transformer are patched by ``packing`` of ``verify.py``, which also compares the first call with a
  padded one, and those of its blocks by ``Stack.packing`` (``stack.py``).
- In each call with gradients (of ``nn.TransformerEncoder``: in training, or if its input or parameters require them),
  ``Layout`` (``layout.py``) moves the real tokens into one row and back (``stack.py``),
  and attention (``document_attention.py``, and ``products.py`` on the CPU) keeps the samples apart.
- ``packed="first_token"`` also shortens the last block (``first_token.py``).
- ``compile=`` leaves the attention of packed blocks out (``CompiledParts`` of ``compile/regions.py``) and refuses CUDA
  graphs (``check_compile``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten.packed.adapters_torch import packed_encoder
from hasten.packed.adapters_transformers import is_packable, packed_model
from hasten.packed.layout import HELP, refusal
from hasten.packed.stack import Stack


@contextmanager
def packed_blocks(
    module: nn.Module, *, first_token: bool = False, asked: str = "packed_blocks(module)"
) -> Iterator[int]:
    """Compute the transformer blocks of a module on real tokens only, inside the block; yields their number.

    Packing applies to calls with gradients; without them (validation, ``generate``) the module computes padded batches.
    The first call with gradients compares a few samples of its batch packed and padded, and refuses blocks that mix
    tokens of different samples.

    Args:
        module: contains one or several transformers. Its weights, classes and outputs do not change.
        first_token: in calls with gradients, compute the last block for the first token of each sequence only. For
            classifiers that read nothing else: their losses and gradients are the same. Other tokens are nan.
        asked: the argument or call that requested packing, for messages.

    Raises:
        MisconfigurationException: the module has no transformer that can be packed; in the first call: packing would
            change the output of a block; in backward: the loss reads padding or, with ``first_token``, other tokens.

    Example::

        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> with packed_blocks(encoder) as count:
        ...     out = encoder(torch.ones(2, 3, 8), src_key_padding_mask=torch.tensor([[0, 0, 1], [0, 0, 0]]).bool())
        >>> count, out.shape
        (2, torch.Size([2, 3, 8]))

    Source: Zeng et al., Boosting Distributed Training Performance of the Unpadded BERT Model,
    https://arxiv.org/abs/2208.08124

    """
    stacks: list[Stack] = []
    with ExitStack() as changed:
        for child in module.modules():
            if isinstance(child, nn.TransformerEncoder):
                stacks.append(changed.enter_context(packed_encoder(child, asked, first_token)))
            elif is_packable(child):
                stacks.append(changed.enter_context(packed_model(child, asked, first_token)))
        blocks = [block for stack in stacks for block in stack.blocks]
        if len(set(blocks)) != len(blocks):
            raise refusal(asked, f"two transformers of {type(module).__name__} share a block")
        if not blocks:
            problem = f"{type(module).__name__} has no transformer that can compute on real tokens only"
            raise refusal(asked, problem, HELP)
        yield len(blocks)
        if any(stack.without_gradients for stack in stacks) and not any(stack.used for stack in stacks):
            rank_zero_warn(
                f"{asked}: the transformer of {type(module).__name__} was called without gradients only, where it "
                "computes padded batches: packing changed nothing.",
                fix="Leave it out.",
            )
