"""Trainer(packed="first_token"): norms after the last block, and when a wrong loss is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hasten._lib.errors import MisconfigurationException
from hasten.packed import first_token
from hasten.packed.blocks import packed_blocks
from hasten.packed.document_attention import packed_attention
from hasten.packed.layout import Layout
from tests.models import quiet
from tests.packed.test_blocks import (
    WIDTH,
    FirstReader,
    batch_of,
    loader,
    model_of,
    trained_both_ways,
)
from tests.refusals import refused


class Normed(FirstReader):
    """Reads the first token behind a norm of the encoder's own."""

    def __init__(self, norm: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.reader.encoder.norm = norm


@pytest.mark.parametrize(
    ("norm", "norm_first", "packed"),
    [
        (nn.LayerNorm, False, True),
        (nn.LayerNorm, True, "first_token"),
        (nn.RMSNorm, False, "first_token"),
        (lambda width: nn.Sequential(nn.LayerNorm(width)), True, True),
    ],
)
def test_a_norm_of_the_encoder_is_trained_as_if_padded(norm: Any, norm_first: bool, packed: Any) -> None:
    trained_both_ways(lambda: Normed(norm(16), norm_first=norm_first), epochs=2, packed=packed)


def test_a_layer_after_the_encoder_that_computes_with_all_tokens_is_named_in_the_refusal() -> None:
    module = Normed(nn.Sequential(nn.LayerNorm(16)))
    with refused(MisconfigurationException, "packed"):
        quiet(packed="first_token").fit(module, loader())


def test_padded_places_are_zero_behind_the_norm_too() -> None:
    encoder = FirstReader().reader.encoder.train()
    encoder.norm = nn.LayerNorm(16)
    nn.init.ones_(encoder.norm.bias)
    real = batch_of([7, 3])["attention_mask"].bool()
    words = torch.randn(2, WIDTH, 16)
    exact = encoder(words, src_key_padding_mask=~real)
    with packed_blocks(encoder):
        # Other tokens up to the first backward, which shows whether they are read.
        encoder(words, src_key_padding_mask=~real)[real].sum().backward()
        packed = encoder(words, src_key_padding_mask=~real)
    torch.testing.assert_close(packed, exact * real[..., None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_first_tokens_attend_as_among_all_tokens(dtype: torch.dtype, key_heads: int) -> None:
    lengths = torch.tensor([3, 0, 5, 1])
    layout = Layout((4, 6), torch.arange(6) < lengths[:, None], torch.device("cpu"))
    tokens = int(lengths.sum())
    query, key, value = (torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, key_heads, key_heads))
    all_tokens = packed_attention(query, key, value, layout.bounds, 6, scale=0.3)
    heads = [each.to(dtype) for each in (query[layout.firsts], key, value)]
    first = first_token.attend_first(*heads, layout, p=0.0, scale=0.3)
    assert first.dtype == dtype
    assert first.shape == (4, 4, 8)
    assert not first[1].any()
    real, error = lengths > 0, 1e-6 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(first[real].float(), all_tokens[layout.firsts[real]], rtol=error, atol=error)
    mine = torch.autograd.grad(first[real].float().square().sum(), (key, value))
    theirs = torch.autograd.grad(all_tokens[layout.firsts[real]].square().sum(), (key, value))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)


def test_where_the_host_would_wait_a_wrong_loss_is_told_at_the_next_forward_or_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_token, "would_wait", lambda _: True)
    model, batch = model_of("bert").bert, batch_of([7, 3, WIDTH, 1])

    def backward(place: int) -> None:
        model(**batch).last_hidden_state[:, place].sum().backward()

    with packed_blocks(model, first_token=True):
        backward(0)
        backward(1)
        with refused(MisconfigurationException, "packed"):
            backward(0)
        backward(0)

    def run() -> None:
        with packed_blocks(model, first_token=True):
            backward(0)
            backward(1)

    with refused(MisconfigurationException, "packed"):
        run()


def test_a_mask_is_read_again_when_it_changes() -> None:
    encoder = FirstReader().reader.encoder.train()
    mask = nn.Transformer.generate_square_subsequent_mask(WIDTH)
    words = torch.randn(2, WIDTH, 16)
    with packed_blocks(encoder):
        for _ in range(2):
            encoder(words, mask)
        mask.zero_()
        for given in ((words, mask), (words[:, :5], nn.Transformer.generate_square_subsequent_mask(WIDTH))):
            with refused(MisconfigurationException, "packed"):
                encoder(*given)


@pytest.mark.parametrize("packed", [True, "first_token"])
def test_a_sample_without_tokens_is_named_where_the_loss_reads_it(packed: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    with packed_blocks(encoder, first_token=packed == "first_token"):
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=hidden)[:, 0].sum().backward()
        hidden[1] = True
        with refused(MisconfigurationException, "packed", says="mask is all 0"):
            encoder(torch.randn(2, 3, 8), src_key_padding_mask=hidden)[:, 0].sum().backward()
