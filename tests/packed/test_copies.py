"""Copies of a model that is packed at the moment: models of their own, padded, now and later."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.memory import recomputed
from hasten.packed.blocks import packed_blocks
from tests.packed.test_blocks import WIDTH, Reader, batch_of, model_of

BATCH = batch_of([7, 3, WIDTH, 1])


def output_of(model: Any) -> Tensor:
    if isinstance(model, Reader):
        real = BATCH["attention_mask"].bool()
        hidden = model.encoder(model.words(BATCH["input_ids"]), src_key_padding_mask=~real)
        return hidden * real[..., None]
    return model(**BATCH).logits


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": saved_and_loaded,
}


@pytest.mark.parametrize(
    ("name", "way", "lever"),
    [
        *((name, way, None) for name in ("bert", "torch") for way in COPIES),
        ("bert", "pickled", "first_token"),
        ("bert", "copied", "memory"),
        ("torch", "pickled", "memory"),
        # transformers adds a local function then, which cannot be pickled.
        ("bert", "copied", "checkpointing"),
    ],
)
def test_a_copy_of_a_packed_model_computes_with_its_own_weights(name: str, way: str, lever: str | None) -> None:
    model = Reader() if name == "torch" else model_of(name)
    exact = output_of(model)
    if lever == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with packed_blocks(model, first_token=lever == "first_token"):
        with recomputed(model, "full") if lever == "memory" else nullcontext():
            output_of(model)
            made = COPIES[way](model)
        during = output_of(made)
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        torch.testing.assert_close(output_of(made), exact)
    torch.testing.assert_close(during, exact)
    torch.testing.assert_close(output_of(made), exact)
    # All of its parameters learn; the original is not touched.
    output_of(made).square().sum().backward()
    inner = made.encoder if name == "torch" else made.bert.encoder
    assert all(one.grad is not None for one in inner.parameters())
    assert all(one.grad is None for one in model.parameters())
    again = COPIES[way](made)
    torch.testing.assert_close(output_of(again), exact)


def test_the_copy_of_a_packed_configuration_names_the_attention_of_before() -> None:
    model = model_of("bert")
    before = model.config._attn_implementation
    with packed_blocks(model), packed_blocks(model_of("gpt2")):
        made = copy.deepcopy(model)
        assert made.config._attn_implementation == before == copy.deepcopy(model.config)._attn_implementation
        assert type(made.config._attn_implementation) is str
    assert model.config._attn_implementation == before


def test_a_copy_can_be_packed_itself() -> None:
    for model in (model_of("bert"), Reader()):
        exact = output_of(model)
        with packed_blocks(model):
            made = copy.deepcopy(model)
            with packed_blocks(made):
                torch.testing.assert_close(output_of(made), output_of(model))
        torch.testing.assert_close(output_of(made), exact)
